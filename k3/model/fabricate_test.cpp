#include "k3/model/fabricate.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "k3/core/file.h"
#include "k3/core/threads.h"
#include "k3/model/checkpoint.h"
#include "k3/model/testing.h"

namespace k3 {
namespace {

namespace fs = std::filesystem;
using testing::throws_error;

const std::string kConfigs = std::string(K3_SOURCE_DIR) + "/configs";

using testing::TemporaryFolder;

Config config_of(const std::string& name) {
  Config c = Config::load(kConfigs + "/" + name);
  c.finish();
  return c;
}

// Shapes that MXFP4 can pack, with the widths of a test.
std::string write_config(const TemporaryFolder& f, Config c, bool quantized) {
  fs::create_directories(f.path);
  c.finish();
  nlohmann::json j = c.to_json();
  if (quantized) (j.contains("text_config") ? j["text_config"] : j)["quantization_config"] = {{"format", "mxfp4-pack-quantized"}};
  write_file(f.str() + "/config.json", j.dump());
  return f.str();
}

Config packable() {
  Config c = testing::tiny_k3();
  c.moe_intermediate_size = 32, c.routed_expert_hidden_size = 64;
  return c;
}

TEST(fabricate, counts_and_sums_of_kimi_k3_are_the_published_ones) {
  const Config c = config_of("k3.json");
  const auto shards = published_layout(c, true);
  int64_t u8 = 0, bf16 = 0, f32 = 0, vision = 0;
  uint64_t total = 0, files = 0, experts = 0, not_text = 0, router = 0, latent = 0, shared = 0;
  std::vector<uint64_t> without_ffn(93), of_shard;
  for (const LayoutShard& s : shards) {
    std::vector<NamedTensor> named;
    uint64_t in_shard = 0;
    for (const LayoutTensor& t : s.tensors) {
      named.push_back({t.name, Tensor(nullptr, t.dtype, t.shape)});
      (t.dtype == DType::u8 ? u8 : t.dtype == DType::bf16 ? bf16 : f32) += 1;
      in_shard += t.bytes();
      auto has = [&](const char* part) { return t.name.find(part) != t.name.npos; };
      if (!t.name.starts_with("language_model.")) ++vision, not_text += t.bytes();
      if (has(".experts."))
        experts += t.bytes();
      else if (has(".layers.1.block_sparse_moe.gate."))
        router += t.bytes();
      else if (has(".layers.1.block_sparse_moe.routed_expert_"))
        latent += t.bytes();
      else if (has(".layers.1.block_sparse_moe.shared_experts."))
        shared += t.bytes();
      else if (size_t at = t.name.find(".layers."); at != t.name.npos && !has(".block_sparse_moe.") && !has(".mlp."))
        without_ffn[size_t(std::atoi(t.name.c_str() + at + 8))] += t.bytes();
    }
    total += in_shard;
    of_shard.push_back(in_shard);
    files += 8 + safetensors_header(named).size() + in_shard;
    if (s.file == "model-00001-of-000096.safetensors") {
      EXPECT_EQ(in_shard, 2341213184u);  // layer 0, dense
      EXPECT_EQ(files, 2341216112u);     // with its header, to the byte
    }
  }
  EXPECT_EQ(shards.size(), 96u);
  EXPECT_EQ(u8, 494592);
  EXPECT_EQ(bf16, 2122);
  EXPECT_EQ(f32, 506);
  EXPECT_EQ(u8 + bf16 + f32, 497220);
  EXPECT_EQ(total, 1560860324864u);
  EXPECT_EQ(files, 1560936091448u);
  EXPECT_EQ(experts, 1446456066048u);
  EXPECT_EQ(not_text, 894717952u);
  EXPECT_EQ(vision, 168);
  EXPECT_EQ(without_ffn[1], 887886848u);
  EXPECT_EQ(without_ffn[3], 464478208u);
  EXPECT_EQ(without_ffn[92], 464478208u);
  EXPECT_EQ(router, 12848640u);
  EXPECT_EQ(latent, 102767616u);
  EXPECT_EQ(shared, 264241152u);
  EXPECT_EQ(of_shard[93], 4697663488u);  // globals
  EXPECT_EQ(shards[1].file, "model-00002-of-000096.safetensors");
  std::vector<std::string> order;
  for (const LayoutTensor& t : shards[1].tensors)
    if (t.name.ends_with("w1.weight_packed")) order.push_back(t.name.substr(t.name.find("experts.") + 8));
  EXPECT_EQ(order[1], "1.w1.weight_packed");
  EXPECT_EQ(order[2], "10.w1.weight_packed");
  EXPECT_EQ(order[3], "100.w1.weight_packed");
}

TEST(fabricate, counts_of_kimi_linear_are_the_published_ones) {
  const Config c = config_of("kimi-linear-48b.json");
  const auto shards = published_layout(c, true);
  int64_t tensors = 0, scalars = 0;
  for (const LayoutShard& s : shards)
    for (const LayoutTensor& t : s.tensors) {
      ++tensors, scalars += t.shape.size();
      EXPECT_EQ(t.dtype == DType::f32, t.name.ends_with("A_log") || t.name.ends_with("dt_bias")) << t.name;
      if (t.name == "model.layers.0.self_attn.A_log") { EXPECT_EQ(to_string(t.shape), "1 x 1 x 32 x 1"); }
      if (t.name == "model.layers.0.mlp.down_proj.weight") { EXPECT_EQ(to_string(t.shape), "2304 x 9216"); }
      if (t.name == "model.layers.3.self_attn.q_proj.weight") { EXPECT_EQ(to_string(t.shape), "6144 x 2304"); }
      if (t.name == "model.layers.26.block_sparse_moe.experts.255.w2.weight") { EXPECT_EQ(to_string(t.shape), "2304 x 1024"); }
    }
  EXPECT_EQ(tensors, 20493);
  EXPECT_EQ(tensors, 3 + 27 * 2 + 20 * 15 + 7 * 5 + 3 + 26 * 773);
  EXPECT_EQ(shards.size(), 20u);
  EXPECT_EQ(scalars / 1000000000, 49);  // "48B"
}

// 497,220 names: the files are written as headers and holes, then opened by index and headers.
TEST(fabricate, an_index_of_kimi_k3s_size_opens) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "1.5 TB of mapped files leave a sanitizer no room for its own";
#endif
  TemporaryFolder f{TemporaryFolder::absent};
  const Fabricated made = fabricate(kConfigs + "/k3.json", f.str(), {.headers_only = true});
  EXPECT_EQ(made.tensors, 497220);
  EXPECT_EQ(made.bytes, 1560860324864u);
  EXPECT_EQ(made.shards, 96);
  EXPECT_EQ(fs::file_size(f.path / "model.safetensors.index.json"), 59764096u);
  Snapshot s(f.str());
  EXPECT_EQ(s.tensors().size(), 497220u);
  EXPECT_EQ(s.bytes(), made.bytes);
  const StoredTensor* t = s.find("language_model.model.layers.92.block_sparse_moe.experts.895.w2.weight_scale");
  ASSERT_NE(t, nullptr);
  EXPECT_EQ(to_string(t->shape), "3584 x 96");
  EXPECT_TRUE(s.file_of(*t).ends_with("model-00093-of-000096.safetensors"));
}

TEST(fabricate, a_cut_model_loads_and_runs) {
  for (bool k3 : {true, false}) {
    TemporaryFolder config{TemporaryFolder::absent}, out{TemporaryFolder::absent};
    write_config(config, k3 ? packable() : testing::tiny_linear(), k3);
    const Fabricated made = fabricate(config.str(), out.str(), {.layers = 5, .experts = 6});
    Config c = Config::load(out.str());
    c.finish();
    EXPECT_EQ(c.num_hidden_layers, 5);
    EXPECT_EQ(c.num_experts, 6);
    EXPECT_EQ(c.num_experts_per_token, 4);
    Model model(c);
    Snapshot s(out.str());
    EXPECT_EQ(int64_t(s.tensors().size()), made.tensors);
    load(model, s, {});
    testing::Step step(false);
    auto ids = testing::some_ids(12, c.vocab_size);
    Tensor h = model.forward(step.context, testing::tensor_of(ids), Batch::one(12)).value();
    double square = 0;
    for (int64_t i = 0; i < h.size(); ++i) square += double(h.f32()[i]) * h.f32()[i];
    EXPECT_GT(square / double(h.size()), 0.5);
    EXPECT_LT(square / double(h.size()), 2.0);  // after the final norm
  }
}

TEST(fabricate, the_same_seed_gives_the_same_bytes_at_any_thread_count) {
  TemporaryFolder config{TemporaryFolder::absent}, a{TemporaryFolder::absent}, b{TemporaryFolder::absent}, other{TemporaryFolder::absent};
  write_config(config, packable(), true);
  const int threads = thread_count();
  fabricate(config.str(), a.str(), {.layers = 2});
  set_thread_count(3);
  fabricate(config.str(), b.str(), {.layers = 2});
  set_thread_count(threads);
  fabricate(config.str(), other.str(), {.layers = 2, .seed = 2});
  for (auto& entry : fs::directory_iterator(a.path)) {
    std::string name = entry.path().filename(), bytes = read_file(entry.path().string());
    EXPECT_EQ(bytes, read_file(b.str() + "/" + name)) << name;
    if (name.ends_with(".safetensors")) { EXPECT_NE(bytes, read_file(other.str() + "/" + name)) << name; }
  }
}

TEST(fabricate, nothing_is_overwritten) {
  TemporaryFolder config{TemporaryFolder::absent};
  write_config(config, packable(), true);
  EXPECT_THAT([&] { fabricate(config.str(), config.str(), {}); }, throws_error("is there and not empty; name another --out"));
  EXPECT_THAT([&] { fabricate(config.str(), config / "config.json/x", {}); }, throws_error("cannot make the folder"));
  EXPECT_THAT([&] { fabricate(config.str(), config / "new", {.layers = 100}); }, throws_error("layers is 100 but"));
}

TEST(fabricate, configs_are_read_as_everywhere_else) {
  TemporaryFolder config{TemporaryFolder::absent}, out{TemporaryFolder::absent};
  write_config(config, packable(), true);
  nlohmann::json j = nlohmann::json::parse(read_file(config / "config.json"));
  j["train"] = {{"steps", 10}};
  write_file(config / "config.json", j.dump());
  fabricate(config.str(), out.str(), {.layers = 1});
  EXPECT_EQ(read_file(out / "config.json").find("\"train\""), std::string::npos);
  write_file(config / "config.json", R"({"hidden_size": 8, "hidden_size": 16})");
  EXPECT_THAT([&] { fabricated_config(config.str(), {}); }, throws_error("\"hidden_size\" stands twice in"));
}

TEST(fabricate, experts_are_written_as_asked_whatever_the_config_says) {
  TemporaryFolder config{TemporaryFolder::absent}, out{TemporaryFolder::absent}, again{TemporaryFolder::absent};
  Config c = testing::tiny_linear();
  c.moe_intermediate_size = 32, c.hidden_size = 64;
  write_config(config, c, false);
  fabricate(config.str(), out.str(), {.layers = 2, .experts_as = "mxfp4"});
  EXPECT_NE(Snapshot(out.str()).find("model.layers.1.block_sparse_moe.experts.3.w1.weight_packed"), nullptr);
  EXPECT_EQ(Config::load(out.str()).quantization, "mxfp4-pack-quantized");
  fabricate(out.str(), again.str(), {.experts_as = "bf16"});
  EXPECT_NE(Snapshot(again.str()).find("model.layers.1.block_sparse_moe.experts.3.w1.weight"), nullptr);
  EXPECT_EQ(Config::load(again.str()).quantization, "");
  EXPECT_THAT([&] { fabricated_config(config.str(), {.experts_as = "int3"}); }, throws_error("experts_as is 'int3' but must be bf16 or mxfp4"));
}

// What a download tool makes first, and what is left when it ends early: the full size and nothing in it, or a beginning.
TEST(fabricate, a_shard_that_was_not_filled_is_refused_before_any_token) {
  TemporaryFolder config{TemporaryFolder::absent}, headers{TemporaryFolder::absent}, part{TemporaryFolder::absent};
  write_config(config, packable(), true);
  fabricate(config.str(), headers.str(), {.layers = 2, .headers_only = true});
  Config c = Config::load(headers.str());
  c.finish();
  Model model(c);
  EXPECT_THAT([&] { load(model, Snapshot(headers.str()), {}); }, throws_error("model-00001-of-000003.safetensors was never written from byte "));
  fabricate(config.str(), part.str(), {.layers = 2});
  const std::string shard = part / "model-00003-of-000003.safetensors", bytes = read_file(shard);
  ASSERT_GT(bytes.size(), 8192u);
  fs::resize_file(shard, 4096), fs::resize_file(shard, bytes.size());
  EXPECT_THAT([&] { load(model, Snapshot(part.str()), {}); },
              throws_error(fmt::format("{} was never written from byte 4096 of {} on, in tensor language_model.", shard, bytes.size())));
}

}  // namespace
}  // namespace k3
