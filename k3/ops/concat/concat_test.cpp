#include "k3/ops/concat/concat.h"

#include <gtest/gtest.h>

#include "k3/ops/testing.h"

namespace k3 {
namespace {

using testing::Values;

// Copies: exact both ways.
TEST(concat, columns_stand_side_by_side_and_gradients_return_to_them) {
  Values va(3 * 2, 1), vb(3 * 5, 2), dy(3 * 7, 3);
  testing::Step step;
  Var a = step.input(va, {3, 2}), b = step.input(vb, {3, 5});
  Var y = concat(a, b);
  step.backward(y, dy);
  for (int64_t n = 0; n < 3; ++n)
    for (int64_t i = 0; i < 7; ++i) {
      EXPECT_EQ(y.f32()[n * 7 + i], i < 2 ? va[n * 2 + i] : vb[n * 5 + i - 2]);
      EXPECT_EQ(i < 2 ? a.grad().f32()[n * 2 + i] : b.grad().f32()[n * 5 + i - 2], dy[n * 7 + i]);
    }
}

TEST(concat, of_itself_adds_both_gradients) {
  Values va(4, 1), dy(8, 2);
  testing::Step step;
  Var a = step.input(va, {2, 2});
  step.backward(concat(a, a), dy);
  for (int64_t n = 0; n < 2; ++n)
    for (int64_t i = 0; i < 2; ++i) EXPECT_EQ(a.grad().f32()[n * 2 + i], dy[n * 4 + i] + dy[n * 4 + 2 + i]);
}

TEST(concat, cuda_equals_cpu) {
  for (auto [n, p, q] : {std::array<int64_t, 3>{3, 2, 5}, {100, 37, 8}, {0, 3, 4}}) {
    Values va(n * p, 1), vb(n * q, 2), dy(n * (p + q), 3);
    testing::expect_cuda_equals_cpu(0, [&, n = n, p = p, q = q](testing::Step& step) {
      Var a = step.input(va, {n, p}), b = step.input(vb, {n, q}), y = concat(a, b);
      step.backward(y, dy);
      return std::vector<Tensor>{y.value(), a.grad(), b.grad()};
    });
  }
}

TEST(concat, different_rows_are_named) {
  testing::Step step;
  Var a = step.input(Values(4, 1), {2, 2}), b = step.input(Values(3, 1), {3, 1});
  EXPECT_THAT([&] { concat(a, b); }, testing::throws_error("a has 2 rows but b has 3"));
}

}  // namespace
}  // namespace k3
