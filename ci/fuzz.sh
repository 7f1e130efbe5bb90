#!/bin/bash
# Fuzzes every parser of bytes from outside, MINUTES in all. Needs a nightly toolchain; not a part
# of `make test`. What it finds lands in fuzz/artifacts.
set -euo pipefail
cd "$(dirname "$0")/.."
targets=(frame control hello set heat nbd)
seconds=$((60 * ${MINUTES:-10} / ${#targets[@]}))

if ! rustup run nightly rustc --version >/dev/null 2>&1; then
    rustup toolchain install nightly --profile minimal
fi
if ! cargo +nightly fuzz --version >/dev/null 2>&1; then
    cargo install --locked --quiet cargo-fuzz
fi
for target in "${targets[@]}"; do
    echo "fuzzing $target for $seconds s"
    cargo +nightly fuzz run "$target" -- -max_total_time="$seconds" -timeout=30 -print_final_stats=0
done
echo "nothing found"
