#!/usr/bin/env python3
"""A migration that begins with a backup against one that copies everything, from a source whose link and disk are
busy: three hosts in network namespaces on a switch, each with a link of its own; guests of the source send as much as
its link gives them, all the time, and read as much as its disk gives them. One image, then two at once. Needs root.

    python3 bench/backups.py [--dray target/release/dray] [--gib 2] [--changed-percent 1] [--rate 1gbit] [--guests 2]
        [--disk 100 --readers 2] [--rounds 2]

The backup is on the third host. After it a part of the image is written; then the image moves. Time is from the command
until every block is local, the source's bytes are those that the target's interface got less those that the third
host's sent, and the guests' throughput is theirs during that time. With --disk the source's agent and the guests that
read share a disk of that rate. The image is compared with the copy that was left behind.
"""

import argparse
import os
import random
import shutil
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from agents import Disk, Host, ask, issue_certificates
from returns import MIB, change, make_image

HOSTS = {"hosta": "10.74.0.1", "hostb": "10.74.0.2", "hostn": "10.74.0.3"}
SINK_PORT = 5400
IMAGES = ["one.raw", "two.raw"]


def namespace(name):
    return f"dray-backups-{os.getpid()}-{name}"


def ip(*words):
    subprocess.run(["ip", *words], check=True)


def inside(name, *words):
    return ["ip", "netns", "exec", namespace(name), *words]


def shape(name, device, rate):
    if rate != "none":
        words = ["tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
        subprocess.run(inside(name, *words), check=True)


def make_network(rate):
    """Each host's link is shaped in both directions."""
    ip("netns", "add", namespace("switch"))
    ip("-n", namespace("switch"), "link", "add", "br0", "type", "bridge")
    ip("-n", namespace("switch"), "link", "set", "br0", "up")
    for name, address in HOSTS.items():
        ip("netns", "add", namespace(name))
        ip("-n", namespace(name), "link", "add", "eth0", "type", "veth", "peer", "name", name, "netns", namespace("switch"))
        ip("-n", namespace("switch"), "link", "set", name, "master", "br0", "up")
        ip("-n", namespace(name), "addr", "add", address + "/24", "dev", "eth0")
        for link in ("eth0", "lo"):
            ip("-n", namespace(name), "link", "set", link, "up")
        shape(name, "eth0", rate)
        shape("switch", name, rate)


def drop_network():
    for name in [*HOSTS, "switch"]:
        subprocess.run(["ip", "netns", "del", namespace(name)], stderr=subprocess.DEVNULL)


def counted(name, way):
    """Bytes that a host has sent (tx) or got (rx)."""
    return int(subprocess.check_output(inside(name, "cat", f"/sys/class/net/eth0/statistics/{way}_bytes")))


def from_source():
    """Bytes that the target got from nobody but the source: the third host talks to it alone meanwhile."""
    return counted("hostb", "rx") - counted("hostn", "tx")


SINK = """
import socket, threading
server = socket.create_server(("0.0.0.0", PORT))
def drain(peer):
    buffer = bytearray(1 << 20)
    while peer.recv_into(buffer): pass
while True:
    threading.Thread(target=drain, args=(server.accept()[0],), daemon=True).start()
"""
# Prints the bytes that the sink has taken so far, ten times a second.
GUEST = """
import fcntl, socket, struct, termios, threading, time
peer = socket.create_connection((ADDRESS, PORT))
sent = 0
def tell():
    while True:
        waiting = struct.unpack("i", fcntl.ioctl(peer, termios.TIOCOUTQ, bytes(4)))[0]
        print(sent - waiting, flush=True)
        time.sleep(0.1)
threading.Thread(target=tell, daemon=True).start()
block = bytes(64 << 10)
while True:
    sent += peer.send(block)
"""


# Reads 64 KiB at random places of a file, past the page cache; prints the bytes so far, ten times a second.
READER = """
import mmap, os, random, time
file = os.open(PATH, os.O_RDONLY | os.O_DIRECT)
places, into = os.fstat(file).st_size >> 16, mmap.mmap(-1, 1 << 16)
read, said = 0, 0
while True:
    read += os.preadv(file, [into], random.randrange(places) << 16)
    if time.monotonic() - said > 0.1:
        said = time.monotonic()
        print(read, flush=True)
"""


class Counters:
    """Processes that print a number that grows."""

    def __init__(self, processes):
        self.processes = processes
        self.values = [0] * len(processes)
        for nth, process in enumerate(processes):
            threading.Thread(target=self._follow, args=(nth, process), daemon=True).start()

    def _follow(self, nth, process):
        for line in process.stdout:
            self.values[nth] = int(line)

    def total(self):
        return sum(self.values)

    def stop(self):
        for process in self.processes:
            process.kill()
            process.wait()


class Guests:
    """What other guests of the source send to the world, the sink being behind the switch, and read from its disk."""

    def __init__(self, args, disk, file):
        ip("-n", namespace("switch"), "addr", "add", "10.74.0.9/24", "dev", "br0")
        self.sink = subprocess.Popen(inside("switch", "python3", "-c", SINK.replace("PORT", str(SINK_PORT))))
        time.sleep(0.5)
        code = GUEST.replace("PORT", str(SINK_PORT)).replace("ADDRESS", '"10.74.0.9"')
        self.senders = Counters([subprocess.Popen(inside("hosta", "python3", "-c", code), stdout=subprocess.PIPE, text=True)
                                 for _ in range(args.guests)])
        code = READER.replace("PATH", repr(str(file)))
        self.readers = Counters([subprocess.Popen(["python3", "-c", code], stdout=subprocess.PIPE, text=True,
                                                  preexec_fn=disk.join) for _ in range(args.readers if disk else 0)])
        time.sleep(2)

    def bytes(self):
        return self.senders.total(), self.readers.total()

    def stop(self):
        self.senders.stop()
        self.readers.stop()
        self.sink.kill()
        self.sink.wait()
        ip("-n", namespace("switch"), "addr", "del", "10.74.0.9/24", "dev", "br0")


def dray(args, host, *words):
    """The command as an operator types it, on a host."""
    command = inside(host.name, args.dray, "--json", "--socket", str(host.api), *words)
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def move(args, source, target, images, more):
    """All at once; seconds until every one is local."""
    began = time.monotonic()
    commands = [inside(source.name, args.dray, "-q", "--socket", str(source.api), "migrate", "--image", image, "--to",
                       target.name, *more) for image in images]
    running = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]
    failed = [process for process in running if process.wait()]
    if failed:
        raise RuntimeError("a migration has failed")
    return time.monotonic() - began


def one(args, hosts, images, size, way, rng):
    """Backup, a day's work, and the move."""
    source, target, backup = hosts
    for host in hosts:
        host.start()
    for image in images:
        make_image(source.pool / image, size)
        ask(source.api, {"image-add": {"name": image, "path": str(source.pool / image)}})
    dray(args, source, "backups", "init", "third")
    dray(args, source, "backup", *images, "--to", "third")
    union = sum(change(source, size, size * args.changed_percent // 100, rng, image) for image in images)
    if source.disk:
        source.disk.hold(int(args.disk * 1e6))
    guests = Guests(args, source.disk, source.dir / "others.raw")
    try:
        sent, before, began = from_source(), guests.bytes(), time.monotonic()
        took = move(args, source, target, images, ["--no-backups"] if way == "full" else [])
        after, busy = guests.bytes(), time.monotonic() - began
        sent = from_source() - sent
    finally:
        guests.stop()
        if source.disk:
            source.disk.hold(0)
    for host in hosts:
        host.stop()
    for image in images:
        left = next(source.pool.glob(f".{image}.*replica*"))
        os.chmod(left, 0o600)
        subprocess.run(["cmp", left, target.pool / image], check=True)
    for host in hosts:
        for left in host.pool.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    shutil.rmtree(backup.dir / "repository", ignore_errors=True)
    sending, reading = [(now - then) / busy for now, then in zip(after, before)]
    return took, sending, reading, sent, union


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dray", default="target/release/dray")
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--changed-percent", type=int, default=1)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--guests", type=int, default=2, help="how many of the source's guests send")
    parser.add_argument("--disk", type=float, help="MB/s of the source's disk; unless given it is not held, and nobody reads")
    parser.add_argument("--readers", type=int, default=2, help="how many of the source's guests read from its disk")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", help="where the images are made")
    args = parser.parse_args()
    size = int(args.gib * (1 << 30)) // (8 * MIB) * (8 * MIB)
    root = Path(tempfile.mkdtemp(prefix="dray-backups-", dir=args.dir))
    hosts = []
    try:
        make_network(args.rate)
        issue_certificates(args.dray, root, HOSTS)
        addresses = {name: f"{address}:7421" for name, address in HOSTS.items()}
        hosts = [Host(args.dray, root, name, peer, addresses, namespace(name))
                 for name, peer in (("hosta", "hostb"), ("hostb", "hosta"), ("hostn", "hosta"))]
        configure(root, addresses)
        if args.disk:
            hosts[0].disk = Disk(root.name, root)
            make_image(hosts[0].dir / "others.raw", size)
        rng, seen = random.Random(args.seed), {}
        for nth in range(args.rounds):
            for count in (1, 2):
                for way in ("full", "backup") if nth % 2 == 0 else ("backup", "full"):
                    told = one(args, hosts, IMAGES[:count], size, way, rng)
                    seen.setdefault((count, way), []).append(told)
                    took, sending, reading, sent, union = told
                    print(f"round {nth + 1}, {count} at once, {way}: {took:.1f} s, guests send {sending / 1e6:.1f} and "
                          f"read {reading / 1e6:.1f} MB/s, the source sent {sent / MIB:.1f} MiB for "
                          f"{union / MIB:.1f} MiB changed", flush=True)
        for count in (1, 2):
            full, backup = ([statistics.median(values) for values in zip(*seen[count, way])] for way in ("full", "backup"))
            reading = f", reading x {backup[2] / full[2]:.2f}" if args.disk else ""
            print(f"{count} at once: time / {full[0] / backup[0]:.2f}, guests' sending x {backup[1] / full[1]:.2f}{reading}, "
                  f"source's bytes {backup[3] / backup[4]:.3f} x changed")
    finally:
        for host in hosts:
            host.stop()
            if host.disk:
                host.disk.drop()
        drop_network()
        shutil.rmtree(root, ignore_errors=True)


def configure(root, addresses):
    """All know each other; the third offers a repository."""
    for name in HOSTS:
        path = root / name / "dray.toml"
        text = path.read_text()
        for peer in HOSTS:
            if peer != name and f'name = "{peer}"' not in text:
                text += f'[[peer]]\nname = "{peer}"\naddress = "{addresses[peer]}"\npools = ["p"]\n'
                text += 'rights = ["receive", "read-replicas", "reuse", "store"]\n'
        if name == "hostn":
            text += f'[backup_store]\npath = "{root}/hostn/repository"\n'
        else:
            text += '[[backup]]\nname = "third"\nurl = "dray://hostn/"\n'
        path.write_text(text)


if __name__ == "__main__":
    main()
