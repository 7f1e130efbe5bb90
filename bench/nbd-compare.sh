#!/bin/bash
# Compares dray's NBD server with qemu-nbd and nbdkit's file plugin: same machine, same run, a file
# in the page cache, a unix socket, fio's nbd engine. The servers take turns within every round, so
# that whatever else the machine does hits all of them.
#
# usage: bench/nbd-compare.sh OUT.json
#   RUNS=3 SECONDS_EACH=3 SIZE_MIB=512   rounds, seconds a case, size of the file
#   CASES='randread-1 …'                 only these cases
#   SERVER=path/to/serve_file            a ready-built server instead of `cargo build`
set -euo pipefail

out=${1:?usage: bench/nbd-compare.sh OUT.json}
runs=${RUNS:-3} seconds=${SECONDS_EACH:-3} size=${SIZE_MIB:-512}
cd "$(dirname "$0")/.."

for program in fio qemu-nbd nbdkit awk; do
    command -v "$program" >/dev/null || { echo "nbd-compare: $program is not installed" >&2; exit 2; }
done
if [ -z "${SERVER:-}" ]; then
    cargo build --release -p dray-nbd --example serve_file
    SERVER=${CARGO_TARGET_DIR:-target}/release/examples/serve_file
fi

dir=$(mktemp -d "${TMPDIR:-/tmp}/nbd-compare.XXXXXX")
declare -A pid
finish() {
    for p in "${pid[@]}"; do kill "$p" 2>/dev/null || true; wait "$p" 2>/dev/null || true; done
    rm -rf "$dir"
}
trap finish EXIT

# Name, fio pattern, block size, depth.
cases='randread-1 randread 4k 1
randread-16 randread 4k 16
randwrite-1 randwrite 4k 1
randwrite-16 randwrite 4k 16
read-1M-1 read 1m 1
read-1M-16 read 1m 16
write-1M-1 write 1m 1
write-1M-16 write 1m 16'
servers='dray qemu-nbd nbdkit'

start() {
    local file=$dir/$1.img socket=$dir/$1.sock
    dd if=/dev/urandom of="$file" bs=1M count="$size" status=none
    case $1 in
        dray) "$SERVER" "$file" "$socket" & ;;
        qemu-nbd) qemu-nbd -t -e 4 -f raw -k "$socket" "$file" & ;;
        nbdkit) nbdkit -f --unix "$socket" file "$file" & ;;
    esac
    pid[$1]=$!
    for _ in $(seq 200); do [ -S "$socket" ] && return; sleep 0.05; done
    echo "nbd-compare: $1 did not start" >&2
    exit 1
}

# User and system time of a process so far, in clock ticks.
ticks() { awk '{ sub(/.*\) /, ""); print $12 + $13 }' "/proc/$1/stat"; }

# One measurement: "case server iops MiB/s µs-of-server-cpu-per-request".
measure() {
    local name=$1 pattern=$2 bs=$3 depth=$4 server=$5 before after
    # What the server before this one left to be written back must not slow this one down, and each
    # finds its file in the page cache as one reader of all of it leaves it there: the sizes of the
    # pages make a difference of two.
    sync -f "$dir"
    dd if="$dir/$server.img" iflag=nocache count=0 status=none
    cat "$dir/$server.img" >/dev/null
    before=$(ticks "${pid[$server]}")
    fio --name=x --ioengine=nbd --uri="nbd+unix:///?socket=$dir/$server.sock" --rw="$pattern" \
        --bs="$bs" --iodepth="$depth" --size="${size}M" --time_based --runtime="$seconds" \
        --randrepeat=0 --norandommap --output-format=terse --terse-version=3 >"$dir/fio" 2>"$dir/err" ||
        { cat "$dir/err" >&2; exit 1; }
    after=$(ticks "${pid[$server]}")
    awk -F';' -v name="$name" -v server="$server" -v ticks=$((after - before)) -v hz="$(getconf CLK_TCK)" '
        $1 == 3 { iops = $8 + $49; mib = ($7 + $48) / 1024; total = ($6 + $47) / 1024
            requests = iops * ($9 + $50) / 1000
            printf "%s %s %.0f %.1f %.2f\n", name, server, iops, mib, (requests ? ticks / hz * 1e6 / requests : 0) }' "$dir/fio"
}

for server in $servers; do start "$server"; done
for round in $(seq "$runs"); do
    while read -r name pattern bs depth; do
        [ -z "${CASES:-}" ] || [[ " $CASES " == *" $name "* ]] || continue
        # Another server goes first in every round.
        order=$(echo "$servers" | awk -v k="$round" '{ for (i = 0; i < NF; i++) print $((i + k) % NF + 1) }')
        for server in $order; do measure "$name" "$pattern" "$bs" "$depth" "$server"; done
    done <<<"$cases"
done | tee "$dir/all" >&2

# Median of the rounds, and dray's against the better of the others.
awk -v runs="$runs" -v seconds="$seconds" -v size="$size" -v out="$out" '
    function median(key, field,   n, i, j, t, v) {
        n = split(values[key, field], v, " ")
        for (i = 2; i <= n; i++) for (j = i; j > 1 && v[j] + 0 < v[j - 1] + 0; j--) { t = v[j]; v[j] = v[j - 1]; v[j - 1] = t }
        return n % 2 ? v[(n + 1) / 2] : (v[n / 2] + v[n / 2 + 1]) / 2
    }
    function object(key) {
        return sprintf("{\"iops\": %.0f, \"mib_per_second\": %.1f, \"server_cpu_us_per_request\": %.2f}",
            median(key, 3), median(key, 4), median(key, 5))
    }
    !($1 in seen) { seen[$1] = 1; names[++count] = $1 }
    { for (f = 3; f <= 5; f++) values[$1 " " $2, f] = values[$1 " " $2, f] " " $f }
    END {
        printf "%-13s %22s %22s %22s %7s\n", "case", "dray", "qemu-nbd", "nbdkit", "ratio"
        printf "{\"runs\": %d, \"seconds\": %d, \"size_mib\": %d, \"cases\": [", runs, seconds, size > out
        for (i = 1; i <= count; i++) {
            n = names[i]; d = n " dray"; q = n " qemu-nbd"; k = n " nbdkit"
            best = median(q, 3) > median(k, 3) ? median(q, 3) : median(k, 3)
            ratio = best ? median(d, 3) / best : 0
            printf "%-13s", n
            m = split(d SUBSEP q SUBSEP k, keys, SUBSEP)
            for (j = 1; j <= m; j++) {
                what = n ~ /1M/ ? sprintf("%.0f MiB/s", median(keys[j], 4)) : sprintf("%.1fk iops", median(keys[j], 3) / 1000)
                printf " %13s %5.1fµs", what, median(keys[j], 5)
            }
            printf " %7.2f\n", ratio
            printf "%s\n  {\"case\": \"%s\", \"dray\": %s, \"qemu-nbd\": %s, \"nbdkit\": %s, \"ratio\": %.3f}",
                (i > 1 ? "," : ""), n, object(d), object(q), object(k), ratio > out
        }
        print "\n]}" > out
        print "(median of " runs " rounds; µs: server CPU time per request; ratio: dray against the better of the others)"
    }' "$dir/all"
