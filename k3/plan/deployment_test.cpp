#include "k3/plan/deployment.h"

#include <gtest/gtest.h>

#include <cmath>

#include "k3/ops/testing.h"

namespace k3::plan {
namespace {

const Architecture& model(const std::string& name) {
  static std::map<std::string, Architecture> loaded;
  auto it = loaded.find(name);
  return it != loaded.end() ? it->second : loaded.emplace(name, load_architecture(name)).first->second;
}

void printed(double value, double golden, int decimals) { EXPECT_NEAR(value, golden, 0.5000001 * std::pow(10.0, -decimals)); }

Deployment layout(int64_t tp, int64_t dp, int64_t ep, double kv = 2) {
  Deployment d;
  d.gpus = tp * dp, d.tp = tp, d.dp = dp, d.ep = ep, d.kv_bytes = kv;
  return d;
}

TEST(deployment, the_five_quantities_are_the_golden_ones) {
  struct Case {
    const char *name, *model;
    Deployment d;
    Work w;
    double F, hbm, net;  // TFLOP/s, TB/s, GB/s: one of each, a simplification of this table
    double touched, t_exp, routed, trunk, kv, state, total, tf;
    double ai;
    int ai_decimals;
    double tp_mb, ep_mb, seed_mb, ms_hbm, ms_flop, ms_net, ratio_seed, ratio;
  } cases[] = {
      // clang-format off
      {"A", "k3", layout(8, 1, 1), {Regime::decode, 1, 8192}, 4500, 7.75, 900,
       16.00, 0.018, 3.229, 24.024, 0.226, 0.112, 27.592, 0.0414, 1.50, 2, 5.82, 0, 0, 3.560, 0.009, 0.006, 0, 0},
      {"B", "k3", layout(8, 1, 1), {Regime::decode, 16, 8192}, 4500, 7.75, 900,
       224.41, 0.286, 45.285, 24.024, 3.624, 1.797, 74.731, 0.6625, 8.87, 2, 93.13, 0, 0, 9.643, 0.147, 0.103, 0, 0},
      {"C", "k3", layout(8, 1, 8), {Regime::decode, 64, 8192}, 4500, 7.75, 900,
       613.20, 1.143, 123.739, 24.024, 14.496, 7.190, 169.449, 2.6501, 15.64, 2, 149.32, 48.85, 126.62, 21.864, 0.589, 0.220, 0.814, 0.314},
      {"D", "k3", layout(8, 4, 32), {Regime::decode, 64, 32768}, 1979, 4.8, 50,
       887.11, 4.571, 44.753, 24.024, 57.982, 7.190, 133.950, 3.6358, 27.14, 2, 149.32, 97.71, 126.62, 27.906, 1.837, 4.941, 6.442, 4.971},
      {"E", "k3", layout(4, 16, 64, 1), {Regime::decode, 128, 32768}, 5000, 8.0, 900,
       896.00, 36.571, 22.601, 36.465, 57.982, 28.760, 145.808, 13.0606, 89.57, 2, 255.98, 444.18, 506.46, 18.226, 2.612, 0.778, 0.904, 0.793},
      {"F", "k3", layout(4, 16, 64, 2), {Regime::prefill, 1, 0, 16384}, 5000, 8.0, 900,
       896.00, 4681.143, 22.601, 36.465, 0.453, 0.112, 59.631, 1039.0407, 17424.5, 1, 32765.90, 56854.61, 64827.16, 7.454, 207.808, 99.578, 0.904, 0.793},
      {"G", "k3", layout(8, 1, 1), {Regime::prefill, 1, 0, 8192}, 4500, 7.75, 900,
       896.00, 146.286, 180.807, 24.024, 0.226, 0.056, 205.114, 301.0234, 1467.59, 2, 47680.85, 0, 0, 26.466, 66.894, 52.979, 0, 0},
      {"H", "k2", layout(16, 1, 1), {Regime::decode, 1, 8192}, 1979, 4.8, 450,
       8.00, 0.021, 1.322, 3.360, 0.576, 0, 5.257, 0.0104, 1.97, 2, 3.28, 0, 0, 1.095, 0.005, 0.007, 0, 0},
      {"I", "k2", layout(1, 96, 96), {Regime::decode, 480, 2050}, 1979, 4.8, 50,
       384.00, 960.0, 10.572, 21.094, 69.148, 0, 100.813, 38.7778, 384.65, 2, 0, 4727.84, 4954.52, 21.003, 19.595, 94.557, 9.663, 9.221},
      {"J", "k2", layout(1, 32, 32), {Regime::prefill, 8, 0, 2048}, 1979, 4.8, 50,
       384.00, 10922.667, 31.717, 21.094, 1.151, 0, 53.962, 1041.7438, 19305.3, 1, 0, 146987.92, 169114.34, 11.242, 526.399, 2939.758, 9.663, 8.399},
      {"K", "kimi-linear-48b", layout(1, 1, 1), {Regime::decode, 1, 8192}, 989, 4.8, 450,
       8.00, 0.031, 2.944, 3.267, 0.066, 0.087, 6.364, 0.0103, 1.61, 2, 0, 0, 0, 1.326, 0.010, 0, 0, 0},
      {"L", "kimi-linear-48b", layout(1, 1, 1), {Regime::decode, 64, 8192}, 989, 4.8, 450,
       222.44, 2.000, 81.870, 3.267, 4.228, 5.557, 94.922, 0.6578, 6.93, 2, 0, 0, 0, 19.776, 0.665, 0, 0, 0},
      {"M", "kimi-linear-48b", layout(1, 1, 1), {Regime::prefill, 1, 0, 131072}, 989, 4.8, 450,
       256.00, 4096, 94.221, 3.267, 1.057, 0.043, 98.588, 1957.3075, 19853.3, 1, 0, 0, 0, 20.539, 1979.077, 0, 0, 0},
      // clang-format on
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    const Architecture& a = model(c.model);
    const Deployment d = resolve(a, c.d);
    Five f = five(a, d, c.w);
    printed(f.touched, c.touched, 2), printed(f.tokens_per_expert, c.t_exp, 3);
    printed(f.routed / 1e9, c.routed, 3), printed(f.trunk / 1e9, c.trunk, 3), printed(f.cache / 1e9, c.kv, 3), printed(f.state / 1e9, c.state, 3);
    printed(f.hbm() / 1e9, c.total, 3), printed(f.flops / 1e12, c.tf, 4), printed(f.intensity(), c.ai, c.ai_decimals);
    printed(f.tp_bytes / 1e6, c.tp_mb, 2), printed(f.ep_bytes / 1e6, c.ep_mb, 2), printed(f.ep_bytes_all_copies / 1e6, c.seed_mb, 2);
    printed(f.hbm() / c.hbm / 1e9, c.ms_hbm, 3), printed(f.flops / c.F / 1e9, c.ms_flop, 3), printed(f.network() / c.net / 1e6, c.ms_net, 3);
    if (c.ratio_seed > 0) {
      printed(f.comm_over_compute(a, d, c.F * 1e12, c.net * 1e9, true), c.ratio_seed, 3);
      printed(f.comm_over_compute(a, d, c.F * 1e12, c.net * 1e9, false), c.ratio, 3);
    }
  }
}

TEST(deployment, weights_of_a_rank) {
  const Hardware h = load_hardware("b300");
  struct Row {
    const char* name;
    double gb[4];
  } rows[] = {{"k3", {1559.94, 205.16, 108.39, 60.00}}, {"k2", {1038.38, 131.70, 66.94, 34.56}}, {"kimi-linear-48b", {98.25, 12.35, 6.21, 3.15}}};
  for (const Row& r : rows) {
    int i = 0;
    for (int64_t tp : {1, 8, 16, 32}) printed(memory_of(model(r.name), h, layout(tp, 1, 1)).weights() / 1e9, r.gb[i++], 2);
  }
  auto latent = [&](int64_t tp) {
    Deployment d = layout(tp, 1, 1);
    d.shard_latent = true;
    return memory_of(model("k3"), h, d).weights() / 1e9;
  };
  printed(latent(8), 196.88, 2), printed(latent(16), 99.52, 2), printed(latent(32), 50.84, 2);
  printed(memory_of(model("k3"), h, layout(8, 4, 32)).weights() / 1e9, 69.55, 2);
  printed(memory_of(model("k3"), h, layout(4, 16, 64)).weights() / 1e9, 59.68, 2);
}

TEST(deployment, sequences_that_fit_beside_k3_on_eight_b300) {
  Memory m = memory_of(model("k3"), load_hardware("b300"), layout(8, 1, 1));
  printed(m.pool / 1e9, 46.40, 2);
  EXPECT_EQ(std::floor(m.sequences(8192)), 164);
  printed(m.sequences(131072), 12.6, 1), printed(m.sequences(1048576), 1.6, 1);
  Deployment d = layout(8, 1, 1);
  d.dcp = 8;
  Memory s = memory_of(model("k3"), load_hardware("b300"), d);
  EXPECT_EQ(std::floor(s.sequences(8192)), 549);
  printed(s.sequences(131072), 91.1, 1), printed(s.sequences(1048576), 12.6, 1);
}

TEST(deployment, copies_that_leave_a_rank_or_a_node) {
  const double e[] = {8, 16, 32, 64, 72, 144}, k16[] = {7.055, 10.303, 12.745, 14.255, 14.437, 15.193},
               k8[] = {5.251, 6.452, 7.178, 7.576, 7.622, 7.808};
  for (int i = 0; i < 6; ++i) printed(distinct_ranks(e[i], 16), k16[i], 3), printed(distinct_ranks(e[i], 8), k8[i], 3);
  const double n[] = {2, 4, 8, 12, 18}, n16[] = {1.000, 2.970, 6.174, 8.266, 10.188}, n8[] = {0.996, 2.700, 4.595, 5.516, 6.239};
  for (int i = 0; i < 5; ++i) printed(remote_node_copies(n[i], 16), n16[i], 3), printed(remote_node_copies(n[i], 8), n8[i], 3);
}

TEST(deployment, communication_over_computation) {
  struct Row {
    double F, B, ratio[3];
    int decimals;
  } rows[] = {{1979, 450, {2.147, 1.074, 0.716}, 3}, {989, 450, {1.073, 0.537, 0.358}, 3}, {1979, 50, {19.33, 9.663, 6.442}, 0},
              {1979, 200, {4.832, 2.416, 1.611}, 3}, {296, 450, {0.321, 0.161, 0.107}, 3}, {4500, 900, {2.441, 1.221, 0.814}, 3},
              {5000, 900, {2.713, 1.356, 0.904}, 3}, {5033, 538, {4.568, 2.284, 1.523}, 3}};
  const double m[] = {1024, 2048, 3072};
  for (const Row& r : rows)
    for (int i = 0; i < 3; ++i) printed(comm_ratio(1, 2, r.F * 1e12, m[i], r.B * 1e9), r.ratio[i], r.decimals ? r.decimals : i ? 3 : 2);
  printed(ridge_tokens(0.53125, 1979e12, 4.8e12) * 56, 6133, 0);
  printed(ridge_tokens(1, 1979e12, 4.8e12) * 48, 9895, 0);
  printed(ridge_tokens(0.53125, 15000e12, 8.0e12), 498.0, 1);
}

TEST(deployment, impossible_layouts_are_named_with_the_nearest_that_works) {
  const Architecture& k3 = model("k3");
  auto expect = [&](Deployment d, const char* text) { EXPECT_THAT([&] { resolve(k3, d); }, testing::throws_error(text)); };
  Deployment d;
  d.tp = 7, expect(d, "the nearest that works is TP 6");
  d = {}, d.gpus = 16, d.tp = 3, expect(d, "TP 3 x DP 1; the nearest that works is TP 2 x DP 8");
  d = layout(8, 4, 24), expect(d, "EP 24 must divide the 896 experts and the 32 GPUs; the nearest that works is EP");
  d = layout(8, 1, 1), d.dcp = 3, expect(d, "DCP 3 must divide TP 8; the nearest that works is DCP");
  d = layout(1, 1, 1), d.gpus = 0, expect(d, "--gpus is 0 but must be at least 1");
  d = layout(1, 1, 1), d.tp = -8, expect(d, "--tp is -8 but must be at least 1");
}

}  // namespace
}  // namespace k3::plan
