#!/usr/bin/env python3
"""Deferred migrations of a small and a large image with equally much data: do they hand over in the same
time? Two agents on loopback; in turns an image of 2 GiB full of data and a sparse one of 64 GiB with 2 GiB of
data, from `migrate` until the target owns the image.

    python3 bench/deferred.py [--dray target/release/dray] [--rounds 5] [--dir DIR] [--data-mib 2048]
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from agents import Host, ask, issue_certificates

GIB = 1 << 30
MIB = 1 << 20
IMAGE = "disk.raw"


def make_image(path, size, data):
    """`data` bytes of noise in 32 pieces over the whole image."""
    piece = data // 32
    with open(path, "wb") as file:
        file.truncate(size)
        for nth in range(32):
            file.seek(nth * (size // 32))
            for _ in range(piece // MIB):
                file.write(os.urandom(MIB))
        os.fsync(file.fileno())


def one(source, target, image):
    """Moves it; seconds until the target owns it, and the parts of the downtime."""
    os.rename(image, source.pool / IMAGE)
    try:
        source.start()
        target.start()
        ask(source.api, {"image-add": {"name": IMAGE, "path": str(source.pool / IMAGE)}})
        subject = {"images": {"names": [IMAGE]}}
        began = time.monotonic()
        ask(source.api, {"migrate": {"subject": subject, "to": target.name, "strategy": "deferred", "detach": True}})
        while not any(row["state"] == "owner" for row in ask(target.api, "images")):
            time.sleep(0.002)
        took = time.monotonic() - began
        time.sleep(0.3)
        shown = ask(source.api, {"status": {}})[0]["progress"]
        return took, shown.get("downtime_ms") or 0.0
    finally:
        source.stop()
        target.stop()
        for left in source.pool.iterdir():
            os.rename(left, image)
            os.chmod(image, 0o600)
        for left in target.pool.iterdir():
            left.unlink()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dray", default="target/release/dray")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--data-mib", type=int, default=2048)
    parser.add_argument("--dir", help="where the images are made")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="dray-deferred-", dir=args.dir))
    hosts = []
    try:
        net = f"127.77.{os.getpid() % 250}"
        addresses = {"hosta": f"{net}.1:7421", "hostb": f"{net}.2:7421"}
        issue_certificates(args.dray, root, addresses)
        hosts = [Host(args.dray, root, "hosta", "hostb", addresses), Host(args.dray, root, "hostb", "hosta", addresses)]
        images = {2: root / "small", 64: root / "large"}
        for size, path in images.items():
            make_image(path, size * GIB, args.data_mib * MIB)
        seen = {size: [] for size in images}
        for nth in range(args.rounds):
            for size in sorted(images, reverse=nth % 2 == 1):
                took, downtime = one(*hosts, images[size])
                seen[size].append((took, downtime))
                print(f"round {nth + 1}: {size:2} GiB in {took * 1e3:7.1f} ms, downtime {downtime:6.1f} ms", flush=True)
        medians = {size: [statistics.median(values) for values in zip(*rows)] for size, rows in seen.items()}
        for size, (took, downtime) in medians.items():
            print(f"median of {args.rounds}: {size:2} GiB in {took * 1e3:7.1f} ms, downtime {downtime:6.1f} ms")
        ratios = [large / small if small else 0.0 for small, large in zip(medians[2], medians[64])]
        print(f"64 GiB / 2 GiB: {ratios[0]:.3f} until the handover, {ratios[1]:.3f} downtime")
    finally:
        for host in hosts:
            host.stop()
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
