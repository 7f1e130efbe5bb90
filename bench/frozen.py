#!/usr/bin/env python3
"""Backups of a real guest with a real guest agent, as after a power cut and with `--fsfreeze`. Debian writes files on
ext4 all the while; then every restored image is looked at by e2fsck: does its journal hold something that has to be
replayed, is anything wrong, and are the files whole that were there?

    python3 bench/frozen.py [--dray target/release/dray] [--backups 3] [--work DIR]

As root, on Debian with mmdebstrap, busybox-static, a linux-image-cloud-amd64 kernel and QEMU; packages come from the
host's own apt sources. What was made in DIR is used again.
"""

import argparse
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from agents import Host, ask, issue_certificates
from debian import make_disk, make_initramfs, make_root, run

IMAGE = "disk.raw"
INCLUDED = "qemu-guest-agent,procps"
MODULES = ["virtio_pci", "virtio_blk", "virtio_console", "ext4"]
AGENT = "org.qemu.guest_agent.0"

SCRIPT = """#!/bin/bash
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
mount -t devtmpfs dev /dev; mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t tmpfs run /run
until [ -c /dev/vport0p1 ]; do sleep 0.1; done
qemu-ga -d -m virtio-serial -p /dev/vport0p1
mkdir -p /home/user; cd /home/user
# Each file says its own sum, and gets its name when it is whole.
n=0
while :; do
    n=$((n + 1))
    head -c 30000 /dev/urandom | base64 > new
    md5sum < new | cut -c1-32 > new.sum
    mv new file-$((n % 50)); mv new.sum file-$((n % 50)).sum
    echo "writes $n" > /dev/ttyS0
done
"""


def start(host, kernel, initramfs, root):
    """The guest on the image that the host serves, when it writes and its agent answers."""
    url = f"nbd+unix:///{IMAGE}?socket={host.dir / 'run/nbd.sock'}"
    log, agent = root / "guest.log", root / "guest.qga"
    command = ["qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max", "-m", "512M", "-nographic",
               "-no-reboot", "-nodefaults", "-serial", "stdio", "-kernel", kernel, "-initrd", initramfs,
               "-append", "console=ttyS0 quiet panic=-1",
               "-drive", f"file={url},format=raw,if=virtio,cache=none",
               "-device", "virtio-serial", "-chardev", f"socket,path={agent},server=on,wait=off,id=agent",
               "-device", f"virtserialport,chardev=agent,name={AGENT}"]
    with open(log, "wb") as out:
        guest = subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    until = time.time() + 240
    while b"writes 20\r" not in log.read_bytes():
        if guest.poll() is not None or time.time() > until:
            guest.kill()
            raise RuntimeError(f"the guest does not write: {log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.2)
    return guest, agent


def dray(args, host, *words):
    told = subprocess.run([args.dray, "-q", "--json", "--socket", host.api, *map(str, words)],
                          check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(told.splitlines()[-1])


def replays(image):
    """Whether the journal holds something that a mount would replay."""
    told = subprocess.run(["dumpe2fs", "-h", image], check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return "needs_recovery" in told.stdout


def is_sound(image):
    """Whether e2fsck finds nothing wrong; it replays the journal first, as a mount would."""
    subprocess.run(["e2fsck", "-p", image], stdout=subprocess.DEVNULL)
    return subprocess.run(["e2fsck", "-fn", image], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def whole_files(image, folder):
    """How many of the guest's files are there, and how many are as their sums say."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    run("debugfs", "-R", f"rdump /home/user {folder}", image, stderr=subprocess.DEVNULL)
    sums = list(folder.rglob("file-*.sum"))
    whole = 0
    for told in sums:
        file = told.with_suffix("")
        found = subprocess.run(["md5sum", file], stdout=subprocess.PIPE, text=True).stdout[:32]
        whole += told.read_text().strip() == found
    return len(sums), whole


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dray", default="target/release/dray")
    parser.add_argument("--backups", type=int, default=3, help="of each kind")
    parser.add_argument("--work", help="where the disk is made, and kept")
    args = parser.parse_args()
    work = Path(args.work or tempfile.mkdtemp(prefix="dray-frozen-"))
    work.mkdir(exist_ok=True)
    if not (work / "tree").exists():
        make_root(work, INCLUDED, SCRIPT)
    kernel, initramfs = make_initramfs(work, MODULES)
    root = Path(tempfile.mkdtemp(prefix="dray-frozen-run-"))
    host = guest = None
    try:
        issue_certificates(args.dray, root, ["hosta", "hostb"])
        host = Host(args.dray, root, "hosta", "hostb", {"hosta": "127.78.1.1:7421", "hostb": "127.78.1.2:7421"})
        make_disk(work / "tree", host.pool / IMAGE, 2)
        host.start()
        ask(host.api, {"image-add": {"name": IMAGE, "path": str(host.pool / IMAGE)}})
        store = f"file://{root}/store"
        dray(args, host, "backups", "init", store)
        guest, agent = start(host, kernel, initramfs, root)
        print("| backup | journal to replay | e2fsck | files whole |\n|---|---|---|---|")
        for nth in range(2 * args.backups):
            frozen = nth % 2 == 1
            time.sleep(3)
            told = dray(args, host, "backup", IMAGE, "--to", store, *(["--fsfreeze", agent] if frozen else []))
            name = f"restored-{nth}"
            dray(args, host, "restore", f"{IMAGE}@{told['images'][0]['generation']['number']}", "--from", store, "--as", name)
            image = host.pool / name
            replay, sound = replays(image), is_sound(image)
            files, whole = whole_files(image, root / "files")
            kind = "with --fsfreeze" if frozen else "without"
            print(f"| {kind} ({told['consistency']}) | {'yes' if replay else 'no'} "
                  f"| {'sound' if sound else 'damaged'} | {whole} of {files} |", flush=True)
    finally:
        if guest:
            guest.terminate()
            guest.wait()
        if host:
            host.stop()
        shutil.rmtree(root, ignore_errors=True)
        if not args.work:
            shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
