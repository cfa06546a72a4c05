#include "k3/ops/linear/linear.h"

#include <gtest/gtest.h>

#include "k3/ops/linear/linear_ref.h"
#include "k3/ops/linear/product.h"
#include "k3/ops/linear/product_kernels.h"
#include "k3/ops/linear/weight_product.h"
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

// A weight in each storage, and what it is as float32. Packed bytes start at an odd address, as in a file.
struct StoredWeight {
  std::vector<uint8_t> bytes, scales;
  std::vector<float> wide;
  Param param;

  StoredWeight(Stored stored, int64_t n, int64_t k, int64_t seed) {
    Rng rng{uint64_t(seed), 9};
    param.name = "w", param.shape = {n, k};
    if (stored == Stored::mxfp4) {
      bytes.resize(size_t(n * k / 2) + 1), scales.resize(size_t(n * k / 32) + 1);
      for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = uint8_t(rng.below(256, i));
      for (size_t i = 0; i < scales.size(); ++i) scales[i] = uint8_t(110 + rng.below(30, i + (1 << 24)));
      param.value = Tensor(bytes.data() + 1, DType::u8, {n, k / 2});
      param.scale = Tensor(scales.data() + 1, DType::u8, {n, k / 32});
      for (int64_t i = 0; i < n * k; ++i) {
        constexpr float magnitude[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
        int code = bytes[size_t(1 + i / 2)] >> (i % 2 * 4) & 15;
        wide.push_back(std::ldexp(code & 8 ? -magnitude[code & 7] : magnitude[code], scales[size_t(1 + i / 32)] - 127));
      }
      return;
    }
    if (stored == Stored::q8) {
      const int64_t groups = (k + 63) / 64;
      bytes.resize(size_t(n * k)), scales.resize(size_t(4 * n * groups));
      for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = uint8_t(rng.below(256, i));
      param.value = Tensor(bytes.data(), DType::u8, {n, k});
      param.scale = Tensor(scales.data(), DType::f32, {n, groups});
      for (int64_t i = 0; i < n * groups; ++i) param.scale.f32()[i] = float(rng.normal(uint64_t(i + (1 << 24))));
      for (int64_t i = 0; i < n * k; ++i) wide.push_back(float(int8_t(bytes[size_t(i)])) * param.scale.f32()[i / k * groups + i % k / 64]);
      return;
    }
    for (int64_t i = 0; i < n * k; ++i) wide.push_back(to_float(to_bf16(float(rng.normal(uint64_t(i))))));
    bytes.resize(size_t(n * k) * (stored == Stored::f32 ? 4 : 2));
    for (int64_t i = 0; i < n * k; ++i) {
      bf16 b = to_bf16(wide[size_t(i)]);
      if (stored == Stored::f32)
        std::memcpy(&bytes[size_t(4 * i)], &wide[size_t(i)], 4);
      else
        std::memcpy(&bytes[size_t(2 * i)], &b, 2);
    }
    param.value = Tensor(bytes.data(), stored == Stored::f32 ? DType::f32 : DType::bf16, {n, k});
  }
};

int64_t inputs_of_scale(Stored stored) { return stored == Stored::mxfp4 ? kGroupMxfp4 : kGroupQ8; }
double scale_of(const StoredWeight& w, Stored stored, int64_t row, int64_t input) {
  const int64_t at = row * w.param.scale.cols() + input / inputs_of_scale(stored);
  return stored == Stored::q8 ? double(w.param.scale.f32()[at]) : std::ldexp(1.0, w.param.scale.as<uint8_t>()[at] - 127);
}
// The step of the group of 32 that input i of a row of k belongs to, as product.h has it.
double step_of(Stored stored, const float* x, int64_t k, int64_t i) {
  double most = 0;
  for (int64_t j = i / 32 * 32; j < std::min(k, i / 32 * 32 + 32); ++j) most = std::max(most, std::abs(double(x[j])));
  const int bits = stored == Stored::mxfp4 ? 22 : 14;
  int e = -1000;
  if (most > 0) std::frexp(1.5 * most, &e), --e;
  return std::ldexp(1.0, std::max(e - bits, -103 - bits));
}

// The order of product.h for codes, written once more as plainly as it can be said.
std::vector<float> codes_in_order(const Values& x, const StoredWeight& w, Stored stored, int64_t m, int64_t n, int64_t k) {
  const int64_t group = stored == Stored::mxfp4 ? 32 : 16;
  std::vector<float> y(size_t(m * n));
  for (int64_t r = 0; r < m; ++r)
    for (int64_t j = 0; j < n; ++j) {
      float chain[4] = {};
      for (int64_t g = 0; g * group < k; ++g) {
        const double step = step_of(stored, x.data() + r * k, k, g * group);
        const float scale = float(scale_of(w, stored, j, g * group));
        int64_t sum = 0;
        for (int64_t i = g * group; i < std::min(k, g * group + group); ++i) {
          const int64_t number = int64_t(std::nearbyint(double(x[r * k + i]) / step));
          const uint8_t* bytes = w.param.value.as<uint8_t>();
          constexpr int doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
          sum += number * (stored == Stored::mxfp4 ? doubled[bytes[(j * k + i) / 2] >> (i % 2 * 4) & 15] : int8_t(bytes[j * k + i]));
        }
        const volatile float scaled = float(float(sum) * float(stored == Stored::mxfp4 ? step / 2 : step)) * scale;
        chain[g % 4] += scaled;
      }
      y[size_t(r * n + j)] = (chain[0] + chain[2]) + (chain[1] + chain[3]);
    }
  return y;
}

TEST(linear, products_with_codes_are_summed_in_the_documented_order_at_every_level) {
  for (auto isa : testing::levels())
    for (auto stored : {Stored::mxfp4, Stored::q8})
      for (auto [m, n, k] : {std::array<int64_t, 3>{1, 1, 32},
                             {1, 130, 480},
                             {2, 64, 384},
                             {3, 67, 416},
                             {7, 17, 96},
                             {8, 5, 1152},
                             {31, 33, 800},
                             {5, 37, 1},
                             {5, 37, 63},
                             {2, 6, 65},
                             {9, 37, 451}}) {
        if (stored == Stored::mxfp4 && k % 32) continue;
        testing::ForceIsa force(isa);
        StoredWeight w(stored, n, k, m);
        Values x(m * k, 1);
        testing::Step step(false);
        Var y = linear(step.input(x, {m, k}), w.param);
        ASSERT_EQ(std::vector<float>(y.f32(), y.f32() + m * n), codes_in_order(x, w, stored, m, n, k))
            << cpu::name_of(isa) << ", " << int(stored) << ": " << m << " x " << n << " x " << k;
      }
}

// Scales from 2^-127 to 2^127 side by side, x from subnormal numbers to 10^30, alike or one far above the others, zeros of both signs.
TEST(linear, mxfp4_keeps_its_order_at_any_scale_and_size_of_x) {
  for (auto isa : testing::levels())
    for (double size : {0.0, 1e-44, 1e-38, 1e-30, 1.0, 1e16, 1e30})
      for (int64_t spread : {1, 33, 254}) {  // scale bytes 127 +- spread / 2
        testing::ForceIsa force(isa);
        const int64_t m = 3, n = 21, k = 416;
        StoredWeight w(Stored::mxfp4, n, k, 3);
        for (size_t i = 0; i < w.scales.size(); ++i) w.scales[i] = uint8_t(127 - spread / 2 + int64_t(Rng{7, 7}.below(uint64_t(spread), i)));
        Values x(m * k, 5, size);
        for (int64_t i = 0; i < m * k; i += 7) x[i] = i % 2 ? 0.0f : -0.0f;
        for (int64_t i = 0; i < m * k; i += 61) x[i] *= 1e5f;
        testing::Step step(false);
        Var y = linear(step.input(x, {m, k}), w.param);
        ASSERT_EQ(testing::bytes_of(y.value()).size(), size_t(4 * m * n));
        const std::vector<float> want = codes_in_order(x, w, Stored::mxfp4, m, n, k);
        ASSERT_EQ(0, std::memcmp(want.data(), y.f32(), want.size() * 4)) << cpu::name_of(isa) << ": size " << size << ", spread " << spread;
      }
}

// Each input counts to within half a step; beyond that, a product and an addition of float32 for each of k / 32 or k / 16 sums.
TEST(linear, products_with_codes_are_as_near_as_documented) {
  for (auto stored : {Stored::mxfp4, Stored::q8}) {
    const int64_t m = 4, n = 40, k = 2048;
    StoredWeight w(stored, n, k, 3);
    Values x(m * k, 1);
    for (int64_t i = 0; i < m * k; i += 100) x[i] *= 1000;
    testing::Step step(false);
    Var y = linear(step.input(x, {m, k}), w.param);
    double worst = 0;
    for (int64_t r = 0; r < m; ++r)
      for (int64_t j = 0; j < n; ++j) {
        double sum = 0, steps = 0, sizes = 0;
        for (int64_t i = 0; i < k; ++i) {
          const double wide = w.wide[size_t(j * k + i)];
          sum += double(x[r * k + i]) * wide, sizes += std::abs(double(x[r * k + i]) * wide);
          steps += step_of(stored, x.data() + r * k, k, i) / 2 * std::abs(wide);
        }
        const double error = std::abs(sum - double(y.f32()[r * n + j]));
        ASSERT_LE(error, steps + 1e-6 * sizes);
        worst = std::max(worst, error / steps);
      }
    EXPECT_GT(worst, 0.005);  // the bound says something
  }
}

TEST(linear, an_input_that_is_not_finite_makes_its_row_nan_and_no_other) {
  for (auto isa : testing::levels())
    for (auto stored : {Stored::mxfp4, Stored::q8})
      for (float bad : {NAN, INFINITY, -INFINITY, 3e38f}) {
        testing::ForceIsa force(isa);
        const int64_t m = 11, n = 9, k = 160;
        StoredWeight w(stored, n, k, 3);
        Values x(m * k, 1);
        x[4 * k + 77] = bad;
        testing::Step step(false);
        Var y = linear(step.input(x, {m, k}), w.param);
        for (int64_t i = 0; i < m * n; ++i) ASSERT_EQ(std::isnan(y.f32()[i]), i / n == 4) << i;
      }
}

TEST(linear, a_row_with_codes_does_not_depend_on_its_neighbours_or_threads) {
  for (auto isa : testing::levels())
    for (auto stored : {Stored::mxfp4, Stored::q8}) {
      testing::ForceIsa force(isa);
      const int64_t m = 43, n = 1100, k = 320;
      StoredWeight w(stored, n, k, 3);
      Values x(m * k, 1);
      testing::expect_same_bits_at_any_thread_count([&](testing::Step& step) {
        return std::vector<Tensor>{linear(step.input(x, {m, k}), w.param).value()};
      });
      testing::Step step(false);
      const Tensor whole = linear(step.input(x, {m, k}), w.param).value();
      for (int64_t rows : {1, 2, 3, 5, 8, 13})
        for (int64_t at : {0, 7, 30}) {
          std::vector<float> part(size_t(rows * n)), room(size_t(room_bytes(rows, k)) / 4 + 16);
          void* aligned = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(room.data()) + 63) / 64 * 64);
          weight_products({{rows, x.data() + at * k, weight_of(w.param), part.data()}}, aligned);
          ASSERT_EQ(0, std::memcmp(part.data(), whole.f32() + at * n, part.size() * 4)) << rows << " rows from " << at;
        }
    }
}

TEST(linear, weights_as_stored_give_the_bits_of_the_widened_ones) {
  for (auto isa : testing::levels())
    for (auto stored : {Stored::f32, Stored::bf16})
      for (auto [m, n, k] :
           {std::array<int64_t, 3>{1, 1, 32}, {1, 130, 480}, {2, 64, 384}, {3, 65, 416}, {7, 17, 96}, {31, 100, 800}, {32, 50, 416}, {70, 99, 512}}) {
        testing::ForceIsa force(isa);
        StoredWeight w(stored, n, k, m);
        Values x(m * k, 1);
        testing::Step step(false);
        Var y = linear(step.input(x, {m, k}), w.param);
        std::vector<float> want(size_t(m * n));
        product_serial(x_wt(x.data(), w.wide.data(), want.data(), m, n, k));
        ASSERT_EQ(0, std::memcmp(want.data(), y.f32(), want.size() * 4)) << int(stored) << ": " << m << " x " << n << " x " << k;
      }
}

TEST(linear, bfloat16_weights_may_be_of_any_width) {
  for (auto isa : testing::levels())
    for (int64_t k : {1, 31, 387}) {
      testing::ForceIsa force(isa);
      StoredWeight w(Stored::bf16, 37, k, k);
      Values x(5 * k, 1);
      testing::Step step(false);
      Var y = linear(step.input(x, {5, k}), w.param);
      std::vector<float> want(5 * 37);
      product_serial(x_wt(x.data(), w.wide.data(), want.data(), 5, 37, k));
      EXPECT_EQ(0, std::memcmp(want.data(), y.f32(), want.size() * 4)) << k;
    }
}

// Each byte with each scale, one weight at a time (x is 1 at one input and 0 elsewhere), and as widened.
TEST(linear, every_byte_of_mxfp4_is_exact_at_every_scale) {
  constexpr float magnitude[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  for (auto isa : testing::levels())
    for (int scale = 0; scale < 255; ++scale) {
      testing::ForceIsa force(isa);
      std::vector<uint8_t> bytes(256 * 16), scales(256, uint8_t(scale));
      for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = i % 16 == 5 ? uint8_t(i / 16) : 0;
      Weight w{Stored::mxfp4, 256, 32, bytes.data(), scales.data()};
      std::vector<float> x(64), y(512), wide(256 * 32);
      x[10] = 1, x[32 + 11] = 1;
      alignas(64) char room[2048];
      ASSERT_LE(room_bytes(2, 32), int64_t(sizeof room));
      weight_products({{2, x.data(), w, y.data()}}, room);
      widen(w, 0, 256, wide.data());
      for (int b = 0; b < 256; ++b)
        for (int half = 0; half < 2; ++half) {
          int code = half ? b >> 4 : b & 15;
          float want = std::ldexp(code & 8 ? -magnitude[code & 7] : magnitude[code], scale - 127);
          ASSERT_EQ(want, wide[size_t(b * 32 + 10 + half)]) << "byte " << b << " scale " << scale;
          ASSERT_TRUE(scale > 252 || want == y[size_t(half * 256 + b)])  // above, 6 is infinite as a float32
              << "byte " << b << " scale " << scale;
        }
    }
}

TEST(linear, a_frozen_weight_as_stored_passes_the_gradient_of_the_widened_one) {
  for (auto stored : {Stored::bf16, Stored::mxfp4, Stored::q8}) {
    int64_t m = 33, n = 400, k = 4096;  // two slices
    StoredWeight w(stored, n, k, 3);
    Values x(m * k, 1), dy(m * n, 2);
    testing::Step step;
    Var vx = step.input(x, {m, k});
    step.backward(linear(vx, w.param), dy);
    std::vector<float> want(size_t(m * k));
    product(dy_w(dy.data(), w.wide.data(), want.data(), m, n, k));
    EXPECT_EQ(0, std::memcmp(want.data(), vx.grad().data(), want.size() * 4));
  }
}

TEST(linear, a_scale_of_255_is_refused_by_name_at_the_first_use) {
  StoredWeight w(Stored::mxfp4, 8, 64, 1);
  w.scales[1 + 5] = 255;
  testing::Step step(false);
  EXPECT_THAT([&] { linear(step.input(Values(64, 1), {1, 64}), w.param); }, testing::throws_error("[weight] w_scale holds 255 (not a number) at 5"));
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
