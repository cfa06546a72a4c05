// SiTU in bfloat16 and float32 against double, with saturated and tiny inputs.
#include <gtest/gtest.h>

#include "k3/ops/activation/activation_cuda.h"
#include "k3/ops/kernel_testing.h"

namespace k3::testing {
namespace {

using situ_kernel = kernel;

template <class T>
std::vector<T> as(const std::vector<float>& x) {
  if constexpr (std::is_same_v<T, float>)
    return x;
  else
    return narrowed(x);
}

template <class T>
void check_situ() {
  constexpr bool wide = std::is_same_v<T, float>;
  Random rng(2);
  const int n = 4096;
  auto gf = rng.normals(n, 0, 6), uf = rng.normals(n, 0, 20);
  for (int i = 0; i < 64; ++i) gf[i] = float((i % 8 - 4) * 1e-4), uf[i] = float((i / 8 - 4) * 1e-3);
  auto g = as<T>(gf), u = as<T>(uf), dy = as<T>(rng.normals(n));
  There<T> bg(g), bu(u), by(n), bd(dy), dg(n), du(n);
  cuda::SituArgs a{bg.data, bu.data, n, 4, 25, wide, by.data, bd.data, dg.data, du.data};
  K3_LAUNCH(situ_forward(a, gpu::stream()));
  K3_LAUNCH(situ_backward(a, gpu::stream()));
  auto wg = widened(g), wu = widened(u), wd = widened(dy);
  std::vector<double> y(n), rg(n), ru(n);
  for (int i = 0; i < n; ++i) {
    double t = std::tanh(wg[i] / 4), s = 1 / (1 + std::exp(-wg[i])), w = std::tanh(wu[i] / 25);
    y[i] = 4 * t * s * 25 * w, rg[i] = wd[i] * ((1 - t * t) * s + 4 * t * s * (1 - s)) * 25 * w, ru[i] = wd[i] * 4 * t * s * (1 - w * w);
  }
  SCOPED_TRACE(wide ? "float32" : "bfloat16");
  const double limit = wide ? 1e-6 : 2.5e-3;
  expect_error("y", error(by, y), limit);
  expect_error("gradients", std::max(error(dg, rg), error(du, ru)), limit);
}

TEST_F(situ_kernel, cuda_equals_double) { check_situ<bf16>(), check_situ<float>(); }

}  // namespace
}  // namespace k3::testing
