#include "k3/ops/moe/balance.h"

#include <gtest/gtest.h>

#include "k3/ops/testing.h"

namespace k3 {
namespace {

using testing::Values;

// A fixed router that prefers some experts strongly (its first column meets a constant 1 in every token), and fresh tokens for each step.
struct Skewed {
  static constexpr int64_t kExperts = 896, kTopK = 16, kTokens = 8192, kWidth = 64;
  Values gate{kExperts * kWidth, 1, 0.5 / std::sqrt(double(kWidth))}, offset{kExperts, 2, 0.55};
  std::vector<Values> batches;
  explicit Skewed(int steps) {
    for (int64_t j = 0; j < kExperts; ++j) gate[j * kWidth] = offset[j];
    for (int s = 0; s < steps; ++s) {
      Values& x = batches.emplace_back(kTokens * kWidth, uint64_t(100 + s));
      for (int64_t i = 0; i < kTokens; ++i) x[i * kWidth] = 1;
    }
  }
  Routing run(testing::Step& step, const std::vector<float>& bias, size_t batch) const {
    return route(step.input(batches[batch], {kTokens, kWidth}), step.keep(step.param("gate", gate, {kExperts, kWidth})),
                 step.keep(step.param("bias", Values(bias), {kExperts}, false)), {.top_k = kTopK}, Batch::one(kTokens));
  }
};

std::vector<float> margins_of(const Routing& r) {
  int64_t n = r.scores.rows(), e = r.scores.cols();
  std::vector<float> m(size_t(n * e));
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < e; ++j) m[i * e + j] = r.cutoff.f32()[i] - r.scores.f32()[i * e + j];
  return m;
}

// max load / mean load - 1
double violation(const std::vector<int64_t>& load) {
  int64_t most = 0, total = 0;
  for (int64_t x : load) most = std::max(most, x), total += x;
  return double(most) * double(load.size()) / double(total) - 1;
}

// training.md 2.3, with q = 146: two samples of q tokens (the one that set the bias, the one that tests it) leave sqrt(2/q) * 3.21 = 0.375.
TEST(balance, quantiles_settle_in_one_step_and_the_sign_rule_does_not) {
  Skewed router(6);
  const int64_t e = router.kExperts;
  for (const std::string rule : {"exact", "histogram", "sign"}) {
    std::vector<float> bias(e);
    std::vector<double> seen;
    for (size_t at = 0; at < 6; ++at) {
      testing::Step step(false, size_t(1) << 26);
      Routing r = router.run(step, bias, at);
      std::vector<int64_t> load(e);
      count_load(r, Batch::one(router.kTokens), load.data());
      seen.push_back(violation(load));
      if (rule == "exact") {
        bias = quantile_bias_exact(margins_of(r), e, router.kTopK);
      } else if (rule == "histogram") {
        MarginHistogram h(Tensor(bias.data(), DType::f32, {e}));
        observe(h, r, Batch::one(router.kTokens));
        bias = quantile_bias(h, router.kTopK);
      } else {
        bias = sign_bias(bias, load);
      }
    }
    fmt::print("{:10} max/mean - 1 = {:.2f} before; {:.2f} {:.2f} {:.2f} after 1, 2, 5 updates\n", rule, seen[0], seen[1], seen[2], seen[5]);
    EXPECT_GT(seen[0], 25);
    for (size_t at : {1, 2, 5}) {
      if (rule == "sign")
        EXPECT_GT(seen[at], 0.8 * seen[0]);
      else
        EXPECT_LT(seen[at], 0.375 * 1.5) << rule << " after " << at;
    }
  }
}

TEST(balance, the_histogram_is_within_a_bin_of_the_exact_quantile) {
  Skewed router(1);
  const int64_t e = router.kExperts;
  testing::Step step(false, size_t(1) << 26);
  std::vector<float> bias(e);
  Routing r = router.run(step, bias, 0);
  std::vector<float> exact = quantile_bias_exact(margins_of(r), e, router.kTopK);
  for (int64_t bins : {200, 1000}) {
    MarginHistogram h(Tensor(bias.data(), DType::f32, {e}), bins);
    observe(h, r, Batch::one(router.kTokens));
    std::vector<float> estimate = quantile_bias(h, router.kTopK);
    double worst = 0;
    for (int64_t j = 0; j < e; ++j) worst = std::max(worst, double(std::abs(estimate[j] - exact[j])));
    EXPECT_LE(worst, 1.1 * double(h.hi - h.lo) / double(bins)) << bins << " bins";  // a bin, and what centring moves
  }
}

TEST(balance, with_the_cutoffs_held_fixed_each_expert_gets_its_share_exactly) {
  int64_t tokens = 600, e = 24, k = 4;  // q = 100
  Values scores(tokens * e, 1), cutoff(tokens, 2);
  std::vector<float> margins(tokens * e);
  for (int64_t i = 0; i < tokens * e; ++i) margins[i] = cutoff[i / e] - scores[i] - float(i % e) / 8;
  std::vector<float> b = quantile_bias_exact(margins, e, k);
  double mean = 0;
  for (float x : b) mean += x;
  EXPECT_NEAR(mean, 0, 1e-5);
  // b is known up to the mean that was taken out: the quantile of expert 0 gives it back
  std::vector<float> first;
  for (int64_t i = 0; i < tokens; ++i) first.push_back(margins[i * e]);
  std::sort(first.begin(), first.end());
  double shift = double(first[100]) - b[0];
  for (int64_t j = 0; j < e; ++j) {
    int64_t below = 0;
    for (int64_t i = 0; i < tokens; ++i) below += margins[i * e + j] < b[j] + shift - 1e-6;
    EXPECT_EQ(below, 100) << "expert " << j;
  }
}

struct Small {
  static constexpr int64_t kTokens = 96, kExperts = 20, kWidth = 8;
  Values x{kTokens * kWidth, 1}, gate{kExperts * kWidth, 2}, bias{kExperts, 3, 0.2};
  void observe_rows(MarginHistogram& h, int64_t a, int64_t b) const {
    testing::Step step(false, size_t(1) << 22);
    Routing r = route(step.input(x.slice(a * kWidth, (b - a) * kWidth), {b - a, kWidth}), step.keep(step.param("gate", gate, {kExperts, kWidth})),
                      step.keep(step.param("bias", bias, {kExperts})), {.top_k = 3}, Batch::one(b - a));
    observe(h, r, Batch::one(b - a));
  }
  MarginHistogram histogram() const { return MarginHistogram(Tensor(const_cast<float*>(bias.data()), DType::f32, {kExperts})); }
};

TEST(balance, counts_do_not_depend_on_micro_batches_order_ranks_or_threads) {
  Small s;
  MarginHistogram whole = s.histogram();
  s.observe_rows(whole, 0, 96);
  EXPECT_EQ(whole.tokens, 96);
  int64_t total = 0;
  for (int32_t x : whole.counts) total += x;
  EXPECT_EQ(total, 96 * 20);
  int before = thread_count();
  for (int parts : {1, 2, 8})
    for (int threads : {1, 8}) {
      set_thread_count(threads);
      MarginHistogram cut = s.histogram(), other = s.histogram();
      for (int64_t i = parts; i-- > 0;) s.observe_rows(i % 2 ? other : cut, i * 96 / parts, (i + 1) * 96 / parts);
      cut.add(other);
      EXPECT_EQ(cut.counts, whole.counts);
      EXPECT_EQ(cut.tokens, whole.tokens);
      EXPECT_EQ(quantile_bias(cut, 3), quantile_bias(whole, 3));
    }
  set_thread_count(before);
}

TEST(balance, padding_changes_no_bit_of_the_bias_or_the_load) {
  Small s;
  Batch batch = Batch::one(96);
  std::vector<float> live;
  for (int64_t i = 0; i < 96; ++i) {
    batch.padding.push_back(i % 10 >= 3);  // 70 %
    if (i % 10 < 3)
      live.insert(live.end(), s.x.data() + i * 8, s.x.data() + (i + 1) * 8);
    else
      std::fill_n(s.x.data() + i * 8, 8, NAN);
  }
  auto next = [&](const Values& x, const Batch& b, std::vector<int64_t>& load) {
    testing::Step step(false, size_t(1) << 22);
    MarginHistogram h = s.histogram();
    Routing r = route(step.input(x, {b.tokens(), 8}), step.keep(step.param("gate", s.gate, {20, 8})), step.keep(step.param("bias", s.bias, {20})),
                      {.top_k = 3}, b);
    observe(h, r, b);
    load.assign(20, 0);
    count_load(r, b, load.data());
    return quantile_bias(h, 3);
  };
  std::vector<int64_t> with, without;
  int64_t rows = int64_t(live.size()) / 8;
  EXPECT_EQ(next(s.x, batch, with), next(Values(live), Batch::one(rows), without));
  EXPECT_EQ(with, without);
  int64_t total = 0;
  for (int64_t x : with) total += x;
  EXPECT_EQ(total, rows * 3);
}

TEST(balance, the_range_holds_every_margin_however_large_the_bias) {
  Small s;
  for (int64_t j = 0; j < 20; ++j) s.bias[j] = float(j) * 3 - 20;
  MarginHistogram h = s.histogram();
  EXPECT_EQ(h.lo, -21.0f);
  EXPECT_EQ(h.hi, 38.0f);
  s.observe_rows(h, 0, 96);
  for (int64_t j = 0; j < 20; ++j) EXPECT_EQ(h.counts[j * h.bins] + h.counts[(j + 1) * h.bins - 1], 0) << "clipped at expert " << j;
}

TEST(balance, without_a_cutoff_there_is_nothing_to_balance) {
  Small s;
  testing::Step step(false, size_t(1) << 22);
  Routing r = route(step.input(s.x, {96, 8}), step.keep(step.param("gate", s.gate, {20, 8})), step.keep(step.param("bias", s.bias, {20})),
                    {.top_k = 20}, Batch::one(96));
  EXPECT_EQ(r.cutoff.f32()[0], -INFINITY);
  MarginHistogram h = s.histogram();
  observe(h, r, Batch::one(96));
  EXPECT_EQ(h.tokens, 0);
  EXPECT_TRUE(quantile_bias(h, 3).empty());
  EXPECT_THAT([&] { quantile_bias(h, 20); }, testing::throws_error("[balance] top 20 of 20 experts has no cutoff to balance"));
  MarginHistogram narrow(Tensor(s.bias.data(), DType::f32, {20}), 10);
  EXPECT_THAT([&] { narrow.add(h); }, testing::throws_error("[balance] histograms of 20 x 10"));
}

TEST(balance, the_sign_rule_moves_each_bias_one_step_towards_the_mean) {
  EXPECT_EQ(sign_bias({0, 1, 2, 0}, {4, 2, 0, 2}, 0.5f), (std::vector<float>{-0.5f, 1, 2.5f, 0}));
}

}  // namespace
}  // namespace k3
