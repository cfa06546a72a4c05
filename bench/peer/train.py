#!/usr/bin/env python3
"""The same model in plain PyTorch, float32, eager, on the CPU: what `k3 train` is compared with.

  python3 -m venv env && env/bin/pip install torch transformers
  env/bin/python bench/peer/train.py configs/demo.json --rows 8 --length 512 --steps 5 --threads 2

Prints tokens/s (median over steps) of forward, backward and AdamW. KDA is the chunked form in tensor operations of the native kimi_linear
implementation; everything else is written here, as plainly as the equations. Random weights and ids: only the time matters.
"""
import argparse, json, statistics, time

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention


def rms(x, w, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


class Kda(nn.Module):
    def __init__(self, c):
        super().__init__()
        la, d = c["linear_attn_config"], c["hidden_size"]
        self.h, self.k, self.bound = la["num_heads"], la["head_dim"], la.get("gate_lower_bound")
        n = self.h * self.k
        self.q, self.key, self.v, self.g = (nn.Linear(d, n, bias=False) for _ in range(4))
        self.conv = nn.ParameterList(nn.Parameter(torch.rand(n, 1, la["short_conv_kernel_size"]) - 0.5) for _ in range(3))
        self.f_a, self.f_b = nn.Linear(d, self.k, bias=False), nn.Linear(self.k, n, bias=False)
        self.b, self.o = nn.Linear(d, self.h, bias=False), nn.Linear(n, d, bias=False)
        self.A, self.dt, self.norm = nn.Parameter(torch.zeros(self.h)), nn.Parameter(torch.full((n,), -4.0)), nn.Parameter(torch.ones(self.k))

    def forward(self, x):
        B, T, _ = x.shape
        def stream(lin, w):
            y = lin(x).transpose(1, 2)
            return F.silu(F.conv1d(y, w, padding=w.shape[-1] - 1, groups=y.shape[1])[..., :T]).transpose(1, 2).view(B, T, self.h, self.k)
        q, k, v = stream(self.q, self.conv[0]), stream(self.key, self.conv[1]), stream(self.v, self.conv[2])
        z = (self.f_b(self.f_a(x)) + self.dt).view(B, T, self.h, self.k)
        rate = self.A.exp()[:, None]
        g = self.bound * torch.sigmoid(rate * z) if self.bound else -rate * F.softplus(z)
        o, _ = chunk_kimi_delta_attention(q, k, v, g, torch.sigmoid(self.b(x)), use_qk_l2norm_in_kernel=True)
        y = rms(o, self.norm, 1e-5) * torch.sigmoid(self.g(x)).view(B, T, self.h, self.k)
        return self.o(y.reshape(B, T, -1))


class Mla(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, self.h = c["hidden_size"], c["num_attention_heads"]
        self.n, self.r, self.v, self.rank = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"], c["kv_lora_rank"]
        self.q_a, self.q_b = nn.Linear(d, c["q_lora_rank"], bias=False), nn.Linear(c["q_lora_rank"], self.h * (self.n + self.r), bias=False)
        self.kv_a, self.kv_b = nn.Linear(d, self.rank + self.r, bias=False), nn.Linear(self.rank, self.h * (self.n + self.v), bias=False)
        self.g, self.o = nn.Linear(d, self.h * self.v, bias=False), nn.Linear(self.h * self.v, d, bias=False)
        self.qn, self.kn = nn.Parameter(torch.ones(c["q_lora_rank"])), nn.Parameter(torch.ones(self.rank))

    def forward(self, x):
        B, T, _ = x.shape
        q = self.q_b(rms(self.q_a(x), self.qn, 1e-6)).view(B, T, self.h, -1).transpose(1, 2)
        c, pe = self.kv_a(x).split([self.rank, self.r], -1)
        kv = self.kv_b(rms(c, self.kn, 1e-6)).view(B, T, self.h, -1).transpose(1, 2)
        k = torch.cat([kv[..., : self.n], pe[:, None].expand(B, self.h, T, self.r)], -1)
        o = F.scaled_dot_product_attention(q, k, kv[..., self.n :].contiguous(), is_causal=True)
        return self.o(torch.sigmoid(self.g(x)) * o.transpose(1, 2).reshape(B, T, -1))


class Glu(nn.Module):
    def __init__(self, d, m):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(d, m, bias=False), nn.Linear(d, m, bias=False), nn.Linear(m, d, bias=False)

    def forward(self, x):
        return self.down(situ(self.gate(x), self.up(x)))


def situ(a, u):
    return 4 * torch.tanh(a / 4) * torch.sigmoid(a) * 25 * torch.tanh(u / 25)


class Moe(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, l, m, self.E, self.top = c["hidden_size"], c["routed_expert_hidden_size"], c["moe_intermediate_size"], c["num_experts"], c["num_experts_per_token"]
        self.gate, self.down, self.up = nn.Linear(d, self.E, bias=False), nn.Linear(d, l, bias=False), nn.Linear(l, d, bias=False)
        self.norm = nn.Parameter(torch.ones(l))
        self.w13 = nn.Parameter(torch.randn(self.E, 2 * m, l) / l**0.5)
        self.w2 = nn.Parameter(torch.randn(self.E, l, m) / m**0.5)
        self.shared = Glu(d, c["num_shared_experts"] * m)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        s = torch.sigmoid(self.gate(flat))
        p, idx = s.topk(self.top)
        p = p / p.sum(-1, keepdim=True)
        z = self.down(flat)
        u = torch.zeros_like(z)
        for e in range(self.E):
            token, slot = torch.where(idx == e)
            if token.numel() == 0:
                continue
            a, b = F.linear(z[token], self.w13[e]).chunk(2, -1)
            u = u.index_add(0, token, F.linear(situ(a, b), self.w2[e]) * p[token, slot, None])
        return (self.up(rms(u, self.norm, 1e-5)) + self.shared(flat)).view_as(x)


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, L = c["hidden_size"], c["num_hidden_layers"]
        kinds = [c["mixers"][i % len(c["mixers"])] for i in range(L)]
        kinds[-1] = c.get("final_mixer", kinds[-1])
        self.block = c["attn_res_block_size"]
        self.embed, self.head = nn.Embedding(c["vocab_size"], d), nn.Linear(d, c["vocab_size"], bias=False)
        self.mixers = nn.ModuleList(Kda(c) if k == "kda" else Mla(c) for k in kinds)
        self.ffns = nn.ModuleList(Moe(c) if i >= c["first_k_dense_replace"] else Glu(d, c["intermediate_size"]) for i in range(L))
        self.gain = nn.Parameter(torch.ones(2 * L + 1, d))
        self.query, self.key = nn.Parameter(torch.randn(2 * L + 1, d) * 0.02), nn.Parameter(torch.ones(2 * L + 1, d))

    def mix(self, i, sources):
        if len(sources) == 1:
            return sources[0]
        v = torch.stack(sources)
        s = (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-5) * (self.query[i] * self.key[i])).sum(-1)
        return (s.softmax(0)[..., None] * v).sum(0)

    def forward(self, ids):
        blocks, p = [], self.embed(ids)
        for l, (mixer, ffn) in enumerate(zip(self.mixers, self.ffns)):
            h = self.mix(2 * l, blocks + [p])
            opens = l % self.block == 0
            if opens:
                blocks = blocks + [p]
            a = mixer(rms(h, self.gain[2 * l], 1e-5))
            p = a if opens else p + a
            p = p + ffn(rms(self.mix(2 * l + 1, blocks + [p]), self.gain[2 * l + 1], 1e-5))
        return self.head(rms(self.mix(-1, blocks + [p]), self.gain[-1], 1e-5))


def main():
    a = argparse.ArgumentParser()
    a.add_argument("config"), a.add_argument("--rows", type=int, default=8), a.add_argument("--length", type=int, default=512)
    a.add_argument("--steps", type=int, default=5), a.add_argument("--threads", type=int, default=2)
    a = a.parse_args()
    torch.set_num_threads(a.threads)
    c = json.load(open(a.config))
    c.setdefault("vocab_size", 512)
    model = Model(c)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    times = []
    for step in range(a.steps + 1):
        ids = torch.randint(0, c["vocab_size"], (a.rows, a.length + 1))
        t = time.perf_counter()
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        times.append(time.perf_counter() - t)
    tokens = a.rows * a.length
    median = statistics.median(times[1:])
    print(json.dumps({"parameters": sum(p.numel() for p in model.parameters()), "tokens": tokens, "seconds": median, "tokens_per_s": tokens / median, "threads": a.threads}))


if __name__ == "__main__":
    main()
