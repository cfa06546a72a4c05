#!/usr/bin/env bash
# Sets up, builds and runs all tests of one preset (default: cpu).
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${1:-cpu}
tools/build.sh "$preset" -- -k 0
ctest --preset "$preset" -j "$(nproc)"
