"""What the benches share: agents on this machine, asked over their local sockets."""

import json
import os
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path


def ask(api, command):
    """One question to an agent."""
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(str(api))
        stream.sendall(json.dumps({"version": 1, "command": command}).encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            more = stream.recv(1 << 16)
            if not more:
                raise RuntimeError("the agent hung up")
            answer += more
    answer = json.loads(answer.splitlines()[-1])
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["result"]


def drop_unknown_fields(dray, file):
    """An earlier build of dray knows fewer fields: what these ask for it does without being asked."""
    while True:
        said = subprocess.run([dray, "check-config", "--config", file], capture_output=True, text=True).stderr
        unknown = re.search(r"unknown field `(\w+)`", said)
        lines = Path(file).read_text().splitlines(keepends=True)
        known = [line for line in lines if not unknown or not line.startswith(f"{unknown[1]} =")]
        if len(known) == len(lines):
            return
        Path(file).write_text("".join(known))


class Host:
    """An agent and its directories, in a network namespace if one is named."""

    def __init__(self, dray, root, name, peer, addresses, namespace=None):
        self.dray, self.name, self.dir = dray, name, root / name
        self.inside = ["ip", "netns", "exec", namespace] if namespace else []
        self.pool, self.api = self.dir / "pool", self.dir / "run/api.sock"
        self.pool.mkdir(parents=True)
        (self.dir / "dray.toml").write_text(
            f'qmp_dirs = ["{root}"]\n[agent]\nname = "{name}"\nstate_dir = "{self.dir}/state"\n'
            f'run_dir = "{self.dir}/run"\nlisten = "{addresses[name]}"\n[tls]\ndir = "{root}/pki/{name}"\n'
            # Without the word an image gets content of its own earlier copies and of base images only.
            f'[[pool]]\nname = "p"\npath = "{self.pool}"\nreuse_domain = "bench"\n'
            f'[[peer]]\nname = "{peer}"\naddress = "{addresses[peer]}"\npools = ["p"]\n'
            f'rights = ["receive", "read-replicas", "reuse", "store"]\n'
        )
        drop_unknown_fields(dray, self.dir / "dray.toml")
        self.process = None
        self.disk = None  # a Disk that it shares with others

    def start(self):
        for part in ("state", "run"):
            shutil.rmtree(self.dir / part, ignore_errors=True)
            (self.dir / part).mkdir()
        log = open(self.dir / "log", "ab")
        command = [*self.inside, self.dray, "agent", "--config", self.dir / "dray.toml"]
        join = self.disk.join if self.disk else None
        self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, preexec_fn=join)
        for _ in range(2000):
            try:
                return ask(self.api, "info")
            except OSError:
                time.sleep(0.01)
        raise RuntimeError(f"{self.name} does not start: {(self.dir / 'log').read_text()[-2000:]}")

    def stop(self):
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None


class Disk:
    """The disk of one of the hosts: what its processes read from and write to the machine's own can be held to a
    rate, by the kernel's control group for block devices."""

    def __init__(self, name, path):
        device = os.stat(path).st_dev
        whole = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
        if (whole / "partition").exists():
            whole = whole.parent
        self.device = (whole / "dev").read_text().strip()
        self.group = Path("/sys/fs/cgroup/blkio") / name
        self.group.mkdir()

    def hold(self, rate):
        """To so many bytes a second in each direction from now on; 0 for no limit. Nothing is in the page cache then."""
        for way in ("read", "write"):
            (self.group / f"blkio.throttle.{way}_bps_device").write_text(f"{self.device} {rate}")
        subprocess.run(["sync"], check=True)
        Path("/proc/sys/vm/drop_caches").write_text("3")

    def join(self):
        """Puts the calling process, not yet its program, on this disk."""
        (self.group / "cgroup.procs").write_text(str(os.getpid()))

    def drop(self):
        """Nobody uses it any more."""
        self.group.rmdir()


def issue_certificates(dray, root, names):
    """A certificate authority in `root`/pki, and a certificate for each host."""
    subprocess.run([dray, "pki", "init", "--dir", root / "pki"], check=True, stdout=subprocess.DEVNULL)
    for name in names:
        issue = [dray, "pki", "issue", name, "--address", "127.0.0.1", "--dir", root / "pki"]
        subprocess.run(issue, check=True, stdout=subprocess.DEVNULL)
