#!/usr/bin/env bash
# Sets up and builds one preset (default: cpu). The program is then build/PRESET/k3.
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${1:-cpu}
shift || true
tools/setup.sh
cmake --preset "$preset" >/dev/null
cmake --build --preset "$preset" "$@"
