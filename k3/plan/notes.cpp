#include "k3/plan/notes.h"

#include <cmath>

#include "k3/core/error.h"
#include "k3/plan/number.h"
#include "k3/plan/time.h"

namespace k3::plan {

const char* name_of(Verdict v) {
  switch (v) {
    case Verdict::holds:
      return "holds";
    case Verdict::condition:
      return "holds with a condition";
    case Verdict::misprint:
      return "misprint";
  }
  return "?";
}

std::vector<Claim> notes() {
  std::vector<Claim> out;
  const Architecture k3 = load_architecture("k3"), k2 = load_architecture("k2"), kl = load_architecture("kimi-linear-48b"),
                     kl_mla = load_architecture("kimi-linear-48b", {"mixers=mla"});
  const Config &c3 = k3.config, &c2 = k2.config;
  const Parameters p3 = parameters(k3), p2 = parameters(k2);
  const Hardware h200 = load_hardware("h200");
  // holds when `right`; otherwise the claim is a misprint
  auto exact = [&](std::string claim, bool right, std::string numbers, std::string why = "") {
    out.push_back({std::move(claim), std::move(numbers), right ? Verdict::holds : Verdict::misprint, std::move(why)});
  };
  auto condition = [&](std::string claim, bool right, std::string numbers, std::string why) {
    out.push_back({std::move(claim), std::move(numbers), right ? Verdict::condition : Verdict::misprint, std::move(why)});
  };
  const double d = double(c3.hidden_size), l = double(c3.latent_size()), H = double(c3.num_attention_heads);
  const MixerForm mla = mixer_form(c3, "mla"), kda = mixer_form(c3, "kda"), absorbed = mixer_form(c3, "mla_absorbed");

  exact("d = 7167", c3.hidden_size == 7167, fmt::format("hidden_size {}; 7167 / 2 is no whole number", c3.hidden_size), "7168");
  exact("8 x 7168 = 16 x 3584: the all-to-all width of a token is unchanged from K2",
        8 * 7168 == 16 * 3584 && c2.num_experts_per_token * c2.hidden_size == c3.num_experts_per_token * c3.latent_size(),
        fmt::format("{} = {}", c2.num_experts_per_token * c2.hidden_size, c3.num_experts_per_token * c3.latent_size()));
  exact("MLA runs as MHA 192/128 in training and prefill, as MQA 576/512 in decode", mla.pair_prefill == H * 640 && mla.pair_decode == H * 2176,
        fmt::format("{} and {} FLOPs a head and pair", mla.pair_prefill / H, mla.pair_decode / H), "one function, two costs");
  {
    double split = 512 * 256, one = 576 * 320, more = 24 * H * (one - split);
    condition("up-projection 512 -> H (128 + 128) or one 576 -> H (192 + 128): about the same", one / split < 1.5,
              fmt::format("{} and {} weights a head, x{:.3f}; K3: {:.1f} M more parameters, {:.3f} GFLOP more a token", split, one, one / split,
                          more / 1e6, 2 * more / 1e9),
              fmt::format("small in the whole ({:+.2f} %), not by itself", 100 * 2 * more / linear_flops(k3)));
  }
  exact("the KDA state of a layer is H d_k d_v numbers, not d^2", kda.state == 96 * 128 * 128,
        fmt::format("{} against {:.1f} M", kda.state, d * d / 1e6));
  {
    const double alpha = d / l, N = double(c2.num_experts), m = double(c3.moe_intermediate_size);
    condition("N' = aN, K' = aK or K at width d/a keep N'lm and K'lm (or divide it)", alpha * N * l * m == N * d * m,
              fmt::format("a = {}: {:.4g} B routed a layer both ways", alpha, N * d * m * 3 / 1e9),
              fmt::format("of the routed matrices; the latent pair ({:.1f} M) and a router a N wide ({:.2f} M) come on top",
                          double(p3.latent_pair) / 1e6, alpha * N * d / 1e6));
    exact("K3 is K2 with a = 2 and N' = aN", double(c3.num_experts) == alpha * N,
          fmt::format("aN = {}, K3 has {}; m {} -> {}", alpha * N, c3.num_experts, c2.moe_intermediate_size, c3.moe_intermediate_size),
          fmt::format("K' = 16 fits; routed parameters a layer {:.2f} B -> {:.2f} B, x{:.2f}", double(p2.routed) / 60e9, double(p3.routed) / 92e9,
                      double(p3.routed) / 92 / (double(p2.routed) / 60)));
    const double w2 = double(c2.num_experts_per_token * c2.hidden_size * c2.moe_intermediate_size),
                 w3 = double(c3.num_experts_per_token * c3.latent_size() * c3.moe_intermediate_size);
    condition("first-order expert compute stays about unchanged from K2 to K3", w3 / w2 <= 1.5,
              fmt::format("K w m {:.4e} -> {:.4e}, x{:.2f}", w2, w3, w3 / w2),
              "only at fixed m; the all-to-all width is unchanged, so comm/compute falls by 1.5");
  }
  exact("448-choose-8 before, 896-choose-16 now, same sparsity", c2.num_experts == 448,
        fmt::format("K2: {} / {} = {}; K3: {} / {} = {}", c2.num_experts, c2.num_experts_per_token, c2.num_experts / c2.num_experts_per_token,
                    c3.num_experts, c3.num_experts_per_token, c3.num_experts / c3.num_experts_per_token),
        "448-choose-8 is a hypothetical of K3's sparsity; K2 is 384-choose-8");
  exact("routing happens in the latent space", p3.router == c3.latent_size() * c3.num_experts,
        fmt::format("router weights {} = {} x {}", p3.router, p3.router / c3.num_experts, c3.num_experts),
        "the router reads the full 7168-wide x; dispatch and experts are latent");
  {
    double elements = comm_ratio(1, 1, 1979e12, 3072, 450e9) / 2 * 2, ours = comm_ratio(1, 2, 1979e12, 3072, 450e9);
    condition("comm/compute = F / (3 m B)", std::fabs(elements - 1979e12 / (3 * 3072 * 450e9)) < 1e-12,
              fmt::format("H200, fp8, NVLink: {:.3f} with B in elements/s; {:.3f} in bytes, fp8 out and bf16 back", elements, ours),
              "in bytes: x (b_d + b_c)/2; routed experts alone, compute-bound, every copy sent; shared experts, latent pair and attention hide more");
  }
  {
    auto bytes_per_flop = [&](const Architecture& a, int64_t ep, double batch) {  // routed experts of one rank, every copy sent
      Deployment x;
      x.gpus = x.dp = x.ep = ep;
      const Five v = five(a, x, {Regime::decode, batch});
      const double pairs = v.tokens_per_expert * double(a.config.num_experts) / double(ep);
      return v.ep_bytes_all_copies / (pairs * 2 * double(parameters(a).expert) * double(a.moe_layers()));
    };
    const Architecture other = load_architecture("k3", {"num_experts=448", "num_experts_per_token=8", "routed_expert_hidden_size=1792"});
    const double one = bytes_per_flop(k3, 8, 16), two = bytes_per_flop(other, 64, 4096);
    condition("in that ratio t, K, d, N and E disappear", std::fabs(two / one - 1) < 1e-12,
              fmt::format("{:.4g} B a FLOP for 896-choose-16, 128 tokens, E = 8 and for 448-choose-8 at half the width, 262,144 tokens, E = 64; with "
                          "one copy a rank {:.2f} of 16 remain at E = 8",
                          one, remote_rank_copies(8, 16)),
              "an upper bound: K copies shrink when several experts share a rank, and then E and K are back");
  }
  {
    const double t_exp = 65536.0 * 16 / 896;
    condition("t_exp = t K / N", std::fabs(t_exp - 1170.2857) < 1e-3,
              fmt::format("t = 65,536: {:.1f} tokens an expert; at t = 16 a loaded expert has {:.2f}, not {:.2f}", t_exp,
                          256 / experts_touched(896, 16, 16), 16.0 * 16 / 896),
              fmt::format("the mean over all experts; the ridge is b_w F / (2 B_m), {:.1f} tokens for mxfp4 on H200 in fp8",
                          ridge_tokens(0.53125, 1979e12, 4.8e12)));
  }
  {
    double u2 = experts_touched(896, 16, 2) / 16, u64 = experts_touched(896, 16, 64) / 16;
    condition("small batch: HBM ~ K d m, network ~ K d, parameters ~ N d m", std::fabs(experts_touched(896, 16, 1) - 16) < 1e-9,
              fmt::format("experts touched over K: 1 at t = 1, {:.2f} at 2, {:.1f} at 64", u2, u64),
              "HBM only at t = 1; from t = 2 on it is U(t) d m, which decides latency");
  }
  exact("GQA8 has more than 3 times the cache of MLA", 2048.0 / double(mla.cached) > 3,
        fmt::format("2048 / {} = {:.3f}", mla.cached, 2048.0 / double(mla.cached)));
  {
    const MixerForm mfa = mixer_form(c3, "mfa");
    condition("MFA 256 + 256 has about MLA's cache and its prefill explodes",
              std::fabs(double(mfa.cached) / double(mla.cached) - 1) < 0.15 && mfa.pair_prefill > mla.pair_prefill,
              fmt::format("cache {} / {} = {:.3f}; core FLOPs a pair x{:.2f} (MQA 576/512: x{:.2f})", mfa.cached, mla.cached,
                          double(mfa.cached) / double(mla.cached), mfa.pair_prefill / mla.pair_prefill, absorbed.pair_prefill / mla.pair_prefill),
              "x1.6 at equal heads; it explodes with more heads or wider ones");
  }
  {
    double ai = 2 * H * 1088 / (576 * 2), ridge = h200.bf16 / h200.hbm;
    condition("MLA is not friendly to MTP", ai < ridge && 2 * ai > ridge,
              fmt::format("decode intensity q x {:.1f} FLOP/B, H200 ridge {:.0f}; under TP 8 q x {:.1f}", ai, ridge, ai / 8),
              fmt::format("compute-bound from q = 2 when heads are not split; under TP 8 from q = {:.0f}", std::ceil(ridge / (ai / 8))));
  }
  exact(
      "SiTU-GLU is bounded by beta1 beta2 = 100", c3.activation_situ_beta * c3.activation_situ_linear_beta == 100,
      fmt::format("{} x {} = {}", c3.activation_situ_beta, c3.activation_situ_linear_beta, c3.activation_situ_beta * c3.activation_situ_linear_beta),
      "of the hidden activation, before the down-projection");
  double low = 0;
  for (double x = -20; x < 0; x += 1e-3) low = std::min(low, c3.activation_situ_beta * std::tanh(x / c3.activation_situ_beta) / (1 + std::exp(-x)));
  condition("the gate is in (-beta, beta)", low > -c3.activation_situ_beta, fmt::format("its least value is {:.3f}", low),
            "true but loose below: the sigmoid ends it there");
  const double counters = double(c3.num_experts) * 1000 * 4;
  condition("one vector of B bins is reduced for quantile balancing", counters > 4000,
            fmt::format("{} x 1000 x 4 B = {:.3f} MB a layer and step, {:.0f} MB for {} layers", c3.num_experts, counters / 1e6,
                        counters * double(k3.moe_layers()) / 1e6, k3.moe_layers()),
            "N B counters a MoE layer: one quantile an expert; 1000 bins are enough (error a few 1e-3)");
  {
    const Deployment tp8 = [] {
      Deployment x;
      x.gpus = x.tp = 8;
      return x;
    }();
    Hardware h = load_hardware("h800");
    h.efficiency.host = 3.3e-3;
    auto tpot = [&](const Architecture& a, double b) { return step_time(a, h, tp8, {Regime::decode, b, 1048576}).seconds(); };
    const Memory full = memory_of(kl_mla, h, tp8), hybrid = memory_of(kl, h, tp8);
    double one = tpot(kl_mla, 1) / tpot(kl, 1), cache = cache_bytes_per_token(kl_mla) / cache_bytes_per_token(kl);
    double bf = std::max(1.0, std::floor(full.sequences(1048576))), bh = std::max(1.0, std::floor(hybrid.sequences(1048576)));
    double batched = tpot(kl_mla, bf) / bf / (tpot(kl, bh) / bh);
    condition("Kimi-Linear decodes 6.3 times faster at 1M", one > 1.5 && batched > 3,
              fmt::format("at batch 1 x{:.1f}; with all memory full of sequences x{:.1f}; cache ratio {:.2f}", one, batched, cache),
              "the published figure is of a large batch; 2.2 was published for batch 1, and the caches give 3.86");
  }
  {
    double flops = double(p3.latent_pair) / (16.0 * double(p3.expert)),
           bytes = 2 * double(p3.latent_pair) / (16 * double(p3.expert) * k3.experts.bytes);
    condition("the overhead of LatentMoE is small", flops < 0.1,
              fmt::format(
                  "{:.1f} M against {:.1f} M active routed: {:+.1f} % FLOPs; at t = 1 {:.1f} MB of bf16 against {:.1f} MB of mxfp4, {:+.0f} % bytes",
                  double(p3.latent_pair) / 1e6, 16 * double(p3.expert) / 1e6, 100 * flops, 2 * double(p3.latent_pair) / 1e6,
                  16 * double(p3.expert) * k3.experts.bytes / 1e6, 100 * bytes),
              "in FLOPs; in bytes at batch 1 it is a third");
  }
  return out;
}

std::string table(const std::vector<Claim>& claims) {
  std::string out;
  int count[3] = {};
  for (const Claim& c : claims) {
    ++count[int(c.verdict)];
    out += fmt::format("{}\n  {:<24}{}\n{}", c.claim, name_of(c.verdict), c.recomputed, c.why.empty() ? "" : fmt::format("  {:<24}{}\n", "", c.why));
  }
  return out + fmt::format("\n{} claims: {} hold, {} hold with a condition, {} are misprints\n", claims.size(), count[0], count[1], count[2]);
}

}  // namespace k3::plan
