#include "k3/plan/time.h"

#include <algorithm>
#include <cctype>
#include <cmath>

#include "k3/core/error.h"

namespace k3::plan {

namespace {

struct Cost1 {  // one call
  double flops = 0, bytes = 0, seconds = 0;
  Bound bound = Bound::launch;
};

// tau + max(memory, compute), and which of the three is largest.
Cost1 roofline(double tau, double bytes, double byte_rate, double flops, double flop_rate) {
  double memory = bytes / byte_rate, compute = flops / flop_rate;
  Bound b = tau > memory && tau > compute ? Bound::launch : memory > compute ? Bound::hbm : Bound::flops;
  return {flops, bytes, tau + std::max(memory, compute), b};
}

Cost1 gemm(const Hardware& h, double rows, double in, double out, double weight_bytes, bool standalone = false) {
  const auto& g = h.efficiency.gemm;
  return roofline(standalone ? g.tau_standalone : g.tau, weight_bytes * in * out + 2 * rows * (in + out), g.hbm * h.hbm, 2 * rows * in * out,
                  g.flops * h.bf16);
}

struct RoutedCost {
  double flops, bytes, seconds, tau, memory, compute;
};

RoutedCost routed(const Architecture& a, const Hardware& h, const Deployment& d, double domain_tokens, double rho) {
  const Config& c = a.config;
  const Parameters p = parameters(a);
  const double ranks = double(d.expert_ranks());
  const Efficiency::Experts& e = a.experts.bytes < 0.9 ? h.efficiency.w4 : a.experts.bytes < 1.5 ? h.efficiency.fp8 : h.efficiency.bf16;
  const bool by_expert = d.ep > 1 || d.tp == 1;
  const double hbm = by_expert ? e.hbm_ep : d.tp > 8 ? e.hbm_tp16 : e.hbm_tp, flop = by_expert ? e.flops_ep : e.flops_tp;
  const bool widened = a.experts.name.starts_with("int4");  // no matrix unit takes int4 weights: they become bf16 on the way
  RoutedCost r;
  r.bytes = d.balance * experts_touched(double(c.num_experts), double(c.num_experts_per_token), domain_tokens, rho) * double(p.expert) *
            a.experts.bytes / ranks;
  r.flops = d.balance * 2 * domain_tokens * double(c.num_experts_per_token) * double(p.expert) / ranks;
  r.tau = e.tau, r.memory = r.bytes / (hbm * h.hbm), r.compute = r.flops / (flop * h.peak(widened ? "bf16" : e.math));
  r.seconds = r.tau + r.memory + r.compute;
  return r;
}

Cost1 kda_decode(const Hardware& h, double heads, double k, double conv, double batch, double tokens, double state_bytes, bool replay) {
  const auto& e = h.efficiency.kda_decode;
  double state = heads * (k * k * state_bytes + (conv - 1) * 3 * k * 2);
  Cost1 r = roofline(e.tau, 2 * batch * state * (replay ? 1 : tokens), e.hbm * h.hbm, 0, 1);
  r.seconds += e.token * (tokens - 1);
  r.flops = batch * tokens * heads * 7 * k * k;
  return r;
}

Cost1 kda_prefill(const Hardware& h, double heads, double k, double sequences, double tokens, double flops_a_token) {
  const auto& e = h.efficiency.kda_prefill;
  double flops = sequences * tokens * flops_a_token, chain = tokens / 16 * e.chunk;  // sequences' chains run side by side
  Cost1 r{flops, sequences * tokens * heads * k * 2 * 6, e.tau + std::max(flops / e.flops, chain),
          chain > flops / e.flops ? Bound::chain : Bound::flops};
  return r;
}

Cost1 attention_decode(const Hardware& h, double cached_bytes, double flops) {
  const auto& e = h.efficiency.mla_decode;
  return roofline(e.tau, cached_bytes, e.hbm * h.hbm, flops, e.flops * h.bf16);
}

double all_reduce(const Hardware& h, double n, double s) {
  if (n <= 1 || s <= 0) return 0;
  const auto& e = h.efficiency.all_reduce;
  double rate = h.between(int64_t(n));
  double large = e.large_tau + 2 * (n - 1) / n * s / (e.large_link * rate);
  return s <= e.limit ? std::min(large, e.small_tau + (n - 1) * s / (e.small_link * rate)) : large;
}

}  // namespace

const char* name_of(Bound b) {
  switch (b) {
    case Bound::launch:
      return "launch";
    case Bound::hbm:
      return "HBM";
    case Bound::flops:
      return "FLOPs";
    case Bound::network:
      return "network";
    case Bound::chain:
      return "serial chain";
  }
  return "?";
}

double StepTime::seconds() const {
  double s = 0;
  for (const auto& o : operators) s += o.seconds;
  return s;
}
double StepTime::of(const std::string& name) const {
  for (const auto& o : operators)
    if (o.name == name) return o.seconds;
  return 0;
}
double StepTime::flops() const {
  double s = 0;
  for (const auto& o : operators) s += o.flops;
  return s;
}
double StepTime::bytes() const {
  double s = 0;
  for (const auto& o : operators) s += o.bytes;
  return s;
}
double StepTime::network() const {
  double s = 0;
  for (const auto& o : operators) s += o.network;
  return s;
}

StepTime step_time(const Architecture& a, const Hardware& h, const Deployment& d, const Work& w) {
  const Config& c = a.config;
  const Efficiency& e = h.efficiency;
  const double hidden = double(c.hidden_size), tp = double(d.tp), t = w.batch * w.tokens, wb = a.trunk.bytes;
  const double L = double(c.num_hidden_layers), moe = double(a.moe_layers()), dense = L - moe;
  const bool decode = w.regime == Regime::decode;
  StepTime step;

  struct Gemm {
    double in, out;
  };
  auto gemms = [&](const std::string& name, double count, const std::vector<Gemm>& list, double rows) {
    if (count == 0) return;
    OperatorTime o{name, count};
    std::string shapes;
    double largest = 0;
    for (const Gemm& g : list) {
      Cost1 one = gemm(h, rows, g.in, g.out, wb);
      o.flops += count * one.flops, o.bytes += count * one.bytes, o.seconds += count * one.seconds;
      if (one.seconds > largest) largest = one.seconds, o.bound = one.bound;
      shapes += fmt::format("{}{:.0f}->{:.0f}", shapes.empty() ? "" : ", ", g.in, g.out);
    }
    o.formula = fmt::format("{:.0f} x sum over {} of tau + max(({} k n + 2 t (k+n)) / ({} B_m), 2 t k n / ({} F)), t = {:.0f}", count, shapes, wb,
                            e.gemm.hbm, e.gemm.flops, rows);
    step.operators.push_back(o);
  };
  auto core = [&](const std::string& name, double count, const Cost1& one, std::string formula) {
    step.operators.push_back({name, count, count * one.flops, count * one.bytes, 0, count * one.seconds, one.bound, std::move(formula)});
  };

  for (const auto& [mixer, layers] : a.mixers()) {
    const MixerForm f = mixer_form(c, mixer);
    const double n = double(layers), H = double(c.num_attention_heads) / tp, nope = double(c.qk_nope_head_dim), rope = double(c.qk_rope_head_dim),
                 v = double(c.v_head_dim), rank = double(c.kv_lora_rank), rq = double(c.q_lora_rank);
    std::string label = mixer;
    for (char& ch : label) ch = ch == '_' ? ' ' : char(std::toupper(ch));
    if (f.state) {
      const double heads = double(c.kda_num_heads) / tp, k = double(c.kda_head_dim), P = heads * k, conv = double(c.short_conv_kernel_size);
      std::vector<Gemm> list = {{hidden, (c.use_full_rank_gate ? 4 : 3) * P},
                                {hidden, double(c.kda_num_heads) + (mixer == "kda"   ? k
                                                                    : mixer == "gdn" ? double(c.kda_num_heads)
                                                                                     : 0)}};
      if (mixer == "kda") list.push_back({k, P});
      if (!c.use_full_rank_gate) list.push_back({hidden, k}), list.push_back({k, P});
      list.push_back({P, hidden});
      gemms(label + " projections", n, list, t);
      if (decode)
        core(label, n, kda_decode(h, heads, k, conv, w.batch, w.tokens, d.state_bytes, w.replay),
             fmt::format("{:.0f} x (tau + 2 b (state + window) / ({} B_m)), {:.0f} heads a rank, b = {}", n, e.kda_decode.hbm, heads, w.batch));
      else
        core(label, n, kda_prefill(h, heads, k, w.batch, w.tokens, f.token_prefill / tp),
             fmt::format("{:.0f} x (tau + max(FLOPs / {:.3g}, T/16 x {:.3g} s)), {:.0f} heads a rank", n, e.kda_prefill.flops, e.kda_prefill.chunk,
                         heads));
      continue;
    }
    std::vector<Gemm> list;
    double value = v;
    const bool latent = mixer.starts_with("mla");
    const double split = mixer == "gqa" ? std::min(tp, double(c.num_key_value_heads)) : 1;  // one latent or shared head is on every rank
    if (latent) {
      if (rq > 0)
        list = {{hidden, rq + rank + rope}, {rq, (nope + rope) * H}};
      else
        list = {{hidden, rank + rope}, {hidden, (nope + rope) * H}};
      list.push_back({rank, nope * H}), list.push_back({rank, v * H});
    } else {
      value = f.pair_decode / 4 / double(f.heads);
      if (mixer == "mfa" && rq > 0)
        list = {{hidden, rq + double(f.cached)}, {rq, value * H}};
      else
        list = {{hidden, value * H + double(f.cached) / split}};
    }
    if (c.mla_use_output_gate) list.push_back({hidden, value * H});
    list.push_back({value * H, hidden});
    gemms(label + " projections", n, list, t);
    if (decode) {
      double bytes = w.batch * w.context * double(f.cached) * d.kv_bytes / split / double(d.dcp), flops = t * w.context * f.pair_decode / tp;
      core(label, n, attention_decode(h, bytes, flops),
           fmt::format("{:.0f} x (tau + max(b c {} / ({} B_m), b q c {} / ({} F))), b = {}, c = {:.0f}", n,
                       double(f.cached) * d.kv_bytes / split / double(d.dcp), e.mla_decode.hbm, f.pair_decode / tp, e.mla_decode.flops, w.batch,
                       w.context));
    } else {
      double flops = t * (w.context + w.tokens / 2) * f.pair_prefill / tp;
      core(label, n, roofline(e.mla_prefill.tau, t * double(f.cached) * d.kv_bytes, h.hbm, flops, e.mla_prefill.flops * h.bf16),
           fmt::format("{:.0f} x (tau + T (c + T/2) {} / ({} F))", n, f.pair_prefill / tp, e.mla_prefill.flops));
    }
    if (d.dcp > 1 && decode) {
      double s = double(d.dcp), bytes = (s - 1) / s * t * H * s * (double(2 * c.kv_lora_rank + c.qk_rope_head_dim) + 1) * 2 / s;
      step.operators.push_back({"DCP exchange", 2 * n, 0, 0, n * bytes,
                                n * (2 * e.all_reduce.small_tau + bytes / (e.all_reduce.small_link * h.between(d.dcp))), Bound::network,
                                "queries gathered, partial outputs scattered within the DCP ranks"});
    }
  }

  if (moe > 0) {
    const double N = double(c.num_experts), K = double(c.num_experts_per_token), width = double(c.latent_size()),
                 Sm = double(c.num_shared_experts * c.moe_intermediate_size);
    gemms("router", moe, {{hidden, N}}, t);
    if (c.routed_expert_hidden_size) gemms("latent pair", moe, {{hidden, width}, {width, hidden / tp}}, t);
    const double domain = t * (d.ep > 1 ? double(d.ep) / tp : 1);
    const double rho = d.rho;
    RoutedCost r = routed(a, h, d, domain, rho);
    OperatorTime routed_op{
        "routed experts",
        moe,
        moe * r.flops,
        moe * r.bytes,
        0,
        moe * r.seconds,
        r.tau > r.memory && r.tau > r.compute ? Bound::launch
        : r.memory > r.compute                ? Bound::hbm
                                              : Bound::flops,
        fmt::format("{:.0f} x (tau {:.3g} s + bytes {:.3g} s + FLOPs {:.3g} s): U({:.0f} tokens, rho {}) experts of {:.0f} B over {} ranks", moe,
                    r.tau, r.memory, r.compute, domain, rho, double(parameters(a).expert) * a.experts.bytes, d.expert_ranks())};
    step.operators.push_back(routed_op);
    if (Sm > 0) {
      gemms("shared experts", moe, {{hidden, 2 * Sm / tp}, {Sm / tp, hidden}}, t);
      OperatorTime& s = step.operators.back();
      s.seconds = std::max(0.0, s.seconds - routed_op.seconds / 2);
      s.formula += "; hidden behind half of the routed time";
    }
    if (d.ep > 1) {
      const double E = double(d.ep), bytes_a_copy = width * (d.dispatch_bytes + d.combine_bytes);
      const double nodes = std::max(1.0, E / double(h.link_domain)), inside = std::min(E, double(h.link_domain));
      const auto& x = e.all_to_all;
      const double tokens = domain / E;  // of one rank
      OperatorTime o{"all-to-all", 2 * moe};
      o.bound = Bound::network;
      double one;
      if (decode) {  // one copy a distinct rank; those outside the node go over the network
        double copies = distinct_ranks(E, K), far = nodes > 1 ? copies * (E - inside) / E : 0, near = copies * (inside - 1) / E;
        o.network = moe * tokens * bytes_a_copy * (far + near);
        one = 2 * x.decode_tau + std::max(tokens * bytes_a_copy * far / (x.decode_net * (h.net > 0 ? h.net : h.link)),
                                          tokens * bytes_a_copy * near / (x.decode_net * h.link));
        if (nodes > 1) one = 2 * x.decode_tau + tokens * bytes_a_copy * (far + near) / (x.decode_net * h.net);
      } else {  // one copy a node, forwarded inside
        double far = remote_node_copies(nodes, K), near = remote_rank_copies(E, K);
        o.network = moe * tokens * bytes_a_copy * (nodes > 1 ? far : near);
        one = 2 * x.prefill_tau + std::max(nodes > 1 ? tokens * bytes_a_copy * far / (x.prefill_net * h.net) : 0,
                                           tokens * bytes_a_copy * near / (x.prefill_link * h.link));
      }
      o.seconds = moe * one;
      o.formula = fmt::format("{:.0f} x (2 tau + copies x {:.0f} B / rate) for {:.1f} tokens a rank over {:.0f} ranks in {:.0f} nodes", moe,
                              bytes_a_copy, tokens, E, nodes);
      step.operators.push_back(o);
    }
  }
  if (dense > 0) {
    const double f = double(c.intermediate_size);
    gemms("dense FFN", dense, {{hidden, 2 * f / tp}, {f / tp, hidden}}, t);
  }
  if (d.tp > 1) {
    double s = t * hidden * 2, count = L + (d.ep > 1 ? dense : L), one = all_reduce(h, tp, s);
    step.operators.push_back({"all-reduce", count, 0, 0, count * 2 * (tp - 1) / tp * s, count * one,
                              s > e.all_reduce.limit ? Bound::network : Bound::launch,
                              fmt::format("{:.0f} x all-reduce of {:.0f} B over {} ranks", count, s, d.tp)});
  }
  gemms("head", 1, {{hidden, double(c.vocab_size) / tp}}, decode ? t : w.batch);
  step.operators.push_back({"the rest", L, 0, 0, 0, L * e.rest, Bound::launch, "norms, AttnRes, convolutions, gates, top-k: a constant a layer"});
  if (e.host > 0) step.operators.push_back({"host", 1, 0, 0, 0, e.host, Bound::launch, "a step outside a graph"});
  if (d.two_batches) {  // the all-to-all of one half behind the computation of the other
    double exposed = step.of("all-to-all"), rest = step.seconds() - exposed;
    for (auto& o : step.operators)
      if (o.name == "all-to-all") o.seconds = std::max(0.0, exposed - rest), o.formula += "; behind the other half's computation";
  }
  return step;
}

double gemm_seconds(const Hardware& h, double rows, double in, double out, double weight_bytes, bool standalone) {
  return gemm(h, rows, in, out, weight_bytes, standalone).seconds;
}
double experts_seconds(const Architecture& a, const Hardware& h, const Deployment& d, double domain_tokens) {
  return routed(a, h, d, domain_tokens, 1).seconds;
}
double kda_decode_seconds(const Hardware& h, double heads, double k, double conv, double batch, double tokens) {
  return kda_decode(h, heads, k, conv, batch, tokens, 4, true).seconds;
}
double kda_prefill_seconds(const Hardware& h, double heads, double k, double tokens) {
  constexpr double C = double(kPlannedChunk);
  return kda_prefill(h, heads, k, 1, tokens, heads * (6 * k * k + 3 * C * k + C * C)).seconds;
}
double mla_decode_seconds(const Hardware& h, const Config& c, double heads, double batch, double context, double kv_bytes, double tokens) {
  double cached = double(c.kv_lora_rank + c.qk_rope_head_dim), pair = 2 * heads * double(2 * c.kv_lora_rank + c.qk_rope_head_dim);
  return attention_decode(h, batch * context * cached * kv_bytes, batch * tokens * context * pair).seconds;
}
double all_reduce_seconds(const Hardware& h, double ranks, double bytes) { return all_reduce(h, ranks, bytes); }

Users users_of(const Architecture& a, const Hardware& h, const Deployment& d, const Traffic& t) {
  const double c = std::max(1.0, t.users / double(d.dp));  // users of one group
  const double prefill = step_time(a, h, d, {Regime::prefill, 1, 0, t.isl}).seconds();
  const double step = step_time(a, h, d, {Regime::decode, c, t.isl + t.osl / 2, t.width}).seconds() + t.draft;
  Users u;
  u.ttft = (c + 1) / 2 * prefill;
  u.tpot = step / t.accepted + (c - 1) / 2 * prefill / t.osl;
  u.throughput = double(d.dp) * c * (t.isl + t.osl) / (c * prefill + t.osl * step / t.accepted);
  return u;
}

double break_even_accepted(const Architecture& a, const Hardware& h, const Deployment& d, double batch, double context, double width, double draft) {
  double plain = step_time(a, h, d, {Regime::decode, batch, context, 1}).seconds();
  double wide = step_time(a, h, d, {Regime::decode, batch, context, width}).seconds();
  return (wide + draft) / plain;
}

}  // namespace k3::plan
