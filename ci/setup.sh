#!/bin/bash
# Installs the Debian packages that building, testing and the demo need, as far as they are missing.
set -euo pipefail

packages=(
    build-essential cmake pkg-config            # aws-lc and zstd are compiled
    qemu-system-x86 qemu-utils qemu-block-extra # the hypervisor
    linux-image-cloud-amd64 busybox-static zstd # the guests in tests
    fio nbdkit libnbd-bin python3-libnbd        # other NBD clients and servers
    python3-venv                                # an S3 server in tests, see ci/s3.sh
    iproute2 jq e2fsprogs                       # networks, JSON and file systems in tests
)

missing() {
    local installed
    installed=$(dpkg-query -W -f '${db:Status-Status} ${Package}\n' "${packages[@]}" 2>/dev/null |
        awk '$1 == "installed" { print $2 }') || true
    comm -23 <(printf '%s\n' "${packages[@]}" | sort) <(sort -u <<<"$installed")
}

as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        echo "setup failed: packages are missing and neither root nor sudo is there: $wanted" >&2
        exit 1
    fi
}

if command -v dpkg-query >/dev/null; then
    wanted=$(missing | tr '\n' ' ')
    if [ -n "$wanted" ]; then
        echo "installing $wanted"
        as_root apt-get update -q
        # shellcheck disable=SC2086 # a list of words
        as_root env DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends $wanted
    fi
else
    echo "setup: no dpkg here; these have to be there already: ${packages[*]}" >&2
fi

if ! command -v cargo >/dev/null; then
    cat >&2 <<'E'
setup failed: cargo is not in PATH
  install rustup (https://rustup.rs), for instance
    apt-get install rustup            # Debian 13 and newer
    curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y --default-toolchain none
  and open a new shell; the toolchain named in rust-toolchain.toml is then fetched by itself
E
    exit 1
fi
