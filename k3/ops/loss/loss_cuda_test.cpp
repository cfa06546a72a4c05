// Cross entropy of bfloat16 logits, which become their gradient, against double: ignored rows, masked logits.
#include <gtest/gtest.h>

#include <algorithm>

#include "k3/ops/loss/loss_cuda.h"
#include "k3/ops/kernel_testing.h"

namespace k3::testing {
namespace {

using loss_kernel = kernel;

// Every third row is ignored, some logits are minus infinity, and a row of nothing but equal logits has the loss log V.
void expect_equals_double(int rows, int V) {
  Random rng(5);
  auto x = narrowed(rng.normals(rows * V, 0, 4));
  for (int i = 0; i < 100; ++i) x[V + i] = bf16{0xff80};
  if (rows > 3) std::fill_n(x.begin() + 3 * V, V, x[0]);
  std::vector<int> targets;
  for (int n = 0; n < rows; ++n) targets.push_back(n % 3 == 2 ? -1 : int((n * 7919l + V - 1) % V));
  targets[1] = V / 2;
  std::vector<double> g(size_t(rows) * V, 0.), loss(rows, 0.);
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

TEST_F(loss_kernel, cuda_gradient_in_place_equals_double) { expect_equals_double(9, 8200); }
TEST_F(loss_kernel, cuda_rows_that_a_cluster_holds_equal_double) {
  expect_equals_double(2, 225280);
  expect_equals_double(few_shapes() ? 3 : 113, 32776);  // more than run at a time, in shares that are not equal
}

}  // namespace
}  // namespace k3::testing
