// Newton-Schulz per head in the Gram form against the plain iteration in double.
#include <gtest/gtest.h>

#include "k3/ops/update/newton_schulz_cuda.h"
#include "k3/ops/kernel_testing.h"

namespace k3::testing {
namespace {

using newton_schulz_kernel = kernel;

const float kFive[5][3] = {{3.4445f, -4.7750f, 2.0315f},
                           {3.4445f, -4.7750f, 2.0315f},
                           {3.4445f, -4.7750f, 2.0315f},
                           {3.4445f, -4.7750f, 2.0315f},
                           {3.4445f, -4.7750f, 2.0315f}};

std::vector<double> plain(const bf16* g, int n, double safety) {  // (128, n)
  const int D = 128;
  std::vector<double> x(D * n), y(D * n), A(D * D), B(D * D);
  double norm = 0;
  for (int i = 0; i < D * n; ++i) x[i] = to_float(g[i]), norm += x[i] * x[i];
  if (norm == 0) return x;
  for (double& v : x) v /= safety * std::sqrt(norm);
  for (auto& c : kFive) {
    for (int i = 0; i < D; ++i)
      for (int j = 0; j < D; ++j) {
        double s = 0;
        for (int k = 0; k < n; ++k) s += x[i * n + k] * x[j * n + k];
        A[i * D + j] = s;
      }
    for (int i = 0; i < D; ++i)
      for (int j = 0; j < D; ++j) {
        double s = 0;
        for (int k = 0; k < D; ++k) s += A[i * D + k] * A[k * D + j];
        B[i * D + j] = c[1] * A[i * D + j] + c[2] * s;
      }
    for (int i = 0; i < D; ++i)
      for (int k = 0; k < n; ++k) y[i * n + k] = c[0] * x[i * n + k];
    for (int i = 0; i < D; ++i)
      for (int j = 0; j < D; ++j)
        for (int k = 0; k < n; ++k) y[i * n + k] += B[i * D + j] * x[j * n + k];
    x.swap(y);
  }
  return x;
}

// Rows of one size; of sizes over three decades; zeros.
TEST_F(newton_schulz_kernel, cuda_equals_the_plain_iteration_in_double) {
  const int heads = 3, n = 384, D = 128;
  Random rng(4);
  std::vector<float> g(heads * D * n, 0.f);
  for (int h = 0; h < 2; ++h)  // rows of very different size: singular values over three decades; the third block is zero
    for (int i = 0; i < D; ++i) {
      double size = std::pow(10., h == 0 ? 0. : -3. * i / D);
      for (int k = 0; k < n; ++k) g[(h * D + i) * n + k] = float(size * rng.normal());
    }
  auto g16 = narrowed(g);
  There<bf16> dg(g16), x(heads * D * n), q(heads * 2 * D * D);
  There<float> gram(heads * D * D);
  cuda::NewtonSchulzArgs a{dg.data, heads, n, 5, kFive, 1.01f, gram.data, q.data, x.data};
  K3_LAUNCH(newton_schulz(a, gpu::stream()));
  auto first = x.download();
  for (int h = 0; h < heads; ++h) {
    std::vector<double> got = widened(std::vector<bf16>(first.begin() + h * D * n, first.begin() + (h + 1) * D * n));
    expect_error("block " + std::to_string(h), error(got, plain(&g16[h * D * n], n, 1.01)), 3e-3);  // result in bf16: 1.7e-3
  }
  x.poison(), gram.poison(), q.poison();
  K3_LAUNCH(newton_schulz(a, gpu::stream()));
  EXPECT_TRUE(same(first, x.download())) << "two runs differ";
}

}  // namespace
}  // namespace k3::testing
