// AdamW in one pass, with the bfloat16 copy that the model reads, against double.
#include <gtest/gtest.h>

#include "k3/ops/kernel_testing.h"
#include "k3/ops/update/adamw_cuda.h"

namespace k3::testing {
namespace {

using adamw_kernel = kernel;

TEST_F(adamw_kernel, cuda_equals_double) {
  Random rng(5);
  const int n = 4099;
  std::vector<float> w = rng.normals(n), m = rng.normals(n, 0, 0.1), v = rng.normals(n), g = rng.normals(n);
  for (float& y : v) y *= y;
  std::vector<double> right(static_cast<size_t>(n));
  for (size_t i = 0; i < right.size(); ++i) {
    const double q = g[i] * 0.5, mm = 0.9 * m[i] + 0.1 * q, vv = 0.95 * v[i] + 0.05 * q * q;
    right[i] = w[i] - 1e-2 * (mm / (1 - std::pow(0.9, 3)) / (std::sqrt(vv / (1 - std::pow(0.95, 3))) + 1e-8) + 0.1 * w[i]);
  }
  There<float> bw(w), bm(m), bv(v), bg(g);
  There<bf16> copy(n);
  K3_LAUNCH(adamw({bw.data, bm.data, bv.data, bg.data, copy.data, n, 3, 1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.5f}, gpu::stream()));
  expect_error("weight", error(bw, right), 1e-6);    // some ten roundings of 2^-24
  expect_error("copy", error(copy, right), 2.5e-3);  // 2^-9 at most, 1.7e-3 on average
}

}  // namespace
}  // namespace k3::testing
