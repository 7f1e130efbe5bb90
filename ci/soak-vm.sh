#!/bin/bash
# Moves a real guest to and fro for MINUTES while agents, hosts, links, clocks and directories fail; the
# guest's own flush log is the judge. Needs root: namespaces and small file systems are made, and go with
# the test. A failure prints the seed that repeats it and where its logs are.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "$(id -u)" != 0 ]; then
    echo "soak-vm: needs root for network namespaces and mounts" >&2
    exit 1
fi
export DRAY_SOAK_MINUTES=${MINUTES:-10}
cargo test --locked -p dray-cli --test soak -- --nocapture
