// Drawing on the GPU against sample() on the CPU.
#include <gtest/gtest.h>

#include "k3/ops/sample/sample.h"
#include "k3/ops/sample/sample_cuda.h"
#include "k3/ops/testing.h"

namespace k3 {
namespace {

// One row of logits a draw; position p is `tokens` of row p.
std::vector<cuda::SampleResult> draw(const std::vector<float>& logits, int64_t rows, const std::vector<SampleOptions>& options, bool has_read) {
  const int64_t v = int64_t(logits.size()) / rows;
  auto list = [&](const auto& values) {
    Buffer b(values.size() * sizeof(values[0]), Device::cuda);
    gpu::upload(b.data(), values.data(), b.bytes());
    return b;
  };
  std::vector<cuda::SampleRow> o;
  std::vector<int32_t> tokens, slots, open(size_t(rows), 16), ids(size_t(rows), 5);
  std::vector<uint32_t> steps(size_t(rows), 0);
  for (int64_t r = 0; r < rows; ++r) {
    const SampleOptions& s = options[size_t(r) % options.size()];
    o.push_back({s.temperature, s.top_p, s.min_p, s.top_k, s.seed});
    tokens.push_back(int32_t(r)), slots.push_back(r % 7 == 6 ? -1 : int32_t(r));
  }
  Buffer l = list(logits), so = list(o), st = list(tokens), ss = list(slots), sp = list(open), si = list(ids), sn = list(steps);
  auto* results = reinterpret_cast<cuda::SampleResult*>(gpu::allocate_shared(size_t(rows) * sizeof(cuda::SampleResult)));
  if constexpr (gpu::kBuilt) {
    auto i32 = [](const Buffer& b) { return reinterpret_cast<int32_t*>(b.data()); };
    gpu::check(cuda::sample_step({reinterpret_cast<float*>(l.data()), rows, v, reinterpret_cast<cuda::SampleRow*>(so.data()), i32(ss), i32(si),
                                  i32(st), i32(sp), reinterpret_cast<uint32_t*>(sn.data()), has_read, 16, results, 1},
                                 gpu::stream()));
  }
  std::vector<int32_t> after(tokens.size()), drawn(tokens.size()), opened(tokens.size());
  gpu::download(after.data(), st.data(), st.bytes()), gpu::download(drawn.data(), si.data(), si.bytes());
  gpu::download(opened.data(), sp.data(), sp.bytes());
  std::vector<cuda::SampleResult> out(results, results + rows);
  gpu::release_shared(reinterpret_cast<char*>(results));
  for (int64_t r = 0; r < rows; ++r) {
    const bool filler = slots[size_t(r)] < 0;
    EXPECT_EQ(after[size_t(r)], tokens[size_t(r)] + (has_read && !filler));
    EXPECT_EQ(opened[size_t(r)], has_read && !filler ? 1 : 16);
    EXPECT_EQ(out[size_t(r)].stamp, filler ? 0u : 1u);
    EXPECT_EQ(drawn[size_t(r)], filler ? 5 : out[size_t(r)].id);
  }
  return out;
}

TEST(sample, cuda_draws_what_the_cpu_draws) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  std::vector<SampleOptions> options = {
      {},                                                                         //
      {.temperature = 1, .seed = 1},                                              //
      {.temperature = 0.6f, .top_k = 5, .seed = 2},                               //
      {.temperature = 1.3f, .top_p = 0.9f, .seed = 3},                            //
      {.temperature = 1, .min_p = 0.05f, .seed = 4},                              //
      {.temperature = 2, .top_k = 40, .top_p = 0.5f, .min_p = 0.01f, .seed = 5},  //
      {.temperature = 0.01f, .top_p = 0.999f, .seed = 6},                         //
      {.temperature = 1, .top_k = 1, .seed = 7},                                  //
      {.temperature = 1, .top_k = 1 << 30, .top_p = 0.01f, .seed = 8},            //
      {.temperature = 50, .top_p = 0.99f, .seed = (uint64_t(1) << 63) + 9},
  };
  // A race checker takes a minute for a draw, whose every thread reads eight blocks' sums some forty times: one draw, greedy rows and a filler.
  if (testing::few_shapes()) options = {options[3], {}, {}, {}, {}, {}, {}};
  for (int64_t v : {1, 2, 5, 97, 2048, 8192, 8193, 50001, 163840, 196608}) {
    if (testing::few_shapes() && v != 8193) continue;
    const int64_t rows = testing::few_shapes() ? 7 : v > 9000 ? 40 : 200;
    for (int kind = 0; kind < (testing::few_shapes() ? 1 : 4); ++kind) {  // spread, many ties, some masked, almost all masked
      std::vector<float> logits(size_t(v * rows));
      for (int64_t i = 0; i < v * rows; ++i) {
        double x = Rng{uint64_t(v), uint64_t(kind)}.normal(i) * 3;
        if (kind == 1) x = std::round(x);
        if (kind == 2 && i % v % 3 == 1) x = -INFINITY;
        if (kind == 3 && i % v != i / v % v) x = -INFINITY;
        logits[size_t(i)] = float(x);
      }
      const auto got = draw(logits, rows, options, kind % 2);
      for (int64_t r = 0; r < rows; ++r) {
        if (r % 7 == 6) continue;
        const SampleOptions& o = options[size_t(r) % options.size()];
        ASSERT_EQ(got[size_t(r)].id, sample(logits.data() + r * v, v, o, uint64_t(r + kind % 2)))
            << "row " << r << " of " << v << " tokens, kind " << kind << ", options " << r % 10;
      }
    }
  }
}

TEST(sample, cuda_finds_broken_logits) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  for (int64_t v : {3, 9000}) {
    std::vector<float> logits(size_t(4 * v), 1.0f);
    logits[size_t(v - 1)] = NAN;
    logits[size_t(v + 1)] = INFINITY, logits[size_t(2 * v - 1)] = NAN;
    for (int64_t i = 2 * v; i < 3 * v; ++i) logits[size_t(i)] = -INFINITY;
    logits[size_t(3 * v)] = -INFINITY;
    const auto got = draw(logits, 4, {{.temperature = 1}}, true);
    for (int r = 0; r < 3; ++r) EXPECT_EQ(got[size_t(r)].id, -1) << r;
    EXPECT_EQ(got[0].where, v - 1);
    EXPECT_TRUE(std::isnan(got[0].value));
    EXPECT_EQ(got[1].where, 1);
    EXPECT_EQ(got[1].value, INFINITY);
    EXPECT_EQ(got[2].where, -1);
    EXPECT_EQ(got[3].id, sample(logits.data() + 3 * v, v, {.temperature = 1}, 4));
  }
}

}  // namespace
}  // namespace k3
