#include "k3/plan/closed_forms.h"

#include <gtest/gtest.h>

#include <cmath>

namespace k3::plan {
namespace {

const Architecture& k3() {
  static Architecture a = load_architecture("k3");
  return a;
}
const Architecture& k2() {
  static Architecture a = load_architecture("k2");
  return a;
}
const Architecture& kl() {
  static Architecture a = load_architecture("kimi-linear-48b");
  return a;
}
const Architecture& ds() {
  static Architecture a = load_architecture("deepseek-v3");
  return a;
}

// A printed number: equal after rounding to as many decimals as were printed.
void printed(double value, double golden, int decimals) { EXPECT_NEAR(value, golden, 0.5000001 * std::pow(10.0, -decimals)); }

TEST(closed_forms, parameters_are_the_golden_ones) {
  struct Row {
    const Architecture& a;
    int64_t total, active, routed, expert, mla, kda, kda_small, shared, latent, router, dense, active_matrices;
    double with_embedding, share, checkpoint;
  } rows[] = {
      {k3(), 2779484476000, 104189612640, 2722740830208, 33030144, 232194048, 443580416, 159968, 132120576, 51380224, 6422528, 726663168,
       104174092288, 105.3640, 46.7, 1559.943},
      {k2(), 1026408232448, 31687095808, 1014686023680, 44040192, 101122048, 0, 0, 44040192, 0, 2752512, 396361728, 31686066176, 32.8615, 66.7,
       1038.378},
      {kl(), 49122681728, 3106972544, 47110422528, 7077888, 29114368, 39460864, 53408, 7077888, 0, 589824, 63700992, 3105767424, 3.4845, 47.4,
       98.245},
      {ds(), 671026419200, 36625618432, 653908770816, 44040192, 187105280, 0, 0, 44040192, 0, 1835008, 396361728, 36624596992, 37.5523, 55.8,
       688.304},
  };
  for (const Row& r : rows) {
    SCOPED_TRACE(r.a.name);
    Parameters p = parameters(r.a);
    EXPECT_EQ(p.total, r.total);
    EXPECT_EQ(p.active, r.active);
    EXPECT_EQ(p.routed, r.routed);
    EXPECT_EQ(p.expert, r.expert);
    EXPECT_EQ(mixer_form(r.a.config, "mla").matrices, r.mla);
    if (r.kda) {
      EXPECT_EQ(mixer_form(r.a.config, "kda").matrices, r.kda);
      EXPECT_EQ(mixer_form(r.a.config, "kda").small, r.kda_small);
    }
    EXPECT_EQ(p.shared, r.shared);
    EXPECT_EQ(p.latent_pair, r.latent);
    EXPECT_EQ(p.router, r.router);
    EXPECT_EQ(p.dense, r.dense);
    EXPECT_EQ(p.active_matrices, r.active_matrices);
    printed(double(p.active + p.embedding) / 1e9, r.with_embedding, 4);
    double routed_active = double(p.expert * r.a.config.num_experts_per_token * r.a.moe_layers());
    printed(100 * routed_active / double(p.active), r.share, 1);
    printed(p.checkpoint_bytes / 1e9, r.checkpoint, 3);
  }
}

TEST(closed_forms, bytes_of_the_published_k3_checkpoint) {
  Parameters p = parameters(k3());
  MixerForm kda = mixer_form(k3().config, "kda");
  // convolutions, A_log (stored 128 long for 96 heads), dt_bias, o_norm and the selection bias are float32
  const int64_t layers = 69, pad = 32 * layers;
  double f32 = double(kda.small * layers + 896 * 92);
  EXPECT_EQ(p.total + pad, 2779484478208);
  EXPECT_EQ(p.checkpoint_bytes + 2 * f32 + 4.0 * double(pad), 1559965606912.0);
  EXPECT_EQ(double(p.expert) * k3().experts.bytes, 17547264.0);
}

TEST(closed_forms, the_golden_models_have_their_elements) {
  EXPECT_EQ(parameters(load_architecture(K3_SOURCE_DIR "/tests/golden/kimi-linear-a")).total, 385096);
  EXPECT_EQ(parameters(load_architecture(K3_SOURCE_DIR "/tests/golden/kimi-linear-b")).total, 724744);
}

TEST(closed_forms, flops_are_the_golden_ones) {
  constexpr double K = 1024;
  struct Row {
    const Architecture& a;
    double linear, decode[4], prefill[4], share[3], train[2];
  } rows[] = {
      {k3(), 208.3482, {229.643, 250.179, 866.238, 5466.148}, {0.8596, 1.7439, 39.7774, 1027.5359}, {2.8, 31.8, 78.9}, {636.63, 645.69}},
      {k2(), 63.3721, {98.168, 132.964, 1176.842, 8971.134}, {0.2709, 0.5837, 29.4609, 1437.5855}, {14.4, 72.9, 95.5}, {205.47, 220.82}},
      {kl(), 6.2115, {8.281, 10.278, 70.173, 517.386}, {0.0239, 0.0502, 1.9573, 84.6198}, {9.6, 62.9, 93.1}, {19.76, 20.64}},
      {ds(), 73.2492, {142.841, 212.433, 2300.190, 17888.774}, {0.3344, 0.7526, 52.2829, 2822.0597}, {22.3, 82.1, 97.3}, {250.45, 281.15}},
  };
  const double lengths[] = {4 * K, 8 * K, 128 * K, 1024 * K};
  for (const Row& r : rows) {
    SCOPED_TRACE(r.a.name);
    printed(linear_flops(r.a) / 1e9, r.linear, 4);
    for (int i = 0; i < 4; ++i) {
      printed(decode_flops(r.a, lengths[i]).total() / 1e9, r.decode[i], 3);
      Flops f = prefill_flops(r.a, lengths[i]);
      printed(f.total() / 1e15, r.prefill[i], 4);
      if (i) printed(100 * f.attention / f.total(), r.share[i - 1], 1);
    }
    for (int i = 0; i < 2; ++i) printed(training_flops(r.a, lengths[i]).total() / 1e9, r.train[i], 2);
  }
}

TEST(closed_forms, experts_touched_are_the_golden_ones) {
  struct Row {
    double n, k, u[11];
  } rows[] = {{896, 16, {16, 31.71, 62.31, 120.28, 224.41, 392.62, 613.20, 806.74, 887.11, 895.91, 896.00}},
              {384, 8, {8, 15.83, 31.01, 59.52, 109.82, 188.23, 284.19, 358.06, 382.25, 383.99, 384.00}},
              {256, 8, {8, 15.75, 30.53, 57.42, 101.96, 163.31, 222.44, 251.60, 255.92, 256.00, 256.00}}};
  for (const Row& r : rows)
    for (int i = 0; i < 11; ++i) printed(experts_touched(r.n, r.k, std::pow(2, i)), r.u[i], 2);
}

TEST(closed_forms, weights_read_in_a_decode_step) {
  struct Row {
    const Architecture& a;
    double gb[5];
  } rows[] = {{k3(), {136.94, 473.39, 1101.02, 1543.21, 1557.56}},
              {k2(), {42.24, 311.35, 772.24, 1031.40, 1036.03}},
              {kl(), {6.21, 40.79, 85.14, 97.46, 97.49}}};
  const double batches[] = {1, 16, 64, 256, 1024};
  for (const Row& r : rows) {
    SCOPED_TRACE(r.a.name);
    Parameters p = parameters(r.a);
    for (int i = 0; i < 5; ++i) {
      double u = experts_touched(double(r.a.config.num_experts), double(r.a.config.num_experts_per_token), batches[i]);
      double bytes = double(r.a.moe_layers()) * u * double(p.expert) * r.a.experts.bytes + double(p.trunk_matrices) * r.a.trunk.bytes;
      printed(bytes / 1e9, r.gb[i], 2);
    }
  }
}

TEST(closed_forms, a_cache_only_where_there_is_attention_and_a_state_elsewhere) {
  EXPECT_EQ(k3().mixers()[0].second, 69);
  EXPECT_EQ(k3().mixers()[1].second, 24);
  EXPECT_EQ(cache_bytes_per_token(k3()), 27648);
  EXPECT_EQ(cache_bytes_per_token(k2()), 70272);
  EXPECT_EQ(cache_bytes_per_token(kl()), 8064);
  EXPECT_EQ(state_bytes(k3()), 449372160);
  EXPECT_EQ(state_bytes(kl()), 43417600);
  EXPECT_EQ(state_bytes(k2()), 0);
  auto gb = [](const Architecture& a, double tokens) { return (tokens * cache_bytes_per_token(a) + state_bytes(a)) / 1e9; };
  printed(gb(k3(), 8192), 0.6759, 4), printed(gb(k3(), 131072), 4.0733, 4), printed(gb(k3(), 1048576), 29.4404, 4);
  printed(gb(k2(), 8192), 0.5757, 4), printed(gb(k2(), 131072), 9.2107, 4), printed(gb(k2(), 1048576), 73.6855, 4);
  printed(gb(kl(), 8192), 0.1095, 4), printed(gb(kl(), 131072), 1.1004, 4), printed(gb(kl(), 1048576), 8.4991, 4);
  // where the state outweighs the cache: in capacity, and in traffic, where it is read and written
  printed(state_bytes(k3()) / 27648, 16253, 0);
  printed(2 * state_bytes(k3()) / 27648, 32507, 0);
  printed(state_bytes(kl()) / 8064, 5384, 0);
  // 443.1 MiB with the state, all but the windows at 434.0
  printed((1048576.0 * 27648) / std::pow(2, 30), 27.0, 1);
}

TEST(closed_forms, smaller_facts) {
  printed(mixer_crossover(k3().config), 14159, 0);
  printed(mixer_crossover(kl().config), 2418, 0);
  EXPECT_EQ(mixer_form(k3().config, "kda").token_prefill, 12189696);
  EXPECT_EQ(mixer_form(k3().config, "kda").token_decode, 11010048);
  EXPECT_EQ(depth_sources(k3().config), 1002);
  EXPECT_EQ(activated_elements(k3()), 5121024);
  EXPECT_EQ(activated_elements(k2()), 1124352);
  EXPECT_EQ(activated_elements(kl()), 248832);
  printed(muon_expert_flops(k3()) / 1e17, 2.390, 3);
  printed(decode_crossover(k2(), k3()), 41859, 0);
  printed(prefill_crossover(k2(), k3()) / 1000, 284.8, 1);
}

TEST(closed_forms, hybrids_of_kda_and_mla) {
  auto with = [](int kda, int mla) {  // the published order does not matter to a count
    std::vector<std::string> sets;
    std::string list;
    for (int i = 0; i < kda; ++i) list += "kda,";
    for (int i = 0; i < mla; ++i) list += "mla,";
    list.pop_back();
    return load_architecture("k3", {"mixers=" + list, "final_mixer=" + std::string(mla ? "mla" : "kda")});
  };
  struct Line {
    int kda, mla;
    double active, kv, state, cache[2], decode[2], prefill[2];
  } lines[] = {{0, 93, 89.59, 107136, 0, {14.04, 112.3}, {2726, 20550}, {72.3, 3327}},
               {46, 47, 99.32, 54144, 299.6, {7.40, 57.1}, {1486, 10494}, {50.6, 1794}},
               {69, 24, 104.19, 27648, 449.4, {4.07, 29.4}, {866, 5466}, {39.8, 1028}},
               {81, 12, 106.73, 13824, 527.5, {2.34, 15.0}, {543, 2843}, {34.1, 628}},
               {93, 0, 109.27, 0, 605.7, {0.61, 0.61}, {219.5, 219.5}, {28.5, 228}}};
  for (const Line& l : lines) {
    SCOPED_TRACE(l.kda);
    Architecture a = with(l.kda, l.mla);
    printed(double(parameters(a).active) / 1e9, l.active, 2);
    EXPECT_EQ(cache_bytes_per_token(a), l.kv);
    printed(state_bytes(a) / 1e6, l.state, 1);
    const double contexts[] = {131072, 1048576};
    for (int i = 0; i < 2; ++i) {
      printed((contexts[i] * cache_bytes_per_token(a) + state_bytes(a)) / 1e9, l.cache[i], l.cache[i] < 15 ? 2 - (i && l.mla) : 1);
      printed(decode_flops(a, contexts[i]).total() / 1e9, l.decode[i], l.mla ? 0 : 1);
      printed(prefill_flops(a, contexts[i]).total() / 1e15, l.prefill[i], i ? 0 : 1);
    }
  }
}

}  // namespace
}  // namespace k3::plan
