"""A small Debian on ext4 that boots from its own disk under QEMU, for benches with a real guest."""

import lzma
import shutil
import subprocess
from pathlib import Path

INITRAMFS = """#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
for module in $(/bin/busybox cat /modules); do /bin/busybox insmod $module; done
until [ -b /dev/vda ]; do /bin/busybox sleep 0.1; done
/bin/busybox mount -t ext4 /dev/vda /root || exec /bin/busybox sh
exec /bin/busybox switch_root /root /sbin/script
"""
# Nothing that the kernel would do later in the background.
EAGER = "lazy_itable_init=0,lazy_journal_init=0"


def run(*command, **more):
    return subprocess.run(list(map(str, command)), check=True, **more)


def make_root(work, included, script):
    """A tree with Debian and these packages (names with commas between), whose first process is `script`."""
    tree = work / "tree"
    run("mmdebstrap", "--quiet", "--variant=minbase", f"--include={included}", "bookworm", tree)
    first = tree / "sbin/script"
    first.write_text(script)
    first.chmod(0o755)
    return tree


def make_disk(tree, image, gib):
    """An image of ext4 with what is in the tree."""
    run("mke2fs", "-q", "-t", "ext4", "-E", EAGER, "-d", tree, image, f"{gib}G")


def make_initramfs(work, modules):
    """The kernel of this host and an archive that loads `modules` and goes on with the first disk."""
    kernel = sorted(Path("/boot").glob("vmlinuz-*cloud*"))[-1]
    version = kernel.name.removeprefix("vmlinuz-")
    tree = work / "initramfs"
    shutil.rmtree(tree, ignore_errors=True)
    for part in ("bin", "dev", "root", "lib"):
        (tree / part).mkdir(parents=True)
    shutil.copy("/bin/busybox", tree / "bin/busybox")
    order = []
    for module in modules:
        told = subprocess.check_output(["modprobe", "-S", version, "--show-depends", module], text=True)
        order += [line.split()[1] for line in told.splitlines() if line.startswith("insmod")]
    names = []
    for path in dict.fromkeys(order):
        name = f"lib/{Path(path).name}"
        data = Path(path).read_bytes()
        if name.endswith(".xz"):
            name, data = name.removesuffix(".xz"), lzma.decompress(data)
        (tree / name).write_bytes(data)
        names.append(f"/{name}")
    (tree / "modules").write_text("\n".join(names))
    (tree / "init").write_text(INITRAMFS)
    (tree / "init").chmod(0o755)
    archive = work / "initramfs.cpio"
    with open(archive, "wb") as out:
        found = subprocess.Popen(["find", "."], cwd=tree, stdout=subprocess.PIPE)
        run("cpio", "--quiet", "-o", "-H", "newc", cwd=tree, stdin=found.stdout, stdout=out)
    return kernel, archive
