#!/bin/bash
# Installs an S3 server for tests, once, and prints where it is: moto, a well-known stand-in written in
# Python, in a folder of its own. Prints nothing where that cannot be done; the tests then say so.
set -uo pipefail
cd "$(dirname "$0")/.."

# What the server is made of; the versions that the tests were written with.
packages=(moto[s3]==5.2.5 flask==3.1.3 flask-cors==6.0.5)
folder=$(realpath -m "${CARGO_TARGET_DIR:-target}")/s3-server
server=$folder/bin/moto_server

if [ ! -e "$folder/complete" ]; then
    {
        rm -rf "$folder"
        python3 -m venv "$folder" &&
            "$folder/bin/pip" install --quiet --disable-pip-version-check "${packages[@]}" &&
            touch "$folder/complete"
    } >&2 || exit 0
fi
echo "$server"
