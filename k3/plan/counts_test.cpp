#include "k3/plan/counts.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>

#include "k3/plan/closed_forms.h"

namespace k3::plan {
namespace {

// Two routes to one number. Sums of floating-point terms in another order: 1e-12.
void agree(const std::vector<Agreement>& list) {
  for (const Agreement& a : list) {
    if (a.counted == 0 && a.closed == 0) continue;
    EXPECT_LT(std::fabs(a.difference()), a.name == "total" ? 1e-3 : 1e-12) << a.name << ": counted " << a.counted << ", closed form " << a.closed;
  }
}

class Shipped : public ::testing::TestWithParam<const char*> {};

TEST_P(Shipped, code_and_closed_forms_count_the_same) {
  const Architecture a = load_architecture(GetParam());
  CountedModel inference(a, CountedModel::For::inference), training(a, CountedModel::For::training);
  EXPECT_EQ(inference.parameters(), parameters(a).total);
  agree(agreement(a, inference, 3, 4096));
  agree(prefill_agreement(a, inference, 4096));
  agree(training_agreement(a, training, 2048));
}

INSTANTIATE_TEST_SUITE_P(counts, Shipped, ::testing::Values("k3", "k2", "kimi-linear-48b", "deepseek-v3"), [](const auto& info) {
  std::string s = info.param;
  for (char& c : s)
    if (c == '-') c = '_';
  return s;
});

TEST(counts, other_mixers_count_the_same_too) {
  for (const char* mixers : {"mixers=gqa", "mixers=mqa", "mixers=gdn,gdn,gdn,mla", "mixers=deltanet,mla"}) {
    SCOPED_TRACE(mixers);
    const Architecture a = load_architecture("kimi-linear-48b", {mixers, "num_key_value_heads=8", "num_experts=16", "attention_head_dim=256"});
    CountedModel m(a, CountedModel::For::inference);
    EXPECT_EQ(m.parameters(), parameters(a).total);
    agree(agreement(a, m, 2, 4096));
    agree(prefill_agreement(a, m, 4096));
  }
}

TEST(counts, muon_of_k3s_experts) {
  const Architecture a = load_architecture("k3");
  CountedModel m(a, CountedModel::For::training);
  // the code forms one triangle of each symmetric product: 3 n^2 k + n^3 and a little, of 4 n^2 k + 2 n^3
  const double n = 3072, k = 3584, experts = muon_expert_flops(a) * (3 * k + n) / (4 * k + 2 * n), all = m.optimizer().of("muon");
  EXPECT_GT(all, experts);
  EXPECT_LT(all, 1.2 * experts);
}

TEST(counts, k3_is_counted_in_seconds) {
  auto start = std::chrono::steady_clock::now();
  CountedModel m(load_architecture("k3"), CountedModel::For::inference);
  m.prefill(8192), m.decode(16, 8192);
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), 30);  // 2 s on a free core
}

TEST(counts, recompute_costs_one_forward_and_saves_memory) {
  CountedModel m(load_architecture(K3_SOURCE_DIR "/tests/golden/kimi-k3-a"), CountedModel::For::training);
  Count kept = m.train(2, 512, false), again = m.train(2, 512, true);
  EXPECT_LT(again.arena_peak, kept.arena_peak);
  EXPECT_GT(again.flops(), 1.2 * kept.flops());
  EXPECT_LT(again.flops(), 1.4 * kept.flops());
}

TEST(counts, a_token_cache_only_in_attention_layers) {
  CountedModel m(load_architecture("k3"), CountedModel::For::inference);
  EXPECT_EQ(m.cache_bytes_per_token(), 2 * 27648);  // this engine's cache is float32
}

}  // namespace
}  // namespace k3::plan
