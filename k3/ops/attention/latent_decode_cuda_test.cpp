// Decode attention over the paged latent cache against a softmax in double: pages in any order, ragged and empty rows, one split and many.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "k3/core/dtype.h"
#include "k3/core/threads.h"
#include "k3/ops/attention/attention_cuda.h"
#include "k3/ops/testing.h"

namespace k3 {
namespace {

using testing::Step;

constexpr int kRow = cuda::kLatentRow, kValue = cuda::kLatent, kPage = cuda::kPageTokens;
const double kScale = 1 / std::sqrt(192.0);

struct Case {
  int heads, split;  // pages a split
  double sharp;      // of the queries: larger scores, so maxima that move
};

struct Inputs {
  std::vector<int32_t> lengths, table;  // entries past a row's last page name no page
  std::vector<bf16> cache, q;           // behind a row's last token the cache is NaN
  int heads, stride, pages = 1;

  Inputs(const Case& c, std::vector<int32_t> row_lengths) : lengths(std::move(row_lengths)), heads(c.heads) {
    Rng rng{7, uint64_t(c.heads)};
    uint64_t drawn = 0;
    const int rows = int(lengths.size());
    stride = (*std::max_element(lengths.begin(), lengths.end()) + kPage - 1) / kPage + 1;
    for (int n : lengths) pages += (n + kPage - 1) / kPage;
    std::vector<int32_t> order(size_t(pages), 0);
    table.assign(size_t(rows * stride), 1 << 30);
    std::iota(order.begin(), order.end(), 0);
    for (int i = pages - 1; i > 0; --i) std::swap(order[size_t(i)], order[size_t(double(i + 1) * rng.uniform(drawn++))]);
    cache.assign(size_t(pages) * kPage * kRow, bf16{0x7fff}), q.resize(size_t(rows) * size_t(heads) * kRow);
    for (bf16& x : q) x = to_bf16(float(c.sharp * rng.normal(drawn++)));
    int used = 0;
    for (int r = 0; r < rows; ++r)
      for (int t = 0; t < lengths[size_t(r)]; ++t) {
        if (t % kPage == 0) table[size_t(r * stride + t / kPage)] = order[size_t(used++)];
        const double size = t % 50 == 49 ? 1 + 0.01 * t : 1;
        for (int i = 0; i < kRow; ++i) cache[token(r, t) + size_t(i)] = to_bf16(float(size * rng.normal(drawn++)));
      }
  }
  size_t token(int r, int t) const { return (size_t(table[size_t(r * stride + t / kPage)]) * kPage + size_t(t % kPage)) * kRow; }
  size_t query(int r, int h) const { return (size_t(r) * size_t(heads) + size_t(h)) * kRow; }

  std::vector<double> reference() const {  // (rows, heads, 512)
    std::vector<double> want(lengths.size() * size_t(heads) * kValue, 0.0);
    std::vector<float> values(cache.size());
    for (size_t i = 0; i < cache.size(); ++i) values[i] = to_float(cache[i]);
    parallel_for(int64_t(lengths.size()) * heads, [&](int64_t pair) {
      const int r = int(pair / heads), h = int(pair % heads);
      const auto tokens = size_t(lengths[size_t(r)]);
      std::vector<double> s(tokens, 0.0), from(kRow);
      for (int i = 0; i < kRow; ++i) from[size_t(i)] = to_float(q[query(r, h) + size_t(i)]);
      double top = -INFINITY, sum = 0;
      for (size_t t = 0; t < s.size(); ++t) {
        const float* key = &values[token(r, int(t))];
        double x = 0;
        for (size_t i = 0; i < kRow; ++i) x += key[i] * from[i];
        s[t] = kScale * x, top = std::max(top, s[t]);
      }
      for (double& x : s) sum += x = std::exp(x - top);
      double* o = &want[size_t(pair) * kValue];
      for (size_t t = 0; t < s.size(); ++t) {
        const float* value = &values[token(r, int(t))];
        for (int i = 0; i < kValue; ++i) o[i] += s[t] / sum * value[i];
      }
    });
    return want;
  }

  std::vector<char> run(int split, int row = -1) const {  // one row alone, or all
    Step step(false, size_t(1) << 30, Device::cuda);
    auto there = [&](DType type, const auto& v) {
      Tensor t = step.arena().lend(type, {int64_t(v.size())});
      write(t, v.data());
      return t;
    };
    const int first = std::max(row, 0), rows = row < 0 ? int(lengths.size()) : 1;
    const int longest = row < 0 ? *std::max_element(lengths.begin(), lengths.end()) : lengths[size_t(row)];
    Tensor out = step.arena().lend(DType::bf16, {int64_t(rows) * heads * kValue});
    Tensor part = step.arena().lend(DType::f32, {std::max<int64_t>(1, cuda::latent_decode_workspace(rows, heads, longest, split))});
    cuda::LatentDecodeArgs a{};
    a.q = static_cast<bf16*>(there(DType::bf16, q).data()) + query(first, 0), a.q_stride = int64_t(heads) * kRow;
    a.pages = there(DType::bf16, cache).data(), a.page_count = pages;
    a.table = there(DType::i32, table).i32() + first * stride, a.table_stride = stride, a.lengths = there(DType::i32, lengths).i32() + first;
    a.rows = rows, a.heads = heads, a.longest = longest, a.scale = float(kScale), a.split_pages = split, a.partial = part.f32(), a.out = out.data();
    gpu::check(cuda::latent_decode(a, gpu::stream()));
    return testing::bytes_of(out);
  }
};

TEST(latent_decode, cuda_equals_a_softmax_in_double) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  if constexpr (gpu::kBuilt) {
    for (const Case& c : {Case{96, 100, 1},
                          {96, 2, 1},
                          {96, 3, 6},
                          {96, 1, 3},
                          {70, 100, 1},
                          {64, 5, 1},
                          {48, 4, 2},
                          {34, 100, 3},
                          {32, 1, 3},
                          {12, 2, 1},
                          {12, 100, 6},
                          {2, 4, 2}}) {
      SCOPED_TRACE(fmt::format("{} heads, {} pages a split, queries x {}", c.heads, c.split, c.sharp));
      if (testing::few_shapes() && c.heads != 96 && c.heads != 48 && c.heads != 12) continue;
      const Inputs inputs(c, testing::few_shapes() ? std::vector<int32_t>{65, 0, 300} : std::vector<int32_t>{1, 63, 64, 65, 0, 97, 300, 600});
      const std::vector<double> want = inputs.reference();
      const std::vector<char> first = inputs.run(c.split);
      if (!testing::few_shapes()) { EXPECT_EQ(inputs.run(c.split), first) << "two runs differ"; }
      const bf16* got = reinterpret_cast<const bf16*>(first.data());
      for (size_t i = 0; i < want.size(); i += kValue) {  // a row's head at a time
        double error = 0, size = 0;
        for (size_t n = i; n < i + kValue; ++n) {
          ASSERT_TRUE(std::isfinite(to_float(got[n]))) << n;
          error += (to_float(got[n]) - want[n]) * (to_float(got[n]) - want[n]), size += want[n] * want[n];
        }
        // P in bf16: 2^-9 of each token's share; the result in bf16, 2^-9 again
        ASSERT_LE(std::sqrt(error), 6e-3 * std::sqrt(size)) << "row " << i / kValue / size_t(c.heads) << ", head " << i / kValue % size_t(c.heads);
      }
    }
  }
}

TEST(latent_decode, a_row_does_not_depend_on_its_neighbours) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  if constexpr (gpu::kBuilt) {
    for (const Case& c : {Case{96, 100, 2}, {96, 2, 2}, {40, 3, 2}, {12, 2, 2}}) {
      const Inputs inputs(c, testing::few_shapes() ? std::vector<int32_t>{130, 0, 65} : std::vector<int32_t>{130, 1, 64, 0, 500, 65});
      const std::vector<char> all = inputs.run(c.split);
      const size_t bytes = size_t(c.heads) * kValue * sizeof(bf16);
      for (int r = 0; r < int(inputs.lengths.size()); ++r) {
        SCOPED_TRACE(fmt::format("{} heads, {} pages a split, row {}", c.heads, c.split, r));
        if (inputs.lengths[size_t(r)] == 0) continue;  // a call whose longest row is empty launches nothing that could differ
        EXPECT_EQ(inputs.run(c.split, r),
                  std::vector<char>(all.begin() + ptrdiff_t(size_t(r) * bytes), all.begin() + ptrdiff_t(size_t(r + 1) * bytes)));
      }
    }
  }
}

}  // namespace
}  // namespace k3
