#!/bin/bash
# Runs all tests of the workspace. What a passing test printed stays in the log, except its reason
# when it could not run ("SKIP: why"): such a test counts as skipped. The last line counts them all.
set -uo pipefail
cd "$(dirname "$0")/.."

log=${CARGO_TARGET_DIR:-target}/test-output.log
mkdir -p "$(dirname "$log")"

# Most tests wait more than they work.
export RUST_TEST_THREADS=${RUST_TEST_THREADS:-$(($(nproc) * 4))}
# Examples are checked by clippy; building them here would take as long as some tests.
run() {
    cargo test --workspace --locked --no-fail-fast --lib --bins --tests "$@" -- --show-output
    local tests=$?
    cargo test --workspace --locked --no-fail-fast --doc "$@" -- --show-output && return "$tests"
}
run "$@" 2>&1 | tee "$log" | awk -f ci/test.awk
status=("${PIPESTATUS[@]}")
# Both say whether all went well: cargo sees what did not build, the count what was printed.
[ "${status[0]}" = 0 ] && [ "${status[2]}" = 0 ]
