#!/bin/bash
# Boundaries between crates. The pure crates (types, wire, heat, engine, api) have no clock, socket, file,
# thread or randomness, neither themselves nor through a dependency; what a host has durably (host) is
# in files, and it has no clock, socket or thread of its own; dependencies between crates point one way;
# no file names a place on one developer's machine.
set -euo pipefail
cd "$(dirname "$0")/.."
failures=0
fail() {
    echo "pure: $*" >&2
    failures=$((failures + 1))
}

# Each crate and the crates of this workspace it may depend on. Tests may use any.
allowed='{
    "dray-types": [],
    "dray-guest": [],
    "dray-files": [],
    "dray-confine": [],
    "dray-wire": ["dray-types"],
    "dray-heat": ["dray-types"],
    "dray-backup": ["dray-types"],
    "dray-trace": ["dray-types"],
    "dray-engine": ["dray-types", "dray-wire"],
    "dray-api": ["dray-types", "dray-engine"],
    "dray-net": ["dray-types", "dray-wire"],
    "dray-image": ["dray-files", "dray-types", "dray-heat"],
    "dray-host": ["dray-files", "dray-types", "dray-api", "dray-wire", "dray-heat", "dray-engine", "dray-image"],
    "dray-serve": ["dray-image"],
    "dray-nbd": ["dray-types", "dray-image", "dray-serve"],
    "dray-qemu": ["dray-types"],
    "dray-sim": ["dray-types", "dray-wire", "dray-heat", "dray-engine", "dray-trace"],
    "dray-testkit": ["dray-types", "dray-image", "dray-guest"],
    "dray-config": ["dray-files", "dray-types", "dray-net", "dray-backup", "dray-host"],
    "dray-vm": ["dray-confine", "dray-files", "dray-types", "dray-api", "dray-image", "dray-serve", "dray-nbd", "dray-qemu", "dray-host", "dray-config"],
    "dray-provider": ["dray-files", "dray-types", "dray-api", "dray-wire", "dray-engine", "dray-net", "dray-image", "dray-backup", "dray-host", "dray-config"],
    "dray-migrate": ["dray-files", "dray-types", "dray-api", "dray-wire", "dray-engine", "dray-net", "dray-image", "dray-qemu", "dray-host", "dray-config", "dray-vm", "dray-provider"],
    "dray-agent": ["dray-confine", "dray-files", "dray-types", "dray-api", "dray-net", "dray-wire", "dray-heat", "dray-engine", "dray-trace", "dray-image", "dray-host", "dray-serve", "dray-nbd", "dray-qemu", "dray-backup", "dray-config", "dray-vm", "dray-provider", "dray-migrate"],
    "dray-cli": ["dray-types", "dray-api", "dray-config", "dray-confine", "dray-net", "dray-heat", "dray-trace", "dray-sim", "dray-agent", "dray-backup"]
}'
wrong=$(cargo metadata --format-version 1 --no-deps --locked | jq -r --argjson allowed "$allowed" '
    .packages[] | .name as $crate
    | if $allowed | has($crate) | not then "\($crate) is not in the list of ci/pure.sh" else
        .dependencies[] | select(.kind != "dev") | .name
        | select(startswith("dray-")) | . as $on
        | select($allowed[$crate] | index([$on]) | not)
        | "\($crate) must not depend on \($on)"
      end')
[ -z "$wrong" ] || fail "$wrong"

impure='^(tokio|mio|socket2|rand|rand_core|getrandom|libc|rustix|nix|rustls|io-uring|chrono|time|crossbeam.*|rayon) '
used='std::(net|thread|fs|os|env|process)\b|(Instant|SystemTime)\b|\b(tokio|rand|getrandom|libc|rustix)::|\bthread_local!'
for crate in dray-types dray-wire dray-heat dray-engine dray-api; do
    tree=$(cargo tree --locked -p "$crate" --edges normal,build --prefix none | grep -E "$impure" || true)
    [ -z "$tree" ] || fail "$crate depends on: $(sort -u <<<"$tree" | tr '\n' ' ')"
    lines=$(grep -rnE "$used" "crates/$crate/src" --include='*.rs' | grep -vE '^[^:]+:[0-9]+: *//' || true)
    [ -z "$lines" ] || fail "$crate uses clocks, sockets, files, threads or randomness:"$'\n'"$lines"
done

# One style of modules: a module with files of its own is a folder with a mod.rs.
for folder in $(find crates/*/src -mindepth 1 -type d); do
    [ ! -e "$folder.rs" ] || fail "$folder.rs is beside a folder of its name: it is to be $folder/mod.rs"
done

# What a host has durably. Its tests may do what they like.
driven='^(tokio|mio|socket2|rustls|rand|crossbeam.*|rayon) '
tree=$(cargo tree --locked -p dray-host --edges normal,build --prefix none | grep -E "$driven" || true)
[ -z "$tree" ] || fail "dray-host depends on: $(sort -u <<<"$tree" | tr '\n' ' ')"
drives='\b(std|unix)::net\b|\bthread::(spawn|scope|Builder)\b|\b(Instant|SystemTime)::now\b|\.elapsed\(|\btokio::'
lines=$(find crates/dray-host/src -name '*.rs' ! -name tests.rs -print0 | sort -z |
    xargs -0 awk 'FNR == 1 { tests = 0 } /^#\[cfg\(test\)\]/ { tests = 1 } !tests { print FILENAME ":" FNR ":" $0 }' |
    grep -E "$drives" | grep -vE '^[^:]+:[0-9]+: *//' || true)
[ -z "$lines" ] || fail "dray-host uses clocks, sockets or threads of its own:"$'\n'"$lines"

private='(^|[^A-Za-z0-9_.-])/wor[k]/|(^|[^A-Za-z0-9_])share[d]/'
places=$(grep -rInE "$private" . --exclude-dir=.git --exclude=.git --exclude-dir=target --exclude-dir=out |
    grep -v '^\./\.ci/run:' || true)
[ -z "$places" ] || fail "paths that exist on one machine only:"$'\n'"$places"

[ "$failures" = 0 ] && echo "pure: the crates keep to their boundaries"
