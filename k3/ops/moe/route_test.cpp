#include <gtest/gtest.h>

#include "k3/ops/moe/moe_ref.h"
#include "k3/ops/moe/moe_testing.h"

namespace k3 {
namespace {

using testing::random_choice;
using testing::Router;
using testing::Values;

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

}  // namespace
}  // namespace k3
