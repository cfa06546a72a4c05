#!/usr/bin/env python3
"""Who may include whom. A folder may include itself and what it stands on; kernels stand on core alone."""
import pathlib
import re
import sys

root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".")
MAY = {
    "core": "",
    "chart": "core",
    "tape": "core",
    "ops": "tape core",
    "tokenizer": "core",
    "model": "ops tape core",
    "train": "chart model tokenizer ops tape core",
    "infer": "chart model tokenizer ops tape core",
    "plan": "chart train infer model ops tape core",
    "lab": "chart plan train infer model tokenizer ops tape core",
    "serve": "infer model tokenizer core",
    "cli": "chart lab serve plan train infer model tokenizer ops tape core",
}
bad = 0
for path in sorted((root / "k3").rglob("*")):
    if path.suffix not in (".h", ".cpp", ".cu", ".cuh"):
        continue
    me = path.relative_to(root / "k3").parts[0]
    may = {me, *MAY[me].split()}
    kernel = me == "ops" and re.search(r"_(ref\.h|cpu\.cpp|cuda\.cu|kernels\.h)$|\.cuh$", path.name)
    if kernel:
        may = {"ops", "core"}  # never the tape: kernels take structs of pointers
    for line, text in enumerate(path.read_text().splitlines(), 1):
        found = re.match(r'\s*#include "k3/(\w+)/', text)
        if found and found[1] not in may:
            who = "kernels" if kernel else me
            print(f"{path.relative_to(root)}:{line} includes {text.split(chr(34))[1]}; {who} may use {', '.join(sorted(may - {me})) or 'nothing'}")
            bad += 1
print(f"layers hold" if not bad else f"{bad} includes break the layers")
sys.exit(bad > 0)
