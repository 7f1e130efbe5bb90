#!/usr/bin/env python3
"""There and back: an image full of noise moves from one host to another over a shaped link, some of it is
written there, and it moves back to the host that kept a replica. How long does each take, and what does the
second one send? Needs root for its two network namespaces.

    python3 bench/returns.py [--dray target/release/dray] [--gib 20] [--changed-mb 100] [--rate 1gbit]
        [--strategies hybrid,pre-copy] [--dir DIR]

Time is from `migrate` until every block is local, wire bytes are those of the interface. At the end a
bystander compares the image with the copy that was left behind, byte for byte.
"""

import argparse
import os
import random
import shutil
import socket
import struct
import subprocess
import tempfile
import time
from pathlib import Path

from agents import Host, ask, issue_certificates

MIB = 1 << 20
BLOCK = 4096
IMAGE = "disk.raw"
ADDRESS = {"hosta": "10.73.0.1", "hostb": "10.73.0.2"}


def namespace(name):
    return f"dray-returns-{os.getpid()}-{name}"


def ip(*words):
    subprocess.run(["ip", *words], check=True)


def make_network(rate):
    a, b = (namespace(name) for name in ADDRESS)
    for name in (a, b):
        ip("netns", "add", name)
    ip("-n", a, "link", "add", "veth0", "type", "veth", "peer", "name", "veth0", "netns", b)
    for name, address in ADDRESS.items():
        ip("-n", namespace(name), "addr", "add", address + "/24", "dev", "veth0")
        for link in ("veth0", "lo"):
            ip("-n", namespace(name), "link", "set", link, "up")
        if rate != "none":
            shape = ["tc", "qdisc", "add", "dev", "veth0", "root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
            subprocess.run(["ip", "netns", "exec", namespace(name), *shape], check=True)


def drop_network():
    for name in ADDRESS:
        subprocess.run(["ip", "netns", "del", namespace(name)], stderr=subprocess.DEVNULL)


def sent_by(name):
    """Bytes that the host has put on the link."""
    path = "/sys/class/net/veth0/statistics/tx_bytes"
    return int(subprocess.check_output(["ip", "netns", "exec", namespace(name), "cat", path]))


class Nbd:
    """As much of an NBD client as writing takes."""

    def __init__(self, path, export):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(path))
        self._read(18)
        self.sock.sendall(struct.pack(">I", 3))
        name = export.encode()
        body = struct.pack(">I", len(name)) + name + struct.pack(">H", 0)
        self.sock.sendall(b"IHAVEOPT" + struct.pack(">II", 7, len(body)) + body)
        while True:
            kind, length = struct.unpack(">12xII", self._read(20))
            self._read(length)
            if kind == 1:
                return
            if kind != 3:
                raise RuntimeError(f"the NBD server answers {kind:#x}")

    def _read(self, length):
        data = b""
        while len(data) < length:
            more = self.sock.recv(length - len(data))
            if not more:
                raise RuntimeError("the NBD server hung up")
            data += more
        return data

    def request(self, kind, offset=0, data=b""):
        self.sock.sendall(struct.pack(">IHHQQI", 0x25609513, 0, kind, 1, offset, len(data)) + data)
        error = struct.unpack(">4xI8x", self._read(16))[0]
        if error:
            raise RuntimeError(f"the NBD server refuses with {error}")


def change(host, size, total, rng, image=IMAGE):
    """Writes of 4 KiB to 1 MiB all over the image; bytes of distinct blocks."""
    nbd, blocks = Nbd(host.dir / "run/nbd.sock", image), set()
    while len(blocks) * BLOCK < total:
        count = 1 << rng.randrange(9)
        first = rng.randrange(size // BLOCK - count)
        nbd.request(1, first * BLOCK, os.urandom(count * BLOCK))
        blocks.update(range(first, first + count))
    nbd.request(3)
    return len(blocks) * BLOCK


def move(source, target, strategy):
    """Seconds until all is local, bytes on the link, and the summary's downtime."""
    before = sum(map(sent_by, ADDRESS))
    began = time.monotonic()
    subject = {"images": {"names": [IMAGE]}}
    started = ask(source.api, {"migrate": {"subject": subject, "to": target.name, "strategy": strategy, "detach": True}})
    while True:
        rows = ask(source.api, {"status": {}})
        state = next(row["state"] for row in rows if row["migration"] == started["migration"])
        if state == "completed":
            break
        if state in ("failed", "cancelled"):
            raise RuntimeError(f"the migration has {state}: {rows}")
        time.sleep(0.01)
    took = time.monotonic() - began
    time.sleep(0.5)
    return took, sum(map(sent_by, ADDRESS)) - before


def make_image(path, size):
    with open(path, "wb") as file:
        for _ in range(size // (8 * MIB)):
            file.write(os.urandom(8 * MIB))
        os.fsync(file.fileno())


def round_trip(hosts, size, changed, strategy, rng):
    here, there = hosts
    made = next(here.pool.glob("*"), None)
    if made is None:
        make_image(here.pool / IMAGE, size)
    for host in hosts:
        host.start()
    ask(here.api, {"image-add": {"name": IMAGE, "path": str(here.pool / IMAGE)}})
    first, first_wire = move(here, there, strategy)
    union = change(there, size, changed, rng)
    back, back_wire = move(there, here, strategy)
    for host in hosts:
        host.stop()
    left = next(there.pool.glob(".*replica*"))
    os.chmod(left, 0o600)
    subprocess.run(["cmp", left, here.pool / IMAGE], check=True)
    left.unlink()
    print(f"{strategy}: there {first:.2f} s, {first_wire / MIB:.1f} MiB on the link; back {back:.2f} s, "
          f"{back_wire / MIB:.2f} MiB for {union / MIB:.2f} MiB of changed blocks", flush=True)
    bound = 1.05 * union + MIB
    print(f"  {first / back:.1f} times faster; {back_wire / union:.4f} x the changed blocks, "
          f"{back_wire / bound:.4f} x (1.05 x changed + 1 MiB)", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dray", default="target/release/dray")
    parser.add_argument("--gib", type=float, default=20)
    parser.add_argument("--changed-mb", type=int, default=100)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--strategies", default="hybrid")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", help="where the images are made")
    args = parser.parse_args()
    size = int(args.gib * (1 << 30)) // (8 * MIB) * (8 * MIB)
    free = shutil.disk_usage(args.dir or tempfile.gettempdir()).free
    if free < 2 * size + (1 << 30):
        parser.error(f"two copies of {size >> 30} GiB do not fit into {free >> 30} GiB: use --gib or --dir")
    root = Path(tempfile.mkdtemp(prefix="dray-returns-", dir=args.dir))
    hosts = []
    try:
        make_network(args.rate)
        issue_certificates(args.dray, root, ADDRESS)
        addresses = {name: f"{address}:7421" for name, address in ADDRESS.items()}
        pairs = (("hosta", "hostb"), ("hostb", "hosta"))
        hosts = [Host(args.dray, root, name, peer, addresses, namespace(name)) for name, peer in pairs]
        rng = random.Random(args.seed)
        for strategy in args.strategies.split(","):
            round_trip(hosts, size, args.changed_mb * 1_000_000, strategy, rng)
    finally:
        for host in hosts:
            host.stop()
        drop_network()
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
