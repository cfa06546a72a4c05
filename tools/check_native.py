#!/usr/bin/env python3
"""A Kimi-Linear-shaped snapshot of ours, loaded by the native kimi_linear of transformers: the same logits?

  env/bin/python tools/check_native.py SNAPSHOT RECORDING        RECORDING: k3 verify SNAPSHOT --golden INPUT --record RECORDING
"""
import sys

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

snapshot, recording = sys.argv[1:3]
recorded = load_file(recording)
model, info = AutoModelForCausalLM.from_pretrained(snapshot, dtype=torch.float32, output_loading_info=True)
print("missing:", info["missing_keys"], "unexpected:", info["unexpected_keys"], "mismatched:", info["mismatched_keys"])
with torch.no_grad():
    logits = model(recorded["input_ids"].long()).logits
want = recorded["logits"].view_as(logits)
relative = ((logits - want).norm() / want.norm()).item()
print(f"relative L2 of the logits: {relative:.2e}, largest difference {(logits - want).abs().max().item():.2e}")
sys.exit(relative > 1e-4 or any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")))
