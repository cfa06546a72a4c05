#!/usr/bin/env bash
# Installs what building, testing and the demo need, from Debian's packages. Does nothing where all of it is there.
set -euo pipefail
packages=(
  g++ cmake ninja-build ccache mold pkg-config python3       # tools
  libdnnl-dev libgomp1                                       # matrix products, threads
  nlohmann-json3-dev libfmt-dev libcli11-dev libpcre2-dev    # JSON, text, command line, Unicode classes
  libgtest-dev libgmock-dev libbenchmark-dev                 # tests, benchmarks
  clang-format                                               # style
  fortunes fortunes-min                                      # text for the demo
)
missing=()
for p in "${packages[@]}"; do
  dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing+=("$p")
done
if [ ${#missing[@]} -gt 0 ]; then
  as_root=()
  [ "$(id -u)" = 0 ] || as_root=(sudo)
  echo "installing: ${missing[*]}"
  "${as_root[@]}" apt-get update -qq
  DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi
