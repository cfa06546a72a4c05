#include "k3/ops/sample/sample.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "k3/ops/testing.h"

namespace k3 {
namespace {

using testing::Values;

// How often each token comes in `draws` positions.
std::map<int32_t, double> frequencies(const std::vector<float>& logits, const SampleOptions& o, int draws = 20000) {
  std::map<int32_t, double> f;
  for (int i = 0; i < draws; ++i) f[sample(logits.data(), int64_t(logits.size()), o, uint64_t(i))] += 1.0 / draws;
  return f;
}
std::vector<float> logs(std::vector<double> p) {
  std::vector<float> l;
  for (double x : p) l.push_back(float(std::log(x)));
  return l;
}
// Four standard deviations of a frequency over 20,000 draws.
double four_sigma(double p) { return 4 * std::sqrt(p * (1 - p) / 20000) + 1e-9; }

TEST(sample, greedy_takes_the_lowest_id_on_ties) {
  std::vector<float> l = {1, 3, 2, 3};
  EXPECT_EQ(sample(l.data(), 4, {}, 0), 1);
  EXPECT_EQ(sample(l.data(), 4, {.temperature = 1, .top_k = 1}, 5), 1);
}

TEST(sample, frequencies_are_the_probabilities) {
  std::vector<double> p = {0.05, 0.4, 0.25, 0.2, 0.1};
  auto f = frequencies(logs(p), {.temperature = 1, .seed = 7});
  for (int i = 0; i < 5; ++i) EXPECT_NEAR(f[i], p[i], four_sigma(p[i])) << i;
  // temperature 2 takes the square root of each
  double sum = 0;
  for (double x : p) sum += std::sqrt(x);
  f = frequencies(logs(p), {.temperature = 2, .seed = 8});
  for (int i = 0; i < 5; ++i) EXPECT_NEAR(f[i], std::sqrt(p[i]) / sum, four_sigma(0.3)) << i;
}

TEST(sample, each_filter_keeps_what_it_says) {
  auto l = logs({0.05, 0.4, 0.25, 0.2, 0.1});
  auto tokens = [&](SampleOptions o) {
    std::vector<int32_t> kept;
    o.temperature = 1;
    for (auto [token, share] : frequencies(l, o, 3000)) kept.push_back(token);
    return kept;
  };
  EXPECT_EQ(tokens({.top_k = 2}), (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(tokens({.top_p = 0.39f}), (std::vector<int32_t>{1}));
  EXPECT_EQ(tokens({.top_p = 0.41f}), (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(tokens({.top_p = 0.86f}), (std::vector<int32_t>{1, 2, 3, 4}));
  EXPECT_EQ(tokens({.min_p = 0.3f}), (std::vector<int32_t>{1, 2, 3}));  // 0.12 and more
  // the order: of the three largest (0.85 together) 0.4 and 0.25 reach 0.7 of the mass; of all five they would not
  EXPECT_EQ(tokens({.top_k = 3, .top_p = 0.7f}), (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(tokens({.top_p = 0.7f}), (std::vector<int32_t>{1, 2, 3}));
  auto f = frequencies(l, {.temperature = 1, .top_k = 2});
  EXPECT_NEAR(f[1], 0.4 / 0.65, four_sigma(0.6));
  std::vector<float> ties = {1, 2, 2, 2};
  EXPECT_EQ(frequencies(ties, {.temperature = 1, .top_k = 2}, 500).size(), 2u);
  EXPECT_EQ(frequencies(ties, {.temperature = 1, .top_k = 2}, 500).count(3), 0u);
}

TEST(sample, the_temperature_comes_before_the_filters) {
  auto l = logs({0.6, 0.3, 0.1});  // at temperature 0.25: 0.941, 0.059, 0.0007
  EXPECT_EQ(frequencies(l, {.temperature = 0.25f, .top_p = 0.9f}, 1000).size(), 1u);
  EXPECT_EQ(frequencies(l, {.temperature = 1, .top_p = 0.9f}, 1000).size(), 2u);
}

TEST(sample, a_filter_that_keeps_everything_changes_nothing) {
  Values v(1000, 1, 2);
  for (uint64_t i = 0; i < 500; ++i) {
    int32_t plain = sample(v.data(), 1000, {.temperature = 1, .seed = 3}, i);
    EXPECT_EQ(sample(v.data(), 1000, {.temperature = 1, .top_k = 1000, .seed = 3}, i), plain);
    EXPECT_EQ(sample(v.data(), 1000, {.temperature = 1, .top_p = 0.99999994f, .min_p = 1e-30f, .seed = 3}, i), plain);
  }
}

// A filter does what masking the others would do, draw for draw.
TEST(sample, a_filter_equals_a_mask) {
  Values v(1000, 1, 2);
  std::vector<int32_t> order(1000);
  for (int i = 0; i < 1000; ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return v[a] > v[b]; });
  double total = 0, mass = 0;
  for (int i = 0; i < 1000; ++i) total += std::exp(double(v[i]));
  size_t half = 0;  // how many of the largest make half of the mass
  while (mass < total / 2) mass += std::exp(double(v[order[half++]]));
  auto only = [&](size_t n) {
    std::vector<float> masked(1000, -INFINITY);
    for (size_t i = 0; i < n; ++i) masked[order[i]] = v[order[i]];
    return masked;
  };
  std::vector<float> largest = only(40), likely = only(half);
  for (uint64_t i = 0; i < 300; ++i) {
    EXPECT_EQ(sample(v.data(), 1000, {.temperature = 1, .top_k = 40}, i), sample(largest.data(), 1000, {.temperature = 1}, i));
    EXPECT_EQ(sample(v.data(), 1000, {.temperature = 1, .top_p = 0.5f}, i), sample(likely.data(), 1000, {.temperature = 1}, i));
  }
}

TEST(sample, is_a_pure_function_of_seed_and_position) {
  Values v(300, 1);
  SampleOptions o{.temperature = 1, .seed = 42}, other = o;
  other.seed = 43;
  int same = 0, next = 0;
  for (uint64_t i = 0; i < 300; ++i) {
    int32_t t = sample(v.data(), 300, o, i);
    EXPECT_EQ(sample(v.data(), 300, o, i), t);
    same += sample(v.data(), 300, other, i) == t, next += sample(v.data(), 300, o, i + 1) == t;
  }
  EXPECT_LT(same, 30);
  EXPECT_LT(next, 30);
}

TEST(sample, masked_tokens_are_never_drawn_or_listed) {
  Values v(100, 1);
  for (int i = 0; i < 100; ++i)
    if (i % 10 != 3) v[i] = -INFINITY;
  for (const SampleOptions& o : {SampleOptions{}, {.temperature = 1}, {.temperature = 100, .top_k = 50}, {.temperature = 5, .top_p = 0.999f}})
    for (auto [token, share] : frequencies({v.data(), v.data() + 100}, o, 500)) EXPECT_EQ(token % 10, 3);
  std::vector<float> out(100);
  log_probabilities(v.data(), 100, out.data());
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(i % 10 == 3 ? std::isfinite(out[i]) : out[i] == -INFINITY);
  auto top = top_log_probabilities(v.data(), 100, 20);
  ASSERT_EQ(top.size(), 10u);
  for (auto t : top) EXPECT_TRUE(std::isfinite(t.log_probability));
  std::vector<float> only = {-INFINITY, 2, -INFINITY};
  EXPECT_EQ(sample(only.data(), 3, {.temperature = 1}, 9), 1);
  EXPECT_EQ(top_log_probabilities(only.data(), 3, 20)[0].log_probability, 0);
}

TEST(sample, extreme_logits_and_temperatures_never_break) {
  std::vector<float> l = {-3e38f, 3e38f, 0, 3e38f};
  for (float t : {1e-45f, 1e-6f, 1.0f, 3e38f})
    for (uint64_t i = 0; i < 100; ++i) {
      int32_t token = sample(l.data(), 4, {.temperature = t, .top_p = 0.9f, .min_p = 0.01f}, i);
      EXPECT_TRUE(token >= 0 && token < 4);
      if (t <= 1) { EXPECT_TRUE(token == 1 || token == 3); }
    }
  std::vector<float> one = {-5};
  EXPECT_EQ(sample(one.data(), 1, {.temperature = 2}, 0), 0);
}

TEST(sample, log_probabilities_are_right_at_every_level) {
  for (auto isa : testing::levels())
    for (int64_t n : {1, 5, 4097}) {
      testing::ForceIsa force(isa);
      Values v(n, 1, 5);
      std::vector<float> out(n);
      log_probabilities(v.data(), n, out.data());
      double sum = 0;
      for (int64_t i = 0; i < n; ++i) sum += std::exp(double(v[i]));
      for (int64_t i = 0; i < n; ++i) EXPECT_NEAR(out[i], double(v[i]) - std::log(sum), 4e-6);  // logits to 40: an ulp is 4e-6
      auto top = top_log_probabilities(v.data(), n, 3);
      for (size_t i = 0; i < top.size(); ++i) {
        EXPECT_EQ(top[i].log_probability, out[top[i].token]);
        if (i) { EXPECT_GE(top[i - 1].log_probability, top[i].log_probability); }
      }
      EXPECT_EQ(top[0].token, sample(v.data(), n, {}, 0));
    }
}

TEST(sample, broken_logits_and_options_are_refused_by_name) {
  std::vector<float> nan = {0, NAN}, inf = {INFINITY, 0}, masked = {-INFINITY, -INFINITY}, fine = {0, 1};
  for (const SampleOptions& o : {SampleOptions{}, {.temperature = 1}}) {
    EXPECT_THAT([&] { sample(nan.data(), 2, o, 0); }, testing::throws_error("[sample] the logit of token 1 is nan"));
    EXPECT_THAT([&] { sample(inf.data(), 2, o, 0); }, testing::throws_error("[sample] the logit of token 0 is inf"));
    EXPECT_THAT([&] { sample(masked.data(), 2, o, 0); }, testing::throws_error("[sample] all 2 tokens are masked"));
  }
  std::vector<float> out(2);
  EXPECT_THAT([&] { log_probabilities(nan.data(), 2, out.data()); }, testing::throws_error("[sample] the logit of token 1 is nan"));
  auto with = [&](SampleOptions o) { return [&fine, o] { sample(fine.data(), 2, o, 0); }; };
  EXPECT_THAT(with({.temperature = -1}), testing::throws_error("[sample] temperature must be 0 or more, not -1"));
  EXPECT_THAT(with({.temperature = NAN}), testing::throws_error("[sample] temperature must be 0 or more, not nan"));
  EXPECT_THAT(with({.top_k = -2}), testing::throws_error("[sample] top_k must be 0 (off) or more, not -2"));
  EXPECT_THAT(with({.top_p = 0}), testing::throws_error("[sample] top_p must be above 0 and at most 1, not 0"));
  EXPECT_THAT(with({.min_p = 2}), testing::throws_error("[sample] min_p must be from 0 to 1, not 2"));
}

}  // namespace
}  // namespace k3
