#!/usr/bin/env python3
"""What others' kernels take at the shapes of `k3 bench ops --device cuda`, on the same GPU: FLA, cuDNN and cuBLASLt through PyTorch, torch.compile.

  python3 bench/peer/kernels.py --json peers.json [--only kda,decode] [--no-check]

Results are checked first, against the plain equations in float64 or float32; a wrong one is reported and not timed. Times are
medians of 30 replays of a captured graph (of 10 launches for what is short), inputs random, two kinds of gates: N(0,1) and slow (about -4).
The names are those of `k3 bench ops`, so that the two files can be laid side by side.
"""
import argparse, json, math, statistics, sys

import parallel_tuning  # noqa: F401
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

OUT = []
BF = torch.bfloat16


def say(op, shape, peer, us=None, **more):
    row = {"op": op, "shape": shape, "peer": peer, **({"us": round(us, 1)} if us else {}), **more}
    OUT.append(row)
    print(json.dumps(row), flush=True)


def time_us(f, inner=1, samples=30, graph=True):
    f(), f()
    torch.cuda.synchronize()
    run = f
    if graph:
        try:
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                f()
            torch.cuda.synchronize()
            g = torch.cuda.CUDAGraph()
            with torch.cuda.graph(g):
                for _ in range(inner):
                    f()
            run = g.replay
        except Exception:
            torch.cuda.synchronize()
            inner = 1
    times = []
    for _ in range(samples + 3):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(), run(), b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) * 1e3 / inner)
    return statistics.median(times[3:])


def relative(a, b):
    a, b = a.double().cpu(), b.double().cpu()
    return ((a - b).norm() / b.norm()).item() if torch.isfinite(a).all() else math.inf


def recurrence(q, k, v, x, b, A_log, dt_bias, bounded, scale, state=None):
    """KDA token by token, in the precision of its inputs: [T, H, D] each."""
    T, H, D = q.shape
    q, k = (t * torch.rsqrt(t.pow(2).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    z, rate = x + dt_bias.view(H, D), A_log.exp()[:, None]
    g = -5 * torch.sigmoid(rate * z) if bounded else -rate * F.softplus(z)
    S = torch.zeros(H, D, v.shape[-1], dtype=q.dtype, device=q.device) if state is None else state
    out = []
    for t in range(T):
        S = S * g[t].exp()[..., None]
        u = torch.sigmoid(b[t])[:, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], S))
        S = S + k[t][..., None] * u[:, None]
        out.append(scale * torch.einsum("hk,hkv->hv", q[t], S))
    return torch.stack(out), S


def kda_inputs(T, H, D, shift, seed=0, device="cuda"):
    g = torch.Generator(device="cuda").manual_seed(seed)
    r = lambda *s, m=0.0, d=1.0: (torch.randn(*s, device="cuda", generator=g) * d + m)
    return [r(1, T, H, D).to(BF), r(1, T, H, D).to(BF), r(1, T, H, D).to(BF), r(1, T, H, D, m=shift).to(BF), r(1, T, H).to(BF), r(H, d=0.05), r(H * D, d=0.1)]


def kda(check):
    from fla.ops.kda import chunk_kda

    def call(t, bounded, state=None, final=False, keep=True):
        gate = {"safe_gate": True, "lower_bound": -5.0} if bounded else {}
        return chunk_kda(*t[:5], A_log=t[5], dt_bias=t[6], use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                         initial_state=state, output_final_state=final, disable_recompute=keep, **gate)

    right = {}
    for bounded in (True, False):
        if check:
            t = kda_inputs(130, 96, 128, -1)
            leaf = [(x.double().squeeze(0) if i < 5 else x.double()).requires_grad_() for i, x in enumerate(t)]
            o, S = recurrence(*leaf, bounded, 128**-0.5)
            dy = torch.randn(o.shape, dtype=torch.double, device=o.device)
            o.backward(dy)
            mine = [x.detach().clone().requires_grad_() for x in t]
            po, pS = call(mine, bounded, final=True)
            po.backward(dy.to(BF)[None])
            errors = {"output": relative(po, o.detach()[None]), "state": relative(pS, S.detach()[None])}
            for name, a, b in zip(("dq", "dk", "dv", "dg", "dbeta", "dA", "dbias"), mine, leaf):
                errors[name] = relative(a.grad, b.grad.view(a.shape))
            worst = max(errors.values())
            right[bounded] = worst < 3e-2
            del o, S, po, pS, leaf
            say("kda forward + backward", f"check, T 130, 96 heads, {'bounded' if bounded else 'softplus'}", "FLA chunk_kda", good=right[bounded], errors={k: float(f"{v:.3g}") for k, v in errors.items()})
        else:
            right[bounded] = True
    shapes = [(8192, 96, 128, True, "T 8192, 96 heads"), (2048, 96, 128, True, "T 2048, 96 heads"), (8192, 96, 128, False, "T 8192, 96 heads, softplus"),
              (4096, 8, 32, False, "T 4096, 8 heads of 32, softplus")]
    for T, H, D, bounded, name in shapes:
        if not right[bounded]:
            continue
        for gates, shift in (("N(0,1)", 0.0), ("slow", -4.0)):
            t = kda_inputs(T, H, D, shift)
            with torch.no_grad():
                say("kda forward", f"{name}, {gates}", "FLA chunk_kda", min(time_us(lambda: call(t, bounded, final=True, keep=k), samples=10) for k in (False, True)))
            if T == 2048:
                continue
            leaf = [x.requires_grad_() for x in t]
            dy = torch.randn_like(t[2])

            def both(keep):
                o, _ = call(leaf, bounded, keep=keep)
                torch.autograd.grad(o, leaf, dy)

            say("kda forward + backward", f"{name}, {gates}", "FLA chunk_kda", min(time_us(lambda: both(k), samples=8) for k in (True, False)))


def decode(check):
    from fla.ops.kda import fused_recurrent_kda

    D, H = 128, 96

    def call(t, state):
        return fused_recurrent_kda(*t[:5], A_log=t[5], dt_bias=t[6], initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True,
                                   use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=-5.0)

    good = True
    if check:
        t = kda_inputs(1, H, D, -1)
        S = torch.randn(1, H, D, D, device="cuda") * 0.3
        o, s = call(t, S.clone())
        want, ws = recurrence(*[x.double().squeeze(0) if i < 5 else x.double() for i, x in enumerate(t)], True, D**-0.5, S[0].double())
        good = relative(o, want[None]) < 1e-2 and relative(s, ws[None]) < 1e-2
        say("kda decode", "check, 96 heads", "FLA fused_recurrent_kda", good=good, errors={"output": relative(o, want[None]), "state": relative(s, ws[None])})
    if good:
        for B in (1, 64):
            for gates, shift in (("N(0,1)", 0.0), ("slow", -4.0)):
                t = [x.view(B, 1, *x.shape[2:]) if i < 5 else x for i, x in enumerate(kda_inputs(B, H, D, shift))]
                S = [torch.randn(B, H, D, D, device="cuda") * 0.3 for _ in range(16 if B == 1 else 1)]
                i = iter(range(1 << 30))
                with torch.no_grad():
                    say("kda decode", f"B {B}, 96 heads, {gates}", "FLA fused_recurrent_kda (recurrence alone)", time_us(lambda: call(t, S[next(i) % len(S)]), inner=16))


def prefill(check):
    T, H = 8192, 96
    q, k, v = (torch.randn(1, H, T, n, device="cuda", dtype=BF) for n in (192, 192, 128))
    f = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        o = f()
        if check:
            rows = torch.tensor([0, 1, 63, 64, 4095, 8191])
            s = torch.einsum("hrd,htd->hrt", q[0, :, rows].float(), k[0].float()) * 192**-0.5
            s.masked_fill_(torch.arange(T, device="cuda")[None, None] > rows.cuda()[None, :, None], -math.inf)
            e = relative(o[0, :, rows], torch.einsum("hrt,htd->hrd", s.softmax(-1), v[0].float()))
            say("mla prefill", "check, six rows", "cuDNN", good=e < 1e-2, errors={"output": e})
        say("mla prefill", "T 8192, 96 heads", "cuDNN", time_us(f, samples=10))
        g = [x.requires_grad_() for x in (q, k, v)]
        do = torch.randn_like(o)
        say("mla prefill forward + backward", "T 8192, 96 heads", "cuDNN", time_us(lambda: torch.autograd.grad(f(), g, do), samples=8))
    del q, k, v, g, do, o
    q, k, v = (torch.randn(1, 16, 4096, n, device="cuda", dtype=BF, requires_grad=True) for n in (192, 192, 128))
    do = torch.randn(1, 16, 4096, 128, device="cuda", dtype=BF)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        say("mla prefill", "T 4096, 16 heads", "cuDNN", time_us(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        say("mla prefill forward + backward", "T 4096, 16 heads", "cuDNN", time_us(lambda: torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), do)))


def latent(check):
    try:
        import flash_mla  # noqa: F401
        say("mla decode", "", "FlashMLA", note="is here but this script does not know its version")
    except ImportError:
        say("mla decode", "", "FlashMLA", note="no wheel in the package index; given on such a card: 218 us (B 64 L 8192), 85 us (B 1 L 131072)")
    H = 96
    for B, L in ((64, 8192), (1, 131072)):
        q, c = torch.randn(B, H, 576, device="cuda", dtype=BF), torch.randn(B, L, 576, device="cuda", dtype=BF)

        def plain():
            p = torch.softmax(torch.bmm(q, c.mT) * 192**-0.5, -1, dtype=torch.float32).to(BF)
            return torch.bmm(p, c[:, :, :512])

        say("mla decode", f"B {B}, L {L}, 96 heads", "PyTorch batched products", time_us(plain))
        try:
            compiled = torch.compile(plain)
            say("mla decode", f"B {B}, L {L}, 96 heads", "torch.compile", time_us(compiled))
        except Exception as e:
            say("mla decode", f"B {B}, L {L}, 96 heads", "torch.compile", error=str(e)[:200])


def linears(check):
    for T, k, n in ((8192, 7168, 12288), (8192, 12288, 7168), (4096, 1024, 163840)):
        x, w = torch.randn(T, k, device="cuda", dtype=BF), torch.randn(n, k, device="cuda", dtype=BF) * 0.01
        us = time_us(lambda: F.linear(x, w), samples=20)
        say("linear", f"T {T}, {k} -> {n}", "cuBLASLt through PyTorch", us, tflops=round(2e-6 * T * k * n / us, 1))
    x, w = torch.randn(1, 7168, device="cuda", dtype=BF), [torch.randn(12288, 7168, device="cuda", dtype=BF) * 0.01 for _ in range(4)]
    i = iter(range(1 << 30))
    us = time_us(lambda: F.linear(x, w[next(i) % 4]), inner=8)
    say("linear", "T 1, 7168 -> 12288", "cuBLASLt through PyTorch", us, TBps=round(w[0].numel() * 2e-6 / us, 2))


def schulz(check):
    n = 7168

    def steps(x):
        for _ in range(5):
            a = torch.bmm(x, x.mT)
            x = torch.baddbmm(x, torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
        return x

    g = torch.randn(96, 128, n, device="cuda", dtype=BF)
    f = lambda: steps(g / (1.01 * g.float().norm(dim=(-2, -1), keepdim=True)).to(BF))
    say("newton-schulz", "96 x 128 x 7168", "PyTorch batched products", time_us(f, samples=15))
    gram = torch.compile(f)
    say("newton-schulz", "96 x 128 x 7168", "torch.compile", time_us(gram, samples=15))


def attnres(check):
    d = 7168

    def plain(query, key, *v):
        s = torch.stack(v).float()
        a = (s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + 1e-5) * (query * key)).sum(-1).softmax(0)
        return (a[..., None] * s).sum(0).to(v[0].dtype)

    from fla.ops.attnres import fused_attnres

    fla = lambda query, key, *v: fused_attnres(query, v, key, rms_eps=1e-5, checkpoint_level=0)
    compiled = torch.compile(plain)
    for T, N in ((8192, 9), (8192, 4), (1024, 9)):
        query, key = (torch.randn(d, device="cuda") * 0.02).requires_grad_(), torch.ones(d, device="cuda", requires_grad=True)
        v = [torch.randn(T, d, device="cuda", dtype=BF, requires_grad=True) for _ in range(N)]
        dy = torch.randn(T, d, device="cuda", dtype=BF)
        want = plain(query, key, *v).detach()
        for name, f in (("FLA fused_attnres", fla), ("torch.compile", compiled), ("PyTorch eager", plain)):
            if (T, N) != (8192, 9) and f is plain:
                continue
            try:
                e = relative(f(query, key, *v), want)
                if e > 1e-2:
                    say("depth mix", f"T {T}, {N} sources", name, good=False, errors={"output": e})
                    continue
                with torch.no_grad():
                    forward = time_us(lambda: f(query, key, *v), samples=15)
                say("depth mix forward", f"T {T}, {N} sources", name, forward)
                if N == 9 and T == 8192:
                    o = f(query, key, *v)
                    leaves = [query, key, *v]
                    back = time_us(lambda: torch.autograd.grad(o, leaves, dy, retain_graph=True), samples=10, graph=False)
                    say("depth mix backward", f"T {T}, {N} sources", name, back)
            except Exception as e:
                say("depth mix", f"T {T}, {N} sources", name, error=str(e)[:200])


def experts(check):
    E, l, m, rows = 56, 3584, 3072, 8192
    g = torch.Generator().manual_seed(1)
    offs = torch.bincount(torch.randint(E, (rows,), generator=g), minlength=E).cumsum(0).int().cuda()
    x = torch.randn(rows, l, device="cuda", dtype=BF)
    w13, w2 = (torch.randn(E, a, b, device="cuda", dtype=BF) * 0.02 for a, b in ((2 * m, l), (l, m)))

    def f():
        a, u = torch._grouped_mm(x, w13.mT, offs).chunk(2, -1)
        return torch._grouped_mm((4 * torch.tanh(a / 4) * torch.sigmoid(a) * 25 * torch.tanh(u / 25)).to(BF), w2.mT, offs)

    say("experts", "56 experts, 8192 rows", "PyTorch grouped product, bf16 weights (4 times the bytes)", time_us(torch.compile(f), samples=15))
    one = [torch.randn(16, a, b, device="cuda", dtype=BF) * 0.02 for a, b in ((2 * m, l), (l, m))]
    z = torch.randn(16, 1, l, device="cuda", dtype=BF)
    h = torch.randn(16, 1, m, device="cuda", dtype=BF)
    say("experts", "1 token, 16 experts", "PyTorch batched product, bf16 weights (4 times the bytes)", time_us(lambda: (torch.bmm(z, one[0].mT), torch.bmm(h, one[1].mT))))


def small(check):
    x, w = torch.randn(8192, 7168, device="cuda", dtype=BF), torch.ones(7168, device="cuda", dtype=BF)
    say("rms norm forward", "8192 x 7168", "torch.compile", time_us(torch.compile(lambda: F.rms_norm(x, (7168,), w, 1e-5))))
    s = torch.rand(8192, 896, device="cuda")
    say("route", "8192 tokens, 16 of 896", "torch.topk", time_us(lambda: s.topk(16)))
    logits, y = torch.randn(4096, 163840, device="cuda", dtype=BF, requires_grad=True), torch.randint(163840, (4096,), device="cuda")
    f = torch.compile(lambda: F.cross_entropy(logits.float(), y))
    say("cross entropy forward + backward", "4096 x 163840, without products", "torch.compile", time_us(lambda: torch.autograd.grad(f(), logits), samples=10))
    p = torch.randn(335 << 20, device="cuda", requires_grad=True)
    p.grad = torch.randn_like(p)
    opt = torch.optim.AdamW([p], fused=True)
    say("adamw", "351 M weights", "PyTorch fused", time_us(opt.step, samples=10, graph=False))


def rates(check):
    a, b = (torch.zeros(1 << 30, device="cuda") for _ in range(2))
    us = time_us(lambda: b.copy_(a), samples=10, graph=False)
    say("copy", "4 GiB", "device", us, TBps=round(8 * a.numel() * 1e-6 / us, 3))
    x, w = torch.randn(8192, 8192, device="cuda", dtype=BF), torch.randn(8192, 8192, device="cuda", dtype=BF)
    us = time_us(lambda: x @ w, samples=15)
    say("product", "8192 x 8192 x 8192", "cuBLASLt through PyTorch", us, tflops=round(2e-6 * 8192**3 / us, 1))


PARTS = {f.__name__: f for f in (rates, kda, decode, prefill, linears, latent, schulz, attnres, experts, small)}


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--json"), a.add_argument("--only", default=""), a.add_argument("--no-check", action="store_true")
    a = a.parse_args()
    for name in a.only.split(",") if a.only else PARTS:
        try:
            PARTS[name](not a.no_check)
        except Exception as e:
            say(name, "", "", error=f"{type(e).__name__}: {e}"[:500])
        torch.cuda.empty_cache()
        if a.json:
            json.dump({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "peers": OUT}, open(a.json, "w"), indent=1)


if __name__ == "__main__":
    main()
