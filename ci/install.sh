#!/bin/bash
# Installs the binary, the systemd unit, completions and an example configuration; never replaces
# a configuration.
set -euo pipefail
cd "$(dirname "$0")/.."
root=${DESTDIR:-}
prefix=$root${PREFIX:-/usr/local}

# Without symbols it is a fifth as large.
install -D -s -m 0755 "$DRAY" "$prefix/bin/dray"
install -d "$root/etc/systemd/system"
sed "s|/usr/local/bin/dray|${PREFIX:-/usr/local}/bin/dray|" packaging/dray.service \
    >"$root/etc/systemd/system/dray.service"
install -D -m 0644 packaging/dray.toml "$root/etc/dray/dray.toml.example"
for shell in bash:bash-completion/completions/dray zsh:zsh/site-functions/_dray \
    fish:fish/vendor_completions.d/dray.fish; do
    path=$prefix/share/${shell#*:}
    install -d "$(dirname "$path")"
    "$DRAY" completions "${shell%%:*}" >"$path"
done
echo "installed under $prefix; next: copy /etc/dray/dray.toml.example to /etc/dray/dray.toml, edit it,"
echo "dray check-config, then systemctl enable --now dray"
