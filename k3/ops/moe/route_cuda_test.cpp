// The router's kernel for many experts: the same experts in the same order as a sort, whichever of its two ways a row goes.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <numeric>

#include "k3/ops/moe/route_cuda.h"
#include "k3/ops/testing.h"

namespace k3 {
namespace {

using testing::Step;
using testing::Values;

TEST(route_kernel, cuda_chooses_as_a_sort_does) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  if constexpr (gpu::kBuilt) {
    for (auto [E, K] : {std::pair{896, 16}, {1024, 31}, {1000, 16}, {257, 8}, {64, 6}, {33, 31}, {32, 31}, {20, 19}, {8, 2}, {2, 1}}) {
      if (testing::few_shapes() && E != 896 && E != 64 && E != 20) continue;
      SCOPED_TRACE(fmt::format("{} experts, top {}", E, K));
      const int64_t T = 133;
      Values logits(T * E, 3), bias(E, 4, 0);
      for (int64_t t = 0; t < T; ++t)
        for (int64_t e = 0; e < E; ++e) {
          float& x = logits[t * E + e];
          if (t % 4 == 0) x = float((e * 7919 + t) % E) * 0.01f - 3;     // all apart
          if (t % 4 == 1) x = float(e % 5);                              // ties
          if (t % 4 == 2) x = float(e % 32 == t % 32 ? e : -e) * 0.01f;  // the large ones in one lane
          if (t % 4 == 3) x = std::round(x * 16) / 8;                    // a few ties
          x = std::min(x, 8.0f);                                         // below where a sigmoid rounds to 1
        }
      std::vector<int32_t> padding(size_t(T), 0);
      padding[5] = padding[132] = 1;
      std::vector<std::vector<char>> first;
      for (int again = 0; again < 2; ++again) {
        Step step(false, size_t(1) << 28, Device::cuda);
        auto ints = [&](int64_t n) { return step.arena().lend(DType::i32, {n}); };
        auto floats = [&](int64_t n) { return step.arena().lend(DType::f32, {n}); };
        Tensor pad = ints(T), chosen = ints(T * K), weights = floats(T * K), cutoff = floats(T);
        write(pad, padding.data());
        gpu::check(cuda::route({step.input(logits, {T * E}).f32(), step.input(bias, {int64_t(E)}).f32(), pad.i32(), T, E, K, true, 2.5f, chosen.i32(),
                                weights.f32(), cutoff.f32()},
                               gpu::stream()));
        const std::vector<std::vector<char>> bytes{testing::bytes_of(chosen), testing::bytes_of(weights), testing::bytes_of(cutoff)};
        if (again) {
          EXPECT_EQ(bytes, first) << "two runs differ";
          continue;
        }
        first = bytes;
        const HostCopy c(chosen), w(weights), cut(cutoff);
        for (int64_t t = 0; t < T; ++t) {
          std::vector<int> order(size_t(E), 0);
          std::iota(order.begin(), order.end(), 0);
          auto logit = [&](int e) { return logits[t * E + e]; };
          std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return logit(a) > logit(b); });
          auto score = [&](int e) { return 1 / (1 + std::exp(-double(logit(e)))); };
          double sum = 0;
          for (int k = 0; k < K; ++k) sum += score(order[size_t(k)]);
          for (int k = 0; k < K; ++k) {
            const int want = padding[size_t(t)] ? -1 : order[size_t(k)];
            ASSERT_EQ(c.tensor().i32()[t * K + k], want) << "token " << t << " choice " << k;
            ASSERT_NEAR(w.tensor().f32()[t * K + k], padding[size_t(t)] ? 0 : 2.5 * score(want) / sum, 2e-6) << "token " << t << " choice " << k;
          }
          ASSERT_NEAR(cut.tensor().f32()[t], padding[size_t(t)] ? 0 : score(order[size_t(K)]), 1e-6) << "token " << t;
        }
      }
    }
  }
}

// Rows by expert and then by token: padding has none, an expert may have none or all.
TEST(route_kernel, cuda_rows_lie_by_expert_and_then_by_token) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  if constexpr (gpu::kBuilt) {
    for (auto [T, E, K] : {std::array<int, 3>{301, 896, 16}, {301, 64, 6}, {77, 33, 31}, {1, 2, 1}, {4000, 8, 2}})
      for (bool one : {false, true}) {
        SCOPED_TRACE(fmt::format("{} tokens, {} experts, top {}{}", T, E, K, one ? ", all on the last ones" : ""));
        std::vector<int32_t> chosen;
        std::vector<float> weights;
        for (int t = 0; t < T; ++t)
          for (int k = 0; k < K; ++k)
            chosen.push_back(t % 9 == 7 ? -1 : one ? E - 1 - k : (t * 13 + k * (E / K)) % E), weights.push_back(float(t) + float(k) / 64);
        Step step(false, size_t(1) << 28, Device::cuda);
        auto ints = [&](int64_t n) { return step.arena().lend(DType::i32, {n}); };
        auto floats = [&](int64_t n) { return step.arena().lend(DType::f32, {n}); };
        Tensor c = ints(T * K), w = floats(T * K), begins = ints(E + 1), gather = ints(T * K), row_weight = floats(T * K), where = ints(T * K);
        Tensor counts = ints(cuda::sort_rows_counts(T, K, E));
        write(c, chosen.data()), write(w, weights.data());
        gpu::check(
            cuda::sort_rows({c.i32(), w.f32(), T, E, K, begins.i32(), gather.i32(), row_weight.f32(), where.i32(), counts.i32()}, gpu::stream()));
        const HostCopy b(begins), g(gather), rw(row_weight), at(where);
        int32_t row = 0;
        for (int e = 0; e < E; ++e) {
          ASSERT_EQ(b.i32()[e], row) << "expert " << e;
          for (int i = 0; i < T * K; ++i) {
            if (chosen[size_t(i)] != e) continue;
            ASSERT_EQ(g.i32()[row], i / K) << "row " << row;
            ASSERT_EQ(rw.f32()[row], weights[size_t(i)]) << "row " << row;
            ASSERT_EQ(at.i32()[i], row) << "row " << row;
            ++row;
          }
        }
        EXPECT_EQ(b.i32()[E], row);
        for (int i = 0; i < T * K; ++i)
          if (chosen[size_t(i)] < 0) { ASSERT_EQ(at.i32()[i], -1); }
      }
  }
}

}  // namespace
}  // namespace k3
