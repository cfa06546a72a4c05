#include "k3/model/config.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "k3/core/error.h"
#include "k3/core/file.h"
#include "k3/core/nearest.h"

namespace k3 {

using nlohmann::json;

namespace {

// Every key once: its published name and its member. Parsing, printing, --set and "nearest known key" all read this.
template <class C, class F>
void each_key(C& c, F f) {
  f("vocab_size", c.vocab_size), f("hidden_size", c.hidden_size), f("intermediate_size", c.intermediate_size);
  f("num_hidden_layers", c.num_hidden_layers), f("num_attention_heads", c.num_attention_heads);
  f("num_key_value_heads", c.num_key_value_heads), f("hidden_act", c.hidden_act), f("activation_situ_beta", c.activation_situ_beta);
  f("activation_situ_linear_beta", c.activation_situ_linear_beta), f("activation_limit", c.activation_limit);
  f("rms_norm_eps", c.rms_norm_eps), f("attn_res_block_size", c.attn_res_block_size), f("first_k_dense_replace", c.first_k_dense_replace);
  f("moe_layer_freq", c.moe_layer_freq), f("num_experts", c.num_experts), f("num_experts_per_token", c.num_experts_per_token);
  f("num_shared_experts", c.num_shared_experts), f("moe_intermediate_size", c.moe_intermediate_size);
  f("routed_expert_hidden_size", c.routed_expert_hidden_size), f("latent_moe_use_norm", c.latent_moe_use_norm);
  f("moe_renormalize", c.moe_renormalize), f("use_grouped_topk", c.use_grouped_topk);
  f("moe_router_activation_func", c.moe_router_activation_func), f("topk_method", c.topk_method);
  f("routed_scaling_factor", c.routed_scaling_factor), f("num_expert_group", c.num_expert_group), f("topk_group", c.topk_group);
  f("q_lora_rank", c.q_lora_rank), f("kv_lora_rank", c.kv_lora_rank), f("qk_nope_head_dim", c.qk_nope_head_dim);
  f("qk_rope_head_dim", c.qk_rope_head_dim), f("v_head_dim", c.v_head_dim), f("mla_use_nope", c.mla_use_nope), f("rope_theta", c.rope_theta);
  f("mla_use_output_gate", c.mla_use_output_gate), f("tie_word_embeddings", c.tie_word_embeddings);
  f("max_position_embeddings", c.max_position_embeddings), f("num_nextn_predict_layers", c.num_nextn_predict_layers);
  f("bos_token_id", c.bos_token_id), f("pad_token_id", c.pad_token_id), f("eos_token_id", c.eos_token_id);
  f("initializer_range", c.initializer_range), f("dtype", c.dtype);
  f("linear_attn_config.num_heads", c.kda_num_heads), f("linear_attn_config.head_dim", c.kda_head_dim);
  f("linear_attn_config.short_conv_kernel_size", c.short_conv_kernel_size), f("linear_attn_config.kda_layers", c.kda_layers);
  f("linear_attn_config.full_attn_layers", c.full_attn_layers), f("linear_attn_config.gate_lower_bound", c.gate_lower_bound);
  f("linear_attn_config.use_full_rank_gate", c.use_full_rank_gate);
  f("attention_head_dim", c.attention_head_dim), f("mixers", c.mixers), f("final_mixer", c.final_mixer), f("latent_moe_norm", c.latent_moe_norm);
  f("ffn", c.ffn), f("residual", c.residual), f("activation", c.activation), f("latent_moe_alpha", c.latent_moe_alpha);
  f("latent_moe_variant", c.latent_moe_variant);
}

struct Alias {
  const char *from, *to;
};
constexpr Alias kAliases[] = {{"norm_topk_prob", "moe_renormalize"},
                              {"n_group", "num_expert_group"},
                              {"n_routed_experts", "num_experts"},
                              {"num_local_experts", "num_experts"},
                              {"num_experts_per_tok", "num_experts_per_token"},
                              {"n_shared_experts", "num_shared_experts"},
                              {"model_max_length", "max_position_embeddings"},
                              {"torch_dtype", "dtype"}};

// Keys of published files that say nothing about the computation. (layer_types and its kin are read in parse().)
// clang-format off
const std::vector<std::string> kWithoutEffect = {
    "architectures", "auto_map", "transformers_version", "use_cache", "model_type", "head_dim", "rope_scaling",
    "rope_parameters", "ignore_index", "image_placeholder", "media_placeholder_token_id", "vision_config", "text_config",
    "quantization_config", "compression_config", "layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads",
    "linear_conv_kernel_dim", "qk_head_dim", "linear_attn_config", "attention_bias", "attention_dropout", "hidden_dropout",
    "output_attentions", "output_hidden_states", "return_dict", "pretraining_tp", "unk_token_id", "name_or_path", "_name_or_path",
    "chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id", "problem_type", "ep_size", "aux_loss_alpha", "seq_aux",
    "scoring_func", "moe_layer_types", "use_unified_vision_chunk", "video_placeholder",};
// clang-format on

std::string canonical(const std::string& key) {
  for (const Alias& a : kAliases)
    if (key == a.from) return a.to;
  return key;
}

[[noreturn]] void unknown_key(const std::string& key) {
  fail("[config] unknown key '{}'; the nearest known one is '{}'", key, nearest(key, Config::keys()));
}

int64_t whole(const std::string& key, const json& value) {
  K3_CHECK(!value.is_null(), "[config] {} is null; it must be a whole number", key);
  K3_CHECK(value.is_number_integer() || (value.is_number_float() && std::abs(value.get<double>()) < 0x1p63) || !value.is_number(),
           "[config] {} is {}, which does not fit into 64 bits", key, value.dump());
  K3_CHECK(value.is_number_integer(), "[config] {} must be a whole number, not {}", key, value.dump());
  K3_CHECK(!value.is_number_unsigned() || value.get<uint64_t>() <= uint64_t(std::numeric_limits<int64_t>::max()),
           "[config] {} is {}, which does not fit into 64 bits", key, value.dump());
  return value.get<int64_t>();
}

// Where a published file writes null for "none of this" or "not said".
bool may_be_null(const std::string& key) {
  for (const char* k : {"num_key_value_heads", "attn_res_block_size", "num_experts", "num_experts_per_token", "num_shared_experts",
                        "moe_intermediate_size", "routed_expert_hidden_size", "q_lora_rank", "qk_rope_head_dim", "num_nextn_predict_layers",
                        "bos_token_id", "pad_token_id", "linear_attn_config.num_heads", "attention_head_dim", "latent_moe_alpha",
                        "first_k_dense_replace", "num_expert_group", "topk_group", "max_position_embeddings"})
    if (key == k) return true;
  return false;
}

template <class T>
void read(const std::string& key, const json& value, T& to) {
  try {
    if constexpr (std::is_same_v<T, std::optional<double>>) {
      if (value.is_null())
        to.reset();
      else
        to = value.get<double>();
    } else if constexpr (std::is_same_v<T, int64_t>) {
      to = value.is_null() && may_be_null(key) ? 0 : whole(key, value);
    } else if constexpr (std::is_same_v<T, std::vector<int64_t>>) {
      to.clear();
      if (value.is_array())
        for (const json& v : value) to.push_back(whole(key, v));
      else if (!value.is_null())
        to.push_back(whole(key, value));
    } else if constexpr (std::is_same_v<T, std::vector<std::string>>) {
      to = value.is_array() ? value.get<T>() : T{value.get<std::string>()};
    } else {
      if (!value.is_null()) to = value.get<T>();
    }
  } catch (const json::exception&) { fail("[config] {} has a value of the wrong kind: {}", key, value.dump()); }
}

void assign(Config& c, const std::string& key, const json& value) {
  bool found = false;
  each_key(c, [&](const char* name, auto& member) {
    if (key == name) read(key, value, member), found = true;
  });
  if (!found) unknown_key(key);
}

// "a,b,c" and bare words become JSON; so do numbers, true, false and null.
json value_of(const std::string& text) {
  json v = json::parse(text, nullptr, false);
  if (!v.is_discarded()) return v;
  if (text.find(',') == std::string::npos) return text;
  json list = json::array();
  for (size_t at = 0; at <= text.size();) {
    size_t end = std::min(text.find(',', at), text.size());
    list.push_back(value_of(text.substr(at, end - at)));
    at = end + 1;
  }
  return list;
}

void read_quantization(Config& c, const json& j) {
  for (const char* key : {"quantization_config", "compression_config"})
    if (j.contains(key) && !j[key].is_null()) {
      std::string format = j[key].value("format", "");
      K3_CHECK(format == "mxfp4-pack-quantized", "[config] {}.format is '{}', but only 'mxfp4-pack-quantized' is known", key, format);
      c.quantization = format;
    }
}

// layer_types counts from 0 and the two lists from 1; a file that has both must say the same twice.
void read_layer_types(Config& c, const json& types) {
  std::vector<int64_t> kda, full;
  int64_t number = 0;
  for (const auto& kind : types) {
    ++number;
    if (kind == "linear_attention" || kind == "kda_attention")
      kda.push_back(number);
    else if (kind == "full_attention")
      full.push_back(number);
    else
      fail("[config] layer_types[{}] is {}, but 'linear_attention' and 'full_attention' are known", number - 1, kind.dump());
  }
  auto agree = [](const char* list, std::vector<int64_t> given, const std::vector<int64_t>& types_say) {
    std::sort(given.begin(), given.end());
    const auto [a, b] = std::mismatch(given.begin(), given.end(), types_say.begin(), types_say.end());
    if (a == given.end() && b == types_say.end()) return;
    fail("[config] linear_attn_config.{} and layer_types disagree about layer {} (counted from 1); correct one of them or leave it out", list,
         a == given.end()       ? *b
         : b == types_say.end() ? *a
                                : std::min(*a, *b));
  };
  if (!c.kda_layers.empty() || !c.full_attn_layers.empty())
    agree("kda_layers", c.kda_layers, kda), agree("full_attn_layers", c.full_attn_layers, full);
  c.kda_layers = kda, c.full_attn_layers = full;
}

// Which layers have experts follows from first_k_dense_replace and moe_layer_freq; a file that has this list too must say the same.
void check_mlp_layer_types(const Config& c, const json& types) {
  if (c.moe_layer_freq <= 0) return;  // refused by finish()
  K3_CHECK(int64_t(types.size()) == c.num_hidden_layers, "[config] mlp_layer_types names {} layers, but num_hidden_layers is {}", types.size(),
           c.num_hidden_layers);
  for (int64_t l = 0; l < c.num_hidden_layers; ++l) {
    const char* want = c.is_moe(l) ? "sparse" : "dense";
    K3_CHECK(types[size_t(l)] == want, "[config] mlp_layer_types[{}] is {}, but first_k_dense_replace {} and moe_layer_freq {} make that layer {}", l,
             types[size_t(l)].dump(), c.first_k_dense_replace, c.moe_layer_freq, want);
  }
}

Config parsed(const json& top) {
  K3_CHECK(top.is_object(), "[config] the file holds no JSON object");
  Config c;
  c.model_type = top.value("model_type", "kimi_k3");
  K3_CHECK(c.model_type == "kimi_k3" || c.model_type == "kimi_linear", "[config] model_type is '{}', but 'kimi_k3' and 'kimi_linear' are known",
           c.model_type);
  read_quantization(c, top);
  auto read_object = [&](const json& object) {
    for (const auto& [key, value] : object.items()) {
      if (std::find(kWithoutEffect.begin(), kWithoutEffect.end(), key) != kWithoutEffect.end()) continue;
      assign(c, canonical(key), value);
    }
    if (object.contains("linear_attn_config") && !object["linear_attn_config"].is_null())
      for (const auto& [key, value] : object["linear_attn_config"].items()) assign(c, "linear_attn_config." + key, value);
    if (object.contains("rope_scaling") && !object["rope_scaling"].is_null())
      K3_CHECK(c.mla_use_nope, "[config] rope_scaling is {}, but only null is known where mla_use_nope is false", object["rope_scaling"].dump());
    if (object.contains("layer_types") && object["layer_types"].is_array()) read_layer_types(c, object["layer_types"]);
    if (object.contains("mlp_layer_types") && object["mlp_layer_types"].is_array()) check_mlp_layer_types(c, object["mlp_layer_types"]);
    if (object.contains("attention_bias"))
      K3_CHECK(object["attention_bias"].is_null() || object["attention_bias"] == false,
               "[config] attention_bias is {}, but this family's projections have no bias", object["attention_bias"].dump());
    if (object.contains("scoring_func") && !object["scoring_func"].is_null()) {
      const bool both = object.contains("moe_router_activation_func");
      K3_CHECK(!both || object["scoring_func"] == object["moe_router_activation_func"],
               "[config] scoring_func is {} but moe_router_activation_func is {}; leave one of the two out", object["scoring_func"].dump(),
               both ? object["moe_router_activation_func"].dump() : "");
      if (!both) read("scoring_func", object["scoring_func"], c.moe_router_activation_func);
    }
  };
  if (c.nested() && top.contains("text_config")) {
    json outer = top;
    outer.erase("text_config");
    read_object(outer);
    read_object(top["text_config"]);
    read_quantization(c, top["text_config"]);
  } else {
    read_object(top);
  }
  return c;
}

}  // namespace

std::vector<std::string> Config::keys() {
  std::vector<std::string> names;
  Config c;
  each_key(c, [&](const char* name, auto&) { names.push_back(name); });
  return names;
}

bool Config::is_key(const std::string& key) {
  auto all = keys();
  return std::find(all.begin(), all.end(), canonical(key)) != all.end();
}

Config Config::parse(const json& top) {
  try {
    return parsed(top);
  } catch (const json::exception& e) { fail("[config] a value of the wrong kind: {}", e.what()); }
}

Config Config::load(const std::string& path) {
  json j = read_config_file(path);
  j.erase("train");  // of a configuration for k3 train: how the model learns, not what it is
  return parse(j);
}

json read_config_file(const std::string& path) {
  const std::string file = std::filesystem::is_directory(path) ? path + "/config.json" : path;
  std::vector<std::set<std::string>> seen;  // keys of the open object at each depth
  auto watch = [&](int depth, json::parse_event_t event, json& value) {
    if (event == json::parse_event_t::object_start) seen.resize(size_t(depth) + 1), seen.emplace_back();
    if (event == json::parse_event_t::key)
      K3_CHECK(seen[size_t(depth)].insert(value.get<std::string>()).second, "[config] {} stands twice in {}; leave one of the two out", value.dump(),
               file);
    return true;
  };
  json j = json::parse(read_file(file), watch, false);
  K3_CHECK(!j.is_discarded(), "[config] {} is not valid JSON", file);
  K3_CHECK(j.is_object(), "[config] {} holds no JSON object", file);
  return j;
}

void Config::set(const std::string& assignment) {
  size_t eq = assignment.find('=');
  K3_CHECK(eq != std::string::npos && eq > 0, "[config] '{}' is not of the form key=value", assignment);
  std::string key = canonical(assignment.substr(0, eq));
  if (!is_key(key) && is_key("linear_attn_config." + key)) key = "linear_attn_config." + key;
  if (key == "mixers" || key == "final_mixer") kda_layers.clear(), full_attn_layers.clear();  // the pattern replaces the lists
  assign(*this, key, value_of(assignment.substr(eq + 1)));
}

bool Config::is_moe(int64_t layer) const { return num_experts > 0 && layer >= first_k_dense_replace && layer % moe_layer_freq == 0; }

void Config::expand() {
  auto one_of = [](const char* key, const std::string& value, std::initializer_list<const char*> known) {
    std::string list;
    for (const char* k : known) {
      if (value == k) return;
      list += (list.empty() ? "" : ", ") + std::string(k);
    }
    K3_CHECK(value.empty(), "[config] {} is '{}', but {} are known", key, value, list);
  };
  one_of("ffn", ffn, {"dense", "moe", "latent_moe"}), one_of("residual", residual, {"plain", "attnres"});
  one_of("activation", activation, {"swiglu", "situ", "clipped"}), one_of("latent_moe_variant", latent_moe_variant, {"eff", "acc"});

  if (!activation.empty()) hidden_act = activation == "swiglu" ? "silu" : activation;
  if (residual == "plain") attn_res_block_size = 0;
  K3_CHECK(residual != "attnres" || attn_res_block_size >= 1,
           "[config] residual is attnres but attn_res_block_size is {}; it must be 1 (every layer a source) to num_hidden_layers {}",
           attn_res_block_size, num_hidden_layers);

  K3_CHECK(latent_moe_variant.empty() || latent_moe_alpha > 0,
           "[config] latent_moe_variant is {} but latent_moe_alpha is {}; it must be at least 1, as in latent_moe_alpha=2", latent_moe_variant,
           latent_moe_alpha);
  K3_CHECK(
      latent_moe_alpha == 0 || !latent_moe_variant.empty(),
      "[config] latent_moe_alpha is {} but latent_moe_variant is not set; it must be eff (same number of active experts) or acc (alpha times it)",
      latent_moe_alpha);
  if (ffn == "dense") num_experts = 0;
  if (ffn == "moe") routed_expert_hidden_size = 0, latent_moe_use_norm = false, latent_moe_norm = "none";
  K3_CHECK(ffn == "dense" || ffn.empty() || num_experts > 0, "[config] ffn is {} but num_experts is 0; it must be at least 1, or ffn=dense", ffn);
  if (latent_moe_alpha) {
    K3_CHECK(ffn != "dense" && ffn != "moe", "[config] latent_moe_alpha is for ffn=latent_moe, not {}", ffn);
    K3_CHECK(num_experts > 0, "[config] latent_moe_alpha needs a MoE to start from: set num_experts and num_experts_per_token");
    K3_CHECK(routed_expert_hidden_size == 0,
             "[config] latent_moe_alpha sets the latent width, but routed_expert_hidden_size is {} already; leave one of the two out",
             routed_expert_hidden_size);
    K3_CHECK(latent_moe_alpha > 0 && hidden_size % latent_moe_alpha == 0, "[config] latent_moe_alpha {} must divide hidden_size {}", latent_moe_alpha,
             hidden_size);
    routed_expert_hidden_size = hidden_size / latent_moe_alpha;
    num_experts *= latent_moe_alpha;
    if (latent_moe_variant == "acc") num_experts_per_token *= latent_moe_alpha;
  }
  K3_CHECK(ffn != "latent_moe" || routed_expert_hidden_size > 0,
           "[config] ffn is latent_moe but there is no latent width; set routed_expert_hidden_size, or latent_moe_alpha and latent_moe_variant");
  ffn.clear(), residual.clear(), activation.clear(), latent_moe_variant.clear(), latent_moe_alpha = 0;
}

void Config::finish() {
  expand();
  auto positive = [](const char* key, int64_t v) { K3_CHECK(v > 0, "[config] {} is {} but must be at least 1", key, v); };
  positive("hidden_size", hidden_size), positive("vocab_size", vocab_size), positive("num_hidden_layers", num_hidden_layers);
  positive("num_attention_heads", num_attention_heads), positive("intermediate_size", intermediate_size);
  positive("moe_layer_freq", moe_layer_freq), positive("linear_attn_config.head_dim", kda_head_dim);
  each_key(*this, [&](const char* key, const auto& v) {
    using T = std::decay_t<decltype(v)>;
    if constexpr (std::is_same_v<T, int64_t>)
      K3_CHECK(v >= 0 && v <= std::numeric_limits<int32_t>::max(), "[config] {} is {}; it must lie between 0 and {}", key, v,
               std::numeric_limits<int32_t>::max());
    if constexpr (std::is_same_v<T, double>) K3_CHECK(std::isfinite(v), "[config] {} is {} but must be finite", key, v);
  });
  for (int64_t id : eos_token_id)
    K3_CHECK(id >= 0 && id <= std::numeric_limits<int32_t>::max(), "[config] eos_token_id is {}; it must lie between 0 and {}", id,
             std::numeric_limits<int32_t>::max());
  K3_CHECK(num_hidden_layers <= 4096, "[config] num_hidden_layers is {}; at most 4096", num_hidden_layers);
  if (num_key_value_heads == 0) num_key_value_heads = num_attention_heads;
  if (kda_num_heads == 0) kda_num_heads = num_attention_heads;
  positive("linear_attn_config.num_heads", kda_num_heads);
  K3_CHECK(num_key_value_heads > 0 && num_attention_heads % num_key_value_heads == 0,
           "[config] num_attention_heads {} must be a multiple of num_key_value_heads {}", num_attention_heads, num_key_value_heads);
  K3_CHECK(attn_res_block_size >= 0, "[config] attn_res_block_size is {}; it must be at least 1, or null for plain residuals", attn_res_block_size);
  K3_CHECK(hidden_act == "silu" || hidden_act == "situ" || hidden_act == "clipped",
           "[config] hidden_act is '{}', but 'silu', 'situ' and 'clipped' are known", hidden_act);
  K3_CHECK(short_conv_kernel_size >= 1 && short_conv_kernel_size <= 8, "[config] short_conv_kernel_size is {}; 1 to 8", short_conv_kernel_size);
  K3_CHECK(!tie_word_embeddings, "[config] tie_word_embeddings is true, but this family has its own lm_head");
  K3_CHECK(num_nextn_predict_layers == 0 || num_nextn_predict_layers == 1, "[config] num_nextn_predict_layers is {}, but 0 and 1 are known",
           num_nextn_predict_layers);
  auto above_0 = [](const char* key, double v, double most) {
    K3_CHECK(v > 0 && v <= most, "[config] {} is {} but must be above 0 and at most {}", key, v, most);
  };
  above_0("rms_norm_eps", rms_norm_eps, 1), above_0("routed_scaling_factor", routed_scaling_factor, 1e6);
  if (initializer_range) above_0("initializer_range", *initializer_range, 1e6);
  if (hidden_act == "situ") {
    above_0("activation_situ_beta", activation_situ_beta, 1e6);
    K3_CHECK(activation_situ_linear_beta >= 0 && activation_situ_linear_beta <= 1e6,
             "[config] activation_situ_linear_beta is {}; it must lie between 0 (the up branch unchanged) and 1e6", activation_situ_linear_beta);
  }
  if (hidden_act == "clipped") above_0("activation_limit", activation_limit, 1e6);
  K3_CHECK(moe_router_activation_func == "sigmoid" || moe_router_activation_func == "softmax",
           "[config] moe_router_activation_func is '{}', but 'sigmoid' and 'softmax' are known", moe_router_activation_func);
  if (num_experts > 0) {
    positive("num_experts_per_token", num_experts_per_token), positive("moe_intermediate_size", moe_intermediate_size);
    K3_CHECK(num_experts_per_token <= num_experts, "[config] num_experts_per_token is {} but there are only {} experts (num_experts)",
             num_experts_per_token, num_experts);
    K3_CHECK(num_shared_experts >= 0, "[config] num_shared_experts is {}", num_shared_experts);
    K3_CHECK(num_expert_group > 0 && num_experts % num_expert_group == 0 && topk_group > 0 && topk_group <= num_expert_group,
             "[config] {} experts cannot be cut into {} groups of which {} are used", num_experts, num_expert_group, topk_group);
    if (latent_moe_norm.empty()) latent_moe_norm = latent_moe_use_norm ? "up" : "none";
    K3_CHECK(latent_moe_norm == "none" || latent_moe_norm == "down" || latent_moe_norm == "up" || latent_moe_norm == "both",
             "[config] latent_moe_norm is '{}', but none, down, up and both are known", latent_moe_norm);
    K3_CHECK(routed_expert_hidden_size || latent_moe_norm == "none", "[config] a latent MoE norm needs routed_expert_hidden_size");
    latent_moe_use_norm = latent_moe_norm != "none";
  }

  if (!mixers.empty() && kda_layers.empty() && full_attn_layers.empty()) {
    mixer_of_layer.clear();
    for (int64_t l = 0; l < num_hidden_layers; ++l) mixer_of_layer.push_back(mixers[size_t(l) % mixers.size()]);
    if (!final_mixer.empty()) mixer_of_layer.back() = final_mixer;
  } else {
    mixer_of_layer.assign(size_t(num_hidden_layers), "");
    auto mark = [&](const char* list, const std::vector<int64_t>& layers, const char* kind) {
      for (int64_t n : layers) {
        K3_CHECK(n >= 1 && n <= num_hidden_layers, "[config] linear_attn_config.{} names layer {}, but layers are counted from 1 to {}", list, n,
                 num_hidden_layers);
        std::string& slot = mixer_of_layer[size_t(n - 1)];
        K3_CHECK(slot.empty(), "[config] layer {} (counted from 1) is named twice in linear_attn_config's lists", n);
        slot = kind;
      }
    };
    mark("kda_layers", kda_layers, "kda");
    mark("full_attn_layers", full_attn_layers, "mla");
    for (size_t l = 0; l < mixer_of_layer.size(); ++l)
      K3_CHECK(!mixer_of_layer[l].empty(),
               "[config] layer {} (counted from 1) is in no list: add it to linear_attn_config.kda_layers or full_attn_layers", l + 1);
  }
  bool published = true;
  kda_layers.clear(), full_attn_layers.clear();
  for (size_t l = 0; l < mixer_of_layer.size(); ++l) {
    if (mixer_of_layer[l] == "kda")
      kda_layers.push_back(int64_t(l) + 1);
    else if (mixer_of_layer[l] == "mla")
      full_attn_layers.push_back(int64_t(l) + 1);
    else
      published = false;
  }
  if (published)
    mixers.clear(), final_mixer.clear();  // the two lists say it all
  else
    kda_layers.clear(), full_attn_layers.clear(), mixers = mixer_of_layer, final_mixer.clear();

  if (std::find(mixer_of_layer.begin(), mixer_of_layer.end(), "mla") != mixer_of_layer.end()) {
    positive("kv_lora_rank", kv_lora_rank), positive("qk_nope_head_dim", qk_nope_head_dim), positive("v_head_dim", v_head_dim);
    K3_CHECK(qk_rope_head_dim >= 0 && q_lora_rank >= 0, "[config] qk_rope_head_dim {} and q_lora_rank {} must not be negative", qk_rope_head_dim,
             q_lora_rank);
    K3_CHECK(mla_use_nope || (qk_rope_head_dim > 0 && qk_rope_head_dim % 2 == 0 && rope_theta > 0),
             "[config] mla_use_nope is false, so qk_rope_head_dim ({}) must be even and rope_theta ({}) above 0", qk_rope_head_dim, rope_theta);
  } else {
    K3_CHECK(mla_use_nope, "[config] mla_use_nope is false, but no layer is mla, and only mla can rotate its queries and keys");
  }
}

json Config::to_json() const {
  json text = json::object();
  const Config defaults;
  each_key(*this, [&](const char* name, const auto& member) {
    std::string key = name;
    json value;
    using T = std::decay_t<decltype(member)>;
    if constexpr (std::is_same_v<T, std::optional<double>>) {
      if (!member) return;
      value = *member;
    } else {
      value = member;
    }
    // Keys that hold nothing in this model stay out, as in the releases; ours appear only where they are used.
    auto absent_when = [&](std::initializer_list<const char*> names, bool absent) {
      return absent && std::find(names.begin(), names.end(), key) != names.end();
    };
    if (absent_when({"ffn", "residual", "activation", "latent_moe_alpha", "latent_moe_variant"}, true)) return;  // resolved
    if (absent_when({"mixers", "final_mixer"}, mixers.empty())) return;
    if (absent_when({"linear_attn_config.kda_layers", "linear_attn_config.full_attn_layers"}, !mixers.empty())) return;
    if (key == "final_mixer" || (key == "attention_head_dim" && attention_head_dim == 0)) return;
    if (absent_when({"latent_moe_norm"}, latent_moe_norm == (latent_moe_use_norm ? "up" : "none") || num_experts == 0)) return;
    if (absent_when({"rope_theta"}, mla_use_nope)) return;
    if (absent_when({"attn_res_block_size"}, attn_res_block_size == 0)) return;
    if (absent_when({"activation_limit"}, hidden_act != "clipped")) return;
    if (absent_when({"activation_situ_beta", "activation_situ_linear_beta"}, hidden_act != "situ")) return;
    if (absent_when({"routed_expert_hidden_size", "latent_moe_use_norm"}, routed_expert_hidden_size == 0)) return;
    if (absent_when({"mla_use_output_gate"}, !mla_use_output_gate) || absent_when({"linear_attn_config.use_full_rank_gate"}, !use_full_rank_gate))
      return;
    if (key == "q_lora_rank" && q_lora_rank == 0) value = nullptr;
    if (key == "num_experts" && num_experts == 0) value = nullptr;
    if (key == "eos_token_id" && eos_token_id.size() == 1) value = eos_token_id[0];
    if (key.starts_with("linear_attn_config."))
      text["linear_attn_config"][key.substr(19)] = value;
    else
      text[key] = value;
  });
  text["model_type"] = "kimi_linear";
  text["architectures"] = {"KimiLinearForCausalLM"};
  if (!nested()) return text;
  json top = {{"model_type", "kimi_k3"}, {"architectures", {"KimiK3ForConditionalGeneration"}}, {"text_config", text}};
  for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id", "dtype", "tie_word_embeddings"}) top[key] = text[key];
  return top;
}

}  // namespace k3
