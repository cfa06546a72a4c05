#include "k3/plan/plan.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "k3/ops/testing.h"
#include "k3/plan/report.h"

namespace k3::plan {
namespace {

Deployment gpus(int64_t n) {
  Deployment d;
  d.gpus = n;
  return d;
}

Question without_counts() {
  Question q;
  q.count = false;
  return q;
}

TEST(plan, every_number_has_a_key_of_its_own_a_kind_and_a_formula) {
  const Architecture a = load_architecture(K3_SOURCE_DIR "/tests/golden/kimi-k3-a");
  const Hardware h = load_hardware("h200");
  for (bool train : {false, true}) {
    Question q;
    q.train = train, q.context = 512, q.sequence = 256;
    std::set<std::string> keys;
    for (const Section& s : plan(a, h, resolve(a, gpus(1)), q))
      for (const Number& n : s.numbers) {
        EXPECT_TRUE(keys.insert(n.key).second) << n.key << " twice";
        EXPECT_FALSE(n.formula.empty()) << n.key;
      }
    EXPECT_GT(keys.size(), 40u);
  }
}

TEST(plan, the_official_model_has_its_cache_and_state) {
  const Architecture a = load_architecture("k3");
  Sections s = plan(a, load_hardware("b300"), resolve(a, gpus(8)), without_counts());
  EXPECT_EQ(find(s, "model.cache").value, 27648);
  EXPECT_EQ(find(s, "model.kda_layers").value, 69);
  EXPECT_EQ(find(s, "model.mla_layers").value, 24);
  EXPECT_EQ(find(s, "model.state").value, 449372160);
  EXPECT_NEAR(find(s, "model.state_float32").value / double(1 << 20), 443.1, 0.05);
  EXPECT_NE(explain(s, "decode.hbm_routed").find("U w_e"), std::string::npos);
  EXPECT_THAT([&] { explain(s, "decode.stepp"); }, testing::throws_error("the nearest is 'decode.step'"));
  EXPECT_EQ(to_json(s)["model.cache"]["kind"], "exact");
}

TEST(plan, bad_input_is_named_with_what_works) {
  const Architecture a = load_architecture("k3");
  const Hardware h = load_hardware("h200");
  EXPECT_THAT([&] { plan(a, h, resolve(a, gpus(8)), without_counts()); }, testing::throws_error("the nearest that works: --gpus 16"));
  Question q = without_counts();
  q.batch = 0;
  EXPECT_THAT([&] { plan(a, h, resolve(a, gpus(32)), q); }, testing::throws_error("--batch is 0 but must be above 0"));
  q.batch = 1000;
  EXPECT_THAT([&] { plan(a, h, resolve(a, gpus(32)), q); }, testing::throws_error("the nearest that works: --batch "));
  EXPECT_THAT([] { load_hardware("h2000"); }, testing::throws_error("the nearest known one is 'h200'"));
  EXPECT_THAT([] { load_architecture("k33"); }, testing::throws_error("the nearest shipped one is 'k3'"));
  EXPECT_THAT([] { load_architecture("k3", {"hiden_size=5"}); }, testing::throws_error("the nearest known one is 'hidden_size'"));
  EXPECT_THAT([] { load_architecture("k3", {"experts_format=mxfp5"}); }, testing::throws_error("the nearest known one is 'mxfp"));
  EXPECT_THAT([] { load_architecture("k3", {"hidden_size=-5"}); }, testing::throws_error("hidden_size is -5"));
  EXPECT_THAT([] { load_architecture("k3", {"mixers=mlaa"}); }, testing::throws_error("the nearest known one is 'mla'"));
}

TEST(plan, training_beyond_memory_is_refused_with_the_fewest_that_hold_it) {
  const Architecture a = load_architecture("kimi-linear-48b");
  const Hardware h = load_hardware("h100");
  Question q = without_counts();
  q.train = true;
  EXPECT_THAT([&] { plan(a, h, resolve(a, gpus(8)), q); }, testing::throws_error("the fewest that work: --tp 1 --dp 16 --ep 8"));
  Deployment d;
  d.dp = 16, d.ep = 8;
  const TrainingMemory m = training_memory(a, resolve(a, d));
  EXPECT_NO_THROW(plan(a, h, resolve(a, d), q));
  EXPECT_LT(m.total(), 0.9 * h.memory);
  EXPECT_EQ(m.total(), m.weights + m.gradients + m.optimizer);
  // By hand: 8 ranks hold an eighth of the experts each and all of the rest, 2 + 4 bytes; the optimizer's 8 are shared by 2 and by 16 ranks.
  const Parameters p = parameters(a);
  const double experts = double(p.routed) / 8, rest = double(p.total - p.routed - p.head);
  EXPECT_NEAR(m.weights + m.gradients, 6 * m.parameters, 1);
  EXPECT_NEAR(m.optimizer, 8 * (experts / 2 + (m.parameters - experts) / 16), 1);
  EXPECT_GE(m.parameters, experts + rest);
}

TEST(plan, fewest_gpus_for_k3) {
  const Architecture a = load_architecture("k3");
  EXPECT_EQ(fewest_gpus(a, load_hardware("b300"), 64, 8192, {}), 8);
  EXPECT_EQ(fewest_gpus(a, load_hardware("mi355x"), 64, 8192, {}), 8);
  EXPECT_EQ(fewest_gpus(a, load_hardware("h200"), 64, 8192, {}), 16);
  EXPECT_EQ(fewest_gpus(a, load_hardware("b200"), 64, 8192, {}), 16);
}

TEST(plan, a_search_returns_only_what_fits_best_first) {
  const Architecture a = load_architecture("k3");
  const Hardware h = load_hardware("b300");
  for (Goal goal : {Goal::latency, Goal::throughput, Goal::context}) {
    auto list = fit(a, h, 64, 32768, goal, {});
    ASSERT_FALSE(list.empty());
    for (size_t i = 0; i < list.size(); ++i) {
      EXPECT_GE(memory_of(a, h, list[i].deployment).sequences(32768), list[i].batch);
      if (i == 0) continue;
      const Fit &x = list[i - 1], &y = list[i];
      EXPECT_TRUE(goal == Goal::latency      ? x.tpot <= y.tpot
                  : goal == Goal::throughput ? x.throughput >= y.throughput
                                             : x.longest_context >= y.longest_context);
    }
  }
}

// acc is iso-cost in all five quantities; eff halves active cost, but reads as much once all experts are touched.
TEST(plan, latent_experts_efficient_and_accurate) {
  auto variant = [](const char* latent, const char* n, const char* k) {
    return load_architecture("k2", {std::string("routed_expert_hidden_size=") + latent, std::string("num_experts=") + n,
                                    std::string("num_experts_per_token=") + k, "experts_format=bf16"});
  };
  const Architecture base = load_architecture("k2", {"experts_format=bf16"}), eff = variant("3584", "768", "8"), acc = variant("3584", "768", "16");
  const double golden[2][4] = {{.7046, 9.673, 25.03, 33.67}, {.3523, 5.217, 16.52, 31.51}};
  int i = 0;
  for (double t : {1.0, 16.0, 64.0, 256.0}) {
    auto gb = [&](const Architecture& a) { return five(a, {}, {Regime::decode, t}).routed / 60 / 1e9; };
    EXPECT_NEAR(gb(base), golden[0][i], golden[0][i] * 6e-4);
    EXPECT_NEAR(gb(acc), gb(base), gb(base) * 1e-12);
    EXPECT_NEAR(gb(eff), golden[1][i], golden[1][i] * 6e-4);
    ++i;
  }
}

TEST(plan, speculation_breaks_even_where_the_experts_unite) {
  const Architecture a = load_architecture("k3");
  const double golden[] = {1.58, 2.19, 2.63, 2.07, 1.89};
  int i = 0;
  Deployment d = resolve(a, gpus(8));
  d.rho = 0.55;
  for (double batch : {1.0, 4.0, 16.0, 64.0, 128.0})
    EXPECT_NEAR(break_even_accepted(a, load_hardware("b300"), d, batch, 8704, 8, 2e-3), golden[i++], 0.05);
}

TEST(plan, a_report_holds_its_charts_and_nothing_from_elsewhere) {
  const Architecture a = load_architecture("kimi-linear-48b");
  const Hardware h = load_hardware("h200");
  Deployment d = resolve(a, gpus(1));
  std::string html = html_report({{a, d, plan(a, h, d, without_counts())}}, h, {});
  size_t charts = 0;
  for (size_t at = 0; (at = html.find("<svg", at)) != std::string::npos; ++at) ++charts;
  EXPECT_EQ(charts, 7u);
  EXPECT_EQ(html.find("http"), std::string::npos);
  EXPECT_EQ(html.find("nan"), std::string::npos);
  EXPECT_EQ(html.find("<script"), std::string::npos);
}

}  // namespace
}  // namespace k3::plan
