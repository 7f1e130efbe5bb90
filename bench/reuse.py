#!/usr/bin/env python3
"""What reuse of content saves where there is something to find, and what it costs where there is nothing.

    python3 bench/reuse.py cost   [--mib 2048] [--runs 8]      random data, link as fast as it gets; with and without, in turns
    python3 bench/reuse.py copies [--mib 256] [--rate 1gbit]   ten copies of one image, 5 % changed each, moved together
    python3 bench/reuse.py base   [--mib 1024] [--rate 1gbit]  a copy of an image that the target's index knows
        [--strategy auto] [--dray target/release/dray] [--dir DIR]

`copies` and `base` need root for their two network namespaces; wire bytes are those of the interface, both
ways. Every file is compared with the source's at the end. `base` also tells what the index takes on disk.
"""

import argparse
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from agents import Host, ask, issue_certificates
from returns import ADDRESS, drop_network, make_network, namespace, sent_by

MIB = 1 << 20
LOOPBACK = {"hosta": "127.73.0.1", "hostb": "127.73.0.2"}


def move(source, names, no_reuse, strategy):
    """The summary of one migration."""
    # Else the handover waits for what was just made to be on disk.
    os.sync()
    command = {"subject": {"images": {"names": names}}, "to": "hostb", "no_reuse": no_reuse, "detach": True,
               "strategy": strategy}
    ask(source.api, {"migrate": command})
    while (row := ask(source.api, {"status": {}})[0])["state"] == "running":
        time.sleep(0.01)
    if row["state"] != "completed":
        raise RuntimeError(f"the migration has {row['state']}: {row}")
    return row["summary"]


def add(source, names):
    for name in names:
        ask(source.api, {"image-add": {"name": name, "path": str(source.pool / name)}})


def put_back(source, target, names):
    """Compares what arrived, removes it, and gives the source's files their names again."""
    for name in names:
        left = next(source.pool.glob(f".{name}.dray-replica*"))
        os.chmod(left, 0o600)
        subprocess.run(["cmp", left, target.pool / name], check=True)
        (target.pool / name).unlink()
        left.rename(source.pool / name)


def noise(path, size):
    with open(path, "wb") as file:
        for _ in range(size // MIB):
            file.write(os.urandom(MIB))


def change(path, size, percent, extent, rng):
    """Writes noise into extents, whole blocks of 4 KiB; how many bytes."""
    places = rng.sample(range(size // extent), max(1, size * percent // 100 // extent))
    with open(path, "r+b") as file:
        for at in places:
            file.seek(at * extent)
            file.write(os.urandom(extent))
    return len(places) * extent


def cost(hosts, args):
    source, target = hosts
    size = args.mib * MIB
    noise(source.pool / "vm.img", size)
    seconds = {False: [], True: []}
    # The first ones find memory that nobody has touched yet.
    for run in range(-2, 2 * args.runs):
        # In turns, and each first as often as second.
        no_reuse = run % 4 in (1, 2)
        for host in hosts:
            host.start()
        add(source, ["vm.img"])
        summary = move(source, ["vm.img"], no_reuse, args.strategy)
        if run >= 0:
            seconds[no_reuse].append(summary["total_seconds"])
        for host in hosts:
            host.stop()
        put_back(source, target, ["vm.img"])
    with_it, without = statistics.median(seconds[False]), statistics.median(seconds[True])
    for name, values in (("with", seconds[False]), ("without", seconds[True])):
        each = " ".join(f"{value:.3f}" for value in values)
        print(f"{name:8} median {statistics.median(values):.3f} s, best {min(values):.3f} s ({each})")
    best = min(seconds[False]) / min(seconds[True])
    print(f"{args.mib} MiB of noise, {args.mib / without:.0f} MiB/s: {100 * (with_it / without - 1):+.2f} % by the median, "
          f"{100 * (best - 1):+.2f} % by the best")


def measured(hosts, names, no_reuse, strategy):
    before = sum(map(sent_by, ADDRESS))
    summary = move(hosts[0], names, no_reuse, strategy)
    time.sleep(0.3)
    return summary, sum(map(sent_by, ADDRESS)) - before


def copies(hosts, args):
    source, target = hosts
    size, rng = args.mib * MIB, random.Random(args.seed)
    names = [f"vm{nth}.img" for nth in range(10)]
    noise(source.dir / "base", size)
    for extent in (MIB, 4096):
        changed = 0
        for name in names:
            shutil.copyfile(source.dir / "base", source.pool / name)
            changed += change(source.pool / name, size, 5, extent, rng)
        least = size + changed
        for no_reuse in (False, True):
            for host in hosts:
                host.start()
            add(source, names)
            summary, wire = measured(hosts, names, no_reuse, args.strategy)
            for host in hosts:
                host.stop()
            put_back(source, target, names)
            found = summary.get("bytes_from_target", 0)
            print(f"ten copies of {args.mib} MiB, 5 % changed in extents of {extent >> 10} KiB, "
                  f"{'without' if no_reuse else 'with'}: {summary['total_seconds']:.2f} s, {wire / MIB:.1f} MiB on the link, "
                  f"{found / MIB:.1f} MiB found, downtime {summary['downtime_ms']['total']:.0f} ms; {wire / least:.3f} x (base once + blocks changed: {least / MIB:.1f} MiB)", flush=True)


def base(hosts, args):
    source, target = hosts
    size, rng = args.mib * MIB, random.Random(args.seed)
    noise(target.pool / "base.img", size)
    shutil.copyfile(target.pool / "base.img", source.pool / "vm.img")
    changed = change(source.pool / "vm.img", size, 5, MIB, rng)
    for no_reuse in (False, True):
        for host in hosts:
            host.start()
        began = time.monotonic()
        while not no_reuse and ask(target.api, "info")["indexed_bytes"] < size:
            time.sleep(0.05)
        index = target.dir / "state/content.redb"
        if not no_reuse:
            took = time.monotonic() - began
            per_tib = index.stat().st_size / size * (1 << 40) / (1 << 30)
            print(f"index of {args.mib} MiB after {took:.1f} s: {index.stat().st_size / MIB:.2f} MiB, {per_tib:.2f} GiB a TiB")
        add(source, ["vm.img"])
        summary, wire = measured(hosts, ["vm.img"], no_reuse, args.strategy)
        for host in hosts:
            host.stop()
        put_back(source, target, ["vm.img"])
        print(f"a copy of {args.mib} MiB, {changed / MIB:.1f} MiB changed, {'without' if no_reuse else 'with'}: "
              f"{summary['total_seconds']:.2f} s, {wire / MIB:.1f} MiB on the link", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "copies", "base"))
    parser.add_argument("--dray", default="target/release/dray")
    parser.add_argument("--mib", type=int)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", help="where the images are made")
    args = parser.parse_args()
    args.mib = args.mib or {"cost": 2048, "copies": 256, "base": 1024}[args.what]
    shaped = args.what != "cost"
    root = Path(tempfile.mkdtemp(prefix="dray-reuse-", dir=args.dir))
    hosts = []
    try:
        if shaped:
            make_network(args.rate)
        issue_certificates(args.dray, root, ADDRESS)
        addresses = {name: f"{at}:7421" for name, at in (ADDRESS if shaped else LOOPBACK).items()}
        inside = namespace if shaped else lambda name: None
        pairs = (("hosta", "hostb"), ("hostb", "hosta"))
        hosts = [Host(args.dray, root, name, peer, addresses, inside(name)) for name, peer in pairs]
        {"cost": cost, "copies": copies, "base": base}[args.what](hosts, args)
    finally:
        for host in hosts:
            host.stop()
        if shaped:
            drop_network()
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
