"""Two hosts on this machine, for the tutorial: each has a network and a file system of its own.

What a shell of a host changes is in memory and goes with it. The other host is reached as a person reaches it, with
`ssh` and `scp`. `systemctl` starts an agent without systemd, and `make` works in the source tree.
"""

import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent
ADDRESSES = {"hosta": "10.0.0.1", "hostb": "10.0.0.2"}
LAB = "/mnt"
# Not on the overlay, whose files have other numbers than those that the kernel's locks name.
OWN = "/run /tmp /var/lib/dray /var/lib/libvirt/images"

# Where cargo is: it may be on a file system of its own, which the overlay does not show.
USUAL = {"CARGO_HOME": Path.home() / ".cargo", "RUSTUP_HOME": Path.home() / ".rustup"}
TOOLS = {name: Path(os.environ.get(name, path)) for name, path in USUAL.items()}
SHOWN = " ".join(str(path) for path in [SOURCE, *TOOLS.values()] if path.is_dir())

ROOT = f"""
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs {LAB}
mkdir {LAB}/upper {LAB}/work {LAB}/root
mount -t overlay -o lowerdir=/,upperdir={LAB}/upper,workdir={LAB}/work overlay {LAB}/root
for dir in /proc /dev /sys {SHOWN}; do mkdir -p {LAB}/root$dir; mount --rbind $dir {LAB}/root$dir; done
for dir in {OWN}; do mkdir -p {LAB}/root$dir; mount -t tmpfs tmpfs {LAB}/root$dir; done
mkdir {LAB}/root/tmp/home
exec chroot {LAB}/root bash
"""

# For what is not here.
FUNCTIONS = """
export {tools} HOME=/tmp/home PATH=/usr/local/bin:$PATH
cd
declare -A hosts=({pids})
make() {{ command make -s -C {source} "$@"; }}
on() {{ nsenter --target "${{hosts[$1]}}" --mount --net --root --wd "${{@:2}}"; }}
ssh() {{ on "$1" sh -c "${{*:2}}"; }}
scp() {{
    [ "$1" = -p ] && shift
    local host=${{@: -1}} file
    local dir=${{host#*:}}
    [ "${{dir#/}}" = "$dir" ] && dir=/tmp/home/$dir
    for file in "${{@:1:$#-1}}"; do
        tar -c -C "$(dirname "$file")" "$(basename "$file")" | on "${{host%%:*}}" tar -x -C "$dir"
    done
}}
systemctl() {{
    dray agent > /run/agent.log 2>&1 &
    for try in {{1..100}}; do
        [ -S /run/dray/api.sock ] && return
        sleep 0.1
    done
    cat /run/agent.log
    return 1
}}
"""


def ip(*words):
    subprocess.run(["ip", *words], check=True)


class Hosts:
    """Both, and the network between them."""

    def __init__(self):
        self.spaces = {name: f"dray-{os.getpid()}-{name}" for name in ADDRESSES}

    def make(self):
        """A network namespace for each, and a link."""
        for space in self.spaces.values():
            ip("netns", "add", space)
        here, there = self.spaces.values()
        ip("link", "add", "eth0", "netns", here, "type", "veth", "peer", "name", "eth0", "netns", there)
        for name, space in self.spaces.items():
            ip("-n", space, "address", "add", f"{ADDRESSES[name]}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", space, "link", "set", device, "up")

    def enter(self, name):
        """The command that becomes a shell of the host."""
        return ["ip", "netns", "exec", self.spaces[name], "unshare", "--mount", "bash", "-c", ROOT]

    @staticmethod
    def functions(pids):
        """What the shell of each host is told first. `pids`: the processes of the shells, by host."""
        pids = " ".join(f"[{name}]={pid}" for name, pid in pids.items())
        tools = " ".join(f"{name}={path}" for name, path in TOOLS.items())
        return FUNCTIONS.format(pids=pids, source=SOURCE, tools=tools)

    def close(self):
        """Their network goes; what runs in it is ended by who began it."""
        for space in self.spaces.values():
            subprocess.run(["ip", "netns", "delete", space], check=False)
