#!/usr/bin/env python3
"""Every flag of `k3 plan` changes what it prints, or is refused; a flag that this script does not know is an error.

usage: check_flags.py K3_PROGRAM
"""
import re
import subprocess
import sys
import tempfile
from pathlib import Path

K3 = sys.argv[1]
SCRATCH = Path(tempfile.mkdtemp())
ONE = ["kimi-linear-48b", "--on", "h200", "--gpus", "8", "--batch", "4", "--context", "4096"]
EXPERTS = ["k3", "--on", "b300", "--gpus", "16", "--ep", "16", "--batch", "8", "--no-count"]
TRAIN = ["kimi-linear-48b", "--on", "h200", "--dp", "16", "--ep", "8", "--train", "--no-count"]
# flag: a command and what to add to it so that the answer must change
CASES = {
    "--on": (["k3", "--gpus", "16", "--no-count"], ["--on", "b300"]),
    "--set": (ONE, ["--set", "num_experts=128"]),
    "--gpus": (["kimi-linear-48b", "--no-count"], ["--gpus", "2"]),
    "--tp": (EXPERTS, ["--tp", "2"]),
    "--dp": (EXPERTS, ["--dp", "8"]),
    "--ep": (["k3", "--on", "b300", "--gpus", "16", "--no-count"], ["--ep", "16"]),
    "--dcp": (["k3", "--on", "b300", "--gpus", "8", "--no-count"], ["--dcp", "8"]),
    "--batch": (["kimi-linear-48b", "--no-count"], ["--batch", "3"]),
    "--context": (["kimi-linear-48b", "--no-count"], ["--context", "3000"]),
    "--kv-bytes": (ONE, ["--kv-bytes", "1"]),
    "--state-bytes": (ONE, ["--state-bytes", "2"]),
    "--slots": (ONE, ["--slots", "3"]),
    "--rho": (ONE, ["--rho", "0.55"]),
    "--balance": (EXPERTS, ["--balance", "1.3"]),
    "--shard-latent": (["k3", "--on", "b300", "--gpus", "8", "--no-count"], ["--shard-latent"]),
    "--two-batches": (EXPERTS, ["--two-batches"]),
    "--draft-width": (ONE, ["--draft-width", "4"]),
    "--accepted": (ONE + ["--draft-width", "4"], ["--accepted", "3"]),
    "--draft-ms": (ONE + ["--draft-width", "4"], ["--draft-ms", "2"]),
    "--snapshot-state": (ONE + ["--draft-width", "4"], ["--snapshot-state"]),
    "--train": (["kimi-linear-48b", "--on", "h200", "--dp", "16", "--ep", "8", "--no-count"], ["--train"]),
    "--sequence": (TRAIN, ["--sequence", "8192"]),
    "--micro-batch": (TRAIN, ["--micro-batch", "2"]),
    "--step-tokens": (TRAIN, ["--step-tokens", "8e6"]),
    "--mfu": (TRAIN, ["--mfu", "0.2"]),
    "--no-count": (["kimi-linear-48b"], ["--no-count"]),
    "--goal": (["fit", "kimi-linear-48b"], ["--goal", "latency"]),
    "--most-gpus": (["fit", "kimi-linear-48b"], ["--most-gpus", "4"]),
    "--sweep": (["kimi-linear-48b"], ["--sweep", "batch"]),
    "--json": (["kimi-linear-48b", "--no-count"], ["--json"]),
    "--html": (["kimi-linear-48b", "--no-count"], ["--html", str(SCRATCH / "x.html")]),
    "--explain": (["kimi-linear-48b", "--no-count"], ["--explain", "decode.step"]),
}
LONG_RUNS = {"--check", "--measure", "--out"}  # they measure this machine
REFUSED = [
    (["kimi-linear-48b", "--mfu", "0.3"], "--mfu has no effect"),
    (["fit", "kimi-linear-48b", "--tp", "2"], "--tp has no effect on fit"),
    (["fit", "kimi-linear-48b", "--gpus", "8"], "bound it with --most-gpus"),
    (["fit", "kimi-linear-48b", "--most-gpus", "0"], "--most-gpus is 0"),
    (["kimi-linear-48b", "--rho", "nan"], "--rho is nan"),
    (["kimi-linear-48b", "--balance", "0"], "--balance is 0"),
    (["kimi-linear-48b", "--draft-ms", "-1"], "--draft-ms is -1"),
    (["kimi-linear-48b", "--state-bytes", "inf"], "--state-bytes is inf"),
    (["kimi-linear-48b", "--context", "inf"], "a finite number above 0"),
    (["notes", "--batch", "3"], "--batch has no effect on notes"),
    (TRAIN + ["--rho", "0.5"], "--rho has no effect on --train"),
    (["kimi-linear-48b", "--sweep", "batch", "--batch", "3"], "--batch has no effect on --sweep batch"),
    (["kimi-linear-48b", "--check"], "model has no effect on --check"),
    (["kimi-linear-48b", "--out", "x"], "--out has no effect"),
    (["kimi-linear-48b", "--bacth", "3"], "--batch"),
]


def plan(arguments):
    p = subprocess.run([K3, "plan", *arguments], capture_output=True, text=True)
    return p.returncode, p.stdout + p.stderr


faults = []
listed = set(re.findall(r"^  (?:-h,)?(--[a-z-]+)", plan(["--help"])[1], re.M)) - {"--help"}
for flag in sorted(listed - set(CASES) - LONG_RUNS):
    faults.append(f"{flag} has no case here")
for flag, (command, more) in CASES.items():
    if flag not in listed:
        faults.append(f"{flag} is not a flag any more")
        continue
    before, after = plan(command), plan(command + more)
    if before[0] or after[0]:
        faults.append(f"{flag}: {' '.join(command + more)} fails: {(before if before[0] else after)[1].strip()}")
    elif before[1] == after[1]:
        faults.append(f"{flag}: {' '.join(command + more)} prints what it prints without")
for command, sentence in REFUSED:
    code, text = plan(command)
    if code == 0 or sentence not in text:
        faults.append(f"{' '.join(command)} must be refused with '{sentence}', but: {text.strip()[:200]}")
print("\n".join(faults) or f"{len(CASES)} flags change the plan, {len(REFUSED)} misuses are refused")
sys.exit(1 if faults else 0)
