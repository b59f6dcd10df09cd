#!/bin/bash
# The parts of one output: build.sh host | gpu. The work is build_parts.py's; here is what conda's environment does to it.
set -euo pipefail
# Our plan has its own flags, the same for wheels, images and the JIT. Those of conda's activation scripts would bring
# this build's folders into the parts' keys and a CPU baseline (-march) that the SIMD levels do not want. What a macOS
# compiler cannot do without is kept.
unset CFLAGS CPPFLAGS LDFLAGS DEBUG_CFLAGS DEBUG_CXXFLAGS
if [ -n "${CONDA_BUILD_SYSROOT:-}" ] && [ "$(uname)" = Darwin ]; then
  export CXXFLAGS="-isysroot ${CONDA_BUILD_SYSROOT}"
else
  unset CXXFLAGS
fi
python "${RECIPE_DIR}/build_parts.py" "$1"
