#!/usr/bin/env python3
"""Moves the same guest between two network namespaces over a shaped link, by QEMU's own mirror (both
copy modes) and by dray, and prints what each cost. Started by bench/run.sh, as root.

    bench/migrate.py --dray target/release/dray --host target/release/examples/bench_host \
        --rate 1gbit --systems memory,background,write-blocking,hybrid --rounds 3 --out out.json

A dray system may name order and throttling: hybrid/sequential, pre-copy/workload-aware/aggressive.
With --load the guest replays a server's load instead of writing at random (bench/orders.sh).

F = bytes allocated at the start + unique 4 KiB blocks the guest wrote between start and its last report
at the source + guest memory moved (docs/measurements/migration.md). Link = TCP payload rate measured
over the same link in the same run. Wire bytes come from the interface's counters, downtime from QMP
events, latency from the guest's own clock.
"""
import argparse, json, os, shutil, socket, statistics, subprocess, sys, tempfile, threading, time

from agents import drop_unknown_fields

MIB = 1 << 20
ADDRESS = {"a": "10.72.0.1", "b": "10.72.0.2"}
NBD_PORT, LINK_PORT = 10809, 5301
# QEMU's mirror; "direct": the target's QEMU opens its file with cache.direct=on.
MIRRORS = ("background", "write-blocking", "write-blocking-direct")


class Qmp:
    """Just enough QMP: commands, and the times at which events came."""

    def __init__(self, path):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(path)
        self.file = self.sock.makefile("rw")
        self.events, self.answers = [], []
        self.cond = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()
        self.execute("qmp_capabilities")

    def _read(self):
        for line in self.file:
            message = json.loads(line)
            with self.cond:
                if "event" in message:
                    stamp = message["timestamp"]
                    at = stamp["seconds"] + stamp["microseconds"] / 1e6
                    self.events.append((message["event"], at, message.get("data", {})))
                elif "QMP" not in message:
                    self.answers.append(message)
                self.cond.notify_all()
        with self.cond:
            self.answers.append({"error": {"desc": "QEMU has gone"}})
            self.cond.notify_all()

    def execute(self, command, **arguments):
        self.file.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
        self.file.flush()
        with self.cond:
            if not self.cond.wait_for(lambda: self.answers, timeout=30):
                raise RuntimeError(f"{command}: no answer")
            answer = self.answers.pop(0)
        if "error" in answer:
            raise RuntimeError(f"{command}: {answer['error']['desc']}")
        return answer["return"]

    def wait(self, name, timeout, match=lambda data: True):
        """The first event of that name that fits; None when it does not come in time."""
        def find():
            return next((e for e in self.events if e[0] == name and match(e[2])), None)
        with self.cond:
            self.cond.wait_for(find, timeout=timeout)
            return find()


class Keeper:
    """A host's QEMUs, in its network namespace, and on its disk if that is one of its own."""

    def __init__(self, inside, binary, directory, memory, join=None):
        command = [*inside, binary, directory, str(memory)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=join)

    def __call__(self, *words):
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        if not answer.startswith("OK"):
            raise RuntimeError(f"{words[0]} {words[1:3]}: {answer}")
        return answer[3:]

    def report(self, name):
        fields = self("tell", name, "report", "disk=vda").split()[1:]
        return {k: float(v) for k, v in (f.split("=", 1) for f in fields) if v.replace(".", "").isdigit()}

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def namespace(host):
    return f"dray-bench-{os.getpid()}-{host}"


def run(*command, **kwargs):
    return subprocess.run(command, check=True, **kwargs)


def make_network(rate):
    for host in "ab":
        run("ip", "netns", "add", namespace(host))
    run("ip", "-n", namespace("a"), "link", "add", "veth0", "type", "veth", "peer", "name", "veth0", "netns", namespace("b"))
    for host in "ab":
        run("ip", "-n", namespace(host), "addr", "add", ADDRESS[host] + "/24", "dev", "veth0")
        for link in ("veth0", "lo"):
            run("ip", "-n", namespace(host), "link", "set", link, "up")
        if rate != "none":
            run("ip", "netns", "exec", namespace(host), "tc", "qdisc", "add", "dev", "veth0", "root",
                "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")


def drop_network():
    for host in "ab":
        subprocess.run(["ip", "netns", "del", namespace(host)], stderr=subprocess.DEVNULL)


def wire_bytes():
    """Bytes that crossed the link, both ways, by the interface's own count."""
    text = subprocess.check_output(["ip", "-n", namespace("a"), "-s", "-j", "link", "show", "veth0"])
    stats = json.loads(text)[0]["stats64"]
    return stats["rx"]["bytes"] + stats["tx"]["bytes"]


SENDER = """
import socket, sys, time
s = socket.create_connection((sys.argv[1], int(sys.argv[2]))); piece = bytes(1 << 17)
end = time.time() + float(sys.argv[3])
while time.time() < end: s.sendall(piece)
"""
RECEIVER = """
import socket, sys, time
l = socket.create_server((sys.argv[1], int(sys.argv[2]))); print("ready", flush=True)
c, _ = l.accept(); n = 0; first = None; last = None
while True:
    d = c.recv(1 << 20)
    if not d: break
    now = time.time()
    if first is None: first = now
    else: n += len(d)
    last = now
print(n / (last - first))
"""


def measure_link(seconds=4):
    """TCP payload rate in bytes a second."""
    receiver = subprocess.Popen(["ip", "netns", "exec", namespace("b"), sys.executable, "-c", RECEIVER,
                                 ADDRESS["b"], str(LINK_PORT)], stdout=subprocess.PIPE, text=True)
    receiver.stdout.readline()
    run("ip", "netns", "exec", namespace("a"), sys.executable, "-c", SENDER, ADDRESS["b"], str(LINK_PORT), str(seconds))
    return float(receiver.communicate()[0])


class Bench:
    def __init__(self, args, directory):
        self.args, self.dir = args, directory
        self.keepers = {}
        self.agents = []
        self.asked = args.write * 1e6
        self.base = os.path.join(directory, "base.raw")
        for host in "ab":
            os.makedirs(os.path.join(directory, host, "pool"))
            self.keepers[host] = Keeper(["ip", "netns", "exec", namespace(host)], args.host, os.path.join(directory, host), args.memory)
        self.keepers["a"]("image", self.base, args.size, args.seeded)

    # --- one run --------------------------------------------------------------------------------

    def one(self, system):
        image = os.path.join(self.dir, "a", "pool", "vm.raw")
        if os.path.exists(image):
            os.remove(image)
        run("cp", "--sparse=always", self.base, image)
        run("sync")
        strategy = system.split("/")[0]
        dray = strategy in ("hybrid", "pre-copy", "post-copy")
        try:
            if dray:
                self.start_agents()
            a = self.keepers["a"]
            qmp = Qmp(a("boot", "source", "disk0", self.local("disk0", image) if not dray else self.resident(image)))
            a("tell", "source", "open", "disk=vda", "image=1", f"seeded={self.args.seeded * MIB}")
            self.load(a, "source")
            time.sleep(self.args.warmup)
            a("tell", "source", "mark")
            allocated = os.stat(image).st_blocks * 512
            start_wire, start = wire_bytes(), time.time()
            mirrors = {name: self.mirror for name in MIRRORS}
            move = {"memory": self.memory, **mirrors}.get(system, self.dray)
            outcome = move(system, qmp, image)
            outcome.update(system=system, allocated=allocated)
            if outcome.get("result") == "completed":
                outcome["wire_bytes"] = wire_bytes() - start_wire
                outcome.setdefault("total_seconds", time.time() - start)
                self.judge(outcome)
            return outcome
        finally:
            self.stop()

    def load(self, keeper, name):
        if self.args.load:
            seconds = self.args.warmup + self.args.load_seconds
            self.asked = int(keeper("load", name, self.args.load, self.args.size, seconds, self.args.seed))
        elif self.args.write > 0:
            keeper("tell", name, "start", "disk=vda", f"span={self.args.seeded * MIB}", "block=65536",
                   f"rate={self.args.write * 1000000}", "threads=4", "verify=0")

    def judge(self, outcome):
        """What the guest saw from the mark to the end, at the target."""
        b = self.keepers["b"]
        report = b.report("target")
        outcome["guest"] = report
        outcome["complaints"] = int(b("complaints", "target")) + int(self.keepers["a"]("complaints", "source"))
        asked = self.asked
        outcome["achieved"] = report.get("rate", 0) / asked if asked else 1.0
        # The source's last line is at most a second older than the handover.
        last = dict(field.split("=", 1) for field in self.keepers["a"]("stat", "source").split()[1:])
        outcome["fresh_bytes"] = int(last.get("fresh_blocks", report.get("fresh_blocks", 0))) * 4096
        outcome["F"] = outcome["allocated"] + outcome["fresh_bytes"] + outcome.get("memory_bytes", 0)

    def stop(self):
        for host, name in (("a", "source"), ("b", "target")):
            self.keepers[host]("kill", name)
        for process in self.agents:
            process.terminate()
        for process in self.agents:
            process.wait()
        self.agents = []
        for host in "ab":
            for leaf in ("pool", "state", "run"):
                shutil.rmtree(os.path.join(self.dir, host, leaf), ignore_errors=True)
            os.makedirs(os.path.join(self.dir, host, "pool"))

    # --- disks ----------------------------------------------------------------------------------

    def local(self, node, path, direct=False):
        return json.dumps({"driver": "file", "node-name": node, "filename": path, "discard": "unmap",
                           "cache": {"direct": direct}}, separators=(",", ":"))

    def resident(self, image):
        self.cli("a", "images", "add", "vm", image)
        return json.dumps({"driver": "nbd", "node-name": "disk0", "discard": "unmap", "export": "vm",
                           "server": {"type": "unix", "path": os.path.join(self.dir, "a", "run", "nbd.sock")},
                           "reconnect-delay": 60}, separators=(",", ":"))

    # --- QEMU alone -----------------------------------------------------------------------------

    def memory(self, _system, qmp, image):
        """The guest's memory alone, the disk being on storage that both hosts see."""
        target = Qmp(self.keepers["b"]("wait", "target", "disk0", self.local("disk0", image)))
        return self.move_memory(qmp, target, lambda: None)

    def mirror(self, mode, qmp, _image):
        """What libvirt and others drive: mirror to an NBD server at the target, then the memory."""
        copy = os.path.join(self.dir, "b", "pool", "vm.raw")
        with open(copy, "wb") as file:
            file.truncate(self.args.size * MIB)
        target = Qmp(self.keepers["b"]("wait", "target", "disk0", self.local("disk0", copy, mode.endswith("direct"))))
        mode = mode.removesuffix("-direct")
        target.execute("nbd-server-start", addr={"type": "inet", "data": {"host": ADDRESS["b"], "port": str(NBD_PORT)}})
        target.execute("block-export-add", type="nbd", id="e", **{"node-name": "disk0", "writable": True, "name": "vm"})
        qmp.execute("blockdev-add", driver="nbd", export="vm", discard="unmap", **{"node-name": "remote",
                    "server": {"type": "inet", "host": ADDRESS["b"], "port": str(NBD_PORT)}})
        qmp.execute("blockdev-mirror", device="disk0", target="remote", sync="full",
                    **{"job-id": "m", "copy-mode": mode})
        if not qmp.wait("BLOCK_JOB_READY", self.args.patience):
            return {"result": f"never ready in {self.args.patience} s"}

        def let_go():
            qmp.execute("block-job-cancel", device="m")
            if not qmp.wait("BLOCK_JOB_COMPLETED", 60):
                raise RuntimeError("the mirror does not end")
            target.execute("nbd-server-stop")
        return self.move_memory(qmp, target, let_go)

    def move_memory(self, qmp, target, let_go):
        for side in (qmp, target):
            caps = [{"capability": c, "state": True} for c in ("events", "pause-before-switchover", "late-block-activate")]
            side.execute("migrate-set-capabilities", capabilities=caps)
        qmp.execute("migrate-set-parameters", **{"max-bandwidth": 1 << 40, "downtime-limit": 300})
        address = f"tcp:{ADDRESS['b']}:4444"
        target.execute("migrate-incoming", uri=address)
        qmp.execute("migrate", uri=address)
        reached = lambda status: lambda data: data.get("status") == status
        if not qmp.wait("MIGRATION", 120, reached("pre-switchover")):
            return {"result": "the memory never fits the downtime"}
        let_go()
        qmp.execute("migrate-continue", state="pre-switchover")
        if not qmp.wait("MIGRATION", 60, reached("completed")) or not target.wait("MIGRATION", 60, reached("completed")):
            return {"result": "the migration did not complete"}
        target.execute("cont")
        end = time.time()
        resumed = target.wait("RESUME", 30)
        ram = qmp.execute("query-migrate").get("ram", {})
        return {"result": "completed", "downtime_ms": (resumed[1] - qmp.wait("STOP", 1)[1]) * 1e3,
                "memory_bytes": ram.get("transferred", 0), "ended": end}

    # --- dray -----------------------------------------------------------------------------------

    def cli(self, host, *arguments, **kwargs):
        socket_path = os.path.join(self.dir, host, "run", "api.sock")
        out = subprocess.run([self.args.dray, "--socket", socket_path, "--json", *arguments],
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs)
        if out.returncode:
            raise RuntimeError(f"dray {arguments[0]}: {out.stderr.strip()} {out.stdout[-300:]}")
        return json.loads(out.stdout.strip().splitlines()[-1])

    def start_agents(self):
        pki = os.path.join(self.dir, "pki")
        if not os.path.exists(pki):
            run(self.args.dray, "pki", "init", "--dir", pki, stdout=subprocess.DEVNULL)
            for host in "ab":
                run(self.args.dray, "pki", "issue", "--dir", pki, f"host{host}", "--address", ADDRESS[host], stdout=subprocess.DEVNULL)
        for host, other in (("a", "b"), ("b", "a")):
            home = os.path.join(self.dir, host)
            for leaf in ("state", "run"):
                os.makedirs(os.path.join(home, leaf), exist_ok=True)
            with open(os.path.join(home, "dray.toml"), "w") as file:
                file.write(f'qmp_dirs = ["{self.dir}"]\n[agent]\nname = "host{host}"\nstate_dir = "{home}/state"\n'
                           f'run_dir = "{home}/run"\nlisten = "{ADDRESS[host]}:7421"\n[tls]\ndir = "{pki}/host{host}"\n'
                           f'[[pool]]\nname = "p"\npath = "{home}/pool"\n[[peer]]\nname = "host{other}"\n'
                           f'address = "{ADDRESS[other]}:7421"\npools = ["p"]\n'
                           f'rights = ["receive", "read-replicas", "reuse"]\n')
            drop_unknown_fields(self.args.dray, os.path.join(home, "dray.toml"))
            log = open(os.path.join(self.dir, f"agent-{host}.log"), "a")
            self.agents.append(subprocess.Popen(["ip", "netns", "exec", namespace(host), self.args.dray, "agent",
                                                 "--config", os.path.join(home, "dray.toml")], stdout=log, stderr=log))
            for _ in range(100):
                if os.path.exists(os.path.join(home, "run", "api.sock")):
                    break
                time.sleep(0.05)

    def dray(self, system, qmp, _image):
        strategy, *more = system.split("/")
        options = [word for pair in zip(("--order", "--throttle"), more) for word in pair]
        source = os.path.join(self.dir, "a", "source.qmp")
        source = qmp.sock.getpeername() or source
        # A monitor has one client at a time; the agent is the next of this one.
        qmp.sock.shutdown(socket.SHUT_RDWR)
        watch_source = Qmp(source + ".watch")
        prepared = self.cli("a", "prepare", "--qmp", source, "--to", "hostb")
        lines = prepared["images"][0]["blockdev"]
        node = json.loads(lines[-1])["node-name"]
        target = self.keepers["b"]("wait", "target", node, *[json.dumps(json.loads(l), separators=(",", ":")) for l in lines])
        watch_target = Qmp(target + ".watch")
        summary = self.cli("a", "migrate", "--qmp", source, "--to", "hostb", "--target-qmp", target, "--strategy", strategy, *options)
        stopped, resumed = watch_source.wait("STOP", 1), watch_target.wait("RESUME", 1)
        return {"result": "completed", "total_seconds": summary["total_seconds"],
                "downtime_ms": (resumed[1] - stopped[1]) * 1e3, "downtime_parts": summary["downtime_ms"],
                "memory_bytes": summary["wire_bytes"]["memory"], "remote_reads": summary["remote_reads"],
                "blocks_sent": summary["blocks_sent"], "blocks_sent_twice": summary["blocks_sent_twice"],
                "summary": summary}


def line(outcome, link):
    if outcome["result"] != "completed":
        return f"{outcome['system']:15} {outcome['result']}"
    ideal = outcome["F"] / link
    guest = outcome["guest"]
    again = outcome.get("blocks_sent_twice")
    extra = "" if again is None else f"  sent again {again * 4096 / MIB:6.1f} MiB"
    if outcome.get("summary", {}).get("throttled_operations"):
        extra += f"  throttled {outcome['summary']['throttled_operations']}"
    return (f"{outcome['system']:15} total {outcome['total_seconds']:6.2f} s ({outcome['total_seconds'] / ideal:4.2f} x F/link)  "
            f"wire {outcome['wire_bytes'] / (1 << 30):5.2f} GiB ({outcome['wire_bytes'] / outcome['F']:4.2f} x F)  "
            f"downtime {outcome['downtime_ms']:6.0f} ms  write p50 {guest.get('p50_us', 0) / 1e3:6.2f} "
            f"p99 {guest.get('p99_us', 0) / 1e3:7.2f} max {guest.get('max_us', 0) / 1e3:7.1f} ms  "
            f"achieved {outcome['achieved'] * 100:3.0f} %{extra}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dray", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--rate", default="1gbit", help="rate of the link for tbf, or none")
    parser.add_argument("--systems", default="memory,background,write-blocking,hybrid,pre-copy,post-copy")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--size", type=int, default=8192, help="MiB of the disk")
    parser.add_argument("--seeded", type=int, default=2048, help="MiB of data in it")
    parser.add_argument("--write", type=int, default=40, help="MB/s the guest asks to write")
    parser.add_argument("--load", help="replay this server's load instead: file-server, mail, web, …")
    parser.add_argument("--load-seconds", type=int, default=600, help="how long the load goes on after the start")
    parser.add_argument("--seed", type=int, default=1, help="of the load")
    parser.add_argument("--warmup", type=int, default=2, help="seconds of the load before the migration")
    parser.add_argument("--memory", type=int, default=256, help="MiB of guest memory")
    parser.add_argument("--patience", type=int, default=60, help="seconds until a mirror counts as never ready")
    parser.add_argument("--out")
    args = parser.parse_args()
    args.dray, args.host = os.path.realpath(args.dray), os.path.realpath(args.host)
    directory = tempfile.mkdtemp(prefix="dray-bench-", dir="/var/tmp")
    results, bench = [], None
    try:
        make_network(args.rate)
        link = measure_link()
        print(f"link {args.rate}: {link * 8 / 1e9:.3f} Gbit/s of TCP payload; load {os.getloadavg()[0]:.1f}", flush=True)
        bench = Bench(args, directory)
        for round_ in range(args.rounds):
            # Back and forth, so that none always comes after the same other.
            systems = args.systems.split(",")
            for system in systems if round_ % 2 == 0 else reversed(systems):
                try:
                    outcome = bench.one(system)
                except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
                    # One system that fails must not take the others' figures with it.
                    outcome = {"system": system, "result": f"failed: {error}"}
                outcome.update(round=round_, link=link, rate=args.rate, load=os.getloadavg()[0])
                results.append(outcome)
                print(line(outcome, link), flush=True)
                if args.out:
                    with open(args.out, "w") as file:
                        json.dump(results, file, indent=1)
    finally:
        if bench:
            for keeper in bench.keepers.values():
                keeper.close()
        drop_network()
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
