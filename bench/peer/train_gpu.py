#!/usr/bin/env python3
"""The same model in PyTorch with FLA's kernels, bfloat16, on a GPU: what `k3 train --device cuda --bf16` is compared with.

  python3 bench/peer/train_gpu.py --check tests/golden/kimi-k3-a        its logits, loss and gradients against a recording, in float32
  python3 bench/peer/train_gpu.py configs/k3-0.4b.json --length 4096    tokens/s: forward, backward, clip and update, the fastest of its forms

Float32 weights, products in bfloat16 (autocast), as ours; KDA, its convolutions, its gated norm and attention over depth by FLA's fused kernels,
attention by the fused kernels of PyTorch, experts by its grouped product, the rest of a layer and the loss through torch.compile; AdamW fused, or Muon over all matrices of one
shape at once. Each form is timed eagerly and as one captured graph of the whole step. Prints one JSON line a form.
"""
import argparse, glob, json, statistics, sys, time

import parallel_tuning  # noqa: F401
import torch
import torch.nn.functional as F
from torch import nn

from fla.modules.causal_conv1d.ops import causal_conv1d
from fla.modules.norm.fused_norm_gate import rms_norm_gated
from fla.ops.attnres import fused_attnres
from fla.ops.kda import chunk_kda


def rms(x, w, eps):
    return F.rms_norm(x.float(), (x.shape[-1],), w, eps).to(x.dtype)


def situ(a, u):
    a, u = a.float(), u.float()
    return 4 * torch.tanh(a / 4) * torch.sigmoid(a) * 25 * torch.tanh(u / 25)


def linear(d, n):
    return nn.Linear(d, n, bias=False, device="cuda")


def gain(n):
    return nn.Parameter(torch.ones(n, device="cuda"))


def kda(x, q, k, v, g, b, conv_q, conv_k, conv_v, A_log, dt_bias, bound, heads, width):
    q, k, v = (causal_conv1d(t, w.squeeze(1), activation="silu")[0].unflatten(-1, (heads, width)) for t, w in ((q, conv_q), (k, conv_k), (v, conv_v)))
    gate = {"safe_gate": True, "lower_bound": bound} if bound else {}
    o, _ = chunk_kda(q, k, v, g.unflatten(-1, (heads, width)), b, A_log=A_log, dt_bias=dt_bias, use_qk_l2norm_in_kernel=True,
                     use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, disable_recompute=True, **gate)
    return o


def gated_norm(o, gate, w):
    return rms_norm_gated(o, gate, w, None, activation="sigmoid", eps=1e-5)


class Kda(nn.Module):
    def __init__(self, c):
        super().__init__()
        la, d = c["linear_attn_config"], c["hidden_size"]
        self.h, self.k, self.bound, taps = la["num_heads"], la["head_dim"], la.get("gate_lower_bound"), la["short_conv_kernel_size"]
        n = self.h * self.k
        self.sizes = [n, n, n, n, self.k, self.h]
        self.qkvg_fa_b = linear(d, sum(self.sizes))  # one product for all that read x
        self.f_b, self.o = linear(self.k, n), linear(n, d)
        self.conv = nn.ParameterList(nn.Parameter((torch.rand(n, 1, taps, device="cuda") - 0.5)) for _ in range(3))
        self.A_log, self.dt_bias, self.norm = nn.Parameter(torch.zeros(self.h, device="cuda")), nn.Parameter(torch.full((n,), -4.0, device="cuda")), gain(self.k)

    def forward(self, x):
        q, k, v, gate, fa, b = self.qkvg_fa_b(x).split(self.sizes, -1)
        o = kda(x, q.contiguous(), k.contiguous(), v.contiguous(), self.f_b(fa), b.contiguous(), *self.conv, self.A_log, self.dt_bias, self.bound, self.h, self.k)
        y = gated_norm(o, gate.contiguous().unflatten(-1, (self.h, self.k)), self.norm)
        return self.o(y.flatten(-2))

    def take(self, w):
        self.qkvg_fa_b.weight.data = torch.cat([w(f"{n}_proj.weight") for n in ("q", "k", "v", "g", "f_a", "b")])
        self.f_b.weight.data, self.o.weight.data = w("f_b_proj.weight"), w("o_proj.weight")
        for p, n in zip(self.conv, "qkv"):
            p.data = w(f"{n}_conv1d.weight")
        self.A_log.data, self.dt_bias.data, self.norm.data = w("A_log")[: self.h].clone(), w("dt_bias"), w("o_norm.weight")

    def gradients(self):
        for n, g in zip(("q", "k", "v", "g", "f_a", "b"), self.qkvg_fa_b.weight.grad.split(self.sizes)):
            yield f"{n}_proj.weight", g
        yield "f_b_proj.weight", self.f_b.weight.grad
        yield "o_proj.weight", self.o.weight.grad
        yield "dt_bias", self.dt_bias.grad
        yield "q_conv1d.weight", self.conv[0].grad


class Mla(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, self.h = c["hidden_size"], c["num_attention_heads"]
        self.n, self.r, self.v, self.rank = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"], c["kv_lora_rank"]
        self.sizes = [c["q_lora_rank"], self.rank, self.r, self.h * self.v]
        self.qa_kva_g = linear(d, sum(self.sizes))
        self.q_b, self.kv_b, self.o = linear(c["q_lora_rank"], self.h * (self.n + self.r)), linear(self.rank, self.h * (self.n + self.v)), linear(self.h * self.v, d)
        self.qn, self.kn = gain(c["q_lora_rank"]), gain(self.rank)

    def forward(self, x):
        B, T, _ = x.shape
        qa, c, pe, g = self.qa_kva_g(x).split(self.sizes, -1)
        q = self.q_b(rms(qa, self.qn, 1e-6)).view(B, T, self.h, -1).transpose(1, 2)
        kv = self.kv_b(rms(c, self.kn, 1e-6)).view(B, T, self.h, -1).transpose(1, 2)
        k = torch.cat([kv[..., : self.n], pe[:, None].expand(B, self.h, T, self.r)], -1)
        o = F.scaled_dot_product_attention(q, k, kv[..., self.n :], is_causal=True)
        return self.o(torch.sigmoid(g) * o.transpose(1, 2).reshape(B, T, -1))

    def take(self, w):
        self.qa_kva_g.weight.data = torch.cat([w("q_a_proj.weight"), w("kv_a_proj_with_mqa.weight"), w("g_proj.weight")])
        self.q_b.weight.data, self.kv_b.weight.data, self.o.weight.data = w("q_b_proj.weight"), w("kv_b_proj.weight"), w("o_proj.weight")
        self.qn.data, self.kn.data = w("q_a_layernorm.weight"), w("kv_a_layernorm.weight")

    def gradients(self):
        a, b, p, g = self.qa_kva_g.weight.grad.split(self.sizes)
        yield from (("q_a_proj.weight", a), ("kv_a_proj_with_mqa.weight", torch.cat([b, p])), ("g_proj.weight", g))
        yield from (("q_b_proj.weight", self.q_b.weight.grad), ("kv_b_proj.weight", self.kv_b.weight.grad), ("o_proj.weight", self.o.weight.grad))


class Glu(nn.Module):
    def __init__(self, d, m):
        super().__init__()
        self.m, self.gate_up, self.down = m, linear(d, 2 * m), linear(m, d)

    def forward(self, x):
        a, u = self.gate_up(x).split(self.m, -1)
        return self.down(situ(a, u).to(x.dtype))

    def take(self, w):
        self.gate_up.weight.data, self.down.weight.data = torch.cat([w("gate_proj.weight"), w("up_proj.weight")]), w("down_proj.weight")

    def gradients(self):
        a, u = self.gate_up.weight.grad.split(self.m)
        yield from (("gate_proj.weight", a), ("up_proj.weight", u), ("down_proj.weight", self.down.weight.grad))


class Moe(nn.Module):
    """Rows ordered by expert on the device, each expert's begin on a multiple of 8 rows (what the grouped product asks for), no wait for the host."""

    def __init__(self, c):
        super().__init__()
        d, l, self.m, self.E, self.top = c["hidden_size"], c["routed_expert_hidden_size"], c["moe_intermediate_size"], c["num_experts"], c["num_experts_per_token"]
        self.gate, self.down, self.up = linear(d, self.E), linear(d, l), linear(l, d)
        self.register_buffer("bias", torch.zeros(self.E, device="cuda"))
        self.norm = gain(l)
        self.w13 = nn.Parameter(torch.randn(self.E, 2 * self.m, l, device="cuda") / l**0.5)
        self.w2 = nn.Parameter(torch.randn(self.E, l, self.m, device="cuda") / self.m**0.5)
        self.shared = Glu(d, c["num_shared_experts"] * self.m)

    def experts(self, z, idx, p):
        N, E, k = z.shape[0], self.E, self.top
        flat = idx.flatten()
        order = torch.argsort(flat, stable=True)
        counts = torch.zeros(E, dtype=torch.int64, device=z.device).scatter_add_(0, flat, torch.ones_like(flat))
        padded = (counts + 7) // 8 * 8
        ends = padded.cumsum(0)
        e = flat[order]
        place = torch.arange(N * k, device=z.device) - (counts.cumsum(0) - counts)[e] + (ends - padded)[e]
        rows = z.new_zeros(N * k + 8 * E, z.shape[1]).index_copy(0, place, z[order // k])
        if z.dtype == torch.bfloat16:
            offs = ends.int()
            h = torch._grouped_mm(rows, self.w13.to(z.dtype).transpose(1, 2), offs)
            a, u = h.chunk(2, -1)
            y = torch._grouped_mm(situ(a, u).to(z.dtype), self.w2.to(z.dtype).transpose(1, 2), offs)
        else:  # float32: a loop, for the check
            y, at = torch.zeros_like(rows), 0
            parts = []
            for i, n in enumerate(padded.tolist()):
                a, u = F.linear(rows[at : at + n], self.w13[i]).chunk(2, -1)
                parts.append(F.linear(situ(a, u), self.w2[i]))
                at += n
            y = torch.cat(parts + [rows.new_zeros(rows.shape[0] - at, rows.shape[1])])
        y = y[place] * p.flatten()[order, None].to(y.dtype)
        return torch.zeros_like(z).index_add(0, order // k, y)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        with torch.autocast("cuda", enabled=False):
            s = torch.sigmoid(F.linear(flat.float(), self.gate.weight))
        idx = (s + self.bias).topk(self.top).indices
        p = s.gather(1, idx)
        p = p / p.sum(-1, keepdim=True)
        u = self.experts(self.down(flat), idx, p)
        return (self.up(rms(u, self.norm, 1e-5)) + self.shared(flat)).view_as(x)

    def take(self, w):
        self.gate.weight.data, self.down.weight.data, self.up.weight.data = w("gate.weight"), w("routed_expert_down_proj.weight"), w("routed_expert_up_proj.weight")
        self.bias.data, self.norm.data = w("gate.e_score_correction_bias"), w("routed_expert_norm.weight")
        self.w13.data = torch.stack([torch.cat([w(f"experts.{e}.w1.weight"), w(f"experts.{e}.w3.weight")]) for e in range(self.E)])
        self.w2.data = torch.stack([w(f"experts.{e}.w2.weight") for e in range(self.E)])
        self.shared.take(lambda n: w("shared_experts." + n))

    def gradients(self):
        yield from (("gate.weight", self.gate.weight.grad), ("routed_expert_down_proj.weight", self.down.weight.grad), ("routed_expert_up_proj.weight", self.up.weight.grad))
        for e in range(self.E):
            yield from ((f"experts.{e}.w1.weight", self.w13.grad[e, : self.m]), (f"experts.{e}.w2.weight", self.w2.grad[e]))
        yield from (("shared_experts." + n, g) for n, g in self.shared.gradients())


def kinds_of(c):
    L = c["num_hidden_layers"]
    full = c.get("linear_attn_config", {}).get("full_attn_layers")
    if full:
        return ["mla" if i + 1 in full else "kda" for i in range(L)]
    kinds = [c["mixers"][i % len(c["mixers"])] for i in range(L)]
    kinds[-1] = c.get("final_mixer", kinds[-1])
    return kinds


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, L = c["hidden_size"], c["num_hidden_layers"]
        self.block, self.eps = c["attn_res_block_size"], c["rms_norm_eps"]
        self.embed, self.head = nn.Embedding(c["vocab_size"], d, device="cuda"), linear(d, c["vocab_size"])
        self.mixers = nn.ModuleList(Kda(c) if k == "kda" else Mla(c) for k in kinds_of(c))
        self.ffns = nn.ModuleList(Moe(c) if i >= c["first_k_dense_replace"] else Glu(d, c["intermediate_size"]) for i in range(L))
        self.gains = nn.ParameterList(gain(d) for _ in range(2 * L + 1))
        self.query = nn.ParameterList(nn.Parameter(torch.randn(d, device="cuda") * 0.02) for _ in range(2 * L + 1))
        self.key = nn.ParameterList(gain(d) for _ in range(2 * L + 1))

    def read(self, i, sources):  # attention over depth and the norm after it
        if len(sources) == 1:
            return rms(sources[0], self.gains[i], self.eps)
        return depth(self.query[i], sources, self.key[i], self.gains[i], self.eps)

    def forward(self, ids):
        blocks, p = [], self.embed(ids)
        if torch.is_autocast_enabled("cuda"):
            p = p.bfloat16()
        for l, (mixer, ffn) in enumerate(zip(self.mixers, self.ffns)):
            h = self.read(2 * l, blocks + [p])
            opens = l % self.block == 0
            if opens:
                blocks = blocks + [p]
            a = mixer(h)
            p = a if opens else p + a
            p = p + ffn(self.read(2 * l + 1, blocks + [p]))
        return self.head(self.read(-1, blocks + [p]))

    def names(self):
        L = len(self.mixers)
        for l in range(L):
            at = f"language_model.model.layers.{l}."
            yield 2 * l, at + "self_attention_res", at + "input_layernorm.weight"
            yield 2 * l + 1, at + "mlp_res", at + "post_attention_layernorm.weight"
        yield 2 * L, "language_model.model.output_attn_res", "language_model.model.norm.weight"

    def parts(self):
        for l, (mixer, ffn) in enumerate(zip(self.mixers, self.ffns)):
            at = f"language_model.model.layers.{l}."
            yield mixer, at + "self_attn."
            yield ffn, at + ("block_sparse_moe." if isinstance(ffn, Moe) else "mlp.")

    def take(self, w):
        self.embed.weight.data, self.head.weight.data = w("language_model.model.embed_tokens.weight"), w("language_model.lm_head.weight")
        for i, res, norm in self.names():
            self.gains[i].data, self.key[i].data, self.query[i].data = w(norm), w(res + "_norm.weight"), w(res + "_proj.weight").flatten()
        for part, at in self.parts():
            part.take(lambda n: w(at + n))

    def gradients(self):
        yield "language_model.model.embed_tokens.weight", self.embed.weight.grad
        yield "language_model.lm_head.weight", self.head.weight.grad
        for i, res, norm in self.names():
            if self.query[i].grad is not None:
                yield res + "_proj.weight", self.query[i].grad
            yield norm, self.gains[i].grad
        for part, at in self.parts():
            yield from ((at + n, g) for n, g in part.gradients())


def depth(query, sources, key, gain_, eps):
    return fused_attnres(query, sources, key, gain_, rms_eps=eps, checkpoint_level=0)


class Muon:
    """Five Newton-Schulz steps in bfloat16 over all matrices of one shape at once; AdamW for embedding, head and vectors."""

    def __init__(self, model, graphed):
        flat = lambda p: p.view(-1, *p.shape[-2:])
        outside = {id(model.embed.weight), id(model.head.weight)}
        matrices = [p for p in model.parameters() if p.ndim >= 2 and p.shape[-1] > 4 and id(p) not in outside]
        chosen = {id(p) for p in matrices}
        self.groups, self.momentum = {}, {}
        for p in matrices:
            self.groups.setdefault(tuple(sorted(p.shape[-2:])), []).append(p)
            self.momentum[p] = torch.zeros_like(p)
        self.flat = flat
        self.adam = torch.optim.AdamW([p for p in model.parameters() if id(p) not in chosen], lr=1e-4, fused=True, capturable=graphed)

    @torch.no_grad()
    def step(self):
        self.adam.step()
        for ps in self.groups.values():
            moments = [self.momentum[p] for p in ps]
            grads = [p.grad for p in ps]
            torch._foreach_lerp_(moments, grads, 0.05)
            updates = torch._foreach_lerp(grads, moments, 0.95)
            turn = [p.shape[-2] > p.shape[-1] for p in ps]
            x = torch.cat([self.flat(u.mT if t else u) for u, t in zip(updates, turn)]).bfloat16()
            x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).to(x.dtype)
            for a, b, c in [(3.4445, -4.7750, 2.0315)] * 5:
                gram = torch.bmm(x, x.mT)
                x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
            sizes = [self.flat(p).shape[0] for p in ps]
            out = [(o.mT if t else o).reshape(p.shape).to(p.dtype) for o, t, p in zip(x.split(sizes), turn, ps)]
            torch._foreach_mul_(ps, 1 - 1e-5)
            torch._foreach_add_(ps, out, alpha=-1e-3)

    def zero_grad(self, set_to_none):
        for p in self.momentum:
            p.grad = None
        self.adam.zero_grad(set_to_none=set_to_none)


def load_config(path):
    c = json.load(open(path))
    c = c.get("text_config", c)
    c.setdefault("vocab_size", 163840)
    return c


def check(folder):
    from safetensors.torch import load_file

    c = load_config(folder + "/config.json")
    weights = {}
    for f in glob.glob(folder + "/model*.safetensors"):
        weights.update(load_file(f))
    golden, want = load_file(folder + "/golden.safetensors"), load_file(folder + "/grads.safetensors")
    model = Model(c)
    model.take(lambda n: weights[n].cuda().float())
    ids = golden["input_ids"].cuda().long()
    relative = lambda a, b: ((a.double().cpu() - b.double().cpu()).norm() / b.double().norm()).item()
    logits = model(ids)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    loss.backward()
    errors = sorted((relative(g.reshape(want[n].shape) if g.numel() == want[n].numel() else g, want[n]), n) for n, g in model.gradients() if n in want)
    rows = {"check": folder, "logits": relative(logits, golden["logits"].view_as(logits)), "loss": loss.item(), "loss_recorded": golden["loss"].item(),
            "gradients": len(errors), "median_gradient": errors[len(errors) // 2], "worst_gradient": errors[-1]}
    with torch.autocast("cuda", torch.bfloat16):
        rows["logits_bf16"] = relative(model(ids), golden["logits"].view_as(logits))
    # FLA's chunk kernels round to less than float32, and a near tie of experts may fall the other way, which moves those experts' gradients much
    rows["good"] = rows["logits"] < 3e-2 and errors[len(errors) // 2][0] < 5e-2 and rows["logits_bf16"] < 0.3
    print(json.dumps(rows), flush=True)
    return rows["good"]


def time_form(c, a, compiled, graphed, muon):
    torch.manual_seed(1)
    torch._dynamo.reset()
    model = Model(c)
    parameters = list(model.parameters())
    opt = Muon(model, graphed) if muon else torch.optim.AdamW(parameters, lr=1e-4, fused=True, capturable=graphed)
    ids = torch.randint(0, c["vocab_size"], (1, a.length + 1), device="cuda")

    def loss_of(x, y):
        return ce(model(x).flatten(0, 1), y.flatten())

    f, ce = loss_of, lambda logits, y: F.cross_entropy(logits.float(), y)
    if compiled:  # all between FLA's kernels, which it cannot see into
        ce = torch.compile(ce)
        for m in model.modules():
            if isinstance(m, (Mla, Moe)) or isinstance(m, Glu) and m not in [x.shared for x in model.ffns if isinstance(x, Moe)]:
                m.compile()

    def step():
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=not graphed):
            loss = f(ids[:, :-1], ids[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        opt.step()
        return loss

    start = time.perf_counter()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            loss = step()
    torch.cuda.current_stream().wait_stream(side)
    first = loss.item()
    warm = time.perf_counter() - start
    run = step
    if graphed:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static = step()
        run = lambda: (graph.replay(), static)[1]
    torch.cuda.synchronize()
    times = []
    for _ in range(a.steps):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        loss = run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    ms = statistics.median(times)
    print(json.dumps({"peer": "train", "compile": compiled, "graph": graphed, "optimizer": "muon" if muon else "adamw", "ms": round(ms, 3), "spread_ms": [round(min(times), 3), round(max(times), 3)],
                      "tokens_per_s": round(a.length / ms * 1e3), "parameters": sum(p.numel() for p in parameters), "first_loss": first, "loss": loss.item(),
                      "peak_GB": round(torch.cuda.max_memory_allocated() / 1e9, 2), "warm_s": round(warm, 1)}), flush=True)


def main():
    a = argparse.ArgumentParser()
    a.add_argument("config", nargs="?"), a.add_argument("--length", type=int, default=4096), a.add_argument("--steps", type=int, default=15)
    a.add_argument("--check", action="append", default=[]), a.add_argument("--forms", default="", help="such as compile+graph,eager; all when empty")
    a = a.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    good = all([check(folder) for folder in a.check])
    if a.config:
        c = load_config(a.config)
        forms = a.forms.split(",") if a.forms else ["eager", "graph", "graph+muon", "compile+graph", "compile+graph+muon"]
        for form in forms:
            try:
                time_form(c, a, "compile" in form, "graph" in form, "muon" in form)
            except Exception as e:  # a form that does not run says so
                print(json.dumps({"peer": "train", "form": form, "error": f"{type(e).__name__}: {e}"[:600]}), flush=True)
            torch.cuda.empty_cache()
    sys.exit(not good)


if __name__ == "__main__":
    main()
