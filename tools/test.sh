#!/usr/bin/env bash
# Sets up, builds and runs the tests of one preset (default: cpu); further arguments go to ctest.
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${1:-cpu}
shift || true
tools/build.sh "$preset" -- -k 0
ctest --preset "$preset" -j "$(nproc)" "$@"
