#!/usr/bin/env python3
"""Does `dray sim` tell what a real move costs? Moves a real guest under a server's load between two network
namespaces (bench/migrate.py), with `dray trace record` writing down its accesses at both hosts, and replays that very
record with the link, the memory and the moment that were measured. Prints both, and the ratio. Needs root.

    python3 bench/recorded.py --dray target/release/dray --host target/release/examples/bench_host \\
        --load mail --rate 200mbit --size 2048 --systems hybrid/workload-aware,hybrid/sequential
"""
import argparse
import csv
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time

from migrate import MIB, Bench, drop_network, make_network, measure_link


class Recorded(Bench):
    """Records what the guest does, first at the source and from the handover on at the target."""

    def __init__(self, args, directory):
        super().__init__(args, directory)
        self.over, self.records = threading.Event(), {}

    def record(self, host):
        """Starts to record there; tries again until there is something to record."""
        path = os.path.join(self.dir, f"{host}.csv")
        socket_path = os.path.join(self.dir, host, "run", "api.sock")
        while not self.over.is_set():
            began = time.monotonic()
            recorder = subprocess.Popen([self.args.dray, "--quiet", "--socket", socket_path, "trace", "record", "vm",
                                         "-o", path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                recorder.wait(0.5)
            except subprocess.TimeoutExpired:
                self.records[host] = (began, recorder, path)
                return

    def load(self, keeper, name):
        self.over.clear()
        self.records = {}
        self.record("a")
        super().load(keeper, name)

    def dray(self, system, qmp, image):
        self.began = time.monotonic()
        waiter = threading.Thread(target=self.record, args=("b",))
        waiter.start()
        try:
            return super().dray(system, qmp, image)
        finally:
            self.over.set()
            waiter.join()

    def finish(self):
        """One trace of both records, and the second of it in which the migration began."""
        # What comes after the end does not matter, but a trace must not end before the replay does.
        time.sleep(self.args.after)
        first = self.records["a"][0]
        whole = os.path.join(self.dir, "both.csv")
        with open(whole, "w", newline="") as file:
            out = csv.writer(file)
            for host in "ab":
                began, recorder, path = self.records[host]
                recorder.terminate()
                recorder.wait()
                with open(path, newline="") as one:
                    for row in csv.reader(one):
                        if row[0] != "time_s":
                            out.writerow([f"{float(row[0]) + began - first:.6f}", *row[1:]])
        return whole, self.began - first

    def one(self, system):
        self.told = None
        outcome = super().one(system)
        outcome["sim"] = self.told
        return outcome

    def judge(self, outcome):
        trace, start = self.finish()
        strategy, order, *_ = [*outcome["system"].split("/"), "workload-aware"]
        memory = max(outcome["memory_bytes"], 4096)
        command = [self.args.dray, "--json", "sim", trace, "--start", f"{start:.3f}", "--strategy", strategy, "--order", order,
                   "--bandwidth", f"{int(self.link * 8)}bit", "--delay", "0", "--seek", "0",
                   "--disk", f"{self.args.size}MiB", "--memory", str(memory)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr.strip())
        self.told = json.loads(done.stdout.strip().splitlines()[-1])
        super().judge(outcome)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dray", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--load", default="mail", help="file-server, mail, java, web or database")
    parser.add_argument("--rate", default="200mbit", help="rate of the link for tbf")
    parser.add_argument("--systems", default="hybrid/workload-aware,hybrid/sequential")
    parser.add_argument("--size", type=int, default=2048, help="MiB of the disk, all of it data")
    parser.add_argument("--load-seconds", type=int, default=300, help="how long the load goes on after the start")
    parser.add_argument("--after", type=int, default=20, help="seconds of the load that are recorded after the end")
    parser.add_argument("--seed", type=int, default=1, help="of the load")
    parser.add_argument("--warmup", type=int, default=45, help="seconds of the load before the migration")
    parser.add_argument("--memory", type=int, default=256, help="MiB of guest memory")
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    args.dray, args.host = os.path.realpath(args.dray), os.path.realpath(args.host)
    args.seeded, args.write, args.patience = args.size, 0, 60
    directory, bench = tempfile.mkdtemp(prefix="dray-bench-", dir="/var/tmp"), None
    try:
        make_network(args.rate)
        link = measure_link()
        print(f"link {args.rate}: {link * 8 / 1e6:.1f} Mbit/s of TCP payload; load {os.getloadavg()[0]:.1f}", flush=True)
        bench = Recorded(args, directory)
        bench.link = link
        for _ in range(args.rounds):
            for system in args.systems.split(","):
                compare(bench.one(system))
    finally:
        if bench:
            for keeper in bench.keepers.values():
                keeper.close()
        drop_network()
        shutil.rmtree(directory, ignore_errors=True)


def compare(outcome):
    if outcome["result"] != "completed":
        print(f"{outcome['system']}: {outcome['result']}")
        return
    sim = outcome["sim"]["runs"][0]
    again = outcome["blocks_sent_twice"] * 4096
    real = (outcome["total_seconds"], again / MIB, outcome["remote_reads"])
    told = (sim["total_ns"] / 1e9, sim["extra_bytes"] / MIB, sim["remote_reads"])
    print(f"{outcome['system']}: guest at {outcome['achieved'] * 100:.0f} % of the load's rate, "
          f"{outcome['complaints']} complaints")
    for what, unit, seen, said in zip(("total time", "sent again", "remote reads"), ("s", "MiB", ""), real, told):
        ratio = f"{said / seen:.3f}" if seen else "-"
        print(f"  {what:13} real {seen:8.1f} {unit:3}  simulated {said:8.1f} {unit:3}  ratio {ratio}", flush=True)


if __name__ == "__main__":
    main()
