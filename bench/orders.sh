#!/bin/bash
# What heat saves in a real move: the same server's load in a real guest, moved in address order and
# in the order of heat, over slow links. Prints what was sent a second time and which writes waited.
#   ROUNDS=1 LOADS="file-server mail" RATES="128mbit 200mbit"   DRAY=path of the dray command
#   SIZE=3072 (MiB) WARMUP=90 (s)   SYSTEMS=pre-copy/sequential/soft,pre-copy/workload-aware/soft
# What they would save in simulation: cargo run --release -p dray-sim --example oracle lab
set -euo pipefail
cd "$(dirname "$0")/.."
[ "$(id -u)" = 0 ] || { echo "bench: needs root for its network namespaces" >&2; exit 1; }
target_dir=${CARGO_TARGET_DIR:-target}
out=${OUT:-out/bench}
systems=hybrid/sequential,hybrid/workload-aware
systems+=,pre-copy/sequential/aggressive,pre-copy/workload-aware/aggressive
mkdir -p "$out"
cargo build --release --quiet --locked -p dray-testkit --example bench_host
for load in ${LOADS:-file-server mail}; do
    for rate in ${RATES:-128mbit 200mbit}; do
        echo "== $load, $rate"
        python3 bench/migrate.py --dray "${DRAY:-$target_dir/release/dray}" \
            --host "$target_dir/release/examples/bench_host" --systems "${SYSTEMS:-$systems}" \
            --load "$load" --warmup "${WARMUP:-90}" --size "${SIZE:-3072}" --seeded "${SIZE:-3072}" \
            --rate "$rate" --rounds "${ROUNDS:-1}" --out "$out/orders-$load-$rate.json"
    done
done
