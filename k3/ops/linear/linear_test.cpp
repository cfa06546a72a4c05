#include "k3/ops/linear/linear.h"

#include <gtest/gtest.h>

#include "k3/ops/linear/linear_ref.h"
#include "k3/ops/linear/product.h"
#include "k3/ops/linear/product_kernels.h"
#include "k3/ops/testing.h"

namespace k3 {
namespace {

using testing::Values;

TEST(linear, backward_equals_complex_step) {
  testing::expect_complex_step(
      {{3 * 5}, {4 * 5}}, []<class S>(const std::vector<const S*>& in, S* out) { ref::linear<S>(in[0], in[1], out, 3, 4, 5); }, 3 * 4,
      [](auto in, const double* dy, auto grad) { ref::linear_backward<double>(in[0], in[1], dy, grad[0], grad[1], 3, 4, 5); });
}

// A chain of k roundings of terms of size 1: sqrt(k) * eps, with a margin of 8.
double tolerance(int64_t k) { return 8 * 6e-8 * std::sqrt(double(k) + 4); }

TEST(linear, cpu_equals_reference_at_every_level) {
  for (auto isa : testing::levels())
    for (auto [m, n, k] : {std::array<int64_t, 3>{1, 1, 1}, {1, 48, 700}, {3, 17, 33}, {31, 64, 128}, {33, 19, 385}, {130, 100, 801}}) {
      testing::ForceIsa force(isa);
      testing::Step step;
      Values x(m * k, 1), w(n * k, 2), dy(m * n, 3);
      Param p = step.param("w", w, {n, k});
      Var vx = step.input(x, {m, k});
      Var y = linear(vx, p);
      step.backward(y, dy);
      std::vector<double> ry(m * n), rdx(m * k), rdw(n * k);
      ref::linear(x.as_double().data(), w.as_double().data(), ry.data(), m, n, k);
      ref::linear_backward(x.as_double().data(), w.as_double().data(), dy.as_double().data(), rdx.data(), rdw.data(), m, n, k);
      testing::expect_near(y.value(), ry, tolerance(k), "y");
      testing::expect_near(vx.grad(), rdx, tolerance(n), "dx");
      testing::expect_near(p.grad, rdw, tolerance(m), "dw");
    }
}

// The order of product.h, written once more as plainly as it can be said.
std::vector<float> in_order(const Values& a, const Values& w, int64_t m, int64_t n, int64_t k) {
  std::vector<float> c(m * n);
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) {
      float total = 0;
      for (int64_t at = 0; at < k;) {
        int64_t size = std::min<int64_t>(384, k - at);
        float chain = 0;
        for (int64_t q = at; q < at + size; ++q) chain = std::fma(a[i * k + q], w[j * k + q], chain);
        total = at ? total + chain : chain;
        at += size;
      }
      c[i * n + j] = total;
    }
  return c;
}

TEST(linear, every_product_is_summed_in_the_documented_order) {
  if (cpu::isa() == cpu::Isa::plain) return;  // no fused multiply-add: another rounding, the same order
  for (auto [m, n, k] : {std::array<int64_t, 3>{1, 50, 1500}, {5, 3, 384}, {31, 33, 385}, {32, 300, 1024}, {64, 1, 100}, {200, 96, 2047}}) {
    Values a(m * k, 1), w(n * k, 2);
    std::vector<float> c(m * n);
    product(x_wt(a.data(), w.data(), c.data(), m, n, k));
    EXPECT_EQ(c, in_order(a, w, m, n, k)) << m << " x " << n << " x " << k;
  }
}

TEST(linear, a_row_does_not_depend_on_its_neighbours) {
  for (auto isa : testing::levels()) {
    testing::ForceIsa force(isa);
    int64_t m = 260, n = 200, k = 1000;
    Values x(m * k, 1), w(n * k, 2);
    std::vector<float> whole(m * n), part(m * n);
    product(x_wt(x.data(), w.data(), whole.data(), m, n, k));
    for (int64_t rows : {1, 2, 3, 7, 16, 31, 32, 64, 129})
      for (int64_t at : {0, 5, 100}) {
        product(x_wt(x.data() + at * k, w.data(), part.data(), rows, n, k));
        ASSERT_EQ(0, std::memcmp(part.data(), whole.data() + at * n, size_t(rows * n) * 4)) << rows << " rows from " << at;
      }
  }
}

TEST(linear, one_thread_equals_many) {
  int64_t m = 300, n = 400, k = 500;
  Values x(m * k, 1), w(n * k, 2), dy(m * n, 3);
  testing::expect_same_bits_at_any_thread_count([&](testing::Step& step) {
    Param& p = step.keep(step.param("w", w, {n, k}));
    Var vx = step.input(x, {m, k});
    Var y = linear(vx, p);
    step.backward(y, dy);
    return std::vector<Tensor>{y.value(), vx.grad(), p.grad};
  });
}

TEST(linear, a_weight_of_another_width_is_refused) {
  testing::Step step;
  Param p = step.param("q_proj.weight", Values(15, 1), {3, 5});
  EXPECT_THAT(
      [&] {
        linear(step.input(Values(8, 1), {2, 4}), p);
      },
      testing::throws_error("[linear] x has 4 columns but q_proj.weight (3 x 5) takes 5"));
}

}  // namespace
}  // namespace k3
