#include "k3/infer/expert_cache.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "k3/core/file.h"
#include "k3/infer/session.h"
#include "k3/model/fabricate.h"
#include "k3/model/loading.h"
#include "k3/model/testing.h"

namespace k3 {
namespace {

namespace fs = std::filesystem;
using testing::throws_error;

using testing::TemporaryFolder;

// A fabricated snapshot: 8 MoE layers of 16 experts in MXFP4 (K3), or 4 of them in bf16 (Kimi-Linear).
struct Files {
  TemporaryFolder config{TemporaryFolder::absent}, folder{TemporaryFolder::absent};
  explicit Files(bool k3) {
    Config c = k3 ? testing::tiny_k3() : testing::tiny_linear();
    c.moe_intermediate_size = 32;
    c.finish();
    nlohmann::json j = c.to_json();
    if (k3) j["text_config"]["quantization_config"] = {{"format", "mxfp4-pack-quantized"}};
    fs::create_directories(config.path);
    write_file(config.str() + "/config.json", j.dump());
    fabricate(config.str(), folder.str(), {});
  }
  Config read_config() const {
    Config c = Config::load(folder.str());
    c.finish();
    return c;
  }
};

uint64_t place_of(const std::string& file, const StoredTensor& t) {
  uint64_t header = 0;
  std::memcpy(&header, read_file(file).data(), 8);
  return 8 + header + t.offset;
}

struct Opened {
  Snapshot snapshot;
  Model model;
  std::unique_ptr<ExpertCache> cache;
  Opened(const Files& f, int64_t slots, ExpertCache::Options o = {}) : snapshot(f.folder.str()), model(f.read_config()) {
    if (slots) {
      cache = std::make_unique<ExpertCache>(model, snapshot, find_parameters(model, snapshot));
      o.slots = slots;
      cache->allocate(o);
    }
    load(model, snapshot, {});
  }
};

// Logits after a prompt, and after each of some tokens that follow.
std::vector<float> logits_of(Session& s, const std::vector<int32_t>& ids, size_t prompt) {
  std::vector<float> all;
  auto read = [&](std::span<const int32_t> some) {
    s.read(some);
    all.insert(all.end(), s.logits(), s.logits() + s.vocabulary());
  };
  read({ids.data(), prompt});
  for (size_t i = prompt; i < ids.size(); ++i) read({ids.data() + i, 1});
  return all;
}

TEST(expert_cache, streamed_experts_give_the_same_bits) {
  for (bool k3 : {true, false}) {
    Files files(k3);
    const auto ids = testing::some_ids(70, 97);
    Opened whole(files, 0);
    Session s(whole.model, {});
    const std::vector<float> want = logits_of(s, ids, 60);
    for (int64_t slots : {1, 3, 4, 17, 200})  // 60 tokens want all 16 experts of a layer: rounds
      for (int readers : {1, 4}) {
        Opened part(files, slots, {.readers = readers});
        Session t(part.model, {});
        EXPECT_EQ(logits_of(t, ids, 60), want) << slots << " slots, " << readers << " readers";
        const ExpertCache::Counts n = part.cache->counts();
        EXPECT_EQ(n.bytes % 32, 0u);
        EXPECT_GE(n.wanted, int64_t(k3 ? 8 : 4) * 10 * 4);
        if (slots == 200) { EXPECT_EQ(n.bytes, uint64_t(part.cache->experts()) * (k3 ? 3 * 32 * 32 * 17 / 32 : 3 * 48 * 32 * 2)); }  // each once
      }
  }
}

// The cut is inside of the experts, which are last in a K3 shard: what is mapped stays whole.
TEST(expert_cache, a_file_cut_while_in_use_is_an_error_and_the_next_request_is_served) {
  Files files(true);
  Opened part(files, 4);
  const auto ids = testing::some_ids(20, 97);
  Session s(part.model, {});
  const std::vector<float> want = logits_of(s, ids, 20);
  const StoredTensor* t = part.snapshot.find("language_model.model.layers.5.block_sparse_moe.experts.3.w2.weight_packed");
  ASSERT_NE(t, nullptr);
  const std::string file = part.snapshot.file_of(*t), good = read_file(file);
  fs::resize_file(file, place_of(file, *t) + 100);
  const auto until_it_is_read = [&] {  // what the cache still holds is served from there
    for (uint64_t seed = 0; seed < 50; ++seed) s.reset(), logits_of(s, testing::some_ids(20, 97, seed), 20);
  };
  EXPECT_THAT(until_it_is_read, throws_error(fmt::format("[experts] {} ends at byte {}, before the end of ", file, place_of(file, *t) + 100)));
  std::FILE* f = std::fopen(file.c_str(), "r+b");  // the same file, in place
  std::fwrite(good.data(), 1, good.size(), f);
  std::fclose(f);
  s.reset();
  EXPECT_EQ(logits_of(s, ids, 20), want);
}

TEST(expert_cache, a_scale_that_is_no_number_is_found_when_it_is_read) {
  Files files(true);
  Snapshot s(files.folder.str());
  const StoredTensor* t = s.find("language_model.model.layers.1.block_sparse_moe.experts.7.w3.weight_scale");
  const std::string file = s.file_of(*t);
  {
    std::FILE* f = std::fopen(file.c_str(), "r+b");
    std::fseek(f, long(place_of(file, *t)) + 5, SEEK_SET);
    std::fputc(255, f);
    std::fclose(f);
  }
  Opened part(files, 4);
  Session session(part.model, {});
  EXPECT_THAT([&] { logits_of(session, testing::some_ids(60, 97), 60); },
              throws_error("layers.1.block_sparse_moe.experts.7.w3.weight_scale in " + file + " holds 255 (not a number) at 5"));
}

// Steps without a model around them: what each layer wants, in turns.
struct Steps {
  Files files{true};
  Opened part;
  std::vector<ExpertSource*> layers;
  explicit Steps(int64_t slots, bool read_ahead) : part(files, slots, {.read_ahead = read_ahead}) {
    for (int64_t l = 0; l < part.model.layers(); ++l)
      if (ExpertWeights* w = expert_weights(part.model.ffn(l))) layers.push_back(w->source);
  }
  void run(size_t layer, const std::vector<int32_t>& experts) {
    layers[layer]->want(experts);
    size_t n = 0;
    for (std::span<const int32_t> some; !(some = layers[layer]->take()).empty();) n += some.size();
    EXPECT_EQ(n, experts.size());
  }
};

TEST(expert_cache, layers_in_turns_do_not_push_out_what_comes_next) {
  Steps steps(16, false);  // 8 layers want 4 each, always the same: dropping the least recent would drop each one just before its turn
  for (int token = 0; token < 40; ++token)
    for (size_t l = 0; l < 8; ++l) steps.run(l, {0, 1, 2, 3});
  const ExpertCache::Counts n = steps.part.cache->counts();
  EXPECT_GT(double(n.hits) / double(n.wanted), 0.35);  // 12 or 13 of 32 at best: 16 slots, 4 of them for the running layer
}

TEST(expert_cache, what_is_used_often_stays) {
  Steps steps(24, false);  // in each layer two favourites, and two others at random
  for (int token = 0; token < 60; ++token)
    for (size_t l = 0; l < 8; ++l) {
      int32_t a = int32_t(Rng{7, l}.below(7, uint64_t(token))), b = int32_t(7 + Rng{8, l}.below(7, uint64_t(token)));
      steps.run(l, {a, b, 14, 15});
    }
  const ExpertCache::Counts n = steps.part.cache->counts();
  EXPECT_GT(double(n.hits) / double(n.wanted), 0.45);  // the favourites are half of what is wanted and fit into 16 slots
}

TEST(expert_cache, the_next_layers_experts_are_read_ahead_when_tokens_repeat_them) {
  Steps repeating(20, true), changing(20, true);
  for (int token = 0; token < 200; ++token)
    for (size_t l = 0; l < 8; ++l) {
      repeating.run(l, {0, 1, 2, int32_t(3 + token % 13)});
      changing.run(l, {int32_t(token % 4), int32_t(4 + token % 4), int32_t(8 + token % 4), int32_t(12 + token % 4)});
    }
  EXPECT_GT(repeating.part.cache->repeats(), 0.5);
  EXPECT_GT(repeating.part.cache->counts().ahead_used, 0);
  EXPECT_LT(changing.part.cache->repeats(), 0.05);
  EXPECT_EQ(changing.part.cache->counts().ahead, 0);
}

TEST(expert_cache, a_step_that_was_given_up_leaves_nothing_behind) {
  Steps steps(2, true);
  steps.layers[0]->want(std::vector<int32_t>{0, 1, 2, 3, 4, 5});
  steps.layers[0]->take();
  steps.run(1, {5, 6, 7});
  steps.run(0, {0, 15});
}

TEST(expert_cache, a_scale_that_is_no_number_is_found_before_the_first_token_too) {
  Files files(true);
  Opened part(files, 4);
  uint64_t last = 0, all = 0;
  part.cache->check_scales([&](uint64_t done, uint64_t total) { last = done, all = total; });
  EXPECT_EQ(last, all);
  EXPECT_EQ(all, 8u * 16 * 3 * 32);  // bytes: one for 32 weights of 32 x 32
  const StoredTensor* t = part.snapshot.find("language_model.model.layers.6.block_sparse_moe.experts.15.w2.weight_scale");
  const std::string file = part.snapshot.file_of(*t);
  std::FILE* f = std::fopen(file.c_str(), "r+b");
  std::fseek(f, long(place_of(file, *t)) + 31, SEEK_SET);
  std::fputc(255, f);
  std::fclose(f);
  EXPECT_THAT([&] { part.cache->check_scales(); },
              throws_error("layers.6.block_sparse_moe.experts.15.w2.weight_scale in " + file + " holds 255 (not a number) at 31"));
}

TEST(expert_cache, all_scales_of_a_model_in_memory_are_looked_at) {
  Files files(true);
  Opened whole(files, 0);
  const auto found = find_parameters(whole.model, whole.snapshot);
  check_all_scales(whole.model, whole.snapshot, found);
  for (const Param& p : whole.model.params().all()) EXPECT_EQ(p.scales_checked, !p.scale.empty()) << p.name;
  Opened damaged(files, 0);
  const StoredTensor* t = damaged.snapshot.find("language_model.model.layers.8.block_sparse_moe.experts.0.w1.weight_scale");
  const std::string file = damaged.snapshot.file_of(*t);
  std::FILE* f = std::fopen(file.c_str(), "r+b");
  std::fseek(f, long(place_of(file, *t)), SEEK_SET);
  std::fputc(255, f);
  std::fclose(f);
  EXPECT_THAT([&] { check_all_scales(damaged.model, damaged.snapshot, found); },
              throws_error("layers.8.block_sparse_moe.experts.0.w1.weight_scale in " + file + " holds 255 (not a number) at 0"));
}

// Tokens that repeat about half of their experts, as texts do: each further slot may only save reads.
TEST(expert_cache, a_bigger_cache_never_reads_more) {
  auto bytes = [](int64_t slots) {
    Steps steps(slots, true);
    for (int token = 0; token < 60; ++token)
      for (size_t l = 0; l < 8; ++l) {
        std::vector<int32_t> wanted = {int32_t(Rng{5, l}.below(4, uint64_t(token / 3))), int32_t(4 + Rng{6, l}.below(4, uint64_t(token / 3))),
                                       int32_t(8 + Rng{7, l}.below(4, uint64_t(token))), int32_t(12 + Rng{8, l}.below(4, uint64_t(token)))};
        steps.run(l, wanted);
      }
    return double(steps.part.cache->counts().bytes);
  };
  double before = 1e300;
  for (int64_t slots : {4, 8, 16, 24, 32, 48, 64, 96, 128}) {
    const double now = bytes(slots);
    EXPECT_LE(now, 1.02 * before) << slots << " slots";  // what is read ahead depends a little on when reads end
    before = now;
  }
}

}  // namespace
}  // namespace k3
