#!/usr/bin/env bash
# The main job: sets up, builds, trains a small but complete K3 on Debian's fortunes, draws its curves and lets it speak.
set -euo pipefail
cd "$(dirname "$0")/.."
tools/build.sh cpu --target k3
k3=build/cpu/k3
out=runs/demo
text=/usr/share/games/fortunes
files=()
for f in "$text"/*; do
  case $f in *.dat|*.u8) ;; *) files+=("$f") ;; esac
done
$k3 train configs/demo.json --data "${files[@]}" --out "$out" --resume-or-start
echo
for prompt in "Q:" "The trouble with" "A computer"; do
  echo "---"
  $k3 generate "$out" --prompt "$prompt" --temperature 0.7 --top-p 0.95 --max-tokens 120 2>/dev/null
done
cat <<EOF

The picture is $out/report.html. Try next:
  $k3 generate $out --prompt "A computer is" --temperature 0.7
  $k3 eval $out --data ${files[0]}
  $k3 inspect $out
  $k3 train configs/demo.json --data YOUR_TEXT --out runs/mine --set steps=1000
EOF
