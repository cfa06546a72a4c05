#!/usr/bin/env python3
"""Every flag of every command has an effect that can be seen, or is refused; a flag that this script does not know is an error.

usage: check_flags.py K3_PROGRAM [COMMAND...]          all commands, or those named
"""
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

K3 = str(Path(sys.argv[1]).resolve())
ROOT = Path(__file__).resolve().parent.parent
SCRATCH = Path(tempfile.mkdtemp(prefix="k3-flags-"))

# ---- plan: a command and what to add to it so that the answer must change

ONE = ["kimi-linear-48b", "--on", "h200", "--gpus", "8", "--batch", "4", "--context", "4096"]
EXPERTS = ["k3", "--on", "b300", "--gpus", "16", "--ep", "16", "--batch", "8", "--no-count"]
TRAIN = ["kimi-linear-48b", "--on", "h200", "--dp", "16", "--ep", "8", "--train", "--no-count"]
# flag: a command and what to add to it so that the answer must change
PLAN = {
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
PLAN_REFUSED = [
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

# ---- the others: flag: (a command, what to add, what must then be seen)
#   OUT          standard output is another
#   "sentence"   what is printed has it, and did not have it before; a refusal is an answer too
#   a function   of the two results (code, standard output, standard error): true when the effect is there

MODEL, DAMAGED, RUN, TEXT, OTHER = SCRATCH / "model", SCRATCH / "damaged", SCRATCH / "run", SCRATCH / "text", SCRATCH / "other"
SMALL = SCRATCH / "config.json"
GOLDEN = ROOT / "tests/golden/kimi-linear-a"
OUT = object()
SOME = object()  # --memory: what the command cannot do without, and room for a third of its experts


def k3(*arguments, stdin="Hello\n"):
    if SOME in arguments:
        too_little = k3(*["1MB" if a is SOME else a for a in arguments], stdin=stdin)
        least = int(re.search(r"Give --memory (\d+)B", too_little[2])[1])
        arguments = [f"{least + 15_000_000}B" if a is SOME else a for a in arguments]
    p = subprocess.run([K3, *map(str, arguments)], capture_output=True, text=True, input=stdin, errors="replace",
                       env={**os.environ, "OMP_WAIT_POLICY": "passive"})
    return p.returncode, p.stdout, p.stderr


def number(pattern, result):
    found = re.search(pattern, result[2])
    return float(found[1]) if found else -1


def grows(pattern):
    return lambda before, after: number(pattern, after) > number(pattern, before) >= 0


def scratch(result):
    size, unit = re.search(r"scratch ([\d.]+) (kB|MB|GB)", result[2]).groups()
    return float(size) * {"kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]


def less_scratch(before, after):
    return scratch(after) < scratch(before)


def wrote(path):
    return lambda before, after: after[0] == 0 and path.exists()


def found_later(before, after):  # a damaged scale: before the first token, or when its expert is wanted
    early = "holds 255 (not a number) at 0; the file is damaged, download it again"
    return "memory plan" in before[2] and early in before[2] and "memory plan" in after[2] and early not in after[2]


def on_gpu(before, after):  # or why not
    return after[0] == 0 or "GPU" in after[2] or "CUDA" in after[2]


def make_models():
    config = json.loads((ROOT / "tests/golden/kimi-k3-b/config.json").read_text())
    config["text_config"].update(vocab_size=512, num_experts=48, moe_intermediate_size=1024)  # 256 bytes and 256 specials; 45 MB of experts
    SMALL.write_text(json.dumps(config))
    text = "".join(f"{i} times {i + 1} is {i * (i + 1)}\n%\n" for i in range(200))
    TEXT.write_text(text)
    OTHER.write_text(text[::-1])
    learnt = json.loads((ROOT / "configs/demo.json").read_text())
    learnt["train"].update(tokenizer="bytes", steps=3, sequence_length=64, batch_tokens=256, micro_batch_tokens=0, held_out=0.2)
    learnt.update(num_hidden_layers=2, mixers=["kda", "mla"])
    learnt.pop("vocab_size", None), learnt.pop("final_mixer", None)
    (SCRATCH / "train.json").write_text(json.dumps(learnt))
    for command in (["fabricate", SMALL, "--out", MODEL], ["train", SCRATCH / "train.json", "--data", TEXT, "--out", RUN]):
        code, _, said = k3(*command)
        if code:
            sys.exit(f"{' '.join(map(str, command))}: {said}")
    shutil.copytree(MODEL, DAMAGED)
    shard = DAMAGED / "model-00005-of-000011.safetensors"
    data = bytearray(shard.read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + length])
    name = next(n for n in header if n.endswith("experts.47.w2.weight_scale"))
    data[8 + length + header[name]["data_offsets"][0]] = 255
    shard.write_bytes(data)


SPEAK = ["generate", MODEL, "--prompt", "What is", "--max-tokens", "30", "--temperature", "1.5", "--ignore-eos"]
TALK = ["chat", MODEL, "--thinking", "off", "--max-tokens", "20", "--temperature", "1.5"]
SCORE = ["eval", RUN, "--data", TEXT]
VERIFY = ["verify", GOLDEN]
TRAIN_NEW = ["train", SCRATCH / "train.json", "--data", TEXT, "--out"]
BENCH = ["bench", "decode", "--config", SMALL, "--layers", "3", "--tokens", "2", "--context", "8"]
TIGHT = ["--memory", SOME]
OPS = ["bench", "ops", "--op", "rms norm"]
STEPS = ["bench", "train", "--config", SCRATCH / "train.json", "--steps", "1"]


def loading(base):
    return {
        "--device": (base, ["--device", "cuda"], on_gpu),
        "--bf16": (base, ["--bf16"], "--bf16 requires --device"),
        "--memory": (base, ["--memory", "77MB"], "77.0 MB"),
        "--dense": (base, ["--dense", "mxfp4"], OUT),
    }


CASES = {
    "generate": loading(SPEAK) | {
        "--prompt": (["generate", MODEL], ["--prompt", "x"], OUT),
        "--prompt-file": (["generate", MODEL], ["--prompt-file", TEXT], OUT),
        "--max-tokens": (SPEAK, ["--max-tokens", "7"], " 7 tokens at"),
        "--temperature": (SPEAK, ["--temperature", "0.2"], OUT),
        "--top-k": (SPEAK, ["--top-k", "2"], OUT),
        "--top-p": (SPEAK, ["--top-p", "0.2"], OUT),
        "--min-p": (SPEAK, ["--min-p", "0.9"], OUT),
        "--seed": (SPEAK, ["--seed", "9"], OUT),
        "--samples": (SPEAK, ["--samples", "2"], OUT),
        "--stop": (SPEAK, lambda b: ["--stop", next(c for c in reversed(b[1]) if c.isalnum())], "stopped by itself"),
        "--ignore-eos": (["generate", MODEL, "--temperature", "9", "--max-tokens", "2500"], ["--ignore-eos"], "stopped by --max-tokens"),
        "--show-specials": (["generate", MODEL, "--temperature", "9", "--ignore-eos"], ["--show-specials"], OUT),
        "--prefill-chunk": (SPEAK + ["--memory", "8GiB"], ["--prefill-chunk", "1"], less_scratch),
        "--fast": (SPEAK + ["--memory", "8GiB"], ["--fast"], "(absorbed)"),
        "--parts": (SPEAK, ["--parts"], "of a plain read"),
        "--trust-scales": (["generate", DAMAGED, "--prompt", "x", "--max-tokens", "1"] + TIGHT, ["--trust-scales"], found_later),
    },
    "chat": loading(TALK) | {
        "--system": (TALK, ["--system", "Be brief"], OUT),
        "--thinking": (TALK, ["--thinking", "on"], OUT),
        "--effort": (["chat", MODEL, "--max-tokens", "2"], ["--effort", "high"], lambda b, a: number(r"read (\d+)", a) != number(r"read (\d+)", b)),
        "--max-tokens": (TALK, ["--max-tokens", "3"], "wrote 3,"),
        "--temperature": (TALK, ["--temperature", "0.2"], OUT),
        "--top-p": (TALK, ["--top-p", "0.2"], OUT),
        "--seed": (TALK, ["--seed", "11"], OUT),
        "--prefill-chunk": (TALK + ["--memory", "8GiB"], ["--prefill-chunk", "1"], less_scratch),
        "--fast": (TALK + ["--memory", "8GiB"], ["--fast"], "(absorbed)"),
        "--context": (TALK + ["--memory", "8GiB"], ["--context", "500"], "states of 500 tokens"),
        "--parts": (TALK, ["--parts"], "of a plain read"),
        "--trust-scales": (["chat", DAMAGED, "--thinking", "off", "--max-tokens", "1", "--context", "400", "--prefill-chunk", "8"] + TIGHT, ["--trust-scales"], found_later),
    },
    "eval": loading(SCORE) | {
        "--data": (["eval", RUN], ["--data", TEXT], OUT),
        "--held-out": (SCORE, ["--held-out"], OUT),
        "--separator": (SCORE, ["--separator", "t"], OUT),
        "--sequence-length": (SCORE, ["--sequence-length", "5"], OUT),
        "--tokens-at-once": (SCORE + ["--memory", "8GiB"], ["--tokens-at-once", "128"], less_scratch),
        "--trust-scales": (["eval", DAMAGED, "--data", OTHER, "--sequence-length", "8", "--tokens-at-once", "8"] + TIGHT, ["--trust-scales"],
                           found_later),
    },
    "verify": loading(VERIFY) | {
        "--golden": (VERIFY, ["--golden", ROOT / "tests/golden/kimi-linear-b/golden.safetensors"], "in the recording"),
        "--dense": (VERIFY, ["--dense", "mxfp4"], "beyond their limits"),
        "--gradients": (VERIFY, ["--gradients"], OUT),
        "--gradients-file": (VERIFY + ["--gradients"], ["--gradients-file", "nowhere"], "nowhere is not there"),
        "--rtol": (VERIFY, ["--rtol", "1e-9"], "beyond their limits"),
        "--gradient-rtol": (VERIFY + ["--gradients"], ["--gradient-rtol", "1e-9"], "beyond their limits"),
        "--force-routing": (["verify", MODEL, "--golden", SCRATCH / "other.safetensors"], ["--force-routing"], lambda b, a: b[1] != a[1]),
        "--record": (VERIFY, ["--record", SCRATCH / "new.safetensors"], wrote(SCRATCH / "new.safetensors")),
        "--trust-scales": (["verify", DAMAGED, "--golden", SCRATCH / "other.safetensors", "--record", SCRATCH / "damaged.safetensors", "--memory", SOME], ["--trust-scales"],
                           found_later),
    },
    "fabricate": {
        "--out": (["fabricate", SMALL], ["--out", SCRATCH / "new"], wrote(SCRATCH / "new")),
        "--layers": (["fabricate", SMALL, "--out"], ["--layers", "2"], OUT),
        "--experts": (["fabricate", SMALL, "--out"], ["--experts", "5"], OUT),
        "--experts-as": (["fabricate", SMALL, "--out"], ["--experts-as", "bf16"], OUT),
        "--headers-only": (["fabricate", SMALL, "--out"], ["--headers-only"], "(headers only)"),
        "--seed": (["fabricate", SMALL, "--layers", "1", "--out"], ["--seed", "2"], lambda b, a: b[3] != a[3]),
    },
    "inspect": {
        "--tensors": (["inspect", MODEL], ["--tensors"], OUT),
        "--verify": (["inspect", MODEL], ["--verify"], OUT),
    },
    "tokenize": {
        "--text": (["tokenize", MODEL], ["--text", "Hello, world"], OUT),
        "--file": (["tokenize", MODEL], ["--file", TEXT], OUT),
        "--ids": (["tokenize", MODEL], ["--ids"], OUT),
        "--pieces": (["tokenize", MODEL], ["--pieces"], OUT),
        "--decode": (["tokenize", MODEL], ["--decode", "72 105"], OUT),
    },
    "train": {
        "--data": (["train", SCRATCH / "train.json", "--out", SCRATCH / "no-data"], ["--data", TEXT], OUT),
        "--out": (["train", SCRATCH / "train.json", "--data", TEXT], ["--out", SCRATCH / "trained"], wrote(SCRATCH / "trained")),
        "--set": (TRAIN_NEW, ["--set", "steps=2"], OUT),
        "--resume": (["train", SCRATCH / "train.json", "--data", TEXT, "--out", RUN], ["--resume"], lambda b, a: b[0] == 1 and a[0] == 0),
        "--resume-or-start": (["train", SCRATCH / "train.json", "--data", TEXT, "--out", RUN], ["--resume-or-start"], lambda b, a: b[0] == 1 and a[0] == 0),
        "--device": (TRAIN_NEW, ["--device", "cuda"], on_gpu),
        "--bf16": (TRAIN_NEW, ["--bf16"], "--bf16 requires --device"),
    },
    "lab list": {},
    "lab run": {
        "--out": (["lab", "run", "plan-claims"], ["--out", SCRATCH / "lab"], OUT),
        "--seeds": (["lab", "run", "plan-claims", "--out", SCRATCH / "lab"], ["--seeds", "0"], "--seeds"),
        "--device": (["lab", "run", "plan-claims", "--out", SCRATCH / "lab"], ["--device", "cuda"], on_gpu),
        "--bf16": (["lab", "run", "plan-claims", "--out", SCRATCH / "lab"], ["--bf16"], "--bf16 requires --device"),
    },
    "bench ops": {
        "--op": (OPS, ["--op", "situ"], "situ forward"),
        "--json": (OPS, ["--json", SCRATCH / "ops.json"], wrote(SCRATCH / "ops.json")),
        "--device": (OPS, ["--device", "cuda"], on_gpu),
    },
    "bench train": {
        "--config": (["bench", "train", "--steps", "1"], ["--config", SCRATCH / "train.json"], "tokens/s"),
        "--set": (STEPS, ["--set", "batch_tokens=512"], "512 tokens a step"),
        "--steps": (STEPS, ["--steps", "2"], "median of 2 steps"),
        "--json": (STEPS, ["--json", SCRATCH / "step.json"], wrote(SCRATCH / "step.json")),
        "--device": (STEPS, ["--device", "cuda"], on_gpu),
        "--bf16": (STEPS, ["--bf16"], "--bf16 requires --device"),
        "--one-by-one": (STEPS, ["--one-by-one"], "--one-by-one is for --device cuda"),
    },
    "bench decode": {
        "--config": (["bench", "decode"], ["--config", SMALL, "--layers", "2", "--tokens", "1", "--context", "4"], OUT),
        "--layers": (BENCH, ["--layers", "4"], "fabricating 4 layers"),
        "--experts": (BENCH, ["--experts", "6"], lambda b, a: number(r"layers, ([\d.]+) MB", b) > number(r"layers, ([\d.]+) MB", a)),
        "--experts-as": (BENCH, ["--experts-as", "bf16"], grows(r"layers, ([\d.]+) MB")),
        "--tokens": (BENCH, ["--tokens", "3"], "decode: 3 tokens"),
        "--context": (BENCH, ["--context", "9"], "at 9 of context"),
        "--fast": (BENCH + ["--memory", "8GiB"], ["--fast"], "(absorbed)"),
        "--json": (BENCH, ["--json"], '"share_of_plain_read"'),
        "--svg": (BENCH, ["--svg", SCRATCH / "x.svg"], wrote(SCRATCH / "x.svg")),
        "--device": (BENCH, ["--device", "cuda"], on_gpu),
        "--bf16": (BENCH, ["--bf16"], "--bf16 requires --device"),
        "--rows": (BENCH, ["--rows", "2"], "--rows is for --device cuda"),
        "--dense": (BENCH, ["--dense", "mxfp4"], lambda b, a: part("ffn", b) > part("ffn", a)),
        "--memory": (BENCH, ["--memory", "77MB"], "77.0 MB"),
        "--trust-scales": (["bench", "decode", DAMAGED, "--tokens", "1", "--context", "4"] + TIGHT, ["--trust-scales"],
                           found_later),
    },
}
ELSEWHERE = {("lab run", "--quick")}  # minutes of training
REFUSED = [
    (["inspect", MODEL, "--verfy"], "the nearest known one is --verify"),
    (["generate", MODEL, "--stop", ""], "--stop is empty"),
    (["chat", MODEL, "--temperature", "-1"], "--temperature"),
    (["chat", GOLDEN, "--effort", "low"], ""),
    (["fabricate", SMALL, "--out", MODEL], "is there and not empty"),
    (["verify", GOLDEN, "--rtol", "0"], "--rtol is 0"),
    (["verify", GOLDEN, "--gradients", "--memory", "1GB"], "leave out --memory"),
    (["tokenize", MODEL, "--ids", "--pieces"], "excludes"),
    (["bench", "decode", MODEL, "--layers", "2"], "requires --config"),
    (["bench", "decode"], "name a snapshot's folder"),
    (["generate", MODEL, "--memory", "8 apples"], "is no size"),
    (["generate", MODEL, "--memory", "1MB"], "is too little"),
    (["train", SCRATCH / "train.json", "--data", TEXT, "--out", SCRATCH / "t", "--set", "hiden_size=3"], "hidden_size"),
]


def part(name, result):
    return float(re.search(rf"{name} +[\d.]+ ms +([\d.]+) MB", result[1])[1])


def flags_of(command):
    return set(re.findall(r"^ +(?:-h,)?(--[a-z0-9-]+)", k3(*command.split(), "--help")[1], re.M)) - {"--help"}


def replaced(base, more):  # a flag that the command has already gets the other value
    if more[0] in base[1:] and len(more) == 2:
        at = base.index(more[0])
        return base[:at] + more + base[at + 2:]
    return base + more


def run(arguments):
    """A trailing --out gets a new folder; the fourth part of the result is what was written first into it."""
    at = [i for i, a in enumerate(arguments) if a == "--out" and (i + 1 == len(arguments) or str(arguments[i + 1]).startswith("--"))]
    if not at:
        return k3(*arguments)
    folder = Path(tempfile.mkdtemp(dir=SCRATCH)) / "out"
    result = k3(*arguments[:at[0] + 1], folder, *arguments[at[0] + 1:])
    shards = sorted(folder.glob("*.safetensors"))
    return *(t if isinstance(t, int) else t.replace(str(folder), "OUT") for t in result), shards[0].read_bytes() if shards else b""


def without_times(text):
    return re.sub(r"[\d.]+ (s|ms|GB/s|tokens/s|GFLOP/s|[A-Za-z]*/s)\b|\([\d.]+ GB/s\)|\d+ %|\d+% of peak|[\d,]+ tokens/s|\d+:\d+", "T", text)


def check_others(wanted):
    make_models()
    another = SCRATCH / "another"  # its recording is not MODEL's
    k3("fabricate", SMALL, "--out", another, "--seed", "2")
    code, _, said = k3("verify", another, "--golden", ROOT / "tests/golden/kimi-k3-b/golden.safetensors", "--record", SCRATCH / "other.safetensors")
    faults, known = ([f"recording failed: {said}"] if code else []), {}
    for command, cases in CASES.items():
        if wanted and command not in wanted:
            continue
        listed = flags_of(command)
        faults += [f"{command} {flag} has no case here" for flag in sorted(listed - set(cases)) if (command, flag) not in ELSEWHERE]
        for flag, (base, more, effect) in cases.items():
            if flag not in listed:
                faults.append(f"{command} {flag} is not a flag any more")
                continue
            key = tuple(map(str, base))
            if key not in known:
                known[key] = run(base)
            more = more(known[key]) if callable(more) else more
            before, after = known[key], run(replaced(base, more))
            if effect is OUT:
                seen = after[0] == 0 and without_times(before[1]) != without_times(after[1])
            elif callable(effect):
                seen = effect(before, after)
            else:
                seen = effect in after[1] + after[2] and effect not in before[1] + before[2]
            if not seen:
                faults.append(f"{' '.join(map(str, base + more))}: no effect of {flag} to be seen: {(after[1] + after[2]).strip()[-300:]}")
    for command, sentence in REFUSED:
        code, out, said = k3(*command)
        if (not wanted or command[0] in wanted) and (code == 0 or sentence not in said):
            faults.append(f"{' '.join(map(str, command))} must be refused with '{sentence}', but: {said.strip()[:200]}")
    return faults


def check_plan():
    faults = []
    listed = flags_of("plan")
    for flag in sorted(listed - set(PLAN) - LONG_RUNS):
        faults.append(f"plan {flag} has no case here")
    for flag, (command, more) in PLAN.items():
        if flag not in listed:
            faults.append(f"plan {flag} is not a flag any more")
            continue
        before, after = k3("plan", *command), k3("plan", *command, *more)
        if before[0] or after[0]:
            faults.append(f"plan {flag}: {' '.join(command + more)} fails: {(before if before[0] else after)[2].strip()}")
        elif before[1:] == after[1:]:
            faults.append(f"plan {flag}: {' '.join(command + more)} prints what it prints without")
    for command, sentence in PLAN_REFUSED:
        code, out, said = k3("plan", *command)
        if code == 0 or sentence not in out + said:
            faults.append(f"plan {' '.join(command)} must be refused with '{sentence}', but: {(out + said).strip()[:200]}")
    return faults


try:
    wanted = sys.argv[2:]
    faults = (check_plan() if not wanted or "plan" in wanted else []) + (check_others(wanted) if wanted != ["plan"] else [])
finally:
    shutil.rmtree(SCRATCH, ignore_errors=True)
count = len(PLAN) + sum(map(len, CASES.values()))
print("\n".join(faults) or f"{count} flags have an effect, {len(PLAN_REFUSED) + len(REFUSED)} misuses are refused")
sys.exit(1 if faults else 0)
