#include "k3/plan/deployment.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "k3/core/error.h"

namespace k3::plan {

namespace {

// The divisor of `n` nearest to `wanted` (the smaller of two).
int64_t nearest_divisor(int64_t n, int64_t wanted) {
  int64_t best = 1;
  for (int64_t i = 1; i <= n; ++i)
    if (n % i == 0 && std::llabs(i - wanted) < std::llabs(best - wanted)) best = i;
  return best;
}

int64_t smallest_common(const Architecture& a) {  // tp must divide this
  int64_t g = 0;
  for (const auto& [name, count] : a.mixers()) g = std::gcd(g, mixer_form(a.config, name).heads);
  if (a.moe_layers()) g = std::gcd(g, a.config.moe_intermediate_size * std::max<int64_t>(1, a.config.num_shared_experts));
  if (a.dense_layers()) g = std::gcd(g, a.config.intermediate_size);
  return g;
}

}  // namespace

Deployment resolve(const Architecture& a, Deployment d) {
  for (auto [name, v] : {std::pair{"--gpus", d.gpus}, {"--tp", d.tp}, {"--dp", d.dp}, {"--ep", d.ep}, {"--dcp", d.dcp}})
    K3_CHECK(v > 0, "[plan] {} is {} but must be at least 1", name, v);
  if (d.gpus == 1) d.gpus = d.tp * d.dp;
  if (d.tp == 1 && d.dp == 1 && d.gpus > 1) {
    if (d.ep == d.gpus)
      d.dp = d.gpus;
    else
      d.tp = d.gpus;
  }
  if (d.dp == 1 && d.gpus % d.tp == 0) d.dp = d.gpus / d.tp;
  if (d.tp == 1 && d.dp > 1 && d.gpus % d.dp == 0) d.tp = d.gpus / d.dp;
  K3_CHECK(d.tp * d.dp == d.gpus, "[plan] {} GPUs cannot be TP {} x DP {}; the nearest that works is TP {} x DP {}", d.gpus, d.tp, d.dp,
           nearest_divisor(d.gpus, d.tp), d.gpus / nearest_divisor(d.gpus, d.tp));
  const int64_t heads = smallest_common(a);
  K3_CHECK(heads % d.tp == 0, "[plan] TP {} does not divide the heads and widths of {} (their common divisor is {}); the nearest that works is TP {}",
           d.tp, a.name, heads, nearest_divisor(heads, d.tp));
  const int64_t n = a.config.num_experts;
  K3_CHECK(d.ep == 1 || n > 0, "[plan] EP {} but {} has no experts; use EP 1", d.ep, a.name);
  if (d.ep > 1) {
    const int64_t common = std::gcd(n, d.gpus);
    K3_CHECK(n % d.ep == 0 && d.gpus % d.ep == 0, "[plan] EP {} must divide the {} experts and the {} GPUs; the nearest that works is EP {}", d.ep, n,
             d.gpus, nearest_divisor(common, d.ep));
    K3_CHECK(d.ep % d.tp == 0,
             "[plan] EP {} must be a multiple of TP {}, so that an attention group lies in one expert group; the nearest that works is EP {}", d.ep,
             d.tp, std::max<int64_t>(d.tp, d.ep / d.tp * d.tp));
  }
  K3_CHECK(d.tp % d.dcp == 0, "[plan] DCP {} must divide TP {}; the nearest that works is DCP {}", d.dcp, d.tp, nearest_divisor(d.tp, d.dcp));
  for (auto [name, v] :
       {std::pair{"--kv-bytes", d.kv_bytes}, {"--state-bytes", d.state_bytes}, {"--slots", d.slots}, {"memory fraction", d.memory_fraction}})
    K3_CHECK(v > 0 && std::isfinite(v), "[plan] {} is {} but must be a finite number above 0", name, v);
  K3_CHECK(d.rho > 0 && d.rho <= 1, "[plan] --rho is {} but must be above 0 and at most 1 (tokens that choose experts independently)", d.rho);
  K3_CHECK(d.balance >= 1 && std::isfinite(d.balance), "[plan] --balance is {} but must be a finite number from 1 (all ranks equally busy)",
           d.balance);
  return d;
}

std::string to_string(const Deployment& d) {
  std::string s = fmt::format("TP {} x DP {}", d.tp, d.dp);
  s += d.ep > 1 ? fmt::format(", EP {}", d.ep) : d.tp > 1 ? ", experts sliced by TP" : "";
  if (d.dcp > 1) s += fmt::format(", DCP {}", d.dcp);
  return s;
}

Memory memory_of(const Architecture& a, const Hardware& h, const Deployment& d) {
  Parameters p = parameters(a);
  const double b = a.trunk.bytes, tp = double(d.tp);
  double whole = double(p.replicated);
  if (d.shard_latent) whole -= double(p.latent_pair * a.moe_layers());
  Memory m;
  m.routed = double(p.routed) * a.experts.bytes / double(d.expert_ranks());
  m.trunk = b * (whole + (double(p.trunk_matrices - p.head) - whole) / tp);
  m.small = 2.0 * double(p.small);
  m.tables = b * double(p.embedding + p.head) / tp;
  m.pool = d.memory_fraction * h.memory - m.weights() - d.workspace;
  m.cache_per_token = cache_bytes_per_token(a, d.kv_bytes) / double(d.dcp);
  m.state_per_sequence = d.slots * plan::state_bytes(a, d.state_bytes) / tp;
  return m;
}

TrainingMemory training_memory(const Architecture& a, const Deployment& d) {
  const Parameters p = parameters(a);
  const double ranks = double(d.expert_ranks()), experts = double(p.routed) / ranks;
  TrainingMemory m;
  m.parameters = experts + double(p.replicated) + double(p.trunk_matrices - p.replicated + p.embedding) / double(d.tp) + double(p.small);
  m.weights = 2 * m.parameters, m.gradients = 4 * m.parameters;
  m.optimizer = 8 * (experts / std::max(1.0, double(d.gpus) / ranks) + (m.parameters - experts) / double(d.dp));
  return m;
}

Deployment fewest_for_training(const Architecture& a, const Hardware& h, const Deployment& like) {
  Deployment best;
  best.gpus = 0;
  const int64_t n = std::max<int64_t>(1, a.config.num_experts);
  for (int64_t tp = 1; tp <= 64; tp *= 2)
    for (int64_t ep = 1; ep <= n; ++ep) {
      if (smallest_common(a) % tp != 0 || n % ep != 0 || (ep > 1 && ep % tp != 0)) continue;
      for (int64_t gpus = std::max(tp, ep); gpus <= 65536; gpus *= 2) {
        Deployment d = like;
        d.gpus = gpus, d.tp = tp, d.dp = gpus / tp, d.ep = ep, d.dcp = 1;
        if (training_memory(a, d).total() > d.memory_fraction * h.memory) continue;
        if (best.gpus == 0 || gpus < best.gpus) best = d;
        break;
      }
    }
  return best;
}

double distinct_ranks(double ranks, double chosen) { return ranks * (1 - std::pow(1 - 1 / ranks, chosen)); }
double remote_rank_copies(double ranks, double chosen) { return distinct_ranks(ranks, chosen) * (ranks - 1) / ranks; }
double remote_node_copies(double nodes, double chosen) { return nodes <= 1 ? 0 : remote_rank_copies(nodes, chosen); }

double comm_ratio(double bd, double bc, double flop_rate, double width, double byte_rate) { return (bd + bc) * flop_rate / (6 * width * byte_rate); }
double ridge_tokens(double weight_bytes, double flop_rate, double hbm) { return weight_bytes * flop_rate / (2 * hbm); }

Five five(const Architecture& a, const Deployment& d, const Work& w) {
  const Config& c = a.config;
  const Parameters p = parameters(a);
  const double moe = double(a.moe_layers()), tp = double(d.tp), ranks = double(d.expert_ranks());
  const double group_tokens = w.batch * w.tokens;
  // tokens that the ranks holding one set of experts see together
  const double domain_tokens = group_tokens * (d.ep > 1 ? double(d.ep) / tp : 1);
  Five f;
  if (moe > 0) {
    f.touched = experts_touched(double(c.num_experts), double(c.num_experts_per_token), domain_tokens, w.regime == Regime::decode ? d.rho : 1);
    f.tokens_per_expert = domain_tokens * double(c.num_experts_per_token) / double(c.num_experts);
    f.routed = d.balance * moe * f.touched * double(p.expert) * a.experts.bytes / ranks;
  }
  const double whole = double(p.replicated), split = double(p.trunk_matrices) - whole;
  f.trunk = a.trunk.bytes * (whole + split / tp);
  const double kv = cache_bytes_per_token(a, d.kv_bytes) / double(d.dcp), state = plan::state_bytes(a, d.state_bytes) / tp;
  // FLOPs: what is kept whole is computed whole on every rank of the group
  double per_token_split = 2 * (split - double(p.head)), cores = 0, head = 2 * double(p.head);
  for (const auto& [name, count] : a.mixers()) {
    MixerForm m = mixer_form(c, name);
    const double n = double(count);
    if (w.regime == Regime::decode)
      cores += n * (m.pair_decode * w.context + m.token_decode);
    else
      cores += n * (m.pair_prefill * (w.context + w.tokens / 2) + m.token_prefill);
  }
  const double routed_flops = 2 * moe * double(p.expert * c.num_experts_per_token);
  if (w.regime == Regime::decode) {
    f.cache = w.batch * (w.context * kv);
    f.state = w.batch * 2 * state * (w.replay ? 1 : w.tokens);
    f.flops = group_tokens * (2 * whole + (per_token_split + head + cores) / tp);
  } else {
    f.cache = w.batch * (w.context + w.tokens) * kv;
    f.state = w.batch * state * (w.context > 0 ? 2 : 1);
    f.flops = group_tokens * (2 * whole + (per_token_split + cores) / tp) + w.batch * head / tp;
  }
  f.flops += domain_tokens * routed_flops / ranks;
  if (d.tp > 1) {
    const double ring = 2 * (tp - 1) / tp, L = double(c.num_hidden_layers), width = 2.0 * double(c.hidden_size);
    double payload = width * L;                                                                                // attention's output
    if (d.ep == 1) payload += width * L;                                                                       // the feed-forward's
    if (d.ep == 1 && c.routed_expert_hidden_size) payload += 2.0 * double(c.routed_expert_hidden_size) * moe;  // before the norm, which isn't linear
    f.tp_bytes = ring * group_tokens * payload;
  }
  if (d.ep > 1) {
    const double E = double(d.ep), K = double(c.num_experts_per_token), width = double(c.latent_size()) * (d.dispatch_bytes + d.combine_bytes);
    f.ep_bytes = domain_tokens * remote_rank_copies(E, K) * width * moe / E;
    f.ep_bytes_all_copies = domain_tokens * K * width * moe / E;
  }
  return f;
}

double Five::comm_over_compute(const Architecture& a, const Deployment& d, double F, double B, bool all_copies) const {
  if (d.ep == 1) return std::nan("");
  const double K = double(a.config.num_experts_per_token);
  double ratio = comm_ratio(d.dispatch_bytes, d.combine_bytes, F, double(a.config.moe_intermediate_size), B);
  return all_copies ? ratio : ratio * remote_rank_copies(double(d.ep), K) / K;
}

}  // namespace k3::plan
