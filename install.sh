#!/bin/bash
# Install this checkout here, or on every host of a hostfile: ./install.sh -h. A thin shell over ds_install.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python="${PYTHON:-python3}"
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
  echo "install.sh: $python is missing or older than Python 3.10; PYTHON=/path/to/python3 ./install.sh" >&2
  exit 1
fi
export PYTHONPATH="$here/src${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m deepspeed_ops.install.command "$@"
