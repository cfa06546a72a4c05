// The optimizers on the GPU against the CPU.
#include <gtest/gtest.h>

#include "k3/ops/testing.h"
#include "k3/ops/update/update.h"

namespace k3 {
namespace {

using testing::Step;
using testing::Values;

TEST(update, cuda_adamw_equals_cpu) {
  for (int64_t n : {1, 5, 17, 40000})
    testing::expect_cuda_equals_cpu(
        2e-5,
        [&](Step& step) {
          Param w = step.param("w", Values(n, 1), {n}), m = step.param("m", Values(n, 0, 0), {n}), v = step.param("v", Values(n, 0, 0), {n});
          for (int64_t t = 1; t <= 20; ++t) {
            Values g(n, uint64_t(10 + t));
            for (int64_t i = 0; i < n; i += 5) g[i] *= i % 2 ? 0 : 1e-9f;
            adamw_step(step.context, w.value, step.param("g", g, {n}).value, m.value, v.value, {.lr = 0.01f, .step = t, .grad_scale = 0.25f});
          }
          return std::vector<Tensor>{w.value, m.value, v.value};
        },
        false);
}

// Wide, tall, square, a vector, one block a head, blocks of zeros, larger than a tile of the products.
TEST(update, cuda_newton_schulz_equals_cpu) {
  for (auto [blocks, rows, cols] :
       {std::array<int64_t, 3>{1, 20, 30}, {3, 12, 50}, {2, 50, 20}, {1, 1, 40}, {1, 33, 33}, {4, 64, 300}, {1, 200, 260}, {2, 130, 600}}) {
    SCOPED_TRACE(fmt::format("{} x {} x {}", blocks, rows, cols));
    testing::expect_cuda_equals_cpu(
        2e-4,  // five steps amplify what the normalisation rounds by a^5 = 485 where singular values are small
        [&](Step& step) {
          Values v(blocks * rows * cols, 7);
          for (int64_t i = 0; blocks > 1 && i < rows * cols; ++i) v[i] = 0;
          Param x = step.param("x", v, {blocks, rows, cols}, false);
          newton_schulz(step.context, x.value);
          return std::vector<Tensor>{x.value};
        },
        false);
  }
}

// Operands as sums of two bfloat16: 1.6e-3 to 3.6e-3 of the norm by the double model, and the worst element three times that.
TEST(update, cuda_newton_schulz_on_the_tensor_units_is_near_cpu) {
  for (auto [blocks, rows, cols] : {std::array<int64_t, 3>{1, 200, 260}, {2, 130, 601}, {1, 700, 256}}) {
    SCOPED_TRACE(fmt::format("{} x {} x {}", blocks, rows, cols));
    testing::expect_cuda_equals_cpu(
        1e-2,
        [&](Step& step) {
          step.context.bf16_products = true;
          Param x = step.param("x", Values(blocks * rows * cols, 7), {blocks, rows, cols}, false);
          newton_schulz(step.context, x.value);
          return std::vector<Tensor>{x.value};
        },
        false);
  }
}

TEST(update, cuda_muon_equals_cpu) {
  for (bool nesterov : {true, false})
    testing::expect_cuda_equals_cpu(
        4e-4,
        [&](Step& step) {
          struct Matrix {
            Param w, g, m;
            int64_t blocks;
          };
          std::vector<Matrix> all;
          for (auto [rows, cols, blocks] : {std::array<int64_t, 3>{20, 30, 1}, {36, 50, 3}, {50, 20, 1}, {256, 520, 2}, {150, 150, 1}}) {
            const int64_t n = rows * cols;
            all.push_back({step.param("w", Values(n, 1), {rows, cols}), step.param("g", Values(n, 2), {rows, cols}),
                           step.param("m", Values(n, 3), {rows, cols}), blocks});
          }
          std::vector<MuonMatrix> list;
          for (Matrix& a : all) list.push_back({a.w.value, a.g.value, a.m.value, a.blocks});
          for (int at = 0; at < 3; ++at) muon_step(step.context, list, {.lr = 0.05f, .grad_scale = 0.5f, .nesterov = nesterov});
          std::vector<Tensor> out;
          for (Matrix& a : all) out.insert(out.end(), {a.w.value, a.m.value});
          return out;
        },
        false);
}

TEST(update, cuda_gradient_norm_and_clip_equal_cpu) {
  testing::expect_cuda_equals_cpu(
      1e-6,
      [&](Step& step) {
        std::vector<Param> params(4);
        params[0] = step.param("a", Values(100000, 1, 1e18), {100000}), params[1].name = "frozen";
        params[2] = step.param("b", Values(50, 2), {50}), params[3] = step.param("c", Values(70, 3), {70});
        for (Param& p : params) std::swap(p.value, p.grad);
        std::vector<Param*> list;
        for (Param& p : params) list.push_back(&p);
        const GradientNorm norm = gradient_norm(step.context, list);
        EXPECT_EQ(norm.bad, "");
        Values bad(50, 2);
        bad[49] = INFINITY;
        write(params[2].grad, bad.data());
        EXPECT_EQ(gradient_norm(step.context, list).bad, "b");
        Param q = step.param("q", Values(4 * 12 * 10, 1), {48, 10}), kv = step.param("kv", Values(4 * 14 * 10, 2), {56, 10});
        EXPECT_EQ(qk_clip(step.context, q, kv, {20, 5, 11, 9}, 10, 8, 4, 6), 2);
        Tensor out = step.arena().lend(DType::f32, {1});
        const float value = float(norm.norm * 1e-18);
        write(out, &value);
        return std::vector<Tensor>{out, q.value, kv.value};
      },
      false);
}

}  // namespace
}  // namespace k3
