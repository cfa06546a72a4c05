#!/usr/bin/env python3
"""Kills a training run with SIGKILL at random moments, goes on each time, and compares the end with a run that nobody disturbed, bit for bit.

    tools/kill_resume.py build/cpu/k3 [--kills 20] [--seed 1] [--keep FOLDER]

What must hold at every moment: the folder can be gone on with, the weights, moments and losses at the end are those of the straight run, and
nothing half-written is left.
"""
import argparse
import json
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time

CONFIG = {
    "model_type": "kimi_k3", "hidden_size": 48, "num_hidden_layers": 4, "mixers": ["kda", "mla"], "num_attention_heads": 2,
    "intermediate_size": 64, "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "attn_res_block_size": 2,
    "first_k_dense_replace": 1, "num_experts": 16, "num_experts_per_token": 2, "num_shared_experts": 1, "moe_intermediate_size": 24,
    "routed_expert_hidden_size": 24, "latent_moe_use_norm": True, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "mla_use_output_gate": True, "rms_norm_eps": 1e-5,
    "linear_attn_config": {"num_heads": 2, "head_dim": 16, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0, "use_full_rank_gate": True},
    # saved after every step, so that many kills fall into the writing of a checkpoint
    "train": {"document_separator": "%", "sequence_length": 64, "batch_tokens": 256, "micro_batch_tokens": 128, "steps": 40,
              "learning_rate": 0.01, "save_every": 1, "eval_every": 3, "eval_tokens": 512, "held_out": 0.1},
}


def text(rng):
    words = "the quick brown fox jumps over a lazy dog and then sleeps until morning comes again".split()
    return "".join(" ".join(rng.choice(words) for _ in range(rng.randrange(3, 40))) + ".\n%\n" for _ in range(300))


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("k3")
    p.add_argument("--kills", type=int, default=20)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--keep", help="work in this folder and leave it there")
    a = p.parse_args()
    rng = random.Random(a.seed)
    work = pathlib.Path(a.keep or tempfile.mkdtemp(prefix="k3-kill-"))
    work.mkdir(exist_ok=True)
    (work / "config.json").write_text(json.dumps(CONFIG))
    (work / "text").write_text(text(rng))
    command = lambda out: [a.k3, "train", work / "config.json", "--data", work / "text", "--out", work / out, "--resume-or-start"]

    began = time.time()
    subprocess.run(command("straight"), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    whole = time.time() - began
    print(f"straight run: {whole:.1f} s")

    last = (work / "straight" / "LATEST").read_text().strip()

    def compare():
        bad = [f"{last}/{name} differs" for name in ("model.safetensors", "optimizer.safetensors", "config.json", "tiktoken.model")
               if (work / "straight" / last / name).read_bytes() != (work / "killed" / last / name).read_bytes()]
        if losses(work / "straight") != losses(work / "killed"):
            bad.append("the losses in metrics.jsonl differ")
        left = [f.name for f in (work / "killed").glob("*.part")]
        return bad + ([f"left behind: {left}"] if left else [])

    kills, rounds, parts, reached, bad = 0, 0, 0, [], []
    while kills < a.kills or reached[-1] != "end":
        run = subprocess.Popen(command("killed"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if kills < a.kills:
            # from the first instruction, through reading the data, to a few steps further; a run that ends first is compared and begun anew
            time.sleep(rng.uniform(0, 0.5 + 2 * whole / a.kills))
            run.kill()
        said = run.communicate()[0]
        if run.returncode > 0:
            sys.exit(f"the run ended by itself with {run.returncode}:\n{said}")
        if run.returncode == 0:
            bad += compare()
            rounds += 1
            reached.append("end")
            if kills < a.kills:
                shutil.rmtree(work / "killed")
            continue
        kills += 1
        parts += len(list((work / "killed").glob("*.part"))) if (work / "killed").exists() else 0
        latest = work / "killed" / "LATEST"
        reached.append(latest.read_text().strip()[-2:] if latest.exists() else "-")
    print(f"{kills} kills in {rounds} runs left {parts} things half-written; steps in force: {' '.join(reached)}")
    if not a.keep:
        shutil.rmtree(work)
    if bad:
        sys.exit("; ".join(bad))
    print("weights, moments and losses of each run equal those of the straight run, bit for bit")


if __name__ == "__main__":
    main()
