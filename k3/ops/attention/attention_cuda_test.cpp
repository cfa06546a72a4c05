// Attention on the GPU against the CPU, and what must not change a bit there: the cut into calls, the neighbours.
#include <gtest/gtest.h>

#include <utility>

#include "k3/ops/attention/attention.h"
#include "k3/ops/attention/prefill.h"
#include "k3/ops/testing.h"

namespace k3 {
namespace {

using testing::bytes_of;
using testing::Step;
using testing::Values;

// Twice that of attention_test.cpp and mla_test.cpp: both devices may be that far from double.
double tolerance(int64_t length) { return 2 * 16 * 6e-8 * std::sqrt(double(length)); }

Batch at_slots(Batch b, std::vector<int32_t> slots) {
  b.slots = std::move(slots);
  return b;
}

struct Plain {
  AttentionShape s;
  Values q, k, v, dy;
  Plain(int64_t n, int64_t heads, int64_t kv_heads, int64_t key, int64_t value)
      : s{heads, kv_heads, key, value, 1 / std::sqrt(float(key))},
        q(n * heads * key, 1),
        k(n * kv_heads * key, 2),
        v(n * kv_heads * value, 3),
        dy(n * heads * value, 4) {}
  int64_t tokens() const { return q.size() / (s.heads * s.key_dim); }
  std::vector<Var> inputs(Step& step, int64_t at, int64_t n) const {
    auto in = [&](const Values& x, int64_t width) { return step.input(x.slice(at * width, n * width), {n, width}); };
    return {in(q, s.heads * s.key_dim), in(k, s.kv_heads * s.key_dim), in(v, s.kv_heads * s.value_dim)};
  }
};

struct Latent {
  MlaShape s;
  Values q, c, k_pe, kv_b, dy;
  Latent(int64_t n, int64_t heads, int64_t nope, int64_t rope, int64_t value, int64_t rank)
      : s{heads, nope, rope, value, rank, 1 / std::sqrt(float(nope + rope))},
        q(n * heads * (nope + rope), 1),
        c(n * rank, 2),
        k_pe(n * rope, 3),
        kv_b(heads * (nope + value) * rank, 4, 1 / std::sqrt(double(rank))),
        dy(n * heads * value, 5) {}
  int64_t tokens() const { return c.size() / s.rank; }
  int64_t length() const { return tokens() + s.nope + s.rope + s.rank; }
  Param& weight(Step& step) const { return step.keep(step.param("kv_b_proj.weight", kv_b, {s.heads * (s.nope + s.value), s.rank})); }
  Var read(Step& step, Param& w, const Batch& batch, int64_t at, LatentCache* cache = nullptr, Tensor* top = nullptr,
           std::vector<Var>* kept = nullptr) const {
    const int64_t n = batch.tokens();
    auto in = [&](const Values& x) {
      const int64_t width = x.size() / tokens();
      return step.input(x.slice(at * width, n * width), {n, width});
    };
    std::vector<Var> x{in(q), in(c), in(k_pe)};
    Var y = mla_attention(x[0], x[1], x[2], w, s, batch, cache, top);
    if (kept) *kept = x;
    return y;
  }
};

TEST(attention, cuda_equals_cpu) {
  struct Case {
    std::vector<int64_t> lengths;
    Plain in;
  };
  auto make = [](std::vector<int64_t> lengths, int64_t heads, int64_t kv_heads, int64_t key, int64_t value) {
    return Case{lengths, Plain(Batch::of_lengths(lengths).tokens(), heads, kv_heads, key, value)};
  };
  for (const Case& k : {make({1}, 1, 1, 16, 16), make({2}, 3, 3, 24, 7), make({63}, 4, 2, 17, 33), make({64}, 1, 1, 48, 32), make({65}, 3, 1, 16, 64),
                        make({130}, 4, 4, 32, 1), make({70}, 2, 1, 100, 80), make({300}, 4, 1, 40, 24), make({129}, 1, 1, 256, 256),
                        make({200}, 2, 2, 192, 128), make({100, 37, 0, 64, 5, 1, 0}, 4, 2, 20, 24), make({1, 2, 3, 4, 5, 1, 1, 2}, 2, 2, 8, 8),
                        make({0}, 2, 2, 8, 8), make({33}, 1, 1, 256, 256), make({20, 0, 13}, 2, 1, 192, 128)}) {
    if (testing::few_shapes() && (k.in.tokens() > 70 || k.in.tokens() / 10 == 6)) continue;
    SCOPED_TRACE(fmt::format("{} tokens, {} / {} heads of {} / {}", k.in.tokens(), k.in.s.heads, k.in.s.kv_heads, k.in.s.key_dim, k.in.s.value_dim));
    testing::expect_cuda_equals_cpu(tolerance(k.in.tokens() + k.in.s.key_dim), [&](Step& step) {
      const int64_t n = k.in.tokens();
      Tensor top = step.arena().lend(DType::f32, {k.in.s.heads});
      auto x = k.in.inputs(step, 0, n);
      Var y = attention(x[0], x[1], x[2], k.in.s, Batch::of_lengths(k.lengths), nullptr, &top);
      step.backward(y, k.in.dy);
      // one key: the weight is 1 whatever q and k are, and their gradients are rounding
      if (n <= 1) return n ? std::vector<Tensor>{y.value(), top, x[2].grad()} : std::vector<Tensor>{y.value()};
      return std::vector<Tensor>{y.value(), top, x[0].grad(), x[1].grad(), x[2].grad()};
    });
  }
}

TEST(attention, cuda_keys_that_are_also_values_and_padding_equal_cpu) {
  const Plain in(150, 4, 2, 24, 24);
  testing::expect_cuda_equals_cpu(tolerance(174), [&](Step& step) {
    Values k = in.k, q = in.q;
    Batch batch = Batch::of_lengths({100, 50});
    batch.padding.assign(150, 0);
    for (int64_t i : {0, 3, 77, 99, 100, 149}) {
      batch.padding[i] = 1;
      for (int64_t c = 0; c < 48; ++c) k[i * 48 + c] = NAN;
    }
    Var qv = step.input(q, {150, 96}), kv = step.input(k, {150, 48});
    Var y = attention(qv, kv, kv, in.s, batch);
    step.backward(y, in.dy);
    return std::vector<Tensor>{y.value(), qv.grad(), kv.grad()};
  });
}

TEST(attention, cuda_huge_logits_stay_finite) {
  Plain in(200, 2, 1, 32, 16);
  for (int64_t i = 0; i < in.q.size(); ++i) in.q[i] *= 300;                // logits of several thousand: one key has all the weight
  testing::expect_cuda_equals_cpu(300 * tolerance(232), [&](Step& step) {  // a logit's rounding grows with it
    auto x = in.inputs(step, 0, 200);
    Var y = attention(x[0], x[1], x[2], in.s, Batch::one(200));
    step.backward(y, in.dy);
    return std::vector<Tensor>{y.value(), x[2].grad()};
  });
}

// Operands rounded to bfloat16: 2^-9 each; two met in a score, two in dP, one in dS, one in the last product, so six. An error is as large as its
// row, and the rows of the first keys, which every query sees, are ten times the mean.
constexpr double kNarrowTolerance = 10 * 6 / 512.0;

TEST(attention, cuda_in_bfloat16_is_near_float32) {
  for (auto [lengths, in] : {std::pair{std::vector<int64_t>{65}, Plain(65, 3, 1, 16, 64)},
                             {{130}, Plain(130, 4, 4, 40, 8)},
                             {{300}, Plain(300, 4, 2, 64, 64)},
                             {{100, 37, 0, 64, 5, 1, 2}, Plain(209, 4, 2, 128, 128)},
                             {{77, 1, 72}, Plain(150, 4, 2, 96, 64)},
                             {{130}, Plain(130, 2, 1, 104, 24)},
                             {{140, 60}, Plain(200, 2, 1, 160, 40)},
                             {{200}, Plain(200, 2, 2, 192, 128)}}) {
    SCOPED_TRACE(fmt::format("{} tokens, {} / {} heads of {} / {}", in.tokens(), in.s.heads, in.s.kv_heads, in.s.key_dim, in.s.value_dim));
    testing::expect_cuda_equals_cpu(kNarrowTolerance, [&, &lengths = lengths, &in = in](Step& step) {
      step.context.bf16_products = true;
      Tensor top = step.arena().lend(DType::f32, {in.s.heads});
      auto x = in.inputs(step, 0, in.tokens());
      Batch batch = Batch::of_lengths(lengths);
      batch.padding.assign(size_t(in.tokens()), 0);
      batch.padding[1] = batch.padding[60] = 1;
      Var y = attention(x[0], x[1], x[2], in.s, batch, nullptr, &top);
      step.backward(y, in.dy);
      return std::vector<Tensor>{y.value(), top, x[0].grad(), x[1].grad(), x[2].grad()};
    });
  }
}

TEST(mla, cuda_in_bfloat16_is_near_float32) {
  for (const Latent& in : {Latent(65, 4, 16, 8, 16, 24), Latent(207, 4, 64, 32, 64, 128), Latent(207, 2, 128, 64, 128, 64)})
    testing::expect_cuda_equals_cpu(kNarrowTolerance, [&](Step& step) {
      step.context.bf16_products = true;
      Param& w = in.weight(step);
      std::vector<Var> x;
      Var y = in.read(step, w, Batch::one(in.tokens()), 0, nullptr, nullptr, &x);
      step.backward(y, in.dy);
      return std::vector<Tensor>{y.value(), x[0].grad(), x[1].grad(), x[2].grad(), w.grad};
    });
}

// The published widths, where a GPU multiplies by warpgroups: packed, with empty sequences and one token; the largest logits too.
TEST(mla, cuda_prefill_in_bfloat16_is_near_float32) {
  for (auto [lengths, half] :
       {std::pair{std::vector<int64_t>{100, 0, 1, 37, 64, 0, 200}, 64}, {{100, 0, 1, 37, 64, 0, 200}, 32}, {{129}, 64}, {{1}, 64}}) {
    const Batch batch = Batch::of_lengths(lengths);
    const Latent in(batch.tokens(), 3, 2 * half, half, 2 * half, 64);
    SCOPED_TRACE(fmt::format("{} tokens", in.tokens()));
    testing::expect_cuda_equals_cpu(kNarrowTolerance, [&](Step& step) {
      step.context.bf16_products = true;
      Tensor top = step.arena().lend(DType::f32, {in.s.heads});
      Param& w = in.weight(step);
      std::vector<Var> x;
      Var y = in.read(step, w, batch, 0, nullptr, &top, &x);
      step.backward(y, in.dy);
      if (batch.tokens() == 1) return std::vector<Tensor>{y.value(), top, x[1].grad(), w.grad};  // the others' are rounding
      return std::vector<Tensor>{y.value(), top, x[0].grad(), x[1].grad(), x[2].grad(), w.grad};
    });
  }
}

// A document of NaN changes no bit of the ones before and behind it, forward and backward.
TEST(mla, cuda_prefill_does_not_see_a_neighbours_nan) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  const Latent good(201, 2, 128, 64, 128, 64);
  Latent bad = good;
  for (auto [x, width] : {std::pair{&bad.q, int64_t(2 * 192)}, {&bad.c, int64_t(64)}, {&bad.k_pe, int64_t(64)}, {&bad.dy, int64_t(2 * 128)}})
    for (int64_t i = 100 * width; i < 137 * width; ++i) (*x)[i] = NAN;
  std::vector<std::vector<char>> seen[2];
  for (bool poisoned : {false, true}) {
    Step step(true, size_t(1) << 30, Device::cuda);
    step.context.bf16_products = true;
    std::vector<Var> x;
    const Latent& in = poisoned ? bad : good;
    Var y = in.read(step, in.weight(step), Batch::of_lengths({100, 37, 64}), 0, nullptr, nullptr, &x);
    step.backward(y, in.dy);
    for (const Tensor& t : {y.value(), x[0].grad(), x[1].grad(), x[2].grad()})
      for (auto [from, to] : {std::pair{0, 100}, {137, 201}}) seen[poisoned].push_back(bytes_of(t.row_range(from, to)));
  }
  for (size_t i = 0; i < seen[0].size(); ++i) EXPECT_EQ(seen[0][i], seen[1][i]) << i;
}

// The same from caches: a prompt beside a few tokens of another sequence, a second piece behind the first, a token of each, and a third.
TEST(mla, cuda_caches_in_bfloat16_are_near_float32) {
  const bool few = testing::few_shapes();  // the same cuts into heads and pages of fewer tokens
  const Latent in(few ? 240 : 600, 3, 128, 64, 128, 64);
  struct Small {  // two heads at a time, then one
    int64_t before = std::exchange(prefill_room, 2 * 2 * (testing::few_shapes() ? 195 : 460) * 256);
    ~Small() { prefill_room = before; }
  } small;
  for (bool deterministic : {true, false})
    for (bool keep_expanded : {true, false}) {
      if (few && keep_expanded) continue;
      SCOPED_TRACE(fmt::format("{}{}", deterministic ? "deterministic" : "absorbed", keep_expanded ? ", kept" : ""));
      testing::expect_cuda_equals_cpu(
          kNarrowTolerance,
          [&](Step& step) {
            step.context.bf16_products = true, step.context.deterministic = deterministic;
            LatentCache cache(3, in.s, keep_expanded, step.context.device);
            Param& w = in.weight(step);
            std::vector<Tensor> out;
            int64_t at = 0;
            for (const auto& [lengths, slots] : {std::pair{std::vector<int64_t>{few ? 70 : 200, 4, 33}, std::vector<int32_t>{0, 1, 2}},
                                                 {{few ? 50 : 150, 0, few ? 34 : 64}, {0, 2, 1}},
                                                 {{1, 1, 1}, {2, 0, 1}},
                                                 {{few ? 8 : 32, few ? 38 : 100}, {1, 0}}}) {
              const Batch batch = at_slots(Batch::of_lengths(lengths), slots);
              Tensor top = step.arena().lend(DType::f32, {in.s.heads});
              out.push_back(in.read(step, w, batch, at, &cache, &top).value());
              out.push_back(top);
              at += batch.tokens();
            }
            return out;
          },
          false);
    }
}

// Prefill and tokens one by one from a cache, for values of every number of tiles.
TEST(attention, cuda_caches_equal_cpu) {
  for (auto [key, value] : {std::pair<int64_t, int64_t>{40, 24}, {64, 100}, {192, 128}, {48, 130}, {256, 256}}) {
    SCOPED_TRACE(fmt::format("{} / {}", key, value));
    const Plain in(80, 3, 1, key, value);
    testing::expect_cuda_equals_cpu(
        tolerance(80 + key),
        [&, key = key](Step& step) {
          KvCache cache(2, in.s, step.context.device);
          std::vector<Tensor> out;
          for (auto [at, n] : {std::pair<int64_t, int64_t>{0, 70}, {70, 1}, {71, 5}, {76, 1}}) {
            auto x = in.inputs(step, at, n);
            out.push_back(attention(x[0], x[1], x[2], in.s, at_slots(Batch::of_lengths({n, 0}), {1, 0}), &cache).value());
          }
          return out;
        },
        false);
  }
}

// On the GPU: whole = any cut = one at a time beside another sequence, to the bit.
TEST(attention, cuda_any_cut_equals_whole) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  const int64_t n = 270;
  const Plain in(n, 4, 2, 40, 24);
  Step training(true, size_t(1) << 30, Device::cuda);
  auto x = in.inputs(training, 0, n);
  const Tensor whole = attention(x[0], x[1], x[2], in.s, Batch::one(n)).value();
  for (std::vector<int64_t> cut : {std::vector<int64_t>{124, 3, 1, 1, 1, 140}, {1, 63, 65, 141}, {17, 253}, {270}}) {
    Step step(false, size_t(1) << 30, Device::cuda);
    KvCache cache(3, in.s, Device::cuda);
    int64_t at = 0;
    for (int64_t size : cut) {
      auto part = in.inputs(step, at, size);
      const Tensor y = attention(part[0], part[1], part[2], in.s, at_slots(Batch::of_lengths({size, 0}), {1, 0}), &cache).value();
      EXPECT_EQ(bytes_of(y), bytes_of(whole.row_range(at, at + size))) << "tokens " << at << " to " << at + size;
      at += size;
    }
  }
}

TEST(mla, cuda_equals_cpu) {
  for (const Latent& in :
       {Latent(2, 3, 17, 5, 9, 20), Latent(65, 4, 16, 8, 16, 24), Latent(207, 2, 128, 64, 128, 64), Latent(130, 3, 16, 8, 20, 40)}) {
    if (testing::few_shapes() && in.tokens() > 100) continue;
    const std::vector<int64_t> lengths = in.tokens() == 207 ? std::vector<int64_t>{100, 37, 0, 64, 5, 1, 0} : std::vector<int64_t>{in.tokens()};
    SCOPED_TRACE(fmt::format("{} tokens", in.tokens()));
    testing::expect_cuda_equals_cpu(tolerance(in.length()), [&](Step& step) {
      Tensor top = step.arena().lend(DType::f32, {in.s.heads});
      Param& w = in.weight(step);
      std::vector<Var> x;
      Var y = in.read(step, w, Batch::of_lengths(lengths), 0, nullptr, &top, &x);
      step.backward(y, in.dy);
      return std::vector<Tensor>{y.value(), top, x[0].grad(), x[1].grad(), x[2].grad(), w.grad};
    });
  }
}

// Prefill, pieces and decode from each kind of cache, absorbed where that is cheaper; padding rows of NaN; K3's widths.
TEST(mla, cuda_caches_equal_cpu) {
  for (const Latent& in : {Latent(300, 3, 16, 8, 20, 40), Latent(700, 4, 16, 8, 24, 32), Latent(140, 5, 128, 64, 128, 512),
                           Latent(90, 2, 32, 16, 32, 200), Latent(40, 2, 16, 8, 20, 200)})
    for (bool deterministic : {true, false})
      for (bool keep_expanded : {true, false}) {
        if (testing::few_shapes() && in.tokens() != 40) continue;
        SCOPED_TRACE(fmt::format("{} tokens, rank {}, {}{}", in.tokens(), in.s.rank, deterministic ? "deterministic" : "absorbed",
                                 keep_expanded ? ", kept" : ""));
        testing::expect_cuda_equals_cpu(
            tolerance(in.length()),
            [&](Step& step) {
              step.context.deterministic = deterministic;
              LatentCache cache(2, in.s, keep_expanded, step.context.device);
              Param& w = in.weight(step);
              std::vector<Tensor> out;
              Tensor top = step.arena().lend(DType::f32, {in.s.heads});
              const int64_t n = in.tokens();
              out.push_back(in.read(step, w, at_slots(Batch::of_lengths({n - 11, 4}), {0, 1}), 0, &cache, &top).value());
              out.push_back(in.read(step, w, at_slots(Batch::of_lengths({1, 1}), {0, 1}), n - 7, &cache).value());
              Batch padded = at_slots(Batch::of_lengths({3, 2}), {1, 0});
              padded.padding = {0, 1, 0, 0, 1};
              out.push_back(in.read(step, w, padded, n - 5, &cache).value());
              out.push_back(top);
              return out;
            },
            false);
      }
}

TEST(mla, cuda_reads_a_bfloat16_weight) {
  Latent in(150, 2, 16, 8, 12, 33);
  std::vector<bf16> half(size_t(in.kv_b.size()));
  for (int64_t i = 0; i < in.kv_b.size(); ++i) half[size_t(i)] = to_bf16(in.kv_b[i]);
  for (bool deterministic : {true, false})
    testing::expect_cuda_equals_cpu(
        tolerance(in.length()),
        [&](Step& step) {
          step.context.deterministic = deterministic;
          Param& w = in.weight(step);
          w.value = step.arena().lend(DType::bf16, w.value.shape());
          write(w.value, half.data());
          LatentCache cache(1, in.s, false, step.context.device);
          return std::vector<Tensor>{in.read(step, w, at_slots(Batch::one(140), {0}), 0, &cache).value(),
                                     in.read(step, w, at_slots(Batch::one(1), {0}), 140, &cache).value()};
        },
        false);
}

TEST(mla, cuda_any_cut_equals_whole) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  const Latent in(270, 3, 16, 8, 20, 40);
  Step training(true, size_t(1) << 30, Device::cuda);
  const Tensor whole = in.read(training, in.weight(training), Batch::one(270), 0).value();
  for (bool keep_expanded : {false, true})
    for (std::vector<int64_t> cut : {std::vector<int64_t>{124, 3, 1, 1, 1, 140}, {1, 63, 65, 141}, {270}}) {
      if (testing::few_shapes() && cut[0] != 124) continue;
      Step step(false, size_t(1) << 30, Device::cuda);
      LatentCache cache(2, in.s, keep_expanded, Device::cuda);
      int64_t at = 0;
      for (int64_t size : cut) {
        const Tensor y = in.read(step, in.weight(step), at_slots(Batch::one(size), {1}), at, &cache).value();
        EXPECT_EQ(bytes_of(y), bytes_of(whole.row_range(at, at + size))) << "tokens " << at << " to " << at + size << " " << keep_expanded;
        at += size;
      }
    }
}

TEST(attention, cuda_sizes_that_it_does_not_serve_are_refused) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  Step step(true, size_t(1) << 30, Device::cuda);
  for (const Plain& in : {Plain(3, 1, 1, 16, 257), Plain(3, 1, 1, 264, 16)}) {
    auto x = in.inputs(step, 0, 3);
    EXPECT_THAT([&] { attention(x[0], x[1], x[2], in.s, Batch::one(3)); }, testing::throws_error("both must be 1 to 256"));
  }
  const Latent wide(2, 1, 16, 8, 16, 513);
  Step decode(false, size_t(1) << 30, Device::cuda);
  decode.context.deterministic = false;
  LatentCache cache(1, wide.s, false, Device::cuda);
  wide.read(decode, wide.weight(decode), at_slots(Batch::one(1), {0}), 0, &cache);  // absorbed only where that is cheaper
  EXPECT_THAT([&] { wide.read(decode, wide.weight(decode), at_slots(Batch::one(1), {0}), 1, &cache); },
              testing::throws_error("[attention] the GPU serves latents of rank up to 512"));
}

// A fork, what was taken back, and a sequence saved on one device that goes on on the other.
TEST(token_cache, cuda_forks_truncates_and_moves_to_the_cpu) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  const Latent in(300, 2, 16, 8, 12, 24), other(300, 2, 16, 8, 12, 24);
  for (bool keep_expanded : {false, true}) {
    Step step(false, size_t(1) << 30, Device::cuda), host(false);
    Param &w = in.weight(step), &v = in.weight(host);
    LatentCache cache(3, in.s, keep_expanded, Device::cuda), there(1, in.s, keep_expanded);
    auto read = [&](int32_t slot, int64_t at, int64_t n) { return bytes_of(in.read(step, w, at_slots(Batch::one(n), {slot}), at, &cache).value()); };
    read(0, 0, 130);
    cache.copy(1, 0);
    const auto a = read(0, 130, 9);
    read(1, 200, 40), cache.truncate(1, 40);
    EXPECT_EQ(read(1, 130, 9), a);
    Blob blob;
    cache.save(0, blob);
    there.load(0, blob);
    const Tensor near = in.read(host, v, at_slots(Batch::one(5), {0}), 139, &there).value();
    const Tensor far = in.read(step, w, at_slots(Batch::one(5), {0}), 139, &cache).value();
    testing::expect_near(HostCopy(far).tensor(), testing::as_double(near), tolerance(in.length()), "after the move");
    Blob back;
    there.save(0, back);
    cache.load(2, back);
    EXPECT_EQ(cache.tokens(2), 144);
    read(2, 144, 3);
  }
}

}  // namespace
}  // namespace k3
