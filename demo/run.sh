#!/bin/bash
# Moves a running guest live between two hosts on this machine, and shows that nothing was lost.
#   STRATEGY=auto|pre-copy|post-copy|hybrid   DRAY=path of the dray command
# Two network namespaces when root, two loopback addresses otherwise. Leaves nothing behind.
set -euo pipefail
cd "$(dirname "$0")/.."

strategy=${STRATEGY:-auto}
target_dir=${CARGO_TARGET_DIR:-target}
dray=$(realpath "${DRAY:-$target_dir/release/dray}")
size=3072 seeded=2048 rate=24      # MiB: the disk, its data, what the guest writes a second
dir=$(mktemp -d "${TMPDIR:-/var/tmp}/dray-demo-XXXXXX")
agents=() namespaces=() guest_pid=

if [ -t 1 ]; then bold=$'\e[1m' dim=$'\e[2m' green=$'\e[32m' red=$'\e[31m' plain=$'\e[0m'
else bold='' dim='' green='' red='' plain=''; fi
step() { printf '\n%s%s%s\n' "$bold" "$*" "$plain"; }
say() { printf '  %s\n' "$*"; }
good() { printf '  %s✓%s %s\n' "$green" "$plain" "$*"; }
fail() { printf '  %s✗ demo failed:%s %s\n' "$red" "$plain" "$*" >&2; exit 1; }

cleanup() {
    local code=$? pid
    trap - EXIT INT TERM
    if [ -n "$guest_pid" ]; then
        # The guest's keeper ends at the end of its input and takes its QEMUs along.
        exec {to_guest}>&-
        wait "$guest_pid" 2>/dev/null || true
    fi
    for pid in "${agents[@]}"; do kill "$pid" 2>/dev/null || true; done
    for pid in "${agents[@]}"; do wait "$pid" 2>/dev/null || true; done
    for name in "${namespaces[@]}"; do ip netns del "$name" 2>/dev/null || true; done
    if [ "$code" != 0 ]; then
        for console in "$dir"/*.serial; do
            [ -s "$console" ] && { echo "--- the end of ${console##*/}" >&2; tail -8 "$console" >&2; }
        done
        for h in a b; do
            [ -s "$dir/$h/log" ] && { echo "--- the end of host$h's log" >&2; tail -5 "$dir/$h/log" >&2; }
        done
    fi
    rm -rf "$dir"
    exit "$code"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Asks the guest's keeper; its answer is in $answer.
ask() {
    printf '%s\n' "$*" >&"$to_guest"
    IFS= read -r answer <&"$from_guest" || fail "the guest's keeper is gone"
    case $answer in
        OK*) answer=${answer#OK} answer=${answer# } ;;
        *) fail "${*%% *}: ${answer#ERROR }" ;;
    esac
}

counters() {
    ask counters
    local written verified longest_ms errors
    eval "$answer"
    say "$(printf 'written %s MiB, %s blocks read back and compared, longest write %s ms, %s errors' \
        "$((written >> 20))" "$verified" "$longest_ms" "$errors")"
    [ "$errors" = 0 ] || fail "the guest saw $errors errors"
}

make_network() {
    address_a=127.0.71.1 address_b=127.0.71.2 in_a=() in_b=()
    [ "$(id -u)" = 0 ] && command -v ip >/dev/null || return 0
    local a=dray-demo-$$-a b=dray-demo-$$-b
    ip netns add "$a" 2>/dev/null || return 0
    namespaces=("$a")
    ip netns add "$b"
    namespaces+=("$b")
    ip -n "$a" link add veth0 type veth peer name veth0 netns "$b"
    address_a=10.71.0.1 address_b=10.71.0.2
    ip -n "$a" address add $address_a/24 dev veth0
    ip -n "$b" address add $address_b/24 dev veth0
    for n in "$a" "$b"; do ip -n "$n" link set veth0 up; ip -n "$n" link set lo up; done
    in_a=(ip netns exec "$a") in_b=(ip netns exec "$b")
}

start_agent() { # letter, address, other letter, other address, command prefix
    local h=$1 address=$2 o=$3 other=$4
    shift 4
    mkdir -p "$dir/$h"/{pool,state,run}
    "$dray" pki issue --dir "$dir/pki" "host$h" --address "$address" >/dev/null
    cat >"$dir/$h/dray.toml" <<T
qmp_dirs = ["$dir"]
[agent]
name = "host$h"
state_dir = "$dir/$h/state"
run_dir = "$dir/$h/run"
listen = "$address:7421"
[tls]
dir = "$dir/pki/host$h"
[[pool]]
name = "pool"
path = "$dir/$h/pool"
[[peer]]
name = "host$o"
address = "$other:7421"
pools = ["pool"]
T
    "$@" "$dray" agent --config "$dir/$h/dray.toml" >"$dir/$h/log" 2>&1 &
    agents+=($!)
    for _ in {1..100}; do
        "$dray" --socket "$dir/$h/run/api.sock" --quiet images >/dev/null 2>&1 && return 0
        sleep 0.1
    done
    fail "host$h's agent does not start"
}

on_a() { "$dray" --socket "$dir/a/run/api.sock" "$@"; }

step "Two hosts"
"$dray" --version >/dev/null || fail "there is no dray command at $dray: run make build"
make_network
"$dray" pki init --dir "$dir/pki" >/dev/null
start_agent a "$address_a" b "$address_b" "${in_a[@]}"
start_agent b "$address_b" a "$address_a" "${in_b[@]}"
where="loopback addresses"
[ ${#namespaces[@]} = 0 ] || where="network namespaces"
good "hosta $address_a and hostb $address_b, $where; certificates made just now"

step "A guest on hosta"
cargo build --release --quiet --locked -p dray-testkit --example demo_guest
coproc KEEPER { exec "$target_dir/release/examples/demo_guest" "$dir" $size $seeded $rate; }
guest_pid=$KEEPER_PID
exec {to_guest}>&"${KEEPER[1]}" {from_guest}<&"${KEEPER[0]}"
eval "exec ${KEEPER[1]}>&- ${KEEPER[0]}<&-"
image=$dir/a/pool/vm1.raw
ask image "$image"
good "a disk of $((size >> 10)) GiB with $((seeded >> 10)) GiB of data, in a plain file"
ask start "$image"
good "a QEMU guest with that disk; it writes $rate MiB/s at random places and reads back what it wrote"
sleep 3
counters

step "Moving it to hostb, live ($strategy)"
say "${dim}dray prepare --qmp …/vm1.qmp --to hostb$plain"
on_a --json prepare --qmp "$dir/vm1.qmp" --to hostb >"$dir/prepared.json"
ask wait "$dir/prepared.json"
good "exports made at hostb; the waiting QEMU was started with the lines that prepare printed"
say "${dim}dray migrate --qmp …/vm1.qmp --to hostb --target-qmp …/vm1-incoming.qmp --strategy $strategy --verify$plain"
on_a migrate --qmp "$dir/vm1.qmp" --to hostb --target-qmp "$dir/vm1-incoming.qmp" \
    --strategy "$strategy" --verify || fail "dray migrate ended with $?"
ask moved

step "The guest on hostb"
ask quit
good "the source's QEMU has ended"
counters
sleep 3
counters
ask finish
good "the guest verified its whole disk and powered off"
[ ! -e "$image" ] || fail "the source's file still has its name"
good "the source's file no longer has its name: nobody opens it by accident"
ask compare "$dir/b/pool/vm1.raw"
good "hostb's image holds exactly what the guest wrote: $answer"
printf '\n%sdone in %s s%s\n' "$green$bold" "$SECONDS" "$plain"
