#!/usr/bin/env python3
"""What a change costs: two builds of dray in alternating runs, told as medians of the ratios of pairs.

    sudo bench/before.py --before TREE --after TREE [--pairs 20] [--cases guest,layers,move]

Each TREE is a checkout in which `make build` and
`cargo build --release -p dray-nbd -p dray-testkit --examples` have run. Cases:

* guest: fio at an agent's disk over its local socket, 4 KiB and 1 MiB, alone and 16 deep.
* layers: `heat_cost`, 16 deep, what a disk of each kind takes.
* move: a guest that writes moves over a shaped link with hybrid; total time and downtime.

Which build is first changes from pair to pair. A ratio is after against before; the interval holds the
median in 95 of 100 cases (by rank: nothing is assumed of how ratios are distributed). Needs root for move.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path

import migrate
from agents import Host, issue_certificates

# Name, fio's pattern, size of a request, depth.
GUEST = [
    ("4 KiB reads, depth 1", "randread", "4k", 1),
    ("4 KiB reads, depth 16", "randread", "4k", 16),
    ("4 KiB writes, depth 1", "randwrite", "4k", 1),
    ("4 KiB writes, depth 16", "randwrite", "4k", 16),
    ("1 MiB reads, depth 16", "read", "1m", 16),
    ("1 MiB writes, depth 16", "write", "1m", 16),
]
# What the downtime is made of, as the agent tells it.
PARTS = ["memory", "quiesce", "map", "commit", "resume"]
MIB = 1 << 20
WHICH = ("before", "after")


def interval(values):
    """Their median, and the ranks between which it is in 95 of 100 cases."""
    values, count = sorted(values), len(values)
    off = math.ceil(0.98 * math.sqrt(count))
    low, high = max(0, round(count / 2) - off), min(count - 1, round(count / 2) + off)
    return statistics.median(values), values[low], values[high]


def order(nth):
    """Who is first in this pair."""
    return WHICH if nth % 2 == 0 else WHICH[::-1]


class Told:
    """All figures of all cases, and the table made of them."""

    def __init__(self):
        self.pairs = {}

    def add(self, name, pair):
        self.pairs.setdefault(name, []).append(pair)

    def print(self):
        for name, pairs in self.pairs.items():
            before, after = (statistics.median(pair[which] for pair in pairs) for which in WHICH)
            line = f"{name:34} {before:12.1f} {after:12.1f}"
            if all(pair["before"] for pair in pairs):
                middle, low, high = interval([pair["after"] / pair["before"] for pair in pairs])
                line += f"  ratio {middle:.4f} ({low:.4f} to {high:.4f})"
            if "downtime" in name:
                middle, low, high = interval([pair["after"] - pair["before"] for pair in pairs])
                line += f"  difference {middle:+.1f} ms ({low:+.1f} to {high:+.1f})"
            print(f"{line}  {len(pairs)} pairs", flush=True)


def start_agents(trees, root):
    """An agent of each build with a disk that is written whole."""
    hosts = {}
    for nth, which in enumerate(WHICH):
        home = root / which
        home.mkdir()
        dray = trees[which] / "target/release/dray"
        issue_certificates(dray, home, ["hosta"])
        addresses = {"hosta": f"127.0.0.1:{7450 + nth}", "hostb": "127.0.0.1:1"}
        host = hosts[which] = Host(dray, home, "hosta", "hostb", addresses)
        image = host.pool / "disk.raw"
        with open(image, "wb") as file:
            for _ in range(512):
                file.write(os.urandom(MIB))
        host.start()
        add = [dray, "--socket", host.api, "images", "add", "disk", image]
        subprocess.run(add, check=True, stdout=subprocess.DEVNULL)
    return hosts


def fio(host, pattern, size, depth):
    """Requests a second."""
    uri = f"nbd+unix:///disk?socket={host.dir}/run/nbd.sock"
    command = ["fio", "--name=x", "--ioengine=nbd", f"--uri={uri}", f"--rw={pattern}", f"--bs={size}"]
    command += [f"--iodepth={depth}", "--size=512M", "--time_based", "--runtime=1", "--randrepeat=0"]
    command += ["--norandommap", "--output-format=json"]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    # The engine says something of its own before.
    job = json.loads(said[said.index("{"):])["jobs"][0]
    return job["read"]["iops"] + job["write"]["iops"]


def guest(trees, pairs, told):
    with tempfile.TemporaryDirectory(prefix="dray-before-", dir="/var/tmp") as root:
        hosts = start_agents(trees, Path(root))
        try:
            for nth in range(pairs):
                for name, *case in GUEST:
                    told.add(name, {which: fio(hosts[which], *case) for which in order(nth)})
        finally:
            for host in hosts.values():
                host.stop()


def layers(trees, pairs, told):
    """What `heat_cost` tells of each kind of disk, in writes a second."""
    def run(which):
        program = trees[which] / "target/release/examples/heat_cost"
        text = subprocess.run([program, "1", "16"], check=True, stdout=subprocess.PIPE, text=True).stdout
        lines = [line.split(" against ") for line in text.splitlines() if "writes a second" in line]
        names = [(left.split(maxsplit=2)[2].strip(), right.split()) for left, right in lines]
        return {f"{name} against {right[0]}": float(right[-7]) for name, right in names}

    for nth in range(pairs):
        both = {which: run(which) for which in order(nth)}
        for name in both["before"]:
            told.add(f"layers: {name}", {which: both[which][name] for which in WHICH})


def move(trees, pairs, told):
    args = argparse.Namespace(
        size=2048, seeded=512, write=20, warmup=2, memory=256, patience=60, load=None,
        dray=None, host=str(trees["after"] / "target/release/examples/bench_host"),
    )
    directory = tempfile.mkdtemp(prefix="dray-before-", dir="/var/tmp")
    bench = None
    try:
        migrate.make_network("1gbit")
        bench = migrate.Bench(args, directory)
        for nth in range(pairs):
            both = {}
            for which in order(nth):
                args.dray = str(trees[which] / "target/release/dray")
                both[which] = bench.one("hybrid")
            told.add("move: total, s", {w: both[w]["total_seconds"] for w in WHICH})
            told.add("move: downtime, ms", {w: both[w]["downtime_ms"] for w in WHICH})
            for part in PARTS:
                told.add(f"  {part} of the downtime, ms", {w: both[w]["downtime_parts"][part] for w in WHICH})
    finally:
        if bench:
            for keeper in bench.keepers.values():
                keeper.close()
        migrate.drop_network()
        shutil.rmtree(directory, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--after", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--cases", default="guest,layers,move")
    args = parser.parse_args()
    trees = {"before": args.before.resolve(), "after": args.after.resolve()}
    print(f"load {os.getloadavg()[0]:.1f} at the start", flush=True)
    for case in args.cases.split(","):
        told = Told()
        {"guest": guest, "layers": layers, "move": move}[case](trees, args.pairs, told)
        told.print()


if __name__ == "__main__":
    main()
