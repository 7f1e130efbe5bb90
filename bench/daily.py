#!/usr/bin/env python3
"""What a day's work changes on a disk: a real guest with Debian on ext4 boots, edits files, fetches a document
of 3 MB and installs packages, each in a life of its own, on an image that dray serves. Every write is recorded
(`dray trace record`); the table counts the distinct blocks of 4 KiB, 64 KiB and 1 MiB that were written, which is
what moves when the image goes back to a host that has it as it was before.

    python3 bench/daily.py [--dray target/release/dray] [--gib 20] [--work DIR]

As root, on Debian with mmdebstrap, busybox-static, a linux-image-cloud-amd64 kernel and QEMU; packages come from the
host's own apt sources. What was made in DIR is used again.
"""

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from agents import Host, ask, issue_certificates
from debian import make_disk, make_initramfs, make_root, run

MIB = 1 << 20
IMAGE = "disk.raw"
INCLUDED = "bash-completion,file,less,man-db,nano,procps,tar"
INSTALLED = ["git", "nginx-light", "python3", "vim"]
JOBS = {
    "boot": "boot, a minute of nothing, shutdown",
    "edit": "40 files written, 60 edited in place, 2,000 lines of log",
    "fetch": "a document of 3 MB fetched, read and saved once more",
    "install": "apt installs " + ", ".join(INSTALLED) + " and what they need",
}
MODULES = ["virtio_pci", "virtio_blk", "ext4"]

DAY = """#!/bin/bash
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root DEBIAN_FRONTEND=noninteractive
mount -t devtmpfs dev /dev; mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t tmpfs run /run
mkdir -p /mnt/net; mount -o ro /dev/vdb /mnt/net
mkdir -p /home/user; cd /home/user
case $(sed 's/.*job=//' /proc/cmdline) in
boot) sleep 60 ;;
edit)
    for n in $(seq 40); do head -c $((n * 1200)) /dev/urandom | base64 > note-$n.txt; done
    for file in $(find /etc -name '*.conf' -size -40k | sort | head -60); do sed -i '$a # changed' $file; done
    for n in $(seq 2000); do echo "$n a line of a log that somebody writes" >> /var/log/day.log; done
    sleep 10 ;;
fetch)
    cp /mnt/net/document.pdf .; md5sum document.pdf > /dev/null; sleep 6
    cp document.pdf edited.pdf; head -c 20000 /dev/urandom >> edited.pdf; sleep 6 ;;
install)
    cp /mnt/net/*.deb /var/cache/apt/archives/
    apt-get install -qy --no-install-recommends -o Dir::Etc::sourcelist=/dev/null /var/cache/apt/archives/*.deb ;;
esac
echo "job ended with $?"
sync; mount -o remount,ro /; sync
echo o > /proc/sysrq-trigger; sleep 60
"""


def make_net(work):
    """A disk with what is fetched from elsewhere."""
    files = work / "net"
    files.mkdir()
    os.chmod(files, 0o777)
    (files / "document.pdf").write_bytes(os.urandom(3_000_000))
    names = subprocess.check_output(
        ["apt-get", "install", "--print-uris", "-qqy", "--no-install-recommends", "-o", "Dir::State::status=/dev/null",
         "-o", f"Dir::State::status={work}/tree/var/lib/dpkg/status", *INSTALLED], text=True)
    wanted = [line.split()[1].split("_")[0] for line in names.splitlines() if ".deb" in line]
    run("apt-get", "download", "-qq", *wanted, cwd=files)
    size = sum(file.stat().st_size for file in files.iterdir()) + 64 * MIB
    run("mke2fs", "-q", "-t", "ext4", "-d", files, work / "net.raw", f"{size >> 10}k")


def live(host, kernel, initramfs, net, job, log):
    """One life of the guest on the image that the host serves."""
    url = f"nbd+unix:///{IMAGE}?socket={host.dir / 'run/nbd.sock'}"
    command = ["qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max", "-m", "1G", "-smp", "2", "-nographic",
               "-no-reboot", "-nodefaults", "-serial", "stdio", "-kernel", kernel, "-initrd", initramfs,
               "-append", f"console=ttyS0 quiet panic=-1 job={job}",
               "-drive", f"file={url},format=raw,if=virtio,cache=none",
               "-drive", f"file={net},format=raw,if=virtio,readonly=on"]
    with open(log, "wb") as out:
        run(*command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, timeout=1200)
    if b"job ended with 0" not in Path(log).read_bytes():
        raise RuntimeError(f"the job '{job}' failed: see {log}")


def written(trace, size):
    """Bytes of the distinct blocks of `size` that the trace writes."""
    blocks = set()
    for line in trace.read_text().splitlines()[1:]:
        _, op, offset, length = line.split(",")
        if op == "W" and int(length):
            blocks.update(range(int(offset) // size, (int(offset) + int(length) - 1) // size + 1))
    return len(blocks) * size


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dray", default="target/release/dray")
    parser.add_argument("--gib", type=int, default=20)
    parser.add_argument("--work", help="where the disks are made, and kept")
    args = parser.parse_args()
    work = Path(args.work or tempfile.mkdtemp(prefix="dray-daily-"))
    work.mkdir(exist_ok=True)
    if not (work / "net.raw").exists():
        make_root(work, INCLUDED, DAY)
        make_net(work)
    kernel, initramfs = make_initramfs(work, MODULES)
    root = Path(tempfile.mkdtemp(prefix="dray-daily-run-"))
    host = None
    try:
        issue_certificates(args.dray, root, ["hosta", "hostb"])
        addresses = {"hosta": "127.78.0.1:7421", "hostb": "127.78.0.2:7421"}
        host = Host(args.dray, root, "hosta", "hostb", addresses)
        image = host.pool / IMAGE
        make_disk(work / "tree", image, args.gib)
        host.start()
        ask(host.api, {"image-add": {"name": IMAGE, "path": str(image)}})
        print(f"ext4 of {args.gib} GiB, {image.stat().st_blocks * 512 / MIB:.0f} MiB used, kernel {kernel.name}")
        print("| job | 4 KiB | 64 KiB | 1 MiB |\n|---|---|---|---|")
        for job, words in JOBS.items():
            trace = root / f"{job}.csv"
            recorder = subprocess.Popen([args.dray, "-q", "--socket", host.api, "trace", "record", IMAGE, "-o", trace])
            time.sleep(0.5)
            live(host, kernel, initramfs, work / "net.raw", job, work / f"{job}.log")
            recorder.terminate()
            recorder.wait()
            sizes = [written(trace, size) / MIB for size in (4096, 65536, MIB)]
            print(f"| {job}: {words} | " + " | ".join(f"{size:.1f} MiB" for size in sizes) + " |", flush=True)
    finally:
        if host:
            host.stop()
        shutil.rmtree(root, ignore_errors=True)
        if not args.work:
            shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
