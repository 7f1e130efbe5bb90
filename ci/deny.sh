#!/bin/bash
# Licences, banned crates and sources. Advisories need a download of their own and are not checked
# here; `cargo deny check advisories` does that.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! cargo deny --version >/dev/null 2>&1; then
    echo "installing cargo-deny"
    # Unoptimised: it is used once and builds in half the time.
    cargo install --locked --quiet --debug cargo-deny --version 0.20.2
fi
cargo deny --offline --locked check bans licenses sources 2>/dev/null ||
    cargo deny --locked check bans licenses sources
