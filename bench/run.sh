#!/bin/bash
# dray against QEMU's own mirror over three links, an adopted disk against QEMU's own file node, then
# the NBD server against two others.
#   ROUNDS=3 SYSTEMS=memory,background,… RATES="1gbit 200mbit none"   DRAY=path of the dray command
set -euo pipefail
cd "$(dirname "$0")/.."
[ "$(id -u)" = 0 ] || { echo "bench: needs root for its network namespaces" >&2; exit 1; }
target_dir=${CARGO_TARGET_DIR:-target}
dray=${DRAY:-$target_dir/release/dray}
out=${OUT:-out/bench}
mkdir -p "$out"
cargo build --release --quiet --locked -p dray-testkit --example bench_host
cargo build --release --quiet --locked -p dray-nbd --example serve_file
for rate in ${RATES:-1gbit 200mbit none}; do
    python3 bench/migrate.py --dray "$dray" --host "$target_dir/release/examples/bench_host" \
        --rate "$rate" --rounds "${ROUNDS:-3}" --out "$out/migrate-$rate.json" \
        ${SYSTEMS:+--systems "$SYSTEMS"}
done
python3 bench/adopted.py --dray "$dray" --host "$target_dir/release/examples/bench_host" \
    --rounds "${ROUNDS:-3}" --out "$out/adopted.json"
bench/nbd-compare.sh "$out/nbd.json"
