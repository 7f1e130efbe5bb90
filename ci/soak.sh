#!/bin/bash
# Random migrations in the simulator for MINUTES; every seed is new. A failure prints the command
# that repeats it.
set -euo pipefail
cd "$(dirname "$0")/.."
batch=2000
end=$(($(date +%s) + 60 * ${MINUTES:-10}))
first=${FIRST:-$(($(date +%s) * 1000))}
cargo test --locked --quiet -p dray-sim --no-run
rounds=0
while [ "$(date +%s)" -lt "$end" ]; do
    DRAY_SIM_FIRST=$first DRAY_SIM_COUNT=$batch \
        cargo test --locked --quiet -p dray-sim --test seeds many_seeds -- --nocapture |
        grep -E 'seeds,|failed|seed'
    first=$((first + batch))
    rounds=$((rounds + 1))
done
echo "$((rounds * batch)) migrations, none failed"
