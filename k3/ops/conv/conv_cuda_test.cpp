// The bfloat16 convolution with SiLU against double: packed, with states, without.
#include <gtest/gtest.h>

#include "k3/ops/conv/conv_cuda.h"
#include "k3/ops/kernel_testing.h"

namespace k3::testing {
namespace {

using conv_kernel = kernel;

TEST_F(conv_kernel, cuda_sequences_shorter_than_the_width_equal_double_and_leave_their_windows) {
  Random rng(3);
  const int C = 136;
  std::vector<int> lengths = {1, 2, 3, 4, 5, 0, 1, 1, 2, 70, 33}, begins = {0}, slots = {5, 0, -1, 3, 8, 2, 9, 4, 7, 6, 1};
  for (int n : lengths) begins.push_back(begins.back() + n);
  const int N = begins.back(), S = 12;
  auto x = narrowed(rng.normals(N * C)), window = narrowed(rng.normals(S * 3 * C));
  auto w = rng.normals(C * 4);
  std::vector<double> y(N * C), left = widened(window);
  for (size_t s = 0; s < lengths.size(); ++s) {
    auto at = [&](int t, int c) {
      return t >= begins[s] ? double(to_float(x[t * C + c]))
             : slots[s] < 0 ? 0.
                            : double(to_float(window[(slots[s] * 3 + 3 + t - begins[s]) * C + c]));
    };
    for (int c = 0; c < C; ++c) {
      for (int t = begins[s]; t < begins[s + 1]; ++t) {
        double z = 0;
        for (int j = 0; j < 4; ++j) z += w[c * 4 + j] * at(t - 3 + j, c);
        y[t * C + c] = z / (1 + std::exp(-z));
      }
      if (slots[s] >= 0)
        for (int i = 0; i < 3; ++i) left[(slots[s] * 3 + i) * C + c] = at(begins[s + 1] - 3 + i, c);
    }
  }
  There<bf16> bx(x), bw(window), by(N * C);
  There<float> weight(w);
  There<int> bb(begins), bs(slots);
  K3_LAUNCH(conv_silu_forward({bx.data, weight.data, bb.data, int(lengths.size()), N, C, bw.data, bw.data, bs.data, by.data}, gpu::stream()));
  expect_error("y", error(by, y), 2.5e-3);
  expect_error("windows", error(bw, left), 0);
}

}  // namespace
}  // namespace k3::testing
