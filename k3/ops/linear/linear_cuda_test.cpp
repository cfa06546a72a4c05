// On the GPU: near the CPU where rounding differs, and to the bit where it may not.
#include <gtest/gtest.h>

#include "k3/ops/linear/linear.h"
#include "k3/ops/testing.h"

namespace k3 {
namespace {

using testing::Values;

// One of each tile, and sizes that none divides. Both sides are chains of k (backward: n and m) roundings, in other orders.
TEST(linear, cuda_equals_cpu) {
  for (auto [m, n, k] : {std::array<int64_t, 3>{1, 50, 1500},
                         {5, 3, 384},
                         {31, 33, 385},
                         {0, 4, 4},
                         {64, 1, 100},
                         {130, 8, 1024},
                         {65, 32, 150},
                         {200, 96, 2047},
                         {700, 650, 65},
                         {1537, 1540, 33}}) {
    if (testing::few_shapes() && (m * n > 500000 || k > 2000)) continue;
    Values x(m * k, 1), w(n * k, 2), dy(m * n, 3);
    testing::expect_cuda_equals_cpu(16 * 6e-8 * std::sqrt(double(std::max({m, n, k}))), [&, m = m, n = n, k = k](testing::Step& step) {
      Param& p = step.keep(step.param("w", w, {n, k}));
      Var vx = step.input(x, {m, k}), y = linear(vx, p);
      step.backward(y, dy);
      return std::vector<Tensor>{y.value(), vx.grad(), p.grad};
    });
  }
}

// Operands rounded to bfloat16, 2^-9 each, twice; the worst of thousands of elements is five deviations out.
TEST(linear, cuda_layers_side_by_side_are_near_one_by_one) {
  for (auto [m, n, k, count] : {std::array<int64_t, 4>{1, 8, 32, 2}, {130, 256, 96, 3}, {77, 24, 200, 4}}) {
    SCOPED_TRACE(fmt::format("{} x {} x {}, {} of them", m, n, k, count));
    testing::expect_cuda_equals_cpu(5 * 2 / 512.0, [&, m = m, n = n, k = k, count = count](testing::Step& step) {
      step.context.bf16_products = true;
      Param all = step.param("w", Values(count * n * k, 2, 1 / std::sqrt(double(k))), {count * n, k});
      if (step.context.device == Device::cuda) all.narrow = step.arena().lend(DType::bf16, {count * n, k}), renew_narrow(all);
      std::vector<Param*> ws;
      for (int64_t i = 0; i < count; ++i) {
        Param& p = *ws.emplace_back(&step.keep(Param{.name = "part"}));
        p.value = all.value.row_range(i * n, (i + 1) * n), p.grad = all.grad.row_range(i * n, (i + 1) * n);
        if (!all.narrow.empty()) p.narrow = all.narrow.row_range(i * n, (i + 1) * n);
      }
      Var x = step.input(Values(m * k, 1), {m, k});
      std::vector<Var> ys = linears(x, ws);
      std::vector<Tensor> out;
      for (int64_t i = 0; i < count; ++i) {
        if (i + 1 < count) write(ys[size_t(i)].grad(), Values(m * n, uint64_t(5 + i)).data());
        out.push_back(ys[size_t(i)].value());
      }
      step.backward(ys.back(), Values(m * n, 50));
      out.push_back(x.grad()), out.push_back(all.grad);
      return out;
    });
  }
}

// The library's fastest algorithms for these gradients of weights sum in parts, so a choice by time alone would move bits.
TEST(linear, cuda_what_comes_often_keeps_the_bits_of_its_first_product) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  for (auto [m, n, k] : {std::array<int64_t, 3>{4096, 256, 1024}, {4096, 1024, 256}, {4096, 160, 1024}}) {
    if (testing::few_shapes() && n != 160) continue;
    std::string first;
    for (int run = 0; run < 4; ++run) {
      testing::Step step(true, size_t(1) << 28, Device::cuda);
      step.context.bf16_products = true;
      Param w = step.param("w", Values(n * k, 2), {n, k});
      Var x = step.input(Values(m * k, 1), {m, k}), y = linear(x, w);
      step.backward(y, Values(m * n, 3));
      std::string bits;
      for (const Tensor& t : {y.value(), x.grad(), w.grad}) bits.append(reinterpret_cast<const char*>(HostCopy(t).f32()), t.bytes());
      if (run == 0) first = bits;
      EXPECT_TRUE(bits == first) << m << " x " << k << " -> " << n << ", product " << run;
    }
  }
}

TEST(linear, cuda_reads_bf16_weights_exactly) {
  const int64_t m = 20, n = 65, k = 130;
  Values x(m * k, 1), w(n * k, 2);
  std::vector<bf16> narrow(size_t(n * k));
  for (int64_t i = 0; i < n * k; ++i) narrow[size_t(i)] = to_bf16(w[i]), w[i] = to_float(narrow[size_t(i)]);
  testing::expect_cuda_equals_cpu(
      16 * 6e-8 * std::sqrt(double(k)),
      [&](testing::Step& step) {
        Param wide = step.param("w", w, {n, k}, false), stored{.name = "w", .value = step.arena().lend(DType::bf16, {n, k})};
        write(stored.value, narrow.data());
        Var vx = step.input(x, {m, k});
        Tensor a = linear(vx, wide).value(), b = linear(vx, stored).value();
        EXPECT_EQ(testing::bytes_of(a), testing::bytes_of(b));
        return std::vector<Tensor>{a, b};
      },
      false);
}

TEST(linear, a_row_on_the_gpu_does_not_depend_on_its_neighbours) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  const int64_t m = 1537, n = 1540, k = 77;
  testing::Step step(false, size_t(1) << 30, Device::cuda);
  Param p = step.param("w", Values(n * k, 2), {n, k}, false);
  Var x = step.input(Values(m * k, 1), {m, k});
  const Tensor whole = linear(x, p).value();
  for (int64_t rows : {1, 7, 16, 17, 100, 400})
    for (int64_t at : {0, 5, 1000}) {
      if (testing::few_shapes() && at != 5) continue;
      EXPECT_EQ(testing::bytes_of(linear(Var(step.context, x.value().row_range(at, at + rows)), p).value()),
                testing::bytes_of(whole.row_range(at, at + rows)))
          << rows << " rows from " << at;
    }
}

// Few rows have a kernel of their own, in two forms by the columns; 40 rows have another. Depths that no slice divides; weights of either kind.
TEST(linear, few_rows_on_the_gpu_have_the_bits_of_many) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  for (auto [n, k] : {std::array<int64_t, 2>{17001, 8}, {17001, 72}, {16897, 1032}, {64, 1096}, {333, 72}}) {
    if (testing::few_shapes() && n * k > 140000) continue;
    const int64_t m = 40;
    Values x(m * k, 1), w(n * k, 2);
    std::vector<bf16> narrow(size_t(n * k));
    for (int64_t i = 0; i < n * k; ++i) narrow[size_t(i)] = to_bf16(w[i]), w[i] = to_float(narrow[size_t(i)]);
    testing::Step step(false, size_t(1) << 30, Device::cuda);
    Param wide = step.param("w", w, {n, k}, false), stored{.name = "w", .value = step.arena().lend(DType::bf16, {n, k})};
    write(stored.value, narrow.data());
    Var all = step.input(x, {m, k});
    const Tensor whole = linear(all, wide).value();
    for (int64_t rows : {1, 2, 3, 4, 7, 8, 9, 16, 17})
      for (Param* p : {&wide, &stored})
        EXPECT_EQ(testing::bytes_of(linear(Var(step.context, all.value().row_range(5, 5 + rows)), *p).value()),
                  testing::bytes_of(whole.row_range(5, 5 + rows)))
            << rows << " rows, " << n << " x " << k;
  }
}

}  // namespace
}  // namespace k3
