// RMS norm with the addition before it, in bfloat16 and float32, against double.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "k3/ops/norm/norm_cuda.h"
#include "k3/ops/kernel_testing.h"

namespace k3::testing {
namespace {

using norm_kernel = kernel;

template <class T>
std::vector<T> as(const std::vector<float>& x) {
  if constexpr (std::is_same_v<T, float>)
    return x;
  else
    return narrowed(x);
}

template <class T>
void check_norm(int64_t rows, int d) {
  constexpr bool wide = std::is_same_v<T, float>;
  Random rng(1);
  auto x = as<T>(rng.normals(rows * d)), add = as<T>(rng.normals(rows * d)), dy = as<T>(rng.normals(rows * d));
  auto w = rng.normals(d, 1, 0.2), dw0 = rng.normals(d);
  There<T> bx(x), ba(add), bs(rows * d), by(rows * d), bdy(dy), bdx(rows * d);
  There<float> bw(w), bdw(dw0), part(264 * d);
  cuda::RmsNormArgs a{bx.data, ba.data, bs.data, bw.data, 1e-5f, rows, d, wide, by.data, bdy.data, bdx.data, bdw.data, part.data};
  K3_LAUNCH(rms_norm_forward(a, gpu::stream()));
  a.x = bs.data;
  K3_LAUNCH(rms_norm_backward(a, gpu::stream()));
  auto s = widened(bs.download()), g = widened(dy);
  std::vector<double> y(rows * d), dx(rows * d), dw(dw0.begin(), dw0.end());
  for (int64_t n = 0; n < rows; ++n) {
    double sq = 0, dot = 0;
    for (int i = 0; i < d; ++i) sq += s[n * d + i] * s[n * d + i], dot += s[n * d + i] * g[n * d + i] * w[i];
    double r = 1 / std::sqrt(sq / d + 1e-5);
    for (int i = 0; i < d; ++i) {
      double v = s[n * d + i];
      y[n * d + i] = v * r * w[i], dx[n * d + i] = r * (g[n * d + i] * w[i] - v * r * r * dot / d), dw[i] += g[n * d + i] * v * r;
    }
  }
  SCOPED_TRACE(fmt::format("{} {} x {}", wide ? "float32" : "bfloat16", rows, d));
  const double limit = wide ? 1e-6 : 2.5e-3;
  expect_error("y", error(by, y), limit);
  expect_error("dx", error(bdx, dx), limit);
  expect_error("dw", error(bdw, dw), 1e-5);
}

TEST_F(norm_kernel, cuda_equals_double) {
  check_norm<bf16>(300, 7168), check_norm<float>(37, 512), check_norm<bf16>(1, 8), check_norm<float>(600, 3584);
}

}  // namespace
}  // namespace k3::testing
