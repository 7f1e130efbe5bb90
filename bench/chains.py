#!/usr/bin/env python3
"""A running VM with a snapshot chain leaves a busy host in three ways: with its whole chain (FullMig of the SnapMig
paper: `--chain keep`), with what it sees now (SelectiveMig: `--chain flatten`), and with a backup of yesterday to begin
with. One VM, or two at once. Three hosts on a switch (bench/backups.py); on the source others send as much as its link
gives and read as much as its disk gives. Needs root.

    python3 bench/chains.py [--dray target/release/dray] [--host target/release/examples/bench_host] [--vms 1]
        [--mib 1024] [--changed 16] [--rate 1gbit] [--guests 2] [--disk 100 --readers 2] [--rounds 1] [--strategy auto]

Each guest writes 16 KiB and flushes, over and over, into the part of its disk that has changed since the backup, so
that what has changed is known. Its chain: a base, a snapshot that has a quarter of it anew, and what was written since. With the
backup its disk was put on dray while the guest ran (`dray adopt`) and backed up with the files below it; then it moves with its
whole chain. Time is from `dray prepare` to the end of `dray migrate`. Reuse of content is off where there is no backup. Every
guest verifies its whole disk at the target.
"""

import argparse
import json
import random
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from agents import Disk, Host, ask, issue_certificates
from backups import HOSTS, Guests, configure, dray, drop_network, from_source, inside, make_network, namespace
from migrate import Keeper
from returns import MIB, make_image

WAYS = {"full": ["--chain", "keep"], "selective": ["--chain", "flatten"], "backup": []}
# Of the disk, what the snapshot has anew.
SNAPSHOT = 4
# Where in it the guest writes: in the middle.
PLACE = 2


def qemu_img(*words):
    subprocess.run(["qemu-img", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


class Template:
    """A VM's disk, a chain: made once, copied for each move."""

    def __init__(self, keeper, root, nth, mib):
        self.dir = root / f"template{nth}"
        self.dir.mkdir()
        self.mib, self.nth = mib, nth
        raw, old, new = (self.dir / name for name in ("disk.raw", "old.raw", "new.raw"))
        keeper("image", raw, mib, mib, nth)
        part = mib // SNAPSHOT
        with open(raw, "rb") as whole, open(new, "wb") as file:
            file.write(whole.read(part * MIB))
        shutil.copyfile(raw, old)
        with open(old, "r+b") as file:
            noise = random.Random(nth)
            for _ in range(part):
                file.write(noise.randbytes(MIB))
        qemu_img("convert", "-f", "raw", "-O", "qcow2", old, self.dir / "base.qcow2")
        qemu_img("create", "-f", "qcow2", "-b", self.dir / "base.qcow2", "-F", "qcow2", self.dir / "middle.qcow2")
        subprocess.run(["qemu-io", "-f", "qcow2", "-c", f"write -s {new} 0 {part}M", self.dir / "middle.qcow2"],
                       check=True, stdout=subprocess.DEVNULL)
        old.unlink()
        new.unlink()

    def place(self, host):
        """Puts the disk into the host's pool; the -blockdev that opens it."""
        node, pool = f"disk{self.nth}", host.pool
        base, middle, top = (pool / f"vm{self.nth}-{name}.qcow2" for name in ("base", "middle", "top"))
        shutil.copyfile(self.dir / "base.qcow2", base)
        shutil.copyfile(self.dir / "middle.qcow2", middle)
        qemu_img("rebase", "-u", "-f", "qcow2", "-b", base, "-F", "qcow2", middle)
        qemu_img("create", "-f", "qcow2", "-b", middle, "-F", "qcow2", top)
        return {"driver": "qcow2", "node-name": node, "discard": "unmap", "file": {"driver": "file", "filename": str(top)}}


class Vm:
    """A guest on the source, and what it tells."""

    def __init__(self, args, source, keepers, template, way):
        self.args, self.source, self.keepers, self.way = args, source, keepers, way
        self.name, self.nth = f"vm{template.nth}", template.nth
        self.summary, self.error = None, None
        blockdev = json.dumps(template.place(source), separators=(",", ":"))
        self.qmp = keepers["hosta"]("boot", self.name, f"disk{self.nth}", blockdev)
        self.tell("open", f"image={self.nth}", f"seeded={args.mib * MIB}")

    def tell(self, command, *words):
        self.keepers["hosta"]("tell", self.name, command, "disk=vda", *words)

    def write(self, rate, pattern):
        """Into what has changed since the backup, from now on."""
        place = self.args.mib // PLACE * MIB
        self.tell("start", f"offset={place}", f"span={self.args.changed * MIB}", "block=16384", f"rate={rate}",
                  f"pattern={pattern}", "flush=1", "verify=4")

    def move(self):
        try:
            self._move()
        except (RuntimeError, OSError, subprocess.CalledProcessError) as why:
            self.error = f"{why} {getattr(why, 'stderr', '') or ''}"

    def _move(self):
        more = [*WAYS[self.way], *([] if self.way == "backup" else ["--no-backups"])]
        prepared = json.loads(dray(self.args, self.source, "prepare", "--qmp", self.qmp, "--to", "hostb", *more))
        lines, top = [], None
        for image in prepared["images"]:
            lines += [json.loads(line) for line in image["blockdev"]]
            top = lines[-1]["node-name"] if image["device"] else top
        lines = [json.dumps(line, separators=(",", ":")) for line in lines]
        target = self.keepers["hostb"]("wait", self.name, top, *lines)
        more = ["--strategy", self.args.strategy, *([] if self.way == "backup" else ["--no-reuse"])]
        told = dray(self.args, self.source, "migrate", "--qmp", self.qmp, "--to", "hostb", "--target-qmp", target, *more)
        self.summary = json.loads(told.strip().splitlines()[-1])

    def rate(self):
        """Bytes a second that it has written since the mark, wherever it is now."""
        return self.keepers["hostb"].report(self.name)["rate"]

    def verify(self):
        self.keepers["hostb"]("tell", self.name, "stop")
        self.keepers["hostb"]("tell", self.name, "verify")
        if int(self.keepers["hostb"]("complaints", self.name)):
            raise RuntimeError(f"{self.name} has found wrong blocks")


def one(args, hosts, keepers, templates, way):
    """Yesterday's backup, a day's work, and the move, of all at once."""
    source = hosts[0]
    for host in hosts:
        host.start()
    vms = [Vm(args, source, keepers, template, way) for template in templates]
    if way == "backup":
        dray(args, source, "backups", "init", "third")
        for vm in vms:
            dray(args, source, "adopt", "--qmp", vm.qmp)
        dray(args, source, "backup", *[f"{vm.name}-top.qcow2" for vm in vms], "--to", "third")
    for vm in vms:
        vm.write(args.changed * MIB // 2, "seq")
    time.sleep(4)
    if source.disk:
        source.disk.hold(int(args.disk * 1e6))
    guests = Guests(args, source.disk, source.dir / "others.raw")
    try:
        for vm in vms:
            vm.write(0, "random")
        time.sleep(1)
        for vm in vms:
            vm.tell("mark")
        sent, before, began = from_source(), guests.bytes(), time.monotonic()
        threads = [threading.Thread(target=vm.move) for vm in vms]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took, after = time.monotonic() - began, guests.bytes()
        sent = from_source() - sent
        failed = [vm.error for vm in vms if vm.error]
        if failed:
            raise RuntimeError("; ".join(failed))
        own = sum(vm.rate() for vm in vms) / len(vms)
    finally:
        guests.stop()
        if source.disk:
            source.disk.hold(0)
    for vm in vms:
        vm.verify()
    memory = sum(vm.summary["wire_bytes"]["memory"] for vm in vms)
    downtime = max(vm.summary["downtime_ms"]["total"] for vm in vms)
    clear(hosts, keepers, vms)
    sending, reading = [(now - then) / took for now, then in zip(after, before)]
    twice = sum(vm.summary["blocks_sent_twice"] for vm in vms) * 4096
    return took, own, sending, reading, sent - memory, downtime, twice


def clear(hosts, keepers, vms):
    for vm in vms:
        for keeper in keepers.values():
            keeper("kill", vm.name)
    # A flattened chain's storage daemon ends when nobody needs it any more; an agent that is killed leaves it.
    deadline = time.monotonic() + 60
    while list((hosts[0].dir / "run").glob("chain-*")):
        if time.monotonic() > deadline:
            raise RuntimeError("a chain's storage daemon stays")
        time.sleep(0.1)
    for host in hosts:
        host.stop()
        for left in host.pool.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    shutil.rmtree(hosts[2].dir / "repository", ignore_errors=True)


def tell(args, seen):
    """Medians, and the backup against both."""
    middle = {way: [statistics.median(values) for values in zip(*all_of)] for way, all_of in seen.items()}
    changed = args.vms * args.changed * MIB
    for way in ("full", "selective"):
        if way in middle and "backup" in middle:
            took, own, sending, reading, *_ = [other / (mine or 1) for other, mine in zip(middle["backup"], middle[way])]
            print(f"{args.vms} VM, backup against {way}: time / {1 / took:.2f}, the VM's own writes x {own:.2f}, others' sending x "
                  f"{sending:.2f}, reading x {reading:.2f}")
    if "backup" in middle:
        print(f"{args.vms} VM: the source's bytes without memory {middle['backup'][4] / changed:.3f} x changed")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dray", default="target/release/dray")
    parser.add_argument("--host", default="target/release/examples/bench_host")
    parser.add_argument("--vms", type=int, default=1)
    parser.add_argument("--mib", type=int, default=1024, help="of each VM's disk, all of it data")
    parser.add_argument("--changed", type=int, default=16, help="MiB that have changed since the backup")
    parser.add_argument("--memory", type=int, default=192, help="MiB of guest memory")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--guests", type=int, default=2, help="how many others send from the source")
    parser.add_argument("--disk", type=float, help="MB/s of the source's disk; unless given it is not held, and nobody reads")
    parser.add_argument("--readers", type=int, default=2, help="how many others read from the source's disk")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--dir", help="where the images are made")
    args = parser.parse_args()
    args.dray, args.host = str(Path(args.dray).resolve()), str(Path(args.host).resolve())
    root = Path(tempfile.mkdtemp(prefix="dray-chains-", dir=args.dir))
    hosts, keepers = [], {}
    try:
        make_network(args.rate)
        issue_certificates(args.dray, root, HOSTS)
        addresses = {name: f"{address}:7421" for name, address in HOSTS.items()}
        pairs = (("hosta", "hostb"), ("hostb", "hosta"), ("hostn", "hosta"))
        hosts = [Host(args.dray, root, name, peer, addresses, namespace(name)) for name, peer in pairs]
        configure(root, addresses)
        if args.disk:
            hosts[0].disk = Disk(root.name, root)
            make_image(hosts[0].dir / "others.raw", args.mib * MIB)
        join = hosts[0].disk.join if args.disk else None
        keepers = {host.name: Keeper(inside(host.name), args.host, str(host.dir), args.memory,
                                     join if host is hosts[0] else None) for host in hosts[:2]}
        templates = [Template(keepers["hostb"], root, nth + 1, args.mib) for nth in range(args.vms)]
        seen, ways = {}, args.ways.split(",")
        for nth in range(args.rounds):
            for way in ways if nth % 2 == 0 else reversed(ways):
                told = one(args, hosts, keepers, templates, way)
                seen.setdefault(way, []).append(told)
                took, own, sending, reading, sent, downtime, twice = told
                print(f"round {nth + 1}, {args.vms} VM, {way}: {took:.1f} s, each VM writes {own / 1e6:.2f} MB/s, others send "
                      f"{sending / 1e6:.1f} and read {reading / 1e6:.1f} MB/s, the source sent {sent / MIB:.1f} MiB without "
                      f"memory ({twice / MIB:.1f} MiB of it a second time), {args.vms * args.changed} MiB changed, downtime "
                      f"{downtime:.0f} ms", flush=True)
        tell(args, seen)
    finally:
        for keeper in keepers.values():
            keeper.close()
        for host in hosts:
            host.stop()
            if host.disk:
                host.disk.drop()
        drop_network()
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
