#!/usr/bin/env python3
"""Whether docs/gpu-facts.md tells of tests that exist, and leaves none out.

  tools/gpu_facts.py ROOT   fails when a named test is not there, when a test of the GPU is not named, or when a folder of k3/ops with kernels has
                            no row
"""
import pathlib
import re
import sys


def of_the_gpu(name):
    suite, fact = name.split(".")
    return "cuda" in fact or "on_the_gpu" in fact or suite in ("captured", "captured_step", "decoder", "gpu")


root = pathlib.Path(sys.argv[1])
text = (root / "docs/gpu-facts.md").read_text()
there = set()
for source in [*root.glob("k3/**/*_test.cpp"), *root.glob("tests/*_test.cpp")]:
    there |= {".".join(t) for t in re.findall(r"^TEST(?:_[FP])?\((\w+),\s*(\w+)\)", source.read_text(), re.M)}
named = {n for n in re.findall(r"`(\w+\.[a-z]\w+)`", text) if "_" in n and not n.endswith((".py", ".cu", ".cuh", ".h"))}
problems = [f"names {n}, and no such test exists" for n in sorted(named - there)]
problems += [f"does not tell of {n}" for n in sorted(filter(of_the_gpu, there - named))]
for folder in sorted({p.parent.name for p in (root / "k3/ops").glob("*/*.cu")}):
    if not re.search(rf"^\| {folder} \|", text, re.M):
        problems.append(f"has no row for k3/ops/{folder}")
if problems:
    sys.exit("\n".join("docs/gpu-facts.md " + p for p in problems))
