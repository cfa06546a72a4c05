#include "k3/plan/closed_forms.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace k3::plan {

MixerForm mixer_form(const Config& c, const std::string& mixer, int64_t chunk) {
  MixerForm f;
  const int64_t d = c.hidden_size;
  if (mixer == "kda" || mixer == "gdn" || mixer == "deltanet") {  // one layer, three gates: a channel, a head, none
    const int64_t heads = c.kda_num_heads, k = c.kda_head_dim, p = heads * k;
    const int64_t low = d * k + k * p;  // two factors through rank k
    const bool channel = mixer == "kda", head = mixer == "gdn";
    f.heads = heads;
    f.matrices = 4 * d * p + (channel ? low : head ? d * heads : 0) + d * heads + (c.use_full_rank_gate ? d * p : low);
    f.replicated = (channel ? d * k : head ? d * heads : 0) + d * heads + (c.use_full_rank_gate ? 0 : d * k);
    f.small = 3 * p * c.short_conv_kernel_size + k + (channel ? heads + p : head ? 2 * heads : 0);
    f.state = heads * k * k;
    f.window = (c.short_conv_kernel_size - 1) * 3 * p;
    f.token_prefill = double(heads) * (6.0 * double(k * k) + 3.0 * double(chunk * k) + double(chunk * chunk));
    f.token_decode = double(heads) * 7.0 * double(k * k);
    return f;
  }
  const int64_t h = c.num_attention_heads, gate = c.mla_use_output_gate ? 1 : 0;
  f.heads = h;
  if (mixer == "mla" || mixer == "mla_absorbed") {
    const int64_t n = c.qk_nope_head_dim, r = c.qk_rope_head_dim, v = c.v_head_dim, latent = c.kv_lora_rank, q = c.q_lora_rank;
    f.matrices = (q ? d * q + q * h * (n + r) : d * h * (n + r)) + d * (latent + r) + latent * h * (n + v) + (1 + gate) * d * h * v;
    f.replicated = d * q + d * (latent + r);
    f.small = q + latent;
    f.cached = latent + r;
    f.pair_decode = 2.0 * double(h * (2 * latent + r));
    f.pair_prefill = mixer == "mla" ? 2.0 * double(h * (n + r + v)) : f.pair_decode;
    return f;
  }
  // plain keys and values: gqa has num_key_value_heads of them, mfa one (and MLA's query rank), mqa one vector that is both
  const int64_t dim = c.attention_head_dim ? c.attention_head_dim : mixer == "mfa" ? 2 * c.v_head_dim : c.v_head_dim;
  const int64_t q = mixer == "mfa" ? c.q_lora_rank : 0;
  f.cached = (mixer == "gqa" ? 2 * c.num_key_value_heads : mixer == "mfa" ? 2 : 1) * dim;
  f.matrices = (q ? d * q + q * h * dim : d * h * dim) + d * f.cached + (1 + gate) * d * h * dim;
  f.replicated = d * q + (mixer == "gqa" ? 0 : d * f.cached);
  f.small = q;
  f.pair_prefill = f.pair_decode = 4.0 * double(h * dim);
  return f;
}

Parameters parameters(const Architecture& a) {
  const Config& c = a.config;
  const int64_t d = c.hidden_size, L = c.num_hidden_layers, moe = a.moe_layers(), w = c.latent_size();
  const bool latent = c.routed_expert_hidden_size > 0;
  Parameters p;
  p.embedding = p.head = c.vocab_size * d;
  p.dense = 3 * d * c.intermediate_size;
  int64_t matrices = p.dense * a.dense_layers(), small = d * (2 * L + 1);
  if (c.attn_res_block_size) small += 4 * d * L + 2 * d;
  for (const auto& [name, count] : a.mixers()) {
    MixerForm f = mixer_form(c, name);
    matrices += f.matrices * count, small += f.small * count, p.replicated += f.replicated * count;
  }
  if (moe) {
    p.expert = 3 * w * c.moe_intermediate_size;
    p.routed = p.expert * c.num_experts * moe;
    p.shared = 3 * d * c.num_shared_experts * c.moe_intermediate_size;
    p.latent_pair = latent ? 2 * d * w : 0;
    p.router = d * c.num_experts;
    matrices += moe * (p.shared + p.latent_pair + p.router);
    int64_t norms = c.latent_moe_norm == "both" ? 2 : c.latent_moe_norm == "none" ? 0 : 1;
    small += moe * (c.num_experts + norms * w);
    p.replicated += moe * (p.latent_pair + p.router);
  }
  p.trunk_matrices = matrices + p.head;
  p.small = small;
  p.total = p.trunk_matrices + small + p.routed + p.embedding;
  p.active_matrices = p.trunk_matrices + p.expert * c.num_experts_per_token * moe;
  p.active = p.active_matrices + small;
  p.checkpoint_bytes = double(p.routed) * a.experts.bytes + double(p.trunk_matrices + p.embedding) * a.trunk.bytes + 2.0 * double(small);
  return p;
}

double experts_touched(double experts, double chosen, double tokens, double rho) {
  if (tokens <= 0) return 0;
  return experts * (1 - std::pow(1 - chosen / experts, 1 + rho * (tokens - 1)));
}

double linear_flops(const Architecture& a) { return 2.0 * double(parameters(a).active_matrices); }

Flops decode_flops(const Architecture& a, double context, double tokens) {
  Flops f;
  f.linear = linear_flops(a) * tokens;
  for (const auto& [name, count] : a.mixers()) {
    MixerForm m = mixer_form(a.config, name);
    f.attention += double(count) * m.pair_decode * context * tokens;
    f.recurrent += double(count) * m.token_decode * tokens;
  }
  return f;
}

Flops prefill_flops(const Architecture& a, double tokens, double cached) {
  Flops f;
  Parameters p = parameters(a);
  f.linear = 2.0 * double(p.active_matrices) * tokens - 2.0 * double(p.head) * (tokens - 1);
  for (const auto& [name, count] : a.mixers()) {
    MixerForm m = mixer_form(a.config, name);
    f.attention += double(count) * m.pair_prefill * tokens * (cached + tokens / 2);
    f.recurrent += double(count) * m.token_prefill * tokens;
  }
  return f;
}

Flops training_flops(const Architecture& a, double context) {
  Flops f;
  f.linear = 3 * linear_flops(a);
  for (const auto& [name, count] : a.mixers()) {
    MixerForm m = mixer_form(a.config, name);
    f.attention += 3 * double(count) * m.pair_prefill * context / 2;
    f.recurrent += 3 * double(count) * m.token_prefill;
  }
  return f;
}

double cache_bytes_per_token(const Architecture& a, double bytes) {
  double n = 0;
  for (const auto& [name, count] : a.mixers()) n += double(count * mixer_form(a.config, name).cached);
  return n * bytes;
}

double state_bytes(const Architecture& a, double bytes) {
  double n = 0;
  for (const auto& [name, count] : a.mixers()) {
    MixerForm m = mixer_form(a.config, name);
    n += double(count) * (double(m.state) * bytes + double(m.window) * 2);
  }
  return n;
}

namespace {

template <class F>
double root(F f) {  // of a function that changes its sign at most once
  double low = 1, high = 1e8;
  if ((f(low) > 0) == (f(high) > 0)) return std::numeric_limits<double>::quiet_NaN();
  for (int i = 0; i < 200; ++i) {
    double mid = (low + high) / 2;
    ((f(mid) > 0) == (f(low) > 0) ? low : high) = mid;
  }
  return low;
}

}  // namespace

double decode_crossover(const Architecture& a, const Architecture& b) {
  return root([&](double x) { return decode_flops(a, x).total() - decode_flops(b, x).total(); });
}

double prefill_crossover(const Architecture& a, const Architecture& b) {
  return root([&](double x) { return prefill_flops(a, x).total() - prefill_flops(b, x).total(); });
}

double mixer_crossover(const Config& c) {
  MixerForm kda = mixer_form(c, "kda"), mla = mixer_form(c, "mla");
  return (2.0 * double(kda.matrices - mla.matrices) + kda.token_prefill) / (mla.pair_prefill / 2);
}

double newton_schulz_flops(double n, double k) {
  if (n > k) std::swap(n, k);
  return 5 * (4 * n * n * k + 2 * n * n * n);
}

double muon_expert_flops(const Architecture& a) {
  const Config& c = a.config;
  return 3.0 * double(a.moe_layers() * c.num_experts) * newton_schulz_flops(double(c.latent_size()), double(c.moe_intermediate_size));
}

int64_t depth_sources(const Config& c) {
  if (!c.attn_res_block_size) return 0;
  const int64_t S = c.attn_res_block_size, L = c.num_hidden_layers;
  int64_t n = (L - 1) / S + 2;  // the output reads every block and the running sum
  for (int64_t l = 0; l < L; ++l) n += (l ? (l + S - 1) / S + 1 : 0) + l / S + 2;
  return n;
}

int64_t activated_elements(const Architecture& a) {
  const Config& c = a.config;
  return a.moe_layers() * (c.num_experts_per_token + c.num_shared_experts) * c.moe_intermediate_size + a.dense_layers() * c.intermediate_size;
}

}  // namespace k3::plan
