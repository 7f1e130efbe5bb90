#!/bin/bash
# Removes what `make install` has installed. The configuration, the state directory and images stay.
set -euo pipefail
root=${DESTDIR:-}
prefix=$root${PREFIX:-/usr/local}

if [ -z "$root" ] && systemctl is-active --quiet dray 2>/dev/null; then
    echo "uninstall: the agent runs, and guests may have their disks on it" >&2
    echo "  'dray images' shows which; release or move them, then: systemctl disable --now dray" >&2
    exit 1
fi
rm -f "$prefix/bin/dray" "$root/etc/systemd/system/dray.service" "$root/etc/dray/dray.toml.example" \
    "$prefix/share/bash-completion/completions/dray" "$prefix/share/zsh/site-functions/_dray" \
    "$prefix/share/fish/vendor_completions.d/dray.fish"
echo "removed dray from $prefix; $root/etc/dray and the state directory stay"
