#include <gtest/gtest.h>

#include "k3/ops/activation/activation_ref.h"
#include "k3/ops/linear/quantize.h"
#include "k3/ops/linear/weight_product.h"
#include "k3/ops/moe/moe_ref.h"
#include "k3/ops/moe/moe_testing.h"

namespace k3 {
namespace {

using testing::random_choice;
using testing::Router;
using testing::Values;

const Activation kSitu{Activation::Kind::situ, 4, 25, 0};

struct Moe {
  int64_t rows, slots, l, m, count;
  Values z, p, w1, w3, w2, du;
  std::vector<int32_t> chosen;
  Moe(int64_t rows, int64_t slots, int64_t l, int64_t m, int64_t count)
      : rows(rows),
        slots(slots),
        l(l),
        m(m),
        count(count),
        z(rows * l, 1),
        p(rows * slots, 2),
        w1(count * m * l, 3, 1 / std::sqrt(double(l))),
        w3(count * m * l, 4, 1 / std::sqrt(double(l))),
        w2(count * m * l, 5, 1 / std::sqrt(double(m))),
        du(rows * l, 6),
        chosen(random_choice(rows, slots, count, 7)) {}
  struct Run {
    Var z, u;
    Routing r;
    ExpertWeights w;
  };
  Run run(testing::Step& step, bool backward = true) const {
    Run out{step.input(z, {rows, l}), {}, {}, {}};
    out.r.weights = step.input(p, {rows, slots});
    out.r.experts = step.arena().lend(DType::i32, {rows, slots});
    std::memcpy(out.r.experts.data(), chosen.data(), chosen.size() * 4);
    out.r.scores = step.arena().lend(DType::f32, {rows, count});
    for (int64_t e = 0; e < count; ++e) {
      out.w.gate.push_back(&step.keep(step.param("w1", w1.slice(e * m * l, m * l), {m, l})));
      out.w.up.push_back(&step.keep(step.param("w3", w3.slice(e * m * l, m * l), {m, l})));
      out.w.down.push_back(&step.keep(step.param("w2", w2.slice(e * m * l, m * l), {l, m})));
    }
    out.u = experts(out.z, out.r, out.w, kSitu);
    if (backward) step.backward(out.u, du);
    return out;
  }
  // a subset of the tokens, in the given order
  Moe of(const std::vector<int64_t>& tokens) const {
    Moe o = *this;
    o.rows = int64_t(tokens.size());
    o.z = Values(o.rows * l, 0), o.p = Values(o.rows * slots, 0), o.du = Values(o.rows * l, 0), o.chosen.resize(o.rows * slots);
    for (int64_t i = 0; i < o.rows; ++i) {
      std::copy_n(z.data() + tokens[i] * l, l, o.z.data() + i * l);
      std::copy_n(du.data() + tokens[i] * l, l, o.du.data() + i * l);
      std::copy_n(p.data() + tokens[i] * slots, slots, o.p.data() + i * slots);
      std::copy_n(chosen.data() + tokens[i] * slots, slots, o.chosen.data() + i * slots);
    }
    return o;
  }
};

auto situ = []<class S>(S a, S c) { return ref::glu<S>(a, c, kSitu); };
auto situ_backward = [](double a, double c, double dy, double& da, double& dc) { ref::glu_backward(a, c, kSitu, dy, da, dc); };

TEST(moe, experts_backward_equals_complex_step) {
  ref::ExpertsShape o{4, 2, 3, 5};
  auto chosen = random_choice(4, 2, 3, 1);
  chosen[2] = chosen[3] = -1;
  testing::expect_complex_step(
      {{4 * 3}, {4 * 2}, {3 * 15}, {3 * 15}, {3 * 15}},
      [&]<class S>(const std::vector<const S*>& in, S* out) { ref::experts<S>(in[0], in[1], chosen.data(), in[2], in[3], in[4], situ, out, o); },
      4 * 3,
      [&](auto in, const double* dy, auto g) {
        ref::experts_backward(in[0], in[1], chosen.data(), in[2], in[3], in[4], situ, situ_backward, dy, g[0], g[1], g[2], g[3], g[4], o);
      });
}

// Chains of l, m and (for dW) rows roundings, three products deep: 8 eps sqrt(length) each.
double tolerance(int64_t length) { return 3 * 8 * 6e-8 * std::sqrt(double(length) + 4); }

void expect_reference(const Moe& moe, const std::string& what) {
  testing::Step step;
  auto out = moe.run(step);
  ref::ExpertsShape o{moe.rows, moe.slots, moe.l, moe.m};
  int64_t size = moe.count * moe.m * moe.l;
  std::vector<double> u(moe.rows * moe.l), dz(moe.rows * moe.l), dp(moe.rows * moe.slots), dw1(size), dw3(size), dw2(size);
  auto z = moe.z.as_double(), p = moe.p.as_double(), w1 = moe.w1.as_double(), w3 = moe.w3.as_double(), w2 = moe.w2.as_double(),
       du = moe.du.as_double();
  const int32_t* chosen = moe.chosen.data();
  ref::experts(z.data(), p.data(), chosen, w1.data(), w3.data(), w2.data(), situ, u.data(), o);
  ref::experts_backward(z.data(), p.data(), chosen, w1.data(), w3.data(), w2.data(), situ, situ_backward, du.data(), dz.data(), dp.data(), dw1.data(),
                        dw3.data(), dw2.data(), o);
  double t = tolerance(std::max({moe.rows, moe.l, moe.m}));
  testing::expect_near(out.u.value(), u, t, what + " u");
  testing::expect_near(out.z.grad(), dz, t, what + " dz");
  testing::expect_near(out.r.weights.grad(), dp, t, what + " dp");
  for (int64_t e = 0; e < moe.count; ++e) {
    auto part = [&](const std::vector<double>& v) { return std::vector<double>(v.begin() + e * moe.m * moe.l, v.begin() + (e + 1) * moe.m * moe.l); };
    testing::expect_near(out.w.gate[e]->grad, part(dw1), t, what + " dw1");
    testing::expect_near(out.w.up[e]->grad, part(dw3), t, what + " dw3");
    testing::expect_near(out.w.down[e]->grad, part(dw2), t, what + " dw2");
  }
}

TEST(moe, experts_equal_the_reference_at_every_level) {
  for (auto isa : testing::levels()) {
    testing::ForceIsa force(isa);
    for (auto [rows, slots, l, m, count] : {std::array<int64_t, 5>{1, 1, 3, 5, 1}, {1, 4, 33, 17, 12}, {150, 3, 20, 50, 7}, {90, 2, 64, 32, 4}})
      expect_reference(Moe(rows, slots, l, m, count), fmt::format("{} rows", rows));
  }
}

TEST(moe, experts_without_rows_and_an_expert_with_all_rows_are_right) {
  Moe moe(80, 1, 24, 20, 5);
  std::fill(moe.chosen.begin(), moe.chosen.end(), 3);
  expect_reference(moe, "all on one");
  expect_reference(Moe(2, 2, 24, 20, 30), "most without rows");
  testing::Step step;
  auto run = Moe(2, 2, 24, 20, 30).run(step);
  Routing none;
  none.weights = Var(step.context, DType::f32, {0, 2}), none.experts = Tensor(nullptr, DType::i32, {0, 2}),
  none.scores = Tensor(nullptr, DType::f32, {0, 30});
  Var u = experts(Var(step.context, DType::f32, {0, 24}), none, run.w, kSitu);
  step.backward(u, Values(0, 1));
  EXPECT_EQ(u.size(), 0);
}

TEST(moe, a_token_does_not_depend_on_who_shares_its_experts) {
  for (auto isa : testing::levels()) {
    testing::ForceIsa force(isa);
    Moe moe(150, 3, 40, 50, 6);
    testing::Step step(true, size_t(1) << 26);
    auto all = moe.run(step);
    for (const auto& tokens : std::vector<std::vector<int64_t>>{{7}, {149, 3}, {9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 60, 61, 62, 90, 140, 141, 142, 143}}) {
      testing::Step other(true, size_t(1) << 26);
      auto some = moe.of(tokens).run(other);
      for (size_t i = 0; i < tokens.size(); ++i) {
        auto same = [&](const Tensor& a, const Tensor& b) {
          return testing::same_bits(a.row_range(tokens[i], tokens[i] + 1), b.row_range(int64_t(i), int64_t(i) + 1));
        };
        EXPECT_TRUE(same(all.u.value(), some.u.value())) << tokens[i];
        EXPECT_TRUE(same(all.z.grad(), some.z.grad())) << tokens[i];
        EXPECT_TRUE(same(all.r.weights.grad(), some.r.weights.grad())) << tokens[i];
      }
    }
  }
}

TEST(moe, one_thread_equals_many) {
  Moe moe(300, 4, 40, 50, 9);
  Router router(300, 9, 24);
  testing::expect_same_bits_at_any_thread_count([&](testing::Step& step) {
    auto out = moe.run(step);
    Routing r = router.run(step, {.top_k = 4}, Batch::one(300));
    std::vector<Tensor> all{out.u.value(), out.z.grad(), out.r.weights.grad(), r.experts, r.weights.value(), r.scores, r.cutoff};
    for (int64_t e = 0; e < moe.count; ++e)
      for (Param* p : {out.w.gate[e], out.w.up[e], out.w.down[e]}) all.push_back(p->grad);
    return all;
  });
}

TEST(moe, inference_gives_the_bits_of_training) {
  Moe moe(50, 3, 40, 50, 6);
  testing::Step training, inference(false);
  EXPECT_TRUE(testing::same_bits(moe.run(training, false).u.value(), moe.run(inference, false).u.value()));
}

TEST(moe, bfloat16_experts_give_the_bits_of_their_widened_copies) {
  for (auto isa : testing::levels())
    for (int64_t rows : {1, 200}) {
      testing::ForceIsa force(isa);
      Moe moe(rows, 2, 70, 130, 5);
      for (Values* v : {&moe.w1, &moe.w3, &moe.w2})
        for (int64_t i = 0; i < v->size(); ++i) (*v)[i] = to_float(to_bf16((*v)[i]));
      testing::Step wide(false), narrow(false);
      Tensor u = moe.run(wide, false).u.value();
      auto run = moe.run(narrow, false);
      for (auto* list : {&run.w.gate, &run.w.up, &run.w.down})
        for (Param* p : *list) {
          Tensor t = narrow.arena().lend(DType::bf16, p->value.shape());
          for (int64_t i = 0; i < t.size(); ++i) t.as<bf16>()[i] = to_bf16(p->value.f32()[i]);
          p->value = t;
        }
      EXPECT_TRUE(testing::same_bits(experts(run.z, run.r, run.w, kSitu).value(), u));
      Tape tape;
      narrow.context.tape = &tape;
      EXPECT_THAT([&] { experts(run.z, run.r, run.w, kSitu); }, testing::throws_error("experts are F32 or, in inference, BF16"));
    }
}

TEST(moe, mxfp4_experts_equal_their_widened_copies_and_only_used_ones_are_checked) {
  for (auto isa : testing::levels())
    for (int64_t rows : {1, 200}) {
      testing::ForceIsa force(isa);
      Moe moe(rows, 2, 96, 160, 5);
      for (int32_t& e : moe.chosen) e = e == 4 ? -1 : e;  // nobody chooses the last one
      testing::Step wide(false), narrow(false);
      auto run = moe.run(narrow, false), same = moe.run(wide, false);
      for (int64_t e = 0; e < 5; ++e)
        for (auto list : {&ExpertWeights::gate, &ExpertWeights::up, &ExpertWeights::down}) {
          Param &p = *(run.w.*list)[e], &q = *(same.w.*list)[e];
          const int64_t out = p.value.rows(), in = p.value.cols();
          Tensor codes = narrow.arena().lend(DType::u8, {out, in / 2}), scales = narrow.arena().lend(DType::u8, {out, in / 32});
          quantize(Stored::mxfp4, p.value.f32(), out, in, codes.data(), scales.data(), p.name);
          p.value = codes, p.scale = scales;
          if (e == 4) scales.as<uint8_t>()[0] = 255;
          if (e < 4) widen(weight_of(p), 0, out, q.value.f32());
        }
      // each of two products in a row loses what is less than 2^-22 of its largest inputs, and sums in another order
      const Tensor got = experts(run.z, run.r, run.w, kSitu).value(), want = experts(same.z, same.r, same.w, kSitu).value();
      testing::expect_near(got, testing::as_double(want), 4e-6, "u");
      run.r.experts.i32()[0] = 4;
      EXPECT_THAT([&] { experts(run.z, run.r, run.w, kSitu); }, testing::throws_error("[weight] w1_scale holds 255"));
    }
}

TEST(moe, padding_rows_reach_no_expert_even_if_they_are_nan) {
  Moe moe(40, 3, 24, 20, 6);
  std::vector<int64_t> live;
  Batch batch = Batch::one(40);
  for (int64_t i = 0; i < 40; ++i) {
    batch.padding.push_back(i % 10 >= 3);  // 70 %
    if (i % 10 < 3) live.push_back(i);
  }
  Values x(40 * 16, 1), gate(6 * 16, 2), bias(6, 3);
  auto run = [&](testing::Step& step, const Moe& m, const Values& xs, const Batch& b) {
    auto out = m.run(step, false);
    Routing r =
        route(step.input(xs, {m.rows, 16}), step.keep(step.param("gate", gate, {6, 16})), step.keep(step.param("bias", bias, {6})), {.top_k = 3}, b);
    out.r = r;
    out.u = experts(out.z, r, out.w, kSitu);
    step.backward(out.u, m.du);
    return out;
  };
  Moe without = moe.of(live);
  Values xs(int64_t(live.size()) * 16, 0);
  for (size_t i = 0; i < live.size(); ++i) std::copy_n(x.data() + live[i] * 16, 16, xs.data() + int64_t(i) * 16);
  for (int64_t i = 0; i < 40; ++i)
    if (batch.padding[i]) {
      std::fill_n(moe.z.data() + i * 24, 24, NAN);
      std::fill_n(moe.du.data() + i * 24, 24, NAN);
      std::fill_n(x.data() + i * 16, 16, NAN);
    }
  testing::Step a, b;
  auto padded = run(a, moe, x, batch), alone = run(b, without, xs, Batch::one(without.rows));
  for (size_t i = 0; i < live.size(); ++i) {
    auto same = [&](const Tensor& s, const Tensor& t) {
      return testing::same_bits(s.row_range(live[i], live[i] + 1), t.row_range(int64_t(i), int64_t(i) + 1));
    };
    EXPECT_TRUE(same(padded.u.value(), alone.u.value()));
    EXPECT_TRUE(same(padded.z.grad(), alone.z.grad()));
    EXPECT_TRUE(same(padded.r.experts, alone.r.experts));
  }
  for (int64_t i = 0; i < 40; ++i)
    for (int64_t s = 0; s < 3 && batch.padding[i]; ++s) {
      EXPECT_EQ(padded.r.experts.i32()[i * 3 + s], -1);
      EXPECT_EQ(padded.r.weights.f32()[i * 3 + s], 0);
      for (int64_t j = 0; j < 24; ++j) EXPECT_EQ(padded.u.f32()[i * 24 + j], 0);
    }
  for (int64_t e = 0; e < 6; ++e) {
    EXPECT_TRUE(testing::same_bits(padded.w.gate[e]->grad, alone.w.gate[e]->grad));
    EXPECT_TRUE(testing::same_bits(padded.w.up[e]->grad, alone.w.up[e]->grad));
    EXPECT_TRUE(testing::same_bits(padded.w.down[e]->grad, alone.w.down[e]->grad));
  }
}

TEST(moe, the_null_device_runs_both_directions_and_counts) {
  Arena arena(0, Device::null);
  Tape tape;
  Context c;
  c.device = Device::null, c.arena = &arena, c.tape = &tape;
  double flops = 0;
  c.on_cost = [&](std::string_view op, const Cost& cost) { flops += op == "experts" ? cost.flops : 0; };
  std::vector<Param> params;
  params.reserve(64);
  auto param = [&](Shape s) {
    Param p;
    p.value = p.grad = Tensor(nullptr, DType::f32, s, Device::null);
    return &params.emplace_back(p);
  };
  ExpertWeights w;
  for (int i = 0; i < 8; ++i) w.gate.push_back(param({5, 6})), w.up.push_back(param({5, 6})), w.down.push_back(param({6, 5}));
  Var x(c, DType::f32, {10, 6});
  Routing r = route(x, *param({8, 6}), *param({8}), {.top_k = 2}, Batch::one(10));
  Var u = experts(x, r, w, kSitu);
  u.grad();
  tape.run_backward();
  EXPECT_EQ(flops, 3 * 6.0 * 10 * 2 * 5 * 6);
}

TEST(moe, weights_that_do_not_fit_are_refused) {
  testing::Step step;
  Moe moe(4, 2, 8, 6, 3);
  auto run = moe.run(step);
  run.w.up[1]->value = run.w.up[1]->value.reshape({8, 6});
  EXPECT_THAT([&] { experts(run.z, run.r, run.w, kSitu); }, testing::throws_error("[experts] w3 is 8 x 6 but must be 6 x 8: z has 8 columns"));
  run.w.up.pop_back();
  EXPECT_THAT([&] { experts(run.z, run.r, run.w, kSitu); },
              testing::throws_error("[experts] the router knows 3 experts but there are 3 w1, 2 w3 and 3 w2"));
}

}  // namespace
}  // namespace k3
