#include "k3/model/config.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "k3/core/file.h"
#include "k3/model/testing.h"

namespace k3 {
namespace {

using nlohmann::json;
using testing::throws_error;

json official(bool k3) {
  Config c = k3 ? testing::tiny_k3() : testing::tiny_linear();
  c.finish();
  return c.to_json();
}
Config finished(const json& j) {
  Config c = Config::parse(j);
  c.finish();
  return c;
}

TEST(config, printing_and_parsing_gives_the_same_config) {
  for (bool k3 : {true, false}) EXPECT_EQ(finished(official(k3)).to_json(), official(k3));
}

TEST(config, the_published_layer_lists_count_from_one) {
  json j = official(true);
  std::vector<int64_t> full, kda;
  for (int64_t n = 4; n <= 92; n += 4) full.push_back(n);
  full.push_back(93);
  for (int64_t n = 1; n <= 91; ++n)
    if (n % 4) kda.push_back(n);
  j["text_config"]["num_hidden_layers"] = 93;
  j["text_config"]["linear_attn_config"]["full_attn_layers"] = full;
  j["text_config"]["linear_attn_config"]["kda_layers"] = kda;
  Config c = finished(j);
  EXPECT_EQ(std::count(c.mixer_of_layer.begin(), c.mixer_of_layer.end(), "kda"), 69);
  EXPECT_EQ(std::count(c.mixer_of_layer.begin(), c.mixer_of_layer.end(), "mla"), 24);
  EXPECT_EQ(c.mixer_of_layer[91], "mla");
  EXPECT_EQ(c.mixer_of_layer[92], "mla");
  EXPECT_EQ(c.mixer_of_layer[0], "kda");
}

TEST(config, layer_lists_that_cannot_be_are_refused_with_the_layer) {
  auto with = [](const char* list, const json& value) {
    json j = official(true);
    j["text_config"]["linear_attn_config"][list] = value;
    finished(j);
  };
  EXPECT_THAT([&] { with("full_attn_layers", {0, 4, 8, 9}); }, throws_error("names layer 0, but layers are counted from 1 to 9"));
  EXPECT_THAT([&] { with("full_attn_layers", {4, 8, 10}); }, throws_error("names layer 10"));
  EXPECT_THAT([&] { with("full_attn_layers", {4, 8}); }, throws_error("layer 9 (counted from 1) is in no list"));
  EXPECT_THAT([&] { with("full_attn_layers", {3, 4, 8, 9}); }, throws_error("layer 3 (counted from 1) is named twice"));
  EXPECT_NO_THROW(with("full_attn_layers", {9, 4, 8}));
}

TEST(config, unknown_keys_name_the_nearest_known_one) {
  json j = official(false);
  j["hiden_size"] = 3;
  EXPECT_THAT([&] { Config::parse(j); }, throws_error("unknown key 'hiden_size'; the nearest known one is 'hidden_size'"));
  j = official(true);
  j["text_config"]["linear_attn_config"]["gate_lowerbound"] = -5;
  EXPECT_THAT([&] { Config::parse(j); }, throws_error("'linear_attn_config.gate_lower_bound'"));
  Config c = testing::tiny_k3();
  EXPECT_THAT([&] { c.set("num_expert=4"); }, throws_error("the nearest known one is 'num_experts'"));
  EXPECT_THAT([&] { c.set("hidden_size"); }, throws_error("not of the form key=value"));
}

TEST(config, values_that_cannot_be_are_refused) {
  auto with = [](const std::string& assignment) {
    Config c = testing::tiny_k3();
    c.set(assignment);
    c.finish();
  };
  EXPECT_THAT([&] { with("num_experts_per_token=17"); }, throws_error("num_experts_per_token is 17 but there are only 16 experts"));
  EXPECT_THAT([&] { with("hidden_size=0"); }, throws_error("hidden_size is 0 but must be at least 1"));
  EXPECT_THAT([&] { with("hidden_size=4.5"); }, throws_error("must be a whole number"));
  EXPECT_THAT([&] { with("hidden_act=gelu"); }, throws_error("'silu', 'situ' and 'clipped' are known"));
  EXPECT_THAT([&] { with("num_key_value_heads=2"); }, throws_error("must be a multiple of num_key_value_heads"));
  EXPECT_THAT([&] { with("attn_res_block_size=-1"); }, throws_error("attn_res_block_size"));
  EXPECT_THAT([&] { with("num_nextn_predict_layers=2"); }, throws_error("num_nextn_predict_layers is 2, but 0 and 1 are known"));
  auto rotating = [](const std::string& assignment) {
    Config c = testing::tiny_k3();
    c.set("mla_use_nope=false");
    c.set(assignment);
    c.finish();
  };
  EXPECT_NO_THROW(rotating("rope_theta=500"));
  EXPECT_THAT([&] { rotating("qk_rope_head_dim=0"); }, throws_error("mla_use_nope is false, so qk_rope_head_dim (0) must be even"));
  EXPECT_THAT([&] { rotating("mixers=kda"); }, throws_error("no layer is mla"));
  EXPECT_NO_THROW(with("linear_attn_config.head_dim=32"));
  EXPECT_NO_THROW(with("head_dim=32"));  // of linear_attn_config: the only head_dim there is to set
}

TEST(config, aliases_are_accepted) {
  json j = official(false);
  j["n_routed_experts"] = j["num_experts"], j.erase("num_experts");
  j["num_experts_per_tok"] = j["num_experts_per_token"], j.erase("num_experts_per_token");
  j["torch_dtype"] = "bfloat16", j.erase("dtype");
  Config c = finished(j);
  EXPECT_EQ(c.num_experts, 16);
  EXPECT_EQ(c.num_experts_per_token, 4);
  EXPECT_EQ(c.dtype, "bfloat16");
}

TEST(config, quantisation_is_found_at_either_level_and_unknown_kinds_are_refused) {
  json j = official(true);
  j["text_config"]["quantization_config"] = {{"format", "mxfp4-pack-quantized"}};
  EXPECT_EQ(Config::parse(j).quantization, "mxfp4-pack-quantized");
  j["text_config"]["quantization_config"]["format"] = "int4";
  EXPECT_THAT([&] { Config::parse(j); }, throws_error("'int4'"));
}

TEST(config, a_pattern_is_tiled_and_ends_in_the_final_mixer) {
  Config c = testing::tiny_k3();
  c.set("mixers=kda,kda,kda,mla");
  c.set("final_mixer=mla");
  c.set("num_hidden_layers=6");
  c.finish();
  EXPECT_EQ(c.mixer_of_layer, (std::vector<std::string>{"kda", "kda", "kda", "mla", "kda", "mla"}));
  EXPECT_EQ(c.full_attn_layers, (std::vector<int64_t>{4, 6}));
}

TEST(config, layer_types_that_contradict_the_lists_are_refused_with_the_layer) {
  json j = official(false);
  Config c = finished(j);
  std::vector<std::string> types;
  for (const std::string& m : c.mixer_of_layer) types.push_back(m == "kda" ? "linear_attention" : "full_attention");
  j["layer_types"] = types;
  EXPECT_EQ(finished(j).mixer_of_layer, c.mixer_of_layer);
  auto given = [&](const char* list, const json& value) {
    json k = j;
    k["linear_attn_config"][list] = value;
    return [k] { Config::parse(k); };
  };
  std::vector<int64_t> kda = c.kda_layers;
  kda.push_back(kda[0]);
  EXPECT_THAT(given("kda_layers", kda), throws_error("kda_layers and layer_types disagree about layer 1 (counted from 1)"));
  kda.back() = 0;
  EXPECT_THAT(given("kda_layers", kda), throws_error("disagree about layer 0"));
  kda.back() = 100;
  EXPECT_THAT(given("kda_layers", kda), throws_error("disagree about layer 100"));
  EXPECT_THAT(given("full_attn_layers", json::array()), throws_error("full_attn_layers and layer_types disagree about layer 4"));
}

TEST(config, a_key_that_stands_twice_is_refused) {
  const std::string path = ::testing::TempDir() + "k3_config_" + std::to_string(getpid()) + ".json";
  write_file(path, R"({"hidden_size": 8, "linear_attn_config": {"head_dim": 4}, "a": [{"x": 1}, {"x": 2}], "hidden_size": 16})");
  EXPECT_THAT([&] { read_config_file(path); }, throws_error("\"hidden_size\" stands twice in"));
  write_file(path, R"({"hidden_size": 8, "b": {"hidden_size": 4}, "a": [{"x": 1}, {"x": 2}]})");
  EXPECT_NO_THROW(read_config_file(path));
  unlink(path.c_str());
}

TEST(config, numbers_out_of_range_are_refused) {
  auto with = [](const std::string& assignment) {
    return [assignment] {
      Config c = testing::tiny_k3();
      c.set(assignment), c.finish();
    };
  };
  for (const char* key : {"num_experts", "num_shared_experts", "bos_token_id", "pad_token_id", "eos_token_id", "max_position_embeddings"})
    EXPECT_THAT(with(std::string(key) + "=-1"), throws_error(std::string(key) + " is -1; it must lie between 0 and 2147483647"));
  EXPECT_THAT(with("hidden_size=2147483648"), throws_error("hidden_size is 2147483648; it must lie between 0 and 2147483647"));
  EXPECT_THAT(with("hidden_size=9223372036854775808"), throws_error("hidden_size is 9223372036854775808, which does not fit into 64 bits"));
  EXPECT_THAT(with("hidden_size=1e30"), throws_error("which does not fit into 64 bits"));
  EXPECT_THAT(with("hidden_size=null"), throws_error("hidden_size is null; it must be a whole number"));
  EXPECT_NO_THROW(with("q_lora_rank=null")());
  EXPECT_THAT(with("activation_situ_beta=0"), throws_error("activation_situ_beta is 0 but must be above 0"));
  EXPECT_THAT(with("activation_situ_linear_beta=-1"), throws_error("activation_situ_linear_beta is -1; it must lie between 0"));
  EXPECT_THAT(with("activation_situ_linear_beta=1e7"), throws_error("activation_situ_linear_beta"));
  EXPECT_THAT(with("rms_norm_eps=2"), throws_error("rms_norm_eps is 2 but must be above 0 and at most 1"));
  EXPECT_THAT(with("routed_scaling_factor=-1"), throws_error("routed_scaling_factor is -1 but must be above 0"));
  EXPECT_THAT(with("initializer_range=0"), throws_error("initializer_range is 0 but must be above 0"));
  Config clipped = testing::tiny_k3();
  clipped.set("hidden_act=clipped"), clipped.set("activation_limit=0");
  EXPECT_THAT([&] { clipped.finish(); }, throws_error("activation_limit is 0 but must be above 0"));
  json j = official(false);
  j["attention_bias"] = true;
  EXPECT_THAT([&] { Config::parse(j); }, throws_error("attention_bias is true"));
  j["attention_bias"] = false, j["scoring_func"] = "softmax";
  EXPECT_THAT([&] { Config::parse(j); }, throws_error("scoring_func is \"softmax\" but moe_router_activation_func is"));
}

Config with(std::vector<std::string> sets) {
  Config c = testing::tiny_k3();
  c.routed_expert_hidden_size = 0, c.latent_moe_use_norm = false;
  for (const std::string& s : sets) c.set(s);
  c.finish();
  return c;
}

TEST(config, alpha_makes_more_and_narrower_experts_and_a_snapshot_holds_the_result) {
  Config eff = with({"latent_moe_alpha=2", "latent_moe_variant=eff"}), acc = with({"latent_moe_alpha=2", "latent_moe_variant=acc"});
  for (const auto& [c, active] : {std::pair{&eff, 4}, {&acc, 8}}) {
    EXPECT_EQ(c->num_experts, 32);
    EXPECT_EQ(c->num_experts_per_token, active);
    EXPECT_EQ(c->routed_expert_hidden_size, 24);
  }
  Config again = Config::parse(acc.to_json());
  again.finish();
  EXPECT_EQ(again.to_json(), acc.to_json());
  acc.finish();  // and once more changes nothing
  EXPECT_EQ(acc.num_experts, 32);
}

TEST(config, short_names_set_the_published_keys) {
  Config c = with({"activation=swiglu", "residual=plain", "ffn=dense"});
  EXPECT_EQ(c.hidden_act, "silu");
  EXPECT_EQ(c.attn_res_block_size, 0);
  EXPECT_EQ(c.num_experts, 0);
  EXPECT_EQ(with({"residual=attnres", "attn_res_block_size=1"}).attn_res_block_size, 1);
}

TEST(config, a_combination_that_cannot_be_names_what_can) {
  EXPECT_THAT(
      [] {
        with({"residual=attnres", "attn_res_block_size=0"});
      },
      testing::throws_error("attn_res_block_size is 0; it must be 1 (every layer a source) to num_hidden_layers 9"));
  EXPECT_THAT([] { with({"latent_moe_variant=eff"}); }, testing::throws_error("latent_moe_alpha is 0; it must be at least 1"));
  EXPECT_THAT([] { with({"latent_moe_alpha=2"}); }, testing::throws_error("it must be eff (same number of active experts) or acc"));
  EXPECT_THAT([] { with({"latent_moe_alpha=7", "latent_moe_variant=acc"}); }, testing::throws_error("latent_moe_alpha 7 must divide hidden_size 48"));
  EXPECT_THAT([] { with({"ffn=mlp"}); }, testing::throws_error("dense, moe, latent_moe are known"));
  EXPECT_THAT([] { with({"residual=none"}); }, testing::throws_error("plain, attnres are known"));
  EXPECT_THAT([] { with({"activation=relu"}); }, testing::throws_error("swiglu, situ, clipped are known"));
  EXPECT_THAT([] { with({"ffn=latent_moe"}); }, testing::throws_error("set routed_expert_hidden_size, or latent_moe_alpha and latent_moe_variant"));
}

TEST(config, mlp_layer_types_that_contradict_the_other_keys_are_refused_with_the_layer) {
  json j = official(false);  // dense, then four layers with experts
  std::vector<std::string> types = {"dense", "sparse", "sparse", "sparse", "sparse"};
  j["mlp_layer_types"] = types;
  EXPECT_NO_THROW(Config::parse(j));
  j["mlp_layer_types"][2] = "dense";
  EXPECT_THAT([&] { Config::parse(j); },
              throws_error("mlp_layer_types[2] is \"dense\", but first_k_dense_replace 1 and moe_layer_freq 1 make that layer sparse"));
  j["mlp_layer_types"] = {"dense"};
  EXPECT_THAT([&] { Config::parse(j); }, throws_error("mlp_layer_types names 1 layers, but num_hidden_layers is 5"));
}

TEST(config, a_configuration_for_training_describes_its_model) {
  testing::TemporaryFolder f;
  json j = official(true), more = j;
  more["train"] = {{"steps", 10}};
  write_file(f / "config.json", more.dump());
  EXPECT_EQ(Config::load(f.str()).hidden_size, finished(j).hidden_size);
}

TEST(config, an_initializer_range_that_is_given_counts_at_every_width) {
  auto deviation = [](std::optional<double> range) {
    Config c = testing::tiny_linear();
    c.initializer_range = range;
    c.finish();
    Model model(c);
    testing::fill(model);
    const Tensor w = model.params().find("model.layers.0.self_attn.q_proj.weight")->value;
    double square = 0;
    for (int64_t i = 0; i < w.size(); ++i) square += double(w.f32()[i]) * w.f32()[i];
    return std::sqrt(square / double(w.size()));
  };
  EXPECT_NEAR(deviation(std::nullopt), 1 / std::sqrt(48.0), 0.01);
  EXPECT_NEAR(deviation(0.02), 0.02, 0.001);
  EXPECT_NEAR(deviation(0.5), 0.5, 0.03);
}

}  // namespace
}  // namespace k3
