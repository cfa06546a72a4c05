// Causal attention of prefill, 192 / 128, against a softmax in double: ragged and empty sequences, more keys than queries, a sequence of NaN.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "k3/ops/attention/attention_cuda.h"
#include "k3/ops/kernel_testing.h"

namespace k3::testing {
namespace {

using prefill_kernel = kernel;

void check(int heads, double sharp, bool gated) {
  Random rng(5);
  const std::vector<std::pair<int, int>> shapes = {{1, 1},     {5, 5},   {64, 64},  {50, 50}, {128, 128}, {129, 129},
                                                   {200, 200}, {1, 300}, {70, 333}, {0, 10},  {127, 255}, {300, 300}};
  const int poisoned = 3;  // this sequence is NaN: nobody else may notice
  std::vector<int> qb = {0}, kb = {0};
  int longest = 0;
  for (auto [n, m] : shapes) qb.push_back(qb.back() + n), kb.push_back(kb.back() + m), longest = std::max(longest, n);
  const int64_t nq = qb.back(), nk = kb.back();
  auto q = narrowed(rng.normals(nq * heads * 192, 0, sharp)), kv = narrowed(rng.normals(nk * heads * 256)), sh = narrowed(rng.normals(nk * 72)),
       gate = narrowed(rng.normals(nq * heads * 128));
  for (int64_t i = kb[poisoned] * heads * 256; i < kb[poisoned + 1] * heads * 256; ++i) kv[i] = bf16{0x7fff};
  std::vector<double> right(nq * heads * 128, 0.), lse(nq * heads), largest(nq * heads), raw(nq * heads * 128, 0.);
  const double scale = 1 / std::sqrt(192.);
  for (size_t s = 0; s < shapes.size(); ++s)
    for (int i = 0; i < shapes[s].first; ++i)
      for (int h = 0; h < heads; ++h) {
        const int64_t row = qb[s] + i;
        int see = i + shapes[s].second - shapes[s].first + 1;
        std::vector<double> p(see);
        double top = -INFINITY, sum = 0;
        for (int j = 0; j < see; ++j) {
          const int64_t k = kb[s] + j;
          double x = 0;
          for (int c = 0; c < 192; ++c)
            x += double(to_float(q[(row * heads + h) * 192 + c])) * to_float(c < 128 ? kv[(k * heads + h) * 256 + c] : sh[k * 72 + c - 128]);
          p[j] = x * scale, top = std::max(top, p[j]);
        }
        for (double& x : p) sum += x = std::exp(x - top);
        lse[row * heads + h] = top + std::log(sum), largest[row * heads + h] = top;
        for (int c = 0; c < 128; ++c) {
          double& o = raw[(row * heads + h) * 128 + c];
          for (int j = 0; j < see; ++j) o += p[j] / sum * to_float(kv[((kb[s] + j) * heads + h) * 256 + 128 + c]);
          right[(row * heads + h) * 128 + c] = gated ? o / (1 + std::exp(-double(to_float(gate[(row * heads + h) * 128 + c])))) : o;
        }
      }
  There<bf16> dq(q), dkv(kv), dsh(sh), dg(gate), o(nq * heads * 128);
  There<float> dl(nq * heads), dm(nq * heads), dr(nq * heads * 128);
  There<int> dqb(qb), dkb(kb);
  cuda::PrefillArgs a{dq.data,  dkv.data,     dkv.data + 128,
                      dsh.data, heads * 192,  heads * 256,
                      256,      72,           heads * 128,
                      dqb.data, dkb.data,     int(shapes.size()),
                      heads,    longest,      nq,
                      nk,       float(scale), gated ? dg.data : nullptr,
                      o.data,   dl.data,      dm.data,
                      dr.data};
  K3_LAUNCH(prefill_forward(a, gpu::stream()));
  auto first = o.download();
  auto drop = [&](std::vector<double> v, bool by_head) {  // without the poisoned sequence
    const int64_t width = heads * (by_head ? 1 : 128);
    std::fill(v.begin() + qb[poisoned] * width, v.begin() + qb[poisoned + 1] * width, 0.);
    return v;
  };
  SCOPED_TRACE(fmt::format("{} heads, queries x {}{}", heads, sharp, gated ? ", gated" : ""));
  expect_error("output", error(drop(widened(first), false), drop(right, false)), 5e-3);  // P and o in bf16
  expect_error("log-sum", error(drop(widened(dl.download()), true), drop(lse, true)), 1e-5);
  expect_error("largest logit", error(drop(widened(dm.download()), true), drop(largest, true)), 1e-5);
  expect_error("output before the gate", error(drop(widened(dr.download()), false), drop(raw, false)), 3e-3);
  o.poison();
  K3_LAUNCH(prefill_forward(a, gpu::stream()));
  EXPECT_TRUE(same(first, o.download())) << "two runs differ";
}

TEST_F(prefill_kernel, cuda_equals_a_softmax_in_double) { check(2, 1, false), check(3, 3, true); }

}  // namespace
}  // namespace k3::testing
