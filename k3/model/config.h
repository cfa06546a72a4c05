#pragma once
// Config: the published keys of a snapshot's config.json, checked, plus a few of ours for choices that no release has. Kimi-K3 and
// Kimi-Linear are values of it, not code. Unknown keys are errors that name the nearest known one.
//
//   Config c = Config::load("model/config.json");
//   c.set("hidden_size=256");
//   c.finish();                  // resolves per-layer kinds and checks that the model can be
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "k3/core/dtype.h"

namespace k3 {

struct Config {
  // Two layouts of one model: kimi_linear is flat, kimi_k3 nests the same keys in text_config and prefixes tensor names.
  std::string model_type = "kimi_k3";

  int64_t vocab_size = 163840, hidden_size = 4096, intermediate_size = 11008, num_hidden_layers = 32;
  int64_t num_attention_heads = 32, num_key_value_heads = 0;             // 0: as many as heads
  std::string hidden_act = "silu";                                       // silu (SwiGLU), situ, clipped
  double activation_situ_beta = 1.0, activation_situ_linear_beta = 0.0;  // 0: the up branch is used unchanged
  double activation_limit = 7.0;                                         // clipped only
  double rms_norm_eps = 1e-6;
  int64_t attn_res_block_size = 0;  // 0: plain residuals
  int64_t first_k_dense_replace = 0, moe_layer_freq = 1;
  int64_t num_experts = 0, num_experts_per_token = 0, num_shared_experts = 0, moe_intermediate_size = 0;
  int64_t routed_expert_hidden_size = 0;  // 0: experts work at hidden_size
  bool latent_moe_use_norm = false, moe_renormalize = true, use_grouped_topk = true;
  std::string moe_router_activation_func = "sigmoid", topk_method = "noaux_tc";
  double routed_scaling_factor = 1.0;
  int64_t num_expert_group = 1, topk_group = 1;
  int64_t q_lora_rank = 0;  // 0: one q_proj
  int64_t kv_lora_rank = 512, qk_nope_head_dim = 128, qk_rope_head_dim = 64, v_head_dim = 128;
  bool mla_use_nope = true, mla_use_output_gate = false, tie_word_embeddings = false;
  double rope_theta = 10000;  // only when mla_use_nope is false: then the last qk_rope_head_dim channels of mla's queries and keys are rotated
  int64_t max_position_embeddings = 1048576;
  int64_t num_nextn_predict_layers = 0;  // 1: training adds a layer that predicts the token after the next one
  int64_t bos_token_id = 1, pad_token_id = 0;
  std::vector<int64_t> eos_token_id = {2};
  std::optional<double> initializer_range;  // unset: 0.02 from hidden_size 2000 on, below it as init.h says
  std::string dtype = "float32";
  // linear_attn_config
  int64_t kda_num_heads = 0, kda_head_dim = 128, short_conv_kernel_size = 4;
  std::vector<int64_t> kda_layers, full_attn_layers;  // counted from 1
  std::optional<double> gate_lower_bound;             // absent: softplus gate
  bool use_full_rank_gate = false;                    // else low rank: g_a_proj, g_b_proj

  // Ours. A pattern tiled over the layers in place of the two lists: kda, mla, ... ; the last layer is final_mixer.
  std::vector<std::string> mixers;
  std::string final_mixer;
  int64_t attention_head_dim = 0;  // gqa, mqa, mfa: width of a head; 0: v_head_dim
  // Where the latent MoE norms: none, down (after the down-projection), up (before the up-projection, K3's), both.
  std::string latent_moe_norm;

  // Short names for comparisons. finish() turns them into the keys above and empties them, so a snapshot holds resolved keys only.
  std::string ffn;         // dense; moe: experts at hidden_size; latent_moe: in the latent space
  std::string residual;    // plain; attnres: in blocks of attn_res_block_size layers
  std::string activation;  // swiglu, situ, clipped
  // A MoE of N experts, K of them active, becomes a latent one of width hidden_size / alpha with alpha N experts, of which eff uses K and acc
  // alpha K (training.md 4.2). 0: off.
  int64_t latent_moe_alpha = 0;
  std::string latent_moe_variant;

  // Filled by finish().
  std::vector<std::string> mixer_of_layer;
  bool is_moe(int64_t layer) const;
  bool nested() const { return model_type == "kimi_k3"; }
  std::string prefix() const { return nested() ? "language_model." : ""; }
  int64_t latent_size() const { return routed_expert_hidden_size ? routed_expert_hidden_size : hidden_size; }

  std::string quantization;  // "" or "mxfp4-pack-quantized"

  static Config parse(const nlohmann::json& json);  // not finished: --set may follow
  static Config load(const std::string& path);      // a config.json or a folder that holds one
  void set(const std::string& assignment);          // "key=value"
  static bool is_key(const std::string& key);
  static std::vector<std::string> keys();
  void finish();
  nlohmann::json to_json() const;  // the published layout

 private:
  void expand();  // the short names
};

// The JSON object of a config.json, or of the folder that holds one. Error: no JSON, no object, a key that stands twice in one object, a whole
// number beyond 64 bits.
nlohmann::json read_config_file(const std::string& path);

}  // namespace k3
