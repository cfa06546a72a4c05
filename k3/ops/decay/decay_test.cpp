#include "k3/ops/decay/decay.h"

#include <gtest/gtest.h>

#include "k3/ops/decay/decay_ref.h"
#include "k3/ops/testing.h"

namespace k3 {
namespace {

using testing::Values;

TEST(decay, bounded_decay_backward_equals_complex_step) {
  testing::expect_complex_step(
      {{3 * 8}, {2}, {8}}, []<class S>(const std::vector<const S*>& in, S* out) { ref::bounded_decay<S>(in[0], in[1], in[2], S(-5), out, 3, 2, 4); },
      3 * 8,
      [](auto in, const double* dy, auto grad) { ref::bounded_decay_backward(in[0], in[1], in[2], -5, dy, grad[0], grad[1], grad[2], 3, 2, 4); });
}
TEST(decay, softplus_decay_backward_equals_complex_step) {
  for (int64_t dim : {1, 4})
    testing::expect_complex_step(
        {{3 * 2 * dim}, {2}, {2 * dim}},
        [&]<class S>(const std::vector<const S*>& in, S* out) { ref::softplus_decay<S>(in[0], in[1], in[2], out, 3, 2, dim); }, 3 * 2 * dim,
        [&](auto in, const double* dy, auto grad) { ref::softplus_decay_backward(in[0], in[1], in[2], dy, grad[0], grad[1], grad[2], 3, 2, dim); });
}

// The exponent e^A (z + bias) is rounded before the exponential, which turns |exponent| eps into a relative error: the values below keep it
// under 16. Sums over the rows and a head's channels: sqrt(terms) * eps, with a margin of 8.
double tolerance(int64_t terms) { return 6e-8 * (16 + 8 * std::sqrt(double(terms) + 4)); }

TEST(decay, cpu_equals_reference_at_every_level) {
  for (auto isa : testing::levels())
    for (auto [rows, heads, dim] : {std::array<int64_t, 3>{1, 1, 1}, {3, 5, 1}, {65, 3, 24}, {130, 40, 1}, {17, 4, 32}, {2, 9, 128}})
      for (bool bounded : {true, false}) {
        testing::ForceIsa force(isa);
        int64_t width = heads * dim;
        Values z(rows * width, 1, 1.5), A(heads + 3, 2, 0.5), bias(width, 3), dg(rows * width, 4);  // three values of padding in A_log
        testing::Step step;
        Param a = step.param("A_log", A, {heads + 3}), b = step.param("dt_bias", bias, {width});
        Var v = step.input(z, {rows, width}), g = bounded ? bounded_decay(v, a, b, heads, -5) : softplus_decay(v, a, b, heads);
        step.backward(g, dg);
        std::vector<double> rg(rows * width), rz(rows * width), ra(heads + 3), rb(width);
        auto zd = z.as_double(), ad = A.as_double(), bd = bias.as_double(), dd = dg.as_double();
        if (bounded) {
          ref::bounded_decay(zd.data(), ad.data(), bd.data(), -5.0, rg.data(), rows, heads, dim);
          ref::bounded_decay_backward(zd.data(), ad.data(), bd.data(), -5, dd.data(), rz.data(), ra.data(), rb.data(), rows, heads, dim);
        } else {
          ref::softplus_decay(zd.data(), ad.data(), bd.data(), rg.data(), rows, heads, dim);
          ref::softplus_decay_backward(zd.data(), ad.data(), bd.data(), dd.data(), rz.data(), ra.data(), rb.data(), rows, heads, dim);
        }
        testing::expect_near(g.value(), rg, tolerance(1), "g");
        testing::expect_near(v.grad(), rz, tolerance(1), "dz");
        testing::expect_near(b.grad, rb, tolerance(rows), "ddt_bias");
        testing::expect_near(a.grad, ra, tolerance(rows * dim), "dA_log");
        for (int64_t h = heads; h < heads + 3; ++h) EXPECT_EQ(a.grad.f32()[h], 0);
      }
}

float gate(bool bounded, float A, float z) {
  testing::Step step(false);
  Param a = step.param("A_log", Values(std::vector<float>{A}), {1, 1, 1, 1}), b = step.param("dt_bias", Values(std::vector<float>{0}), {1});
  Var v = step.input(Values(std::vector<float>{z}), {1, 1});
  return (bounded ? bounded_decay(v, a, b, 1, -5) : softplus_decay(v, a, b, 1)).f32()[0];
}

TEST(decay, both_gates_give_the_published_values) {
  float ln3 = std::log(3.0f);
  for (auto [A, z, kimi_linear, k3] : {std::array<double, 4>{0, 0, -0.693147181, -2.5},
                                       {0, 1, -1.313261688, -3.655292893},
                                       {ln3, -2, -0.380784033, -0.012363116},
                                       {2, 3, -22.526182963, -4.999999999}}) {
    EXPECT_NEAR(gate(false, float(A), float(z)) / kimi_linear, 1, 1e-6);
    EXPECT_NEAR(gate(true, float(A), float(z)) / k3, 1, 1e-6);
  }
}

TEST(decay, gate_near_its_bound_stays_inside) {
  for (auto isa : testing::levels()) {
    testing::ForceIsa force(isa);
    for (float z : {-1e30f, -100.0f, -20.0f, 0.0f, 20.0f, 100.0f, 1e30f}) {
      float g = gate(true, 1, z);
      EXPECT_TRUE(g >= -5 && g <= 0) << z;
    }
    EXPECT_LT(gate(true, 0, -30), 0);  // small, but not lost: -5 e^-30
    EXPECT_NEAR(gate(true, 0, -30) / (-5 * std::exp(-30.0)), 1, 1e-6);
    EXPECT_NEAR(gate(false, 0, -30) / -std::exp(-30.0), 1, 1e-6);
  }
}

// A_log of 200: e^A overflows, and infinity times the zero of a saturated sigmoid is NaN.
TEST(decay, saturated_gates_give_no_nan) {
  for (auto isa : testing::levels())
    for (bool bounded : {true, false})
      for (float A : {-200.0f, 0.0f, 60.0f, 90.0f, 200.0f}) {
        testing::ForceIsa force(isa);
        testing::Step step;
        Values zs(std::vector<float>{-1e30f, -1e5f, -100, -1, 0, 1, 100, 1e5f, 1e30f}), none(std::vector<float>(9, 0)),
            ones(std::vector<float>(9, 1));
        Param a = step.param("A_log", Values(std::vector<float>{A}), {1}), b = step.param("dt_bias", none, {9});
        Var z = step.input(zs, {1, 9}), g = bounded ? bounded_decay(z, a, b, 1, -5) : softplus_decay(z, a, b, 1);
        Values dg(std::vector<float>(9, bounded ? 1.0f : 0.0f));  // where g is -1e30, the gradient through e^g is exactly 0
        step.backward(g, dg);
        for (int i = 0; i < 9; ++i)
          EXPECT_TRUE(std::isfinite(g.f32()[i]) && std::isfinite(z.grad().f32()[i]) && std::isfinite(b.grad.f32()[i])) << A << " " << zs[i];
        EXPECT_TRUE(std::isfinite(a.grad.f32()[0])) << A;
      }
}

TEST(decay, nan_is_kept) {
  for (bool bounded : {true, false}) {
    EXPECT_TRUE(std::isnan(gate(bounded, 0, NAN)));
    EXPECT_TRUE(std::isnan(gate(bounded, NAN, 1)));
  }
}

TEST(decay, a_row_does_not_depend_on_its_neighbours) {
  int64_t rows = 70, heads = 3, width = 111;
  for (auto isa : testing::levels())
    for (bool bounded : {true, false}) {
      testing::ForceIsa force(isa);
      Values z(rows * width, 1), dg(rows * width, 4);
      testing::Step all, one;
      Param a = all.param("A_log", Values(heads, 2), {heads}), b = all.param("dt_bias", Values(width, 3), {width});
      auto f = [&](Var v) { return bounded ? bounded_decay(v, a, b, heads, -5) : softplus_decay(v, a, b, heads); };
      Var az = all.input(z, {rows, width}), ag = f(az);
      all.backward(ag, dg);
      for (int64_t n : {0, 1, 15, 16, 64, 69}) {
        Var v = one.input(z.slice(n * width, width), {1, width}), g = f(v);
        one.backward(g, dg.slice(n * width, width));
        EXPECT_TRUE(testing::same_bits(g.value(), ag.value().row_range(n, n + 1)));
        EXPECT_TRUE(testing::same_bits(v.grad(), az.grad().row_range(n, n + 1)));
      }
    }
}

TEST(decay, one_thread_equals_many) {
  int64_t rows = 150, heads = 7, width = 7 * 160;
  Values z(rows * width, 1), A(heads, 2), bias(width, 3), dg(rows * width, 4);
  for (bool bounded : {true, false})
    testing::expect_same_bits_at_any_thread_count([&](testing::Step& step) {
      Param &a = step.keep(step.param("A_log", A, {heads})), &b = step.keep(step.param("dt_bias", bias, {width}));
      Var v = step.input(z, {rows, width}), g = bounded ? bounded_decay(v, a, b, heads, -5) : softplus_decay(v, a, b, heads);
      step.backward(g, dg);
      return std::vector<Tensor>{g.value(), v.grad(), a.grad, b.grad};
    });
}

TEST(decay, no_rows_give_no_rows) {
  testing::Step step;
  Param a = step.param("A_log", Values(2, 1), {2}), b = step.param("dt_bias", Values(4, 1), {4});
  Var z = step.input(Values(0, 1), {0, 4}), g = bounded_decay(z, a, b, 2, -5);
  step.backward(g, Values(0, 1));
  EXPECT_EQ(g.rows(), 0);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(b.grad.f32()[i], 0);
}

TEST(decay, the_null_device_lends_the_same_and_touches_nothing) {
  auto run = [](Device device) {
    Arena arena(1 << 20, device), weights(1 << 10, device);
    Tape tape;
    Context c{.device = device, .arena = &arena, .tape = &tape};
    Param a{.name = "A_log", .value = weights.lend_zeroed(DType::f32, {2}), .grad = weights.lend_zeroed(DType::f32, {2})};
    Param b{.name = "dt_bias", .value = weights.lend_zeroed(DType::f32, {8}), .grad = weights.lend_zeroed(DType::f32, {8})};
    Var z(c, DType::f32, {10, 8}), g = softplus_decay(z, a, b, 2);
    g.grad();
    tape.run_backward();
    return arena.peak();
  };
  EXPECT_EQ(run(Device::null), run(Device::cpu));
}

TEST(decay, what_does_not_fit_is_refused) {
  testing::Step step;
  Param a = step.param("A_log", Values(3, 1), {3}), b = step.param("dt_bias", Values(8, 1), {8}), c = step.param("dt_bias", Values(6, 1), {6});
  Var z = step.input(Values(16, 1), {2, 8});
  EXPECT_THAT([&] { bounded_decay(z, a, b, 3, -5); }, testing::throws_error("[bounded_decay] 8 columns don't divide into 3 heads"));
  EXPECT_THAT([&] { bounded_decay(z, a, b, 4, -5); }, testing::throws_error("[bounded_decay] 4 heads but A_log has 3 values"));
  EXPECT_THAT([&] { softplus_decay(z, a, c, 2); }, testing::throws_error("[softplus_decay] z has 8 columns but dt_bias has 6 values"));
  EXPECT_THAT([&] { bounded_decay(z, a, b, 2, 5); }, testing::throws_error("[bounded_decay] gate_lower_bound must be below 0, not 5"));
}

TEST(decay, cuda_equals_cpu) {
  for (auto [rows, heads, dim] : {std::array<int64_t, 3>{1, 1, 1}, {3, 5, 1}, {65, 3, 24}, {130, 40, 1}, {17, 4, 32}, {0, 2, 4}})
    for (bool bounded : {true, false})
      for (double scale : {1.5, 60.0}) {  // ordinary gates, and saturated ones
        const int64_t width = heads * dim;
        Values z(rows * width, 1, scale), A(heads, 2, 0.5), bias(width, 3), dg(rows * width, 4);
        testing::expect_cuda_equals_cpu(2 * tolerance(rows * dim), [&, rows = rows, heads = heads](testing::Step& step) {
          Param &a = step.keep(step.param("A_log", A, {heads})), &b = step.keep(step.param("dt_bias", bias, {width}));
          Var v = step.input(z, {rows, width}), g = bounded ? bounded_decay(v, a, b, heads, -5) : softplus_decay(v, a, b, heads);
          step.backward(g, dg);
          return std::vector<Tensor>{g.value(), v.grad(), a.grad, b.grad};
        });
      }
}

}  // namespace
}  // namespace k3
