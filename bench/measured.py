#!/usr/bin/env python3
"""The table "The workload-aware order against address order" of docs/measurements/simulation.md.

    python3 bench/measured.py --dray target/release/dray --traces FOLDER [--starts 10] [NAME…]

Replays the four traces of FOLDER and the five generated loads in address order and in the
workload-aware one; a NAME, a part of a file's or load's, picks some of them. One process at a time, ten minutes of one core.
"""

import argparse
import json
import subprocess
from pathlib import Path

# What a line is called, what `dray sim` is given, and its options.
FILES = [
    ("CloudPhysics VM, 2 h, 32 GiB", "cloudphysics-vm.csv.zst", []),
    ("MySQL server, 1 h, 32 GiB", "blkreplay-linux-mysql.csv.zst", []),
    ("EC2 guest with Spark, 180 s, 7 GiB", "ec2-spark-wordcount-root.csv.zst", []),
    ("MSR Cambridge, 86 s, 14 GiB", "msr-cut1370.csv.zst", ["--delay", "10"]),
]
LOADS = ["web", "java", "database", "file-server", "mail"]


def count(value):
    """A mean of counts: whole from 100 on."""
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.1f}"


def link(bytes_per_second):
    """A rate as people write it."""
    mbit = bytes_per_second * 8 / 1e6
    return f"{mbit / 1000:.2f} Gbit/s" if mbit >= 1000 else f"{mbit:.0f} Mbit/s"


def change(before, after):
    """By how much `after` is more, in percent."""
    if before == 0:
        return "–"
    return f"{(after - before) / before * 100:+.1f} %".replace("-", "−")


def both(before, after, write, unit=""):
    """Two values, or one zero."""
    if before == after == 0:
        return "0"
    return f"{write(before)} → {write(after)}{unit}"


def line(label, row):
    """A line of the table."""
    old, new = row["sequential"], row["ordered"]
    ended = old["failed"] == new["failed"] == 0
    extra = [mean["extra_bytes"] / 2**20 for mean in (old, new)]
    reads = [mean["remote_reads"] for mean in (old, new)]
    waits = [mean["remote_read_wait_ns"] / 1e6 for mean in (old, new)]
    return [
        label,
        row["strategy"],
        link(row["bandwidth"]) if label else "",
        both(*extra, lambda mib: f"{mib:,.1f}", " MiB"),
        change(*extra),
        both(*reads, count),
        change(*reads),
        both(*waits, lambda ms: f"{ms:.0f}", " ms") if any(reads) else "–",
        change(old["total_ns"], new["total_ns"]) if ended else "none ends"
        if old["failed"] + new["failed"] == old["runs"] + new["runs"] else "some end",
    ]


def main():
    """Prints the table."""
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("--dray", required=True)
    args.add_argument("--traces", type=Path, required=True)
    args.add_argument("--starts", type=int, default=10)
    args.add_argument("--seed", type=int, default=1)
    args.add_argument("names", nargs="*")
    args = args.parse_args()
    cases = [(label, str(args.traces / name), options) for label, name, options in FILES]
    cases += [(f"load `{name}`", name, []) for name in LOADS]
    for part in args.names:
        if not any(part in name for _, name, _ in cases):
            raise SystemExit(f"measured: no trace or load is called {part}")
    head = "trace | model | link | extra traffic | change | remote reads | change | wait | time"
    print(f"| {head} |\n|{'---|' * 9}", flush=True)
    for label, name, options in cases:
        if args.names and not any(part in name for part in args.names):
            continue
        command = [args.dray, "--json", "sim", "compare", "--starts", str(args.starts)]
        command += ["--seed", str(args.seed), *options, name]
        told = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        for row in json.loads(told)["rows"]:
            print(f"| {' | '.join(line(label, row))} |", flush=True)
            label = ""


if __name__ == "__main__":
    main()
