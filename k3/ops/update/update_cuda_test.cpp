// The optimizers on the GPU against the CPU.
#include <gtest/gtest.h>

#include <cstring>

#include "k3/ops/linear/linear.h"
#include "k3/ops/testing.h"
#include "k3/ops/update/resident.h"
#include "k3/ops/update/resident_cuda.h"
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
    if (testing::few_shapes() && cols > 50) continue;
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
    if (testing::few_shapes() && rows != 200) continue;
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
            if (testing::few_shapes() && rows > 50) continue;
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

// A table of which each step touches a few rows, 130 times, so that rows are behind by more than what is kept of the rates; beside it the same table
// with a whole gradient. Rows lie across the grain of Param::touched.
TEST(update, cuda_late_rows_are_those_of_an_update_a_step) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  const int64_t rows = 301, d = 300, n = rows * d, parts = (n + kGradPart - 1) / kGradPart;
  Step step(false, size_t(1) << 26, Device::cuda);
  Context& c = step.context;
  struct Table {
    Param* p;
    Tensor m, v;
    std::unique_ptr<ResidentUpdate> update;
  };
  auto table = [&](bool late) {
    Param& p = step.keep(step.param("table", Values(n, 1), {rows, d}, false));
    Table t{&p, step.param("m", Values(n, 0, 0), {rows, d}, false).value, step.param("v", Values(n, 0, 0), {rows, d}, false).value, nullptr};
    p.grad = step.param("g", Values(n, 0, 0), {rows, d}, false).value;
    if (late) p.touched = step.arena().lend_zeroed(DType::u8, {parts});
    t.update = std::make_unique<ResidentUpdate>(std::vector<Param*>{&p}, std::vector<ResidentUpdate::AdamW>{{&p, t.m, t.v, true}},
                                                std::vector<ResidentUpdate::Muon>{});
    return t;
  };
  Table late = table(true), whole = table(false);
  ASSERT_TRUE(late.p->catch_up);
  ASSERT_FALSE(whole.p->catch_up);
  const Rng rng{5, 9};
  Tensor ids_there = step.arena().lend(DType::i32, {8});
  AdamWOptions a{.weight_decay = 0.1f, .step = 1};
  for (uint64_t s = 0; s < 130; ++s) {
    std::vector<int32_t> ids;  // one often, one in the first half of the rows seldom, some twice, a row of padding
    for (uint64_t i = 0; i < 6; ++i) ids.push_back(int32_t(i ? rng.below(uint64_t(rows) / (s % 7 ? 4 : 1), s * 8 + i) : 7));
    ids.push_back(ids[3]), ids.push_back(-1);
    const bool bad = s == 40;
    Values g(n, 0, 0), some(8 * d, 100 + s);
    std::vector<uint8_t> touched(size_t(parts), 0);
    for (int64_t i = 0; i < 7; ++i) {
      for (int64_t j = 0; j < d; ++j) g[ids[size_t(i)] * d + j] = bad && i == 2 ? NAN : some[i * d + j];
      for (int64_t q = ids[size_t(i)] * d / kGradPart; q <= (ids[size_t(i)] * d + d - 1) / kGradPart; ++q) touched[size_t(q)] = 1;
    }
    write(ids_there, ids.data());
    late.p->catch_up(ids_there.i32(), 8);
    for (int64_t i = 0; i < 7; ++i) {
      const Tensor x = late.p->value.row_range(ids[size_t(i)], ids[size_t(i)] + 1), y = whole.p->value.row_range(ids[size_t(i)], ids[size_t(i)] + 1);
      ASSERT_EQ(0, std::memcmp(HostCopy(x).f32(), HostCopy(y).f32(), x.bytes())) << "read before step " << s;
    }
    write(late.p->touched, touched.data());
    a.lr = 0.01f / float(1 + s);
    for (Table* t : {&late, &whole}) {
      write(t->p->grad, g.data());
      bool finite = false;
      t->update->step(c, a, {}, 3, [&](const GradientNorm& norm) { finite = norm.bad.empty(); });
      ASSERT_EQ(finite, !bad) << s;
    }
    if (!bad) ++a.step;
  }
  auto same = [](const Tensor& x, const Tensor& y) { return 0 == std::memcmp(HostCopy(x).f32(), HostCopy(y).f32(), x.bytes()); };
  EXPECT_FALSE(same(late.p->value, whole.p->value)) << "no row was behind";
  late.update.reset();
  EXPECT_FALSE(late.p->catch_up);
  EXPECT_TRUE(same(late.p->value, whole.p->value));
  EXPECT_TRUE(same(late.m, whole.m));
  EXPECT_TRUE(same(late.v, whole.v));
}

// Three steps of a whole optimizer from resident lists; on the CPU the same by the operators one after another.
struct Whole {
  bool narrow, bad = false;
  std::vector<Tensor> run(Step& step) const {
    Context& c = step.context;
    c.bf16_products = narrow;
    std::vector<ResidentUpdate::AdamW> adamw;
    std::vector<ResidentUpdate::Muon> muon;
    std::vector<Param*> all;
    auto param = [&](uint64_t seed, Shape s) {
      Param& p = step.keep(step.param("p" + std::to_string(seed), Values(s.size(), seed), s, false));
      p.grad = step.param("g", Values(s.size(), seed + 100), s, false).value;
      if (narrow && c.device == Device::cuda) p.narrow = step.arena().lend(DType::bf16, s), renew_narrow(p);
      all.push_back(&p);
      return &p;
    };
    auto moment = [&](uint64_t seed, Shape s) { return step.param("m", Values(s.size(), seed, seed ? 1.0 : 0.0), s, false).value; };
    for (Shape s : {Shape{5}, {20000}, {163, 8}}) {
      Param* p = param(uint64_t(s.size()), s);
      adamw.push_back({p, moment(0, s), moment(0, s), s.rank == 2});
    }
    for (auto [rows, cols, blocks] :
         {std::array<int64_t, 3>{24, 40, 1}, {24, 40, 3}, {40, 24, 1}, {130, 70, 1}, {20, 12, 1}, {256, 512, 1}, {512, 256, 1}}) {
      if (testing::few_shapes() && rows > 50) continue;
      Param* p = param(uint64_t(rows * 1000 + cols + blocks), {rows, cols});
      muon.push_back({p, moment(7, {rows, cols}), blocks});
    }
    {  // a gradient of three parts and a rest, of which one part and the rest were touched: what else is there is not looked at
      const int64_t n = 3 * kGradPart + 100;
      Param* p = param(11, {n});
      adamw.push_back({p, moment(0, {n}), moment(0, {n}), true});
      const bool there = c.device == Device::cuda;
      Values g(n, 12);
      for (int64_t i = 0; i < n; ++i)
        if (i / kGradPart % 2 == 0) g[i] = there ? NAN : 0;
      write(p->grad, g.data());
      if (there) {
        const uint8_t touched[4] = {0, 1, 0, 1};
        p->touched = step.arena().lend(DType::u8, {4});
        write(p->touched, touched);
      }
    }
    if (bad) {
      Values g(20000, 3);
      g[19999] = NAN;
      write(all[1]->grad, g.data());
    }
    AdamWOptions a{.lr = 0.01f, .weight_decay = 0.1f};
    const MuonOptions o{.lr = 0.05f, .weight_decay = 0.1f};
    std::string found;
    const double clip = 3;
    std::unique_ptr<ResidentUpdate> resident;
    if (c.device == Device::cuda) resident = std::make_unique<ResidentUpdate>(all, adamw, muon);
    for (a.step = 1; a.step <= 3; ++a.step) {
      if (resident) {
        resident->step(c, a, o, clip, [&](const GradientNorm& g) { found = g.bad; });
        continue;
      }
      const GradientNorm g = gradient_norm(c, all);
      found = g.bad;
      if (!g.bad.empty()) continue;
      AdamWOptions b = a;
      MuonOptions m = o;
      b.grad_scale = m.grad_scale = float(clip / g.norm);
      for (auto& t : adamw) b.weight_decay = t.decay ? a.weight_decay : 0, adamw_step(c, t.param->value, t.param->grad, t.m, t.v, b);
      std::vector<MuonMatrix> list;
      for (auto& t : muon) list.push_back({t.param->value, t.param->grad, t.momentum, t.blocks});
      muon_step(c, list, m);
    }
    EXPECT_EQ(found, bad ? all[1]->name : "");
    std::vector<Tensor> out;
    for (Param* p : all) {
      out.push_back(p->value);
      if (p->narrow.empty()) continue;
      gpu::synchronize();
      const HostCopy wide(p->value), half(p->narrow);
      for (int64_t i = 0; i < p->value.size(); ++i) EXPECT_EQ(half.tensor().as<bf16>()[i].bits, to_bf16(wide.f32()[i]).bits) << p->name << " " << i;
    }
    for (auto& t : adamw) out.push_back(t.m), out.push_back(t.v);
    for (auto& t : muon) out.push_back(t.momentum);
    return out;
  }
};
TEST(update, cuda_resident_lists_equal_the_operators) {
  testing::expect_cuda_equals_cpu(
      4e-4, [](Step& s) { return Whole{false}.run(s); }, false);
  testing::expect_cuda_equals_cpu(
      0,
      [](Step& s) {
        return Whole{false, true}.run(s);
      },
      false);
  // In bfloat16 an orthogonalised matrix is a few percent off where its singular values are small; a step moves a weight by 0.05 of that.
  testing::expect_cuda_equals_cpu(
      0.05, [](Step& s) { return Whole{true}.run(s); }, false);
  testing::expect_cuda_equals_cpu(
      0,
      [](Step& s) {
        return Whole{true, true}.run(s);
      },
      false);
}

// A part that no token touched is not written either: what is there, here NaN, stays; the others become zeros, and no part is marked any more.
TEST(update, cuda_clears_the_parts_that_were_touched_and_no_other) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  const int64_t n = 3 * kGradPart + 100;
  Step step(false, size_t(1) << 28, Device::cuda);
  Values g(n, 1);
  for (int64_t i = 0; i < n; ++i)
    if (i / kGradPart % 2 == 0) g[i] = NAN;
  const Tensor grad = step.input(g, {n}).value(), touched = step.arena().lend(DType::u8, {4});
  const uint8_t marks[4] = {0, 1, 0, 1};
  write(touched, marks);
  if constexpr (gpu::kBuilt) gpu::check(cuda::clear_touched(grad.f32(), n, touched.as<uint8_t>(), gpu::stream()));
  const HostCopy left(grad), marked(touched);
  for (int64_t i = 0; i < n; ++i) {
    if (i / kGradPart % 2)
      ASSERT_EQ(left.f32()[i], 0) << i;
    else
      ASSERT_TRUE(std::isnan(left.f32()[i])) << i;
  }
  for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(marked.tensor().as<uint8_t>()[i], 0) << i;
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
