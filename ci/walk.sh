#!/bin/bash
# A random walk over VMs and images on two hosts for MINUTES, while agents and guests end and other programs come
# in between; what guests and clients have flushed is the judge. A failure prints the seed that repeats it and where its
# logs are.
set -euo pipefail
cd "$(dirname "$0")/.."
export DRAY_WALK_MINUTES=${MINUTES:-10}
cargo test --locked -p dray-cli --test walk -- --nocapture
