#include "k3/ops/moe/moe.h"

#include <gtest/gtest.h>

#include <numeric>

#include "k3/ops/activation/activation_ref.h"
#include "k3/ops/moe/moe_ref.h"
#include "k3/ops/linear/quantize.h"
#include "k3/ops/linear/weight_product.h"
#include "k3/ops/testing.h"

namespace k3 {
namespace {

using testing::Values;

const Activation kSitu{Activation::Kind::situ, 4, 25, 0};

// The first k of a random order of the experts, a row each.
std::vector<int32_t> random_choice(int64_t rows, int64_t k, int64_t experts, uint64_t seed) {
  std::vector<int32_t> chosen;
  for (int64_t n = 0; n < rows; ++n) {
    std::vector<int32_t> order(experts);
    std::iota(order.begin(), order.end(), 0);
    for (int64_t i = 0; i < k; ++i) std::swap(order[i], order[i + int64_t(Rng{seed, 3}.below(uint64_t(experts - i), uint64_t(n * k + i)))]);
    chosen.insert(chosen.end(), order.begin(), order.begin() + k);
  }
  return chosen;
}

// ---- routing

const ref::RouteShape kRoutes[] = {
    {3, 7, 3}, {3, 7, 3, true}, {3, 7, 3, false, false, 2.5}, {3, 7, 3, true, false, 2.5}, {3, 7, 1, false, true, 0.5}, {3, 7, 7, true, true, 2.446},
};

TEST(moe, routing_backward_equals_complex_step) {
  for (const auto& o : kRoutes) {
    auto chosen = random_choice(o.rows, o.top_k, o.experts, 1);
    testing::expect_complex_step(
        {{o.rows * o.experts}}, [&]<class S>(const std::vector<const S*>& in, S* out) { ref::route_weights<S>(in[0], chosen.data(), out, o); },
        o.rows * o.top_k, [&](auto in, const double* dy, auto grad) { ref::route_backward(in[0], chosen.data(), dy, grad[0], o); });
  }
}

struct Router {
  Values x, gate, bias;
  int64_t rows, experts, d;
  Router(int64_t rows, int64_t experts, int64_t d, double bias_scale = 0.3, uint64_t seed = 1)
      : x(rows * d, seed),
        gate(experts * d, seed + 1, 1 / std::sqrt(double(d))),
        bias(experts, seed + 2, bias_scale),
        rows(rows),
        experts(experts),
        d(d) {}
  Routing run(testing::Step& step, const RouteOptions& o, const Batch& batch, const Tensor* forced = nullptr) const {
    return route(step.input(x, {rows, d}), step.keep(step.param("gate", gate, {experts, d})), step.keep(step.param("bias", bias, {experts}, false)),
                 o, batch, forced);
  }
};

// The reference is run on the operator's own float32 scores, so that the choice must agree exactly; biased sums are made in float32 as well.
TEST(moe, routes_equal_the_reference_at_every_level) {
  for (auto isa : testing::levels())
    for (ref::RouteShape o : {ref::RouteShape{1, 5, 2},
                              {70, 33, 4, true},
                              {17, 33, 1, false, true, 2},
                              {20, 16, 16},
                              {130, 96, 8, false, true, 2.446, 12, 3},
                              {40, 896, 16},
                              {9, 24, 3, false, true, 1, 24, 5}}) {
      testing::ForceIsa force(isa);
      testing::Step step;
      Router router(o.rows, o.experts, 24);
      RouteOptions options{o.top_k, o.softmax, o.renormalize, float(o.scale), o.groups, o.top_groups};
      Var x = step.input(router.x, {o.rows, 24});
      Param& gate = step.keep(step.param("gate", router.gate, {o.experts, 24}));
      Param& bias = step.keep(step.param("bias", router.bias, {o.experts}, false));
      Routing r = route(x, gate, bias, options, Batch::one(o.rows));
      std::vector<double> logits(o.rows * o.experts), scores(o.rows * o.experts), choice(o.rows * o.experts), zero(o.experts), cutoff(o.rows);
      auto xd = router.x.as_double(), gd = router.gate.as_double();
      for (int64_t n = 0; n < o.rows; ++n)
        for (int64_t j = 0; j < o.experts; ++j) {
          for (int64_t i = 0; i < 24; ++i) logits[n * o.experts + j] += xd[n * 24 + i] * gd[j * 24 + i];
          choice[n * o.experts + j] = r.scores.f32()[n * o.experts + j] + router.bias[j];
        }
      ref::route_scores(logits.data(), scores.data(), o);
      testing::expect_near(r.scores, scores, 3e-6, "scores");  // logits of size 3 after 24 roundings, then the sigmoid's 2 ulp
      std::vector<int32_t> chosen(o.rows * o.top_k);
      ref::route_choose(choice.data(), zero.data(), chosen.data(), cutoff.data(), o);
      EXPECT_EQ(std::vector<int32_t>(r.experts.i32(), r.experts.i32() + r.experts.size()), chosen);
      for (int64_t n = 0; n < o.rows; ++n) {
        EXPECT_EQ(r.cutoff.f32()[n], float(cutoff[n]));
        EXPECT_EQ(r.margin.f32()[n], float(choice[n * o.experts + chosen[n * o.top_k + o.top_k - 1]]) - float(cutoff[n]));
      }
      std::vector<double> weights(o.rows * o.top_k), dlogits(o.rows * o.experts), dx(o.rows * 24), dgate(o.experts * 24);
      ref::route_weights(logits.data(), chosen.data(), weights.data(), o);
      testing::expect_near(r.weights.value(), weights, 5e-6, "weights");
      Values dw(o.rows * o.top_k, 9);
      step.backward(r.weights, dw);
      ref::route_backward(logits.data(), chosen.data(), dw.as_double().data(), dlogits.data(), o);
      for (int64_t n = 0; n < o.rows; ++n)
        for (int64_t j = 0; j < o.experts; ++j)
          for (int64_t i = 0; i < 24; ++i) {
            dx[n * 24 + i] += dlogits[n * o.experts + j] * gd[j * 24 + i];
            dgate[j * 24 + i] += dlogits[n * o.experts + j] * xd[n * 24 + i];
          }
      testing::expect_near(x.grad(), dx, 2e-5, "dx");
      testing::expect_near(gate.grad, dgate, 2e-5, "dgate");
      EXPECT_TRUE(bias.grad.empty());
    }
}

TEST(moe, exact_ties_go_to_the_lower_index) {
  testing::Step step;
  Values x(std::vector<float>{1, -1}), gate(40, 1, 0), bias(std::vector<float>{0, 0, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1});
  Routing r = route(step.input(x, {1, 2}), step.keep(step.param("gate", gate, {20, 2})), step.keep(step.param("bias", bias, {20})), {.top_k = 6},
                    Batch::one(1));
  EXPECT_EQ(std::vector<int32_t>(r.experts.i32(), r.experts.i32() + 6), (std::vector<int32_t>{2, 4, 5, 19, 0, 1}));
  EXPECT_EQ(r.margin.f32()[0], 0);
}

TEST(moe, near_ties_are_decided_by_float32_and_not_by_the_batch) {
  int64_t d = 32, experts = 16;
  Values x(64 * d, 1), gate(experts * d, 2, 0.2), bias(experts, 3, 0);
  for (int64_t j = 1; j < experts; j += 2)  // pairs of experts that differ by 1e-4 .. 1e-7
    for (int64_t i = 0; i < d; ++i) gate[j * d + i] = gate[(j - 1) * d + i] * (1 + float(std::pow(10.0, -4 - double(j / 2 % 4))));
  testing::Step whole;
  Router router(64, experts, d);
  router.x = x, router.gate = gate, router.bias = bias;
  Routing all = router.run(whole, {.top_k = 4}, Batch::one(64));
  for (int64_t rows : {1, 2, 3, 7, 31, 32, 64})
    for (int64_t at = 0; at + rows <= 64; at += rows) {
      testing::Step step;
      Router part = router;
      part.x = x.slice(at * d, rows * d), part.rows = rows;
      Routing r = part.run(step, {.top_k = 4}, Batch::one(rows));
      EXPECT_TRUE(testing::same_bits(r.experts, all.experts.row_range(at, at + rows)));
      EXPECT_TRUE(testing::same_bits(r.weights.value(), all.weights.value().row_range(at, at + rows)));
      EXPECT_TRUE(testing::same_bits(r.scores, all.scores.row_range(at, at + rows)));
    }
}

TEST(moe, the_bias_chooses_but_does_not_weigh) {
  Router router(50, 16, 24, 1.0);
  testing::Step step;
  Routing biased = router.run(step, {.top_k = 4}, Batch::one(50));
  router.bias = Values(16, 1, 0);
  Routing plain = router.run(step, {.top_k = 4}, Batch::one(50));
  EXPECT_FALSE(testing::same_bits(biased.experts, plain.experts));
  for (int64_t n = 0; n < 50; ++n) {
    double total = 0;
    for (int64_t i = 0; i < 4; ++i) total += biased.scores.f32()[n * 16 + biased.experts.i32()[n * 4 + i]];
    for (int64_t i = 0; i < 4; ++i)
      EXPECT_NEAR(biased.weights.f32()[n * 4 + i], biased.scores.f32()[n * 16 + biased.experts.i32()[n * 4 + i]] / total, 1e-6);
  }
}

TEST(moe, forced_choices_are_taken_and_margins_stay_those_of_the_free_choice) {
  Router router(10, 12, 8);
  testing::Step step;
  Routing free = router.run(step, {.top_k = 3}, Batch::one(10));
  auto chosen = random_choice(10, 3, 12, 5);
  Tensor forced(chosen.data(), DType::i32, {10, 3});
  Routing r = router.run(step, {.top_k = 3}, Batch::one(10), &forced);
  EXPECT_TRUE(testing::same_bits(r.experts, forced));
  EXPECT_TRUE(testing::same_bits(r.cutoff, free.cutoff));
  EXPECT_TRUE(testing::same_bits(r.margin, free.margin));
  chosen[4] = 12;
  EXPECT_THAT([&] { router.run(step, {.top_k = 3}, Batch::one(10), &forced); },
              testing::throws_error("[route] forced choice 1 of token 1 is 12; there are 12 experts"));
  chosen[4] = chosen[3];
  EXPECT_THAT([&] { router.run(step, {.top_k = 3}, Batch::one(10), &forced); }, testing::throws_error("twice"));
}

TEST(moe, a_row_of_nan_gets_a_valid_choice_and_spoils_no_other) {
  Router router(5, 12, 8);
  testing::Step step;
  Routing clean = router.run(step, {.top_k = 3}, Batch::one(5));
  for (int64_t i = 0; i < 8; ++i) router.x[2 * 8 + i] = NAN;
  Routing r = router.run(step, {.top_k = 3}, Batch::one(5));
  for (int64_t n = 0; n < 5; ++n)
    for (int64_t i = 0; i < 3; ++i)
      if (n == 2)
        EXPECT_EQ(r.experts.i32()[n * 3 + i], int32_t(i));
      else
        EXPECT_EQ(r.experts.i32()[n * 3 + i], clean.experts.i32()[n * 3 + i]);
}

TEST(moe, an_expert_whose_score_is_nan_is_never_preferred) {
  Router router(20, 12, 8);
  for (int64_t i = 0; i < 8; ++i) router.gate[5 * 8 + i] = NAN;
  testing::Step step;
  Routing r = router.run(step, {.top_k = 3}, Batch::one(20));
  for (int64_t i = 0; i < 60; ++i) EXPECT_NE(r.experts.i32()[i], 5);
}

TEST(moe, a_wrong_router_is_refused_with_the_reason) {
  testing::Step step;
  Router router(4, 12, 8);
  EXPECT_THAT([&] { router.run(step, {.top_k = 13}, Batch::one(4)); }, testing::throws_error("[route] top k is 13 of 12 experts"));
  EXPECT_THAT([&] { router.run(step, {.top_k = 4, .groups = 5}, Batch::one(4)); },
              testing::throws_error("[route] 12 experts don't divide into 5 groups (num_expert_group)"));
  EXPECT_THAT([&] { router.run(step, {.top_k = 7, .groups = 4, .top_groups = 2}, Batch::one(4)); },
              testing::throws_error("[route] top k is 7 of 6 experts to choose from"));
  Batch batch = Batch::one(4);
  batch.padding = {0, 1};
  EXPECT_THAT([&] { router.run(step, {.top_k = 2}, batch); }, testing::throws_error("[route] padding marks 2 rows but x has 4"));
}

// ---- experts

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
