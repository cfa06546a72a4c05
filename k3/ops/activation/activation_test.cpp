#include "k3/ops/activation/activation.h"

#include <gtest/gtest.h>

#include "k3/ops/activation/activation_ref.h"
#include "k3/ops/activation/mean.h"
#include "k3/ops/testing.h"

namespace k3 {
namespace {

using testing::Values;
using Kind = Activation::Kind;

const Activation kUnits[] = {{Kind::swiglu}, {Kind::situ}, {Kind::situ, 4, 0}, {Kind::clipped, 4, 25, 1.5f}};

TEST(activation, glu_backward_equals_complex_step) {
  // normals times 8: both tanh in their bends, the clip on both sides
  for (const Activation& unit : kUnits)
    testing::expect_complex_step(
        {{40}, {40}},
        [&]<class S>(const std::vector<const S*>& in, S* out) {
          for (int i = 0; i < 40; ++i) out[i] = ref::glu<S>(in[0][i], in[1][i], unit);
        },
        40,
        [&](auto in, const double* dy, auto grad) {
          for (int i = 0; i < 40; ++i) ref::glu_backward(in[0][i], in[1][i], unit, dy[i], grad[0][i], grad[1][i]);
        },
        1e-12, [](size_t input, int64_t, double v) { return v * (input ? 8 : 3); });
}
TEST(activation, gate_backward_equals_complex_step) {
  testing::expect_complex_step(
      {{20}, {20}},
      []<class S>(const std::vector<const S*>& in, S* out) {
        for (int i = 0; i < 20; ++i) out[i] = ref::sigmoid_gate<S>(in[0][i], in[1][i]) + ref::silu<S>(in[0][i]) + ref::sigmoid<S>(in[1][i]);
      },
      20,
      [](auto in, const double* dy, auto grad) {
        for (int i = 0; i < 20; ++i) {
          ref::sigmoid_gate_backward(in[0][i], in[1][i], dy[i], grad[0][i], grad[1][i]);
          grad[0][i] += ref::silu_backward(in[0][i], dy[i]);
          grad[1][i] += ref::sigmoid_backward(in[1][i], dy[i]);
        }
      });
}

// A result is a product of at most six factors, each within two units in the last place; a slope is a sum of two such.
constexpr double kTolerance = 24 * 6e-8;

TEST(activation, cpu_equals_reference_at_every_level) {
  for (auto isa : testing::levels())
    for (int64_t n : {1, 5, 16, 33, 20000}) {  // the last one is more than a block
      testing::ForceIsa force(isa);
      Values a(n, 1, 3), b(n, 2, 12), dy(n, 3);
      for (const Activation& unit : kUnits) {
        testing::Step step;
        Var g = step.input(a, {1, n}), u = step.input(b, {1, n}), y = glu(g, u, unit);
        step.backward(y, dy);
        std::vector<double> ry(n), rg(n), ru(n);
        for (int64_t i = 0; i < n; ++i) ry[i] = ref::glu<double>(a[i], b[i], unit), ref::glu_backward(a[i], b[i], unit, dy[i], rg[i], ru[i]);
        testing::expect_near(y.value(), ry, kTolerance, "glu");
        testing::expect_near(g.grad(), rg, kTolerance, "dgate");
        testing::expect_near(u.grad(), ru, kTolerance, "dup");
      }
      testing::Step step;
      Var x = step.input(a, {1, n}), g = step.input(b, {1, n}), y = add(add(sigmoid_gate(x, g), silu(x)), sigmoid(g));
      step.backward(y, dy);
      std::vector<double> ry(n), rx(n), rg(n);
      for (int64_t i = 0; i < n; ++i) {
        ry[i] = ref::sigmoid_gate<double>(a[i], b[i]) + ref::silu<double>(a[i]) + ref::sigmoid<double>(b[i]);
        ref::sigmoid_gate_backward(a[i], b[i], dy[i], rx[i], rg[i]);
        rx[i] += ref::silu_backward(a[i], dy[i]), rg[i] += ref::sigmoid_backward(b[i], dy[i]);
      }
      testing::expect_near(y.value(), ry, kTolerance, "sum of gates");
      testing::expect_near(x.grad(), rx, kTolerance, "dx");
      testing::expect_near(g.grad(), rg, kTolerance, "dg");
    }
}

float situ(float g, float u) {
  testing::Step step(false);
  return glu(step.input(Values({g}), {1, 1}), step.input(Values({u}), {1, 1}), {Kind::situ}).f32()[0];
}

TEST(activation, situ_gives_the_published_values) {
  EXPECT_NEAR(situ(1, 1), 0.715817828, 2e-7);
  EXPECT_NEAR(situ(-2, 3), -0.657873819, 2e-7);
  EXPECT_NEAR(situ(8, -40), -88.821594288, 2e-5);
  EXPECT_NEAR(situ(30, 30), 83.365409698, 2e-5);
}

// 25 tanh(u/25) is u for small u: the tanh must be right relatively, not only absolutely.
TEST(activation, situ_keeps_small_values) {
  for (float u : {1e-3f, 1e-10f, 1e-30f}) EXPECT_NEAR(situ(3, u) / (4 * std::tanh(0.75) / (1 + std::exp(-3.0)) * u), 1, 1e-6);
}

TEST(activation, situ_stays_within_its_bounds) {
  Values g(4001, 0), u(4001, 0);
  for (int i = 0; i <= 4000; ++i) g[i] = float(i - 2000) * 0.01f, u[i] = 1;
  auto gate = [](double a) { return ref::glu<double>(a, 1, {Kind::situ, 4, 0}); };
  double low = 0, low_at = 0, steepest = 0, steepest_at = 0;
  testing::Step step;
  Var x = step.input(g, {1, 4001}), y = glu(x, step.input(u, {1, 4001}), {Kind::situ, 4, 0});
  step.backward(y, u);
  for (int i = 0; i <= 4000; ++i) {
    if (y.f32()[i] < low) low = y.f32()[i], low_at = g[i];
    if (x.grad().f32()[i] > steepest) steepest = x.grad().f32()[i], steepest_at = g[i];
    EXPECT_LE(y.f32()[i], 4);
  }
  EXPECT_NEAR(low, -0.26977, 1e-5);
  EXPECT_NEAR(low_at, -1.2188, 0.01);
  EXPECT_NEAR(steepest, 0.9264, 1e-4);
  EXPECT_NEAR(steepest_at, 1.49, 0.02);
  EXPECT_NEAR(gate(4), 2.992, 1e-3);
  EXPECT_NEAR(situ(1e4f, 1e4f), 100, 1e-4);  // the largest value there is
  EXPECT_NEAR(situ(1e4f, -1e4f), -100, 1e-4);
}

TEST(activation, a_large_beta_gives_swiglu) {
  for (double a : {-3.0, -0.5, 0.7, 5.0}) EXPECT_NEAR(ref::glu<double>(a, 2, {Kind::situ, 1e6f, 1e6f}), ref::glu<double>(a, 2, {Kind::swiglu}), 1e-9);
}

TEST(activation, extreme_values_stay_finite_and_nan_is_kept) {
  for (auto isa : testing::levels()) {
    testing::ForceIsa force(isa);
    Values big({-1e30f, -200, -88, 0, 88, 200, 1e30f}), ones({1, 1, 1, 1, 1, 1, 1});
    for (const Activation& unit : kUnits) {
      testing::Step step;
      Var g = step.input(big, {1, 7}), u = step.input(ones, {1, 7}), y = glu(g, u, unit);
      step.backward(y, ones);
      for (int i = 0; i < 7; ++i) EXPECT_TRUE(std::isfinite(y.f32()[i]) && std::isfinite(g.grad().f32()[i]) && std::isfinite(u.grad().f32()[i]));
      Var bad = step.input(Values({NAN}), {1, 1}), good = step.input(Values({1}), {1, 1});
      EXPECT_TRUE(std::isnan(glu(bad, good, unit).f32()[0]) && std::isnan(glu(good, bad, unit).f32()[0]));
    }
  }
}

TEST(activation, a_value_that_is_used_twice_gets_both_gradients) {
  testing::Step step;
  Var x = step.input(Values(3, 1), {1, 3});
  step.backward(add(x, x), Values(std::vector<float>(3, 1)));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(x.grad().f32()[i], 2);
}

TEST(activation, a_row_does_not_depend_on_its_neighbours) {
  for (auto isa : testing::levels()) {
    testing::ForceIsa force(isa);
    int64_t rows = 70, d = 37;
    Values a(rows * d, 1, 3), b(rows * d, 2, 12), dy(rows * d, 3);
    for (const Activation& unit : kUnits) {
      testing::Step all, one;
      Var ag = all.input(a, {rows, d}), au = all.input(b, {rows, d}), ay = glu(ag, au, unit);
      all.backward(ay, dy);
      for (int64_t n : {0, 1, 33, 69}) {
        Var g = one.input(a.slice(n * d, d), {1, d}), u = one.input(b.slice(n * d, d), {1, d}), y = glu(g, u, unit);
        one.backward(y, dy.slice(n * d, d));
        EXPECT_TRUE(testing::same_bits(y.value(), ay.value().row_range(n, n + 1)));
        EXPECT_TRUE(testing::same_bits(g.grad(), ag.grad().row_range(n, n + 1)));
        EXPECT_TRUE(testing::same_bits(u.grad(), au.grad().row_range(n, n + 1)));
      }
    }
  }
}

TEST(activation, one_thread_equals_many) {
  int64_t n = 100'003;
  Values a(n, 1, 3), b(n, 2, 12), dy(n, 3);
  testing::expect_same_bits_at_any_thread_count([&](testing::Step& step) {
    Var g = step.input(a, {1, n}), u = step.input(b, {1, n}), y = sigmoid_gate(add(glu(g, u, {Kind::situ}), silu(g)), u);
    step.backward(y, dy);
    return std::vector<Tensor>{y.value(), g.grad(), u.grad()};
  });
}

TEST(activation, the_null_device_lends_the_same_and_touches_nothing) {
  auto run = [](Device device) {
    Arena arena(1 << 20, device);
    Tape tape;
    Context c{.device = device, .arena = &arena, .tape = &tape};
    double flops = 0;
    c.on_cost = [&](std::string_view, const Cost& cost) { flops += cost.flops; };
    Var g(c, DType::f32, {3, 40}), u(c, DType::f32, {3, 40}), y = glu(g, sigmoid(u), {Kind::situ});
    y.grad();
    tape.run_backward();
    return std::pair(arena.peak(), flops);
  };
  EXPECT_EQ(run(Device::null), run(Device::cpu));
  EXPECT_GT(run(Device::null).second, 0);
}

TEST(activation, other_sizes_and_bounds_are_refused) {
  testing::Step step;
  Var a = step.input(Values(6, 1), {2, 3}), b = step.input(Values(4, 1), {2, 2});
  EXPECT_THAT([&] { add(a, b); }, testing::throws_error("[add] the second input has 4 values but the first has 6"));
  EXPECT_THAT([&] { glu(a, b, {}); }, testing::throws_error("[glu] up has 4 values but gate has 6"));
  EXPECT_THAT([&] { glu(a, a, {Kind::situ, 0}); }, testing::throws_error("[glu] SiTU's beta must be above 0, not 0"));
  EXPECT_THAT([&] { glu(a, a, {Kind::clipped, 4, 25, -1}); }, testing::throws_error("[glu] the clip limit must be above 0, not -1"));
}

TEST(activation, cuda_equals_cpu) {
  for (int64_t n : {1, 5, 255, 20001}) {
    Values a(n, 1, 3), b(n, 2, 12), dy(n, 3);
    for (const Activation& unit : kUnits)
      testing::expect_cuda_equals_cpu(2 * kTolerance, [&](testing::Step& step) {
        Var g = step.input(a, {1, n}), u = step.input(b, {1, n}), y = glu(g, u, unit);
        step.backward(y, dy);
        return std::vector<Tensor>{y.value(), g.grad(), u.grad()};
      });
    testing::expect_cuda_equals_cpu(2 * kTolerance, [&](testing::Step& step) {
      Var x = step.input(a, {1, n}), g = step.input(b, {1, n}), y = add(add(sigmoid_gate(x, g), silu(x)), sigmoid(g));
      step.backward(y, dy);
      return std::vector<Tensor>{y.value(), x.grad(), g.grad()};
    });
  }
  // the extremes of the CPU's test: saturated gates
  Values big({-1e30f, -200, -88, 0, 88, 200, 1e30f}), ones({1, 1, 1, 1, 1, 1, 1});
  for (const Activation& unit : kUnits)
    testing::expect_cuda_equals_cpu(2 * kTolerance, [&](testing::Step& step) {
      Var g = step.input(big, {1, 7}), u = step.input(ones, {1, 7}), y = glu(g, u, unit);
      step.backward(y, ones);
      return std::vector<Tensor>{y.value(), g.grad(), u.grad()};
    });
}

// Sums in double of values of float32 exponentials, which differ from the host's by a rounding or two; also where they are handed on later.
TEST(mean, cuda_equals_cpu) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  for (int64_t n : {1, 5, 255, 20001, 1 << 20})
    for (Mean of : {Mean::exp, Mean::sigmoid}) {
      SCOPED_TRACE(fmt::format("{} of {} values", of == Mean::exp ? "exp" : "sigmoid", n));
      const Values x(n, 1, 3, -2);
      auto run = [&](Device device, Readback* later) {
        testing::Step step(false, size_t(1) << 26, device);
        step.context.later = later;
        double got = -1;
        mean(step.context, of, step.input(x, {n}).value(), [&](double m) { got = m; });
        if (later) {
          EXPECT_EQ(got, -1) << "given before it was asked for";
          later->deliver();
        }
        return got;
      };
      const double want = run(Device::cpu, nullptr), got = run(Device::cuda, nullptr);
      EXPECT_NEAR(got, want, 4 * 6e-8 * want);
      Readback later;
      EXPECT_EQ(run(Device::cuda, &later), got) << "two runs differ";
    }
}

}  // namespace
}  // namespace k3
