// Routing, experts and balancing on the GPU against the CPU.
#include <gtest/gtest.h>

#include <numeric>

#include "k3/ops/activation/activation.h"
#include "k3/ops/linear/linear.h"
#include "k3/ops/linear/quantize.h"
#include "k3/ops/moe/balance.h"
#include "k3/ops/testing.h"

namespace k3 {
namespace {

using testing::Step;
using testing::Values;

const Activation kSitu{Activation::Kind::situ, 4, 25, 0};

struct Router {
  Values x, gate, bias;
  int64_t rows, experts;
  static constexpr int64_t d = 24;
  Router(int64_t rows, int64_t experts)
      : x(rows * d, 1), gate(experts * d, 2, 1 / std::sqrt(double(d))), bias(experts, 3, 0.3), rows(rows), experts(experts) {}
  Routing run(Step& step, Var in, Param& w, const RouteOptions& o, const Batch& batch, const Tensor* forced = nullptr) const {
    return route(in, w, step.keep(step.param("bias", bias, {experts}, false)), o, batch, forced);
  }
};

// Scores differ in the last bit between devices, so choices are compared where no margin is that small; with `forced` they are the same anyway.
TEST(moe, cuda_routes_equal_cpu) {
  struct Case {
    int64_t rows, experts;
    RouteOptions o;
  };
  for (const Case& k : {Case{1, 5, {.top_k = 2}},
                        {70, 33, {.top_k = 4, .softmax = true}},
                        {17, 33, {.top_k = 1, .scale = 2}},
                        {20, 16, {.top_k = 16}},
                        {130, 96, {.top_k = 8, .scale = 2.446f, .groups = 12, .top_groups = 3}},
                        {40, 896, {.top_k = 16}},
                        {9, 24, {.top_k = 3, .groups = 24, .top_groups = 5}},
                        {33, 7, {.top_k = 3, .softmax = true, .renormalize = false, .scale = 2.5f}},
                        {0, 7, {.top_k = 3}}}) {
    SCOPED_TRACE(fmt::format("{} rows, {} experts", k.rows, k.experts));
    const Router router(k.rows, k.experts);
    const Values dw(k.rows * k.o.top_k, 9);
    testing::expect_cuda_equals_cpu(4e-5, [&](Step& step) {  // 24-term logits and the sigmoid: 1e-6; the gradient divides by the scores' sum
      Var x = step.input(router.x, {k.rows, router.d});
      Param& gate = step.keep(step.param("gate", router.gate, {k.experts, router.d}));
      Batch batch = Batch::one(k.rows);
      batch.padding.assign(size_t(k.rows), 0);
      for (int64_t i = 2; i < k.rows; i += 7) batch.padding[i] = 1;
      Routing r = router.run(step, x, gate, k.o, batch);
      const HostCopy margin(r.margin);
      for (int64_t i = 0; i < k.rows; ++i) EXPECT_GT(margin.f32()[i], 1e-6) << "a tie: choose other values";
      step.backward(r.weights, dw);
      std::vector<Tensor> out{r.weights.value(), r.experts, r.scores, x.grad(), gate.grad};
      if (k.o.top_k < k.experts && k.rows > 0) out.push_back(r.cutoff);
      return out;
    });
  }
}

TEST(moe, cuda_ties_nans_and_forced_choices_are_those_of_the_cpu) {
  testing::expect_cuda_equals_cpu(1e-6, [&](Step& step) {  // exact ties and a NaN expert
    Values x(std::vector<float>{1, -1, 0.5f, 2}), gate(40, 1, 0),
        bias(std::vector<float>{0, -0.0f, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1});
    gate[8] = NAN;
    Routing r = route(step.input(x, {2, 2}), step.keep(step.param("gate", gate, {20, 2})), step.keep(step.param("bias", bias, {20})), {.top_k = 6},
                      Batch::one(2));
    const HostCopy chosen(r.experts);
    EXPECT_EQ(std::vector<int32_t>(chosen.i32(), chosen.i32() + 6), (std::vector<int32_t>{2, 5, 19, 0, 1, 3}));
    return std::vector<Tensor>{r.experts, r.weights.value(), r.cutoff, r.margin};
  });
  testing::expect_cuda_equals_cpu(1e-6, [&](Step& step) {  // nothing but NaN: the choice is valid
    Values x(3 * 2, 1), gate(8, 2), bias(4, 3, 0);
    x[2] = NAN;
    Routing r = route(step.input(x, {3, 2}), step.keep(step.param("gate", gate, {4, 2})), step.keep(step.param("bias", bias, {4})), {.top_k = 2},
                      Batch::one(3));
    return std::vector<Tensor>{r.experts};
  });
  const Router router(50, 12);
  std::vector<int32_t> choice;
  for (int32_t i = 0; i < 50; ++i)
    for (int32_t k = 0; k < 3; ++k) choice.push_back((i + k * 5) % 12);
  testing::expect_cuda_equals_cpu(4e-5, [&](Step& step) {
    const Tensor forced(choice.data(), DType::i32, {50, 3});
    Param& gate = step.keep(step.param("gate", router.gate, {12, router.d}));
    Routing r = router.run(step, step.input(router.x, {50, router.d}), gate, {.top_k = 3}, Batch::one(50), &forced);
    return std::vector<Tensor>{r.experts, r.weights.value(), r.cutoff, r.margin};
  });
}

struct Moe {
  int64_t rows, slots, l, m, count;
  bool narrow;
  bool kept = false, all = false;  // with Param::narrow
  bool codes = false;              // in MXFP4
  bool quantized = false;          // only values that MXFP4 holds
  std::vector<int32_t> chosen;
  Moe(int64_t rows, int64_t slots, int64_t l, int64_t m, int64_t count, bool narrow = false)
      : rows(rows), slots(slots), l(l), m(m), count(count), narrow(narrow) {
    for (int64_t n = 0; n < rows; ++n)
      for (int64_t s = 0; s < slots; ++s) chosen.push_back(int32_t((n * 7 + s * (count / slots > 0 ? count / slots : 1) + n / 3) % count));
  }
  std::vector<Tensor> run(Step& step) const {
    Routing r;
    Var z = step.input(Values(rows * l, 1), {rows, l});
    r.weights = step.input(Values(rows * slots, 2), {rows, slots});
    r.experts = step.arena().lend(DType::i32, {rows, slots});
    write(r.experts, chosen.data());
    r.scores = step.arena().lend(DType::f32, {rows, count});
    ExpertWeights w;
    auto weight = [&](uint64_t seed, int64_t e, Shape s) {
      Values v(s.size(), seed * 1000 + uint64_t(e), 1 / std::sqrt(double(s[1])));
      for (int64_t i = 0; quantized && i < v.size(); ++i) v[i] = std::ldexp(std::round(std::clamp(v[i] * 16.0f, -4.0f, 4.0f)), -4);
      Param& p = step.keep(step.param("w", v, s));
      if (codes) {
        std::vector<uint8_t> code(size_t(v.size() / 2)), scale(size_t(v.size() / 32));
        quantize(Stored::mxfp4, v.data(), s[0], s[1], code.data(), scale.data(), "w");
        p.value = step.arena().lend(DType::u8, {s[0], s[1] / 2}), p.scale = step.arena().lend(DType::u8, {s[0], s[1] / 32});
        write(p.value, code.data()), write(p.scale, scale.data());
      }
      if (narrow && (all || e % 3)) {
        std::vector<bf16> half;
        for (int64_t i = 0; i < v.size(); ++i) half.push_back(to_bf16(v[i]));
        p.value = step.arena().lend(DType::bf16, s);
        write(p.value, half.data());
      }
      if (kept && step.context.device == Device::cuda) p.narrow = step.arena().lend(DType::bf16, s), renew_narrow(p);
      return &p;
    };
    for (int64_t e = 0; e < count; ++e)
      w.gate.push_back(weight(3, e, {m, l})), w.up.push_back(weight(4, e, {m, l})), w.down.push_back(weight(5, e, {l, m}));
    Var u = experts(z, r, w, kSitu);
    if (!step.context.tape) return {u.value()};
    step.backward(u, Values(rows * l, 6));
    std::vector<Tensor> out{u.value(), z.grad(), r.weights.grad()};
    for (int64_t e = 0; e < count; ++e) out.insert(out.end(), {w.gate[e]->grad, w.up[e]->grad, w.down[e]->grad});
    return out;
  }
};
double tolerance(int64_t length) { return 2 * 3 * 8 * 6e-8 * std::sqrt(double(length) + 4); }  // both devices: moe_test.cpp's

TEST(moe, cuda_experts_equal_cpu) {
  for (auto [rows, slots, l, m, count] : {std::array<int64_t, 5>{1, 1, 3, 5, 1},
                                          {1, 4, 33, 17, 12},
                                          {150, 3, 20, 50, 7},
                                          {90, 2, 64, 32, 4},
                                          {700, 2, 96, 72, 3},
                                          {2, 2, 24, 20, 30}}) {
    if (testing::few_shapes() && rows == 700) continue;
    SCOPED_TRACE(fmt::format("{} rows", rows));
    Moe moe(rows, slots, l, m, count);
    testing::expect_cuda_equals_cpu(tolerance(std::max({rows, l, m})), [&](Step& s) { return moe.run(s); });
    for (int64_t i = 0; i < rows; i += 5)  // padding
      for (int64_t k = 0; k < slots; ++k) moe.chosen[size_t(i * slots + k)] = -1;
    testing::expect_cuda_equals_cpu(tolerance(std::max({rows, l, m})), [&](Step& s) { return moe.run(s); });
  }
  Moe one(300, 1, 24, 20, 5);
  std::fill(one.chosen.begin(), one.chosen.end(), 3);
  testing::expect_cuda_equals_cpu(tolerance(300), [&](Step& s) { return one.run(s); });
  testing::expect_cuda_equals_cpu(
      tolerance(64), [&](Step& s) { return Moe(40, 2, 64, 48, 6, true).run(s); }, false);
}

// Operands rounded to bfloat16: 2^-9 each, three products deep, a random walk; the worst of thousands of elements is five deviations out.
TEST(moe, cuda_experts_in_bfloat16_are_near_float32) {
  for (auto [rows, slots, l, m, count] : {std::array<int64_t, 5>{1, 1, 3, 5, 1}, {150, 3, 20, 50, 7}, {700, 2, 96, 72, 3}, {300, 2, 160, 200, 4}}) {
    if (testing::few_shapes() && rows == 700) continue;
    SCOPED_TRACE(fmt::format("{} rows", rows));
    const Moe moe(rows, slots, l, m, count);
    testing::expect_cuda_equals_cpu(5 * 6 / 512.0, [&](Step& s) {
      s.context.bf16_products = true;
      return moe.run(s);
    });
  }
}

// The same with the weights' copies kept, so that operands lie in memory as bfloat16; padding rows, experts without rows, more rows than a tile.
TEST(moe, cuda_experts_with_kept_bfloat16_are_near_float32) {
  for (auto [rows, slots, l, m, count] :
       {std::array<int64_t, 5>{1, 1, 8, 8, 1}, {150, 3, 24, 56, 7}, {700, 2, 96, 72, 3}, {400, 2, 160, 200, 30}, {90, 4, 512, 136, 5}}) {
    if (testing::few_shapes() && rows > 90 && rows != 150) continue;
    SCOPED_TRACE(fmt::format("{} rows", rows));
    Moe moe(rows, slots, l, m, count);
    moe.kept = true;
    auto run = [&](Step& s) {
      s.context.bf16_products = true;
      return moe.run(s);
    };
    testing::expect_cuda_equals_cpu(5 * 6 / 512.0, run);
    Moe one = moe;
    for (int64_t i = 0; i < rows * slots; ++i) one.chosen[size_t(i)] = int32_t(count - 1 - i % slots);  // all on as many experts as a token takes
    testing::expect_cuda_equals_cpu(5 * 6 / 512.0, [&](Step& s) {
      s.context.bf16_products = true;
      return one.run(s);
    });
    for (int64_t i = 0; i < rows; i += 5)
      for (int64_t k = 0; k < slots; ++k) moe.chosen[size_t(i * slots + k)] = -1;
    if (rows > 1) testing::expect_cuda_equals_cpu(5 * 6 / 512.0, run);
  }
}

// Without a tape: weights that are bfloat16 as a snapshot stores them, or whose copies training keeps. A row has the same bits alone and in a crowd.
TEST(moe, cuda_experts_of_bfloat16_weights_are_near_float32_in_inference) {
  for (bool kept : {false, true})
    for (auto [rows, slots, l, m, count] : {std::array<int64_t, 5>{1, 1, 8, 8, 1}, {1, 4, 64, 24, 12}, {150, 3, 24, 56, 7}, {700, 2, 96, 72, 3}}) {
      if (testing::few_shapes() && rows == 700) continue;
      SCOPED_TRACE(fmt::format("{} rows{}", rows, kept ? ", kept" : ""));
      Moe moe(rows, slots, l, m, count, !kept);
      moe.all = true, moe.kept = kept;
      auto run = [&](Step& s) {
        s.context.bf16_products = true;
        return moe.run(s);
      };
      testing::expect_cuda_equals_cpu(5 * 6 / 512.0, run, false);
      for (int64_t i = 0; i < rows; i += 5)
        for (int64_t k = 0; k < slots; ++k) moe.chosen[size_t(i * slots + k)] = -1;
      if (rows > 1) testing::expect_cuda_equals_cpu(5 * 6 / 512.0, run, false);
    }
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  Moe crowd(200, 2, 40, 32, 4, true);
  crowd.all = true;
  Moe first = crowd;
  first.rows = 3, first.chosen.resize(6);
  Step a(false, size_t(1) << 30, Device::cuda), b(false, size_t(1) << 30, Device::cuda);
  a.context.bf16_products = b.context.bf16_products = true;
  EXPECT_EQ(testing::bytes_of(crowd.run(a)[0].row_range(0, 3)), testing::bytes_of(first.run(b)[0]));
}

// MXFP4 is multiplied as it is: the bits of the same weights in bfloat16, which holds them. Experts without rows, one token, half a step of the sum.
TEST(moe, cuda_experts_of_mxfp4_codes_are_near_float32) {
  for (auto [rows, slots, l, m, count] :
       {std::array<int64_t, 5>{1, 2, 96, 160, 12}, {150, 3, 64, 32, 7}, {700, 2, 96, 544, 5}, {40, 1, 512, 64, 3}}) {
    if (testing::few_shapes() && rows == 700) continue;
    SCOPED_TRACE(fmt::format("{} rows", rows));
    Moe moe(rows, slots, l, m, count);
    moe.codes = true;
    testing::expect_cuda_equals_cpu(
        5 * 6 / 512.0,
        [&](Step& s) {
          s.context.bf16_products = true;
          return moe.run(s);
        },
        false);
  }
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  Moe exact(3, 2, 64, 32, 4);
  exact.codes = true;
  Step step(false, size_t(1) << 30, Device::cuda);
  EXPECT_THAT([&] { exact.run(step); }, testing::throws_error("experts in MXFP4 need products in bfloat16"));
  for (bool codes : {true, false}) {
    Moe both(300, 2, 96, 288, 5, !codes);
    both.codes = codes, both.all = true, both.quantized = true;
    Step s(false, size_t(1) << 30, Device::cuda);
    s.context.bf16_products = true;
    static std::vector<char> first;
    if (codes)
      first = testing::bytes_of(both.run(s)[0]);
    else
      EXPECT_EQ(testing::bytes_of(both.run(s)[0]), first);
  }
}

// A token's row has the same bits alone and in a crowd.
TEST(moe, cuda_a_token_does_not_depend_on_who_shares_its_experts) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  const Moe all(200, 2, 40, 30, 4);
  Moe first = all;
  first.rows = 3, first.chosen.resize(6);
  Step a(false, size_t(1) << 30, Device::cuda), b(false, size_t(1) << 30, Device::cuda);
  EXPECT_EQ(testing::bytes_of(all.run(a)[0].row_range(0, 3)), testing::bytes_of(first.run(b)[0]));
}

// Every expert's bins hold every token once, and two halves of a batch add up to the whole.
TEST(balance, cuda_bins_sum_to_the_tokens_and_halves_to_the_whole) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  const int64_t rows = 333, experts = 40, bins = 64;
  const Router router(rows, experts);
  Step step(false, size_t(1) << 30, Device::cuda);
  Param& gate = step.keep(step.param("gate", router.gate, {experts, router.d}, false));
  const Tensor bias = step.param("bias", router.bias, {experts}, false).value;
  auto counts = [&](int64_t from, int64_t to) {
    Batch batch = Batch::one(to - from);
    for (int64_t i = from; i < to; ++i) batch.padding.push_back(i % 9 == 4);
    Router part = router;
    part.rows = to - from, part.x = router.x.slice(from * router.d, (to - from) * router.d);
    const Routing r = part.run(step, step.input(part.x, {to - from, router.d}), gate, {.top_k = 4}, batch);
    MarginHistogram h(bias, bins);
    observe(h, r, batch);
    return h;
  };
  const MarginHistogram whole = counts(0, rows);
  EXPECT_EQ(whole.tokens, rows - rows / 9);
  for (int64_t e = 0; e < experts; ++e)
    EXPECT_EQ(std::accumulate(whole.counts.begin() + e * bins, whole.counts.begin() + (e + 1) * bins, int64_t(0)), whole.tokens) << "expert " << e;
  for (int64_t cut : {1, 32, 200, 332}) {
    MarginHistogram sum = counts(0, cut);
    sum.add(counts(cut, rows));
    EXPECT_EQ(sum.counts, whole.counts) << cut;
    EXPECT_EQ(sum.tokens, whole.tokens) << cut;
  }
}

TEST(balance, cuda_counts_equal_cpu) {
  const Router router(500, 40);
  testing::expect_cuda_equals_cpu(
      1e-6,
      [&](Step& step) {
        Param& gate = step.keep(step.param("gate", router.gate, {40, router.d}, false));
        Batch batch = Batch::one(500);
        batch.padding.assign(500, 0);
        for (int64_t i = 0; i < 500; i += 9) batch.padding[i] = 1;
        Routing r = router.run(step, step.input(router.x, {500, router.d}), gate, {.top_k = 4}, batch);
        // the CPU's scores on both devices: a margin at a bin's border would fall on either side
        Step host(false);
        Param& w = host.keep(host.param("gate", router.gate, {40, router.d}, false));
        Routing h = router.run(host, host.input(router.x, {500, router.d}), w, {.top_k = 4}, batch);
        write(r.scores, h.scores.data()), write(r.cutoff, h.cutoff.data());
        MarginHistogram counts(step.param("bias", router.bias, {40}, false).value, 100);
        observe(counts, r, batch), observe(counts, r, batch);
        std::vector<int64_t> load(40, 0);
        count_load(r, batch, load.data());
        std::vector<int32_t> all = counts.counts;
        for (int64_t n : load) all.push_back(int32_t(n));
        all.push_back(int32_t(counts.tokens));
        Tensor out = step.arena().lend(DType::i32, {int64_t(all.size())});
        write(out, all.data());
        return std::vector<Tensor>{out};
      },
      false);
}

}  // namespace
}  // namespace k3
