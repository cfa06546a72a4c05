// The bfloat16 kernels of attention over depth against double precision: forward, with addition and norm, backward.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "k3/ops/depth_mix/depth_mix_cuda.h"
#include "k3/ops/kernel_testing.h"

namespace k3::testing {
namespace {

using depth_mix_kernel = kernel;

void check(int n, int64_t rows, int d, double size, bool equal = false) {
  Random rng(uint64_t(n * 7 + d));
  std::vector<std::vector<bf16>> v;
  for (int i = 0; i < n; ++i) v.push_back(equal && i ? v[0] : narrowed(rng.normals(rows * d, 0, size * (i + 1))));
  std::vector<float> w = rng.normals(d, 1, 0.2), p = rng.normals(d, 0, 3 / std::sqrt(d)), norm = rng.normals(d, 1, 0.2), dw0 = rng.normals(d),
                     dp0 = rng.normals(d);
  std::vector<bf16> add = narrowed(rng.normals(rows * d)), dy = narrowed(rng.normals(rows * d));
  SCOPED_TRACE(fmt::format("{} sources, {} x {}, of size {}{}", n, rows, d, size, equal ? ", all the same" : ""));

  std::vector<There<bf16>> dv, dd;
  for (int i = 0; i < n; ++i) dv.emplace_back(v[i]), dd.emplace_back(rows * d);
  There<bf16> dadd(add), ddy(dy), y(rows * d), nn(rows * d), sum(rows * d);
  There<float> fw(w), fp(p), fn(norm), stats(rows * 32), part(cuda::depth_mix_partial(d)), gw(dw0), gp(dp0);
  cuda::DepthMixArgs a{};
  for (int i = 0; i < n; ++i) a.v[i] = dv[i].data, a.dv[i] = dd[i].data;
  a.sources = n, a.w = fw.data, a.p = fp.data, a.eps = 1e-5f, a.rows = rows, a.d = d, a.y = y.data, a.stats = stats.data, a.dy = ddy.data;
  a.dw = gw.data, a.dp = gp.data, a.partial = part.data;

  std::vector<double> ry(rows * d, 0.), rn(rows * d), rdw(dw0.begin(), dw0.end()), rdp(dp0.begin(), dp0.end());
  std::vector<std::vector<double>> rdv(n, std::vector<double>(rows * d));
  auto reference = [&] {
    std::fill(ry.begin(), ry.end(), 0.);
    std::vector<double> du(d, 0.);
    for (int64_t t = 0; t < rows; ++t) {
      std::vector<double> r(n), s(n), c(n), alpha(n);
      double top = -INFINITY, total = 0, mean = 0;
      for (int i = 0; i < n; ++i) {
        double ss = 0, dot = 0;
        for (int k = 0; k < d; ++k) {
          double x = to_float(v[i][t * d + k]);
          ss += x * x, dot += x * w[k] * p[k], c[i] += x * to_float(dy[t * d + k]);
        }
        r[i] = 1 / std::sqrt(ss / d + 1e-5), s[i] = r[i] * dot, top = std::max(top, s[i]);
      }
      for (int i = 0; i < n; ++i) total += alpha[i] = std::exp(s[i] - top);
      for (int i = 0; i < n; ++i) alpha[i] /= total, mean += alpha[i] * c[i];
      for (int i = 0; i < n; ++i) {
        double ds = alpha[i] * (c[i] - mean);
        for (int k = 0; k < d; ++k) {
          double x = to_float(v[i][t * d + k]);
          ry[t * d + k] += alpha[i] * x;
          rdv[i][t * d + k] = alpha[i] * to_float(dy[t * d + k]) + ds * r[i] * w[k] * p[k] - ds * s[i] * r[i] * r[i] / d * x;
          du[k] += ds * r[i] * x;
        }
      }
      double square = 0;
      for (int k = 0; k < d; ++k) square += ry[t * d + k] * ry[t * d + k];
      for (int k = 0; k < d; ++k) rn[t * d + k] = ry[t * d + k] / std::sqrt(square / d + 1e-5) * norm[k];
    }
    for (int k = 0; k < d; ++k) rdw[k] = dw0[k] + du[k] * p[k], rdp[k] = dp0[k] + du[k] * w[k];
  };
  reference();
  K3_LAUNCH(depth_mix_forward(a, gpu::stream()));
  K3_LAUNCH(depth_mix_backward(a, gpu::stream()));
  auto first = y.download();
  expect_error("y", error(widened(first), ry), 2.5e-3);  // rounded to bf16: 1.7e-3
  double worst = 0;
  for (int i = 0; i < n; ++i) worst = std::max(worst, error(dd[i], rdv[i]));
  expect_error("dv", worst, 2.5e-3);
  auto fdw = gw.download(), fdp = gp.download();
  expect_error("dw", error(widened(fdw), rdw), 1e-4);
  expect_error("dp", error(widened(fdp), rdp), 1e-4);
  gw.upload(dw0), gp.upload(dp0), y.poison(), part.poison();
  for (auto& x : dd) x.zero();
  a.add = true;
  K3_LAUNCH(depth_mix_forward(a, gpu::stream()));
  K3_LAUNCH(depth_mix_backward(a, gpu::stream()));
  double again = 0;
  for (int i = 0; i < n; ++i) again = std::max(again, error(dd[i], rdv[i]));
  expect_error("dv added to zeros", again, 2.5e-3);
  EXPECT_TRUE(same(first, y.download()) && same(fdw, gw.download()) && same(fdp, gp.download())) << "two runs differ";

  a.addend = dadd.data, a.sum = sum.data, a.norm = fn.data, a.n = nn.data;  // fused: the last source grows first, the mix is normed
  for (int64_t i = 0; i < rows * d; ++i) v[n - 1][i] = to_bf16(to_float(v[n - 1][i]) + to_float(add[i]));
  reference();
  K3_LAUNCH(depth_mix_forward(a, gpu::stream()));
  expect_error("fused y", error(y, ry), 2.5e-3);
  expect_error("fused norm", error(nn, rn), 4e-3);
  expect_error("fused sum", error(sum, widened(v[n - 1])), 0);
}

TEST_F(depth_mix_kernel, cuda_equals_double) {
  check(9, few_shapes() ? 30 : 300, few_shapes() ? 1024 : 7168, 1), check(5, 5, 7168, 1), check(4, 133, 512, 1), check(3, 40, 8, 1),
      check(2, 1, 4096, 1e-3), check(5, few_shapes() ? 27 : 270, 3584, 1);
}

// One source is handed through; equal ones have equal shares; sizes from 1e-20 to 1e15 (bfloat16 has float32's range, and squares of 1e15 still fit).
TEST_F(depth_mix_kernel, cuda_one_source_equal_logits_and_huge_norms_equal_double) {
  check(1, 5, 7168, 1), check(6, 33, 1024, 1, true), check(9, 20, 7168, 1e4), check(4, 20, 512, 1e15), check(2, 20, 512, 1e-20);
}

}  // namespace
}  // namespace k3::testing
