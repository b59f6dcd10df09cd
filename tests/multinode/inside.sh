#!/bin/bash
# First process of the namespaces of `make multinode`: a disk in memory that vanishes with them, then the command.
set -euo pipefail
mount --make-rprivate /
disk="$(pwd)/build/multinode"
wheels="$(mktemp -d)"
cp "$disk"/*.whl "$wheels"
mount -t tmpfs -o size=1g,mode=755 none "$disk"
mkdir "$disk/wheel ü"
cp "$wheels"/*.whl "$disk/wheel ü"
rm -rf "$wheels"
export DS_TEST_MULTINODE="$disk" PYTHONDONTWRITEBYTECODE=1
"$@" -p no:cacheprovider --basetemp "$disk/tmp"
