#include "k3/ops/norm/norm.h"

#include <gtest/gtest.h>

#include "k3/ops/norm/norm_ref.h"
#include "k3/ops/testing.h"

namespace k3 {
namespace {

using testing::Values;

// Every row count and width here crosses an edge: one row, a block of rows, widths that are no multiple of sixteen.
constexpr std::pair<int64_t, int64_t> kSizes[] = {{1, 5}, {3, 17}, {64, 16}, {65, 33}, {130, 128}};

TEST(norm, rms_norm_backward_equals_complex_step) {
  testing::expect_complex_step(
      {{3 * 7}, {7}}, []<class S>(const std::vector<const S*>& in, S* out) { ref::rms_norm<S>(in[0], in[1], S(1e-5), out, 3, 7); }, 3 * 7,
      [](auto in, const double* dy, auto grad) { ref::rms_norm_backward<double>(in[0], in[1], 1e-5, dy, grad[0], grad[1], 3, 7); });
}
TEST(norm, l2_norm_backward_equals_complex_step) {
  testing::expect_complex_step(
      {{3 * 7}}, []<class S>(const std::vector<const S*>& in, S* out) { ref::l2_norm<S>(in[0], S(1e-6), out, 3, 7); }, 3 * 7,
      [](auto in, const double* dy, auto grad) { ref::l2_norm_backward<double>(in[0], 1e-6, dy, grad[0], 3, 7); });
}
TEST(norm, gated_rms_norm_backward_equals_complex_step) {
  testing::expect_complex_step(
      {{3 * 7}, {3 * 7}, {7}},
      []<class S>(const std::vector<const S*>& in, S* out) { ref::gated_rms_norm<S>(in[0], in[1], in[2], S(1e-5), out, 3, 7); }, 3 * 7,
      [](auto in, const double* dy, auto grad) {
        ref::gated_rms_norm_backward<double>(in[0], in[1], in[2], 1e-5, dy, grad[0], grad[1], grad[2], 3, 7);
      });
}

// Sums of d terms in float32: d/2 * eps of the largest is never reached; sqrt(d) * eps with a margin of 8 is.
double tolerance(int64_t d) { return 8 * 6e-8 * std::sqrt(double(d) + 4); }

TEST(norm, cpu_equals_reference_at_every_level) {
  for (auto isa : testing::levels())
    for (auto [rows, d] : kSizes) {
      testing::ForceIsa force(isa);
      Values x(rows * d, 1), gate(rows * d, 2), w(d, 3), dy(rows * d, 4);
      for (int kind = 0; kind < 3; ++kind) {
        testing::Step step;
        Var vx = step.input(x, {rows, d}), vg = step.input(gate, {rows, d});
        Param p = step.param("w", w, {d});
        Var y = kind == 0 ? rms_norm(vx, p, 1e-5f) : kind == 1 ? l2_norm(vx, d) : gated_rms_norm(vx, vg, p, 1e-5f);
        step.backward(y, dy);
        std::vector<double> ry(rows * d), rdx(rows * d), rdg(rows * d), rdw(d);
        auto xd = x.as_double(), gd = gate.as_double(), wd = w.as_double(), dyd = dy.as_double();
        if (kind == 0) {
          ref::rms_norm(xd.data(), wd.data(), 1e-5, ry.data(), rows, d);
          ref::rms_norm_backward(xd.data(), wd.data(), 1e-5, dyd.data(), rdx.data(), rdw.data(), rows, d);
        } else if (kind == 1) {
          ref::l2_norm(xd.data(), 1e-6, ry.data(), rows, d);
          ref::l2_norm_backward(xd.data(), 1e-6, dyd.data(), rdx.data(), rows, d);
        } else {
          ref::gated_rms_norm(xd.data(), gd.data(), wd.data(), 1e-5, ry.data(), rows, d);
          ref::gated_rms_norm_backward(xd.data(), gd.data(), wd.data(), 1e-5, dyd.data(), rdx.data(), rdg.data(), rdw.data(), rows, d);
        }
        testing::expect_near(y.value(), ry, tolerance(d), "y");
        testing::expect_near(vx.grad(), rdx, tolerance(d), "dx");
        if (kind == 2) testing::expect_near(vg.grad(), rdg, tolerance(d), "dgate");
        if (kind != 1) testing::expect_near(p.grad, rdw, tolerance(d + rows), "dw");
      }
    }
}

TEST(norm, a_row_does_not_depend_on_its_neighbours) {
  int64_t rows = 70, d = 37;
  Values x(rows * d, 1), w(d, 3);
  testing::Step step;
  Param p = step.param("w", w, {d});
  Var all = rms_norm(step.input(x, {rows, d}), p, 1e-5f);
  for (int64_t n : {0, 1, 63, 64, 69}) {
    Var one = rms_norm(step.input(x.slice(n * d, d), {1, d}), p, 1e-5f);
    EXPECT_TRUE(testing::same_bits(one.value(), all.value().row_range(n, n + 1)));
  }
}

TEST(norm, one_thread_equals_many) {
  int64_t rows = 300, d = 40;
  Values x(rows * d, 1), w(d, 3), dy(rows * d, 4);
  testing::expect_same_bits_at_any_thread_count([&](testing::Step& step) {
    Param& p = step.keep(step.param("w", w, {d}));
    Var vx = step.input(x, {rows, d});
    Var y = rms_norm(vx, p, 1e-5f);
    step.backward(y, dy);
    return std::vector<Tensor>{y.value(), vx.grad(), p.grad};
  });
}

TEST(norm, a_gain_of_another_width_is_refused) {
  testing::Step step;
  Param p = step.param("input_layernorm.weight", Values(5, 1), {5});
  EXPECT_THAT(
      [&] {
        rms_norm(step.input(Values(8, 1), {2, 4}), p, 1e-5f);
      },
      testing::throws_error("[rms_norm] x has 4 columns but input_layernorm.weight has 5 values"));
}

TEST(norm, cuda_equals_cpu) {
  for (auto [rows, d] : {std::pair<int64_t, int64_t>{1, 1},
                         {3, 17},
                         {130, 64},
                         {65, 128},
                         {70, 257},
                         {5, 7168},
                         {40, 7168},
                         {35, 2304},
                         {17, 1028},
                         {0, 8},
                         {70, 260},
                         {33, 512},
                         {17, 1000},
                         {130, 1024}}) {
    Values x(rows * d, 1), gate(rows * d, 2), w(d, 3), dy(rows * d, 4);
    for (int kind = 0; kind < 3; ++kind)
      testing::expect_cuda_equals_cpu(2 * tolerance(d + rows), [&, rows = rows, d = d](testing::Step& step) {
        Param& p = step.keep(step.param("w", w, {d}));
        Var vx = step.input(x, {rows, d}), vg = step.input(gate, {rows, d});
        Var y = kind == 0 ? rms_norm(vx, p, 1e-5f) : kind == 1 ? l2_norm(vx, d, 1e-6f) : gated_rms_norm(vx, vg, p, 1e-5f);
        step.backward(y, dy);
        return std::vector<Tensor>{y.value(), vx.grad(), vg.grad(), p.grad};
      });
  }
}

}  // namespace
}  // namespace k3
