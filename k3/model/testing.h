#pragma once
// Small models for tests: every part of K3 at sizes that no tile divides, or the Kimi-Linear shape.
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "k3/model/init.h"
#include "k3/model/model.h"
#include "k3/ops/testing.h"

namespace k3::testing {

// 9 layers, full attention at 4, 8 and 9, blocks of 3, first layer dense, 16 experts top 4 in a latent space, 2 shared.
inline Config tiny_k3() {
  Config c;
  c.model_type = "kimi_k3", c.vocab_size = 97, c.hidden_size = 48, c.intermediate_size = 56, c.num_hidden_layers = 9, c.num_attention_heads = 3;
  c.hidden_act = "situ", c.activation_situ_beta = 4, c.activation_situ_linear_beta = 25, c.rms_norm_eps = 1e-5, c.attn_res_block_size = 3;
  c.first_k_dense_replace = 1, c.num_experts = 16, c.num_experts_per_token = 4, c.num_shared_experts = 2, c.moe_intermediate_size = 24;
  c.routed_expert_hidden_size = 32, c.latent_moe_use_norm = true, c.q_lora_rank = 20, c.kv_lora_rank = 24, c.qk_nope_head_dim = 16;
  c.qk_rope_head_dim = 8, c.v_head_dim = 16, c.mla_use_output_gate = true, c.kda_num_heads = 3, c.kda_head_dim = 16, c.gate_lower_bound = -5.0;
  c.use_full_rank_gate = true, c.kda_layers = {1, 2, 3, 5, 6, 7}, c.full_attn_layers = {4, 8, 9};
  return c;
}

// Softplus gate, low-rank output gate, plain residuals, experts at full width, no q_lora, no MLA gate.
inline Config tiny_linear() {
  Config c = tiny_k3();
  c.model_type = "kimi_linear", c.hidden_act = "silu", c.attn_res_block_size = 0, c.routed_expert_hidden_size = 0, c.latent_moe_use_norm = false;
  c.q_lora_rank = 0, c.mla_use_output_gate = false, c.gate_lower_bound.reset(), c.use_full_rank_gate = false, c.routed_scaling_factor = 2.446;
  c.num_hidden_layers = 5, c.kda_layers = {1, 2, 3}, c.full_attn_layers = {4, 5}, c.num_shared_experts = 1;
  return c;
}

// Initialised, with AttnRes queries and router biases that are not zero, so that nothing is trivially right.
inline void fill(Model& model, uint64_t seed = 1) {
  model.params().allocate(Device::cpu);
  initialize(model, seed);
  for (Param& p : model.params().all())
    if (p.name.ends_with("_res_proj.weight") || p.name.ends_with("e_score_correction_bias"))
      for (int64_t i = 0; i < p.value.size(); ++i) p.value.f32()[i] = float(Rng{seed, 9}.normal(uint64_t(i)) * 0.1);
}

inline std::vector<int32_t> some_ids(int64_t n, int64_t vocabulary, uint64_t seed = 3) {
  std::vector<int32_t> ids(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) ids[size_t(i)] = int32_t(Rng{seed, 1}.below(uint64_t(vocabulary), uint64_t(i)));
  return ids;
}

inline Tensor tensor_of(const std::vector<int32_t>& v) { return Tensor(const_cast<int32_t*>(v.data()), DType::i32, {int64_t(v.size())}); }

// Loss and the gradient of every parameter, each relative to its own size, on the CPU and twice on the GPU: float32 on both sides, some hundred
// operators deep, and the two runs the same bits. `step_of` goes forward and back and returns the loss.
template <class F>
void expect_gradients_on_cuda_equal_cpu(const Config& config, F step_of) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  std::map<std::string, std::vector<double>> want;
  std::map<std::string, std::vector<char>> first;
  double loss = 0;
  for (int run = 0; run < 3; ++run) {
    Model m(config);
    fill(m);
    if (run) m.params().move_to(Device::cuda);
    m.params().allocate_grads();
    Step step(true, size_t(1) << 30, m.params().device());
    const double sum = step_of(m, step);
    if (!run) loss = sum;
    EXPECT_NEAR(sum, loss, 1e-5 * loss);
    for (const Param& p : m.params().all()) {
      if (p.grad.empty()) continue;
      const HostCopy grad(p.grad);
      if (run == 0) want[p.name] = as_double(grad.tensor());
      if (run == 1) expect_near(grad.tensor(), want[p.name], 1e-3, p.name), first[p.name] = bytes_of(p.grad);
      if (run == 2) { EXPECT_EQ(bytes_of(p.grad), first[p.name]) << p.name << ": two runs differ"; }
    }
  }
}

}  // namespace k3::testing
