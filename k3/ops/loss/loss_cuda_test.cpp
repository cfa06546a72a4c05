// Cross entropy of bfloat16 logits, which become their gradient, against double: ignored rows, masked logits.
#include <gtest/gtest.h>

#include "k3/ops/loss/loss_cuda.h"
#include "k3/ops/kernel_testing.h"

namespace k3::testing {
namespace {

using loss_kernel = kernel;

TEST_F(loss_kernel, cuda_gradient_in_place_equals_double) {
  Random rng(5);
  const int rows = 9, V = 8200;
  auto x = narrowed(rng.normals(rows * V, 0, 4));
  for (int i = 0; i < 100; ++i) x[V + i] = bf16{0xff80};  // minus infinity
  std::vector<int> targets = {5, 8000, -1, 0, 8199, 77, 1, 2, 3};
  std::vector<double> g(rows * V, 0.), loss(rows, 0.);
  for (int n = 0; n < rows; ++n) {
    if (targets[n] < 0) continue;
    double top = -INFINITY, sum = 0;
    for (int i = 0; i < V; ++i) top = std::max(top, double(to_float(x[n * V + i])));
    for (int i = 0; i < V; ++i) sum += std::exp(to_float(x[n * V + i]) - top);
    loss[n] = std::log(sum) + top - to_float(x[n * V + targets[n]]);
    for (int i = 0; i < V; ++i) g[n * V + i] = (std::exp(to_float(x[n * V + i]) - top) / sum - (i == targets[n])) * 0.125;
  }
  There<bf16> bx(x);
  There<int> bt(targets);
  There<float> bl(rows);
  K3_LAUNCH(cross_entropy({bx.data, bt.data, rows, V, 0.125f, bl.data}, gpu::stream()));
  expect_error("gradient", error(bx, g), 2.5e-3);
  expect_error("loss", error(bl, loss), 1e-6);
}

}  // namespace
}  // namespace k3::testing
