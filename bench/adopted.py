#!/usr/bin/env python3
"""What an adopted disk costs: the same running guest on QEMU's own file node, then adopted by dray,
then handed back, and so on, in turns. Started by bench/run.sh, as root.

    bench/adopted.py --dray target/release/dray --host target/release/examples/bench_host --out out.json

Two loads for each: the guest's own 4 KiB random writes (under emulation most of the time is the
guest's), and fio's nbd engine on an export that QEMU makes of the very node the guest's disk is on
(no emulation, but one more hop for both). CPU is that of QEMU and the agent together.
"""
import argparse, json, os, shutil, statistics, subprocess, tempfile, time

import migrate

MIB = 1 << 20
SPAN = 512 * MIB


def cpu_seconds(pids):
    total = 0
    for pid in pids:
        fields = open(f"/proc/{pid}/stat").read().rsplit(") ", 1)[1].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


class Guest:
    def __init__(self, bench):
        self.bench, self.keeper = bench, bench.keepers["a"]
        self.image = os.path.join(bench.dir, "a", "pool", "vm.raw")
        migrate.run("cp", "--sparse=always", bench.base, self.image)
        self.qmp_path = self.keeper("boot", "source", "disk0", bench.local("disk0", self.image))
        self.keeper("tell", "source", "open", "disk=vda", "image=1", f"seeded={bench.args.seeded * MIB}")
        self.pids = [agent_pid(bench), int(qemu_pid(self.qmp_path))]

    def writes(self, depth, seconds):
        """The guest's own latency in microseconds, its rate, and CPU seconds for each GiB."""
        self.keeper("tell", "source", "start", "disk=vda", f"span={SPAN}", "block=4096", "rate=0",
                    f"threads={depth}", "verify=0")
        time.sleep(1)
        self.keeper("tell", "source", "mark")
        cpu, start = cpu_seconds(self.pids), time.time()
        time.sleep(seconds)
        report = self.keeper.report("source")
        cpu, wall = cpu_seconds(self.pids) - cpu, time.time() - start
        self.keeper("tell", "source", "stop")
        return {"iops": report["writes"] / report["seconds"], "p50_us": report["p50_us"],
                "p99_us": report["p99_us"], "cpu_us_per_io": cpu / wall / (report["writes"] / report["seconds"]) * 1e6}

    def export(self, depth, pattern, seconds):
        """fio on an export of the disk's node."""
        watch = migrate.Qmp(self.qmp_path + ".watch")
        socket_path = os.path.join(self.bench.dir, "export.sock")
        watch.execute("nbd-server-start", addr={"type": "unix", "data": {"path": socket_path}})
        node = next(b["inserted"]["node-name"] for b in watch.execute("query-block") if "disk0" in b["qdev"])
        watch.execute("block-export-add", type="nbd", id="e", name="e", writable=True, **{"node-name": node})
        cpu = cpu_seconds(self.pids)
        fio = subprocess.run(["fio", "--name=x", "--ioengine=nbd", f"--uri=nbd+unix:///e?socket={socket_path}",
                              f"--rw={pattern}", "--bs=4k", f"--iodepth={depth}", f"--size={SPAN}", "--time_based",
                              f"--runtime={seconds}", "--randrepeat=0", "--output-format=json"],
                             stdout=subprocess.PIPE, check=True, text=True)
        cpu = cpu_seconds(self.pids) - cpu
        watch.execute("nbd-server-stop")
        watch.sock.shutdown(2)
        job = json.loads(fio.stdout[fio.stdout.index("{"):])["jobs"][0]["read" if "read" in pattern else "write"]
        percentile = job["clat_ns"]["percentile"]
        return {"iops": job["iops"], "p50_us": percentile["50.000000"] / 1e3, "p99_us": percentile["99.000000"] / 1e3,
                "cpu_us_per_io": cpu / job["total_ios"] * 1e6}


def agent_pid(bench):
    # The agent replaces `ip netns exec`, so the process started is the agent.
    return bench.agents[0].pid


def qemu_pid(qmp_path):
    return subprocess.check_output(["pgrep", "-f", f"qemu-system.*{qmp_path},"], text=True).split()[0]


CASES = [("guest write", 1), ("guest write", 16), ("randread", 1), ("randread", 16), ("randwrite", 1), ("randwrite", 16)]


def measure(guest, load, depth, seconds):
    return guest.writes(depth, seconds) if load == "guest write" else guest.export(depth, load, seconds)


def table(results):
    for load, depth in CASES:
        cell = {}
        for where in ("own", "adopted"):
            runs = [r for r in results if (r["load"], r["depth"], r["where"]) == (load, depth, where)]
            cell[where] = {key: statistics.median(r[key] for r in runs) for key in ("iops", "p50_us", "p99_us", "cpu_us_per_io")}
        own, adopted = cell["own"], cell["adopted"]
        print(f"{load:12} depth {depth:2}  " + "  ".join(
            f"{name} {own[key]:8.{digits}f} -> {adopted[key]:8.{digits}f} ({adopted[key] / own[key]:4.2f} x)"
            for name, key, digits in (("iops", "iops", 0), ("p50 us", "p50_us", 1), ("p99 us", "p99_us", 1), ("cpu us/io", "cpu_us_per_io", 1))))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dray", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--out")
    args = parser.parse_args()
    args.dray, args.host = os.path.realpath(args.dray), os.path.realpath(args.host)
    args.size, args.seeded, args.memory, args.write = 2048, 1024, 256, 0
    directory = tempfile.mkdtemp(prefix="dray-bench-", dir="/var/tmp")
    bench, results = None, []
    try:
        migrate.make_network("none")
        bench = migrate.Bench(args, directory)
        bench.start_agents()
        guest = Guest(bench)
        for round_ in range(args.rounds):
            for where in ("own", "adopted") if round_ % 2 == 0 else ("adopted", "own"):
                if where == "adopted":
                    bench.cli("a", "adopt", "--qmp", guest.qmp_path)
                for load, depth in CASES:
                    outcome = measure(guest, load, depth, args.seconds)
                    results.append({"round": round_, "where": where, "load": load, "depth": depth, **outcome})
                if where == "adopted":
                    bench.cli("a", "release", "--qmp", guest.qmp_path)
        table(results)
        if args.out:
            with open(args.out, "w") as file:
                json.dump(results, file, indent=1)
    finally:
        if bench:
            bench.stop()
            for keeper in bench.keepers.values():
                keeper.close()
        migrate.drop_network()
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
