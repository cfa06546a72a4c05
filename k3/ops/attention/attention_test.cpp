#include "k3/ops/attention/attention.h"

#include <gtest/gtest.h>

#include "k3/ops/attention/attention_ref.h"
#include "k3/ops/testing.h"

namespace k3 {
namespace {

using testing::Step;
using testing::Values;

// Scores are sums of d products and o a weighted mean of up to t values; roundings add up like sqrt. A margin of 16: a score's error is
// multiplied by the spread of the values and, backward, by q, k and dy of size 1 each.
double tolerance(int64_t t, int64_t d) { return 16 * 6e-8 * std::sqrt(double(t + d)); }

struct Inputs {
  AttentionShape s;
  Values q, k, v, dy;
  Inputs(int64_t n, AttentionShape shape, uint64_t seed = 1)
      : s(shape),
        q(n * s.heads * s.key_dim, seed),
        k(n * s.kv_heads * s.key_dim, seed + 1),
        v(n * s.kv_heads * s.value_dim, seed + 2),
        dy(n * s.heads * s.value_dim, seed + 3) {}
  int64_t tokens() const { return q.size() / (s.heads * s.key_dim); }
  Inputs rows(int64_t first, int64_t n) const {
    Inputs r = *this;
    auto cut = [&](const Values& x) { return x.slice(first * (x.size() / tokens()), n * (x.size() / tokens())); };
    r.q = cut(q), r.k = cut(k), r.v = cut(v), r.dy = cut(dy);
    return r;
  }
};
AttentionShape shape(int64_t heads, int64_t kv_heads, int64_t key, int64_t value) { return {heads, kv_heads, key, value, 1 / std::sqrt(float(key))}; }

struct Call {
  Var q, k, v, y;
};
Call run(Step& step, const Inputs& in, const Batch& batch, KvCache* cache = nullptr, Tensor* max_logit = nullptr) {
  int64_t n = in.tokens();
  Call r;
  r.q = step.input(in.q, {n, in.s.heads * in.s.key_dim});
  r.k = step.input(in.k, {n, in.s.kv_heads * in.s.key_dim});
  r.v = step.input(in.v, {n, in.s.kv_heads * in.s.value_dim});
  r.y = attention(r.q, r.k, r.v, in.s, batch, cache, max_logit);
  return r;
}
Batch at_slots(Batch b, std::vector<int32_t> slots) {
  b.slots = std::move(slots);
  return b;
}

TEST(attention, backward_equals_complex_step) {
  const int64_t n = 5, heads = 4, kv_heads = 2, key = 3, value = 2;
  testing::expect_complex_step(
      {{n * heads * key}, {n * kv_heads * key}, {n * kv_heads * value}},
      []<class S>(const std::vector<const S*>& in, S* out) { ref::attention<S>(in[0], in[1], in[2], out, n, heads, kv_heads, key, value, 0.6); },
      n * heads * value,
      [](auto in, const double* dy, auto grad) {
        ref::attention_backward<double>(in[0], in[1], in[2], dy, grad[0], grad[1], grad[2], n, heads, kv_heads, key, value, 0.6);
      });
}

TEST(attention, cpu_equals_reference_at_every_level) {
  const std::pair<int64_t, AttentionShape> cases[] = {
      {1, shape(1, 1, 16, 16)},  {2, shape(3, 3, 24, 7)},    {63, shape(4, 2, 17, 33)},  {64, shape(1, 1, 48, 32)},    {65, shape(3, 1, 16, 64)},
      {130, shape(4, 4, 32, 1)}, {300, shape(3, 3, 64, 48)}, {300, shape(4, 1, 40, 24)}, {129, shape(1, 1, 256, 256)},
  };
  for (auto& [n, s] : cases) {
    Inputs in(n, s);
    auto q = in.q.as_double(), k = in.k.as_double(), v = in.v.as_double(), dy = in.dy.as_double();
    std::vector<double> y(dy.size()), dq(q.size()), dk(k.size()), dv(v.size()), logit(s.heads);
    ref::attention(q.data(), k.data(), v.data(), y.data(), n, s.heads, s.kv_heads, s.key_dim, s.value_dim, double(s.scale), logit.data());
    ref::attention_backward(q.data(), k.data(), v.data(), dy.data(), dq.data(), dk.data(), dv.data(), n, s.heads, s.kv_heads, s.key_dim, s.value_dim,
                            double(s.scale));
    for (auto isa : testing::levels()) {
      testing::ForceIsa force(isa);
      Step step;
      Tensor top = step.arena().lend(DType::f32, {s.heads});
      Call r = run(step, in, Batch::one(n), nullptr, &top);
      step.backward(r.y, in.dy);
      std::string what = std::to_string(n) + " tokens, " + std::to_string(s.heads) + " heads: ";
      testing::expect_near(r.y.value(), y, tolerance(n, s.key_dim), what + "y");
      testing::expect_near(r.v.grad(), dv, tolerance(n, s.key_dim), what + "dv");
      testing::expect_near(top, logit, tolerance(1, s.key_dim), what + "max_logit");
      if (n == 1) {  // one key: the weight is 1 whatever q and k are; what is left of dy . v - D is rounding
        for (int64_t i = 0; i < r.q.size(); ++i) EXPECT_NEAR(r.q.grad().f32()[i], 0, 1e-6);
        for (int64_t i = 0; i < r.k.size(); ++i) EXPECT_NEAR(r.k.grad().f32()[i], 0, 1e-6);
        continue;
      }
      testing::expect_near(r.q.grad(), dq, tolerance(n, s.key_dim), what + "dq");
      testing::expect_near(r.k.grad(), dk, tolerance(n, s.key_dim), what + "dk");
    }
  }
}

TEST(attention, shared_key_heads_equal_repeated_ones) {
  const int64_t n = 70;
  Inputs in(n, shape(6, 2, 16, 24));
  Inputs repeated(n, shape(6, 6, 16, 24));
  repeated.q = in.q;
  for (int64_t t = 0; t < n; ++t)
    for (int64_t h = 0; h < 6; ++h) {
      for (int64_t i = 0; i < 16; ++i) repeated.k[(t * 6 + h) * 16 + i] = in.k[(t * 2 + h / 3) * 16 + i];
      for (int64_t i = 0; i < 24; ++i) repeated.v[(t * 6 + h) * 24 + i] = in.v[(t * 2 + h / 3) * 24 + i];
    }
  Step step(false);
  Tensor a = run(step, in, Batch::one(n)).y.value(), b = run(step, repeated, Batch::one(n)).y.value();
  EXPECT_TRUE(testing::same_bits(a, b));
}

TEST(attention, keys_that_are_also_the_values_get_both_gradients) {
  const int64_t n = 40;
  Inputs in(n, shape(4, 2, 16, 16));
  in.v = in.k;
  Step step;
  Call two = run(step, in, Batch::one(n));
  step.backward(two.y, in.dy);
  Step other;
  Var q = other.input(in.q, two.q.value().shape()), k = other.input(in.k, two.k.value().shape());
  Var y = attention(q, k, k, in.s, Batch::one(n));
  other.backward(y, in.dy);
  EXPECT_TRUE(testing::same_bits(y.value(), two.y.value()));
  std::vector<double> sum(in.k.size());
  for (size_t i = 0; i < sum.size(); ++i) sum[i] = double(two.k.grad().f32()[i]) + double(two.v.grad().f32()[i]);
  testing::expect_near(k.grad(), sum, tolerance(n, 16), "dk + dv");
}

// Prefill in pieces, then token by token: whatever the cut, the bits of the whole.
TEST(attention, any_cut_equals_whole) {
  const int64_t n = 300;
  for (auto isa : testing::levels()) {
    testing::ForceIsa force(isa);
    Inputs in(n, shape(4, 2, 24, 20));
    Step step(false);
    Tensor whole = run(step, in, Batch::one(n)).y.value();
    for (std::vector<int64_t> cut : {std::vector<int64_t>{1, 1, 62, 64, 1, 128, 43}, {127, 1, 1, 130, 41}, {200, 100}, {0, 3, 0, 297}}) {
      KvCache cache(2, in.s);
      int64_t at = 0;
      for (int64_t size : cut) {
        Tensor part = run(step, in.rows(at, size), at_slots(Batch::one(size), {1}), &cache).y.value();
        EXPECT_TRUE(testing::same_bits(part, whole.row_range(at, at + size))) << "tokens " << at << " to " << at + size;
        at += size;
      }
      EXPECT_EQ(cache.tokens(1), n);
      EXPECT_EQ(cache.tokens(0), 0);
    }
  }
}

TEST(attention, decode_equals_prefill) {
  const int64_t n = 140;
  Inputs in(n, shape(3, 3, 16, 24));
  Step step(false);
  Tensor whole = run(step, in, Batch::one(n)).y.value();
  KvCache cache(1, in.s);
  for (int64_t t = 0; t < n; ++t)
    ASSERT_TRUE(testing::same_bits(run(step, in.rows(t, 1), at_slots(Batch::one(1), {0}), &cache).y.value(), whole.row_range(t, t + 1))) << t;
}

// Borders at 1, 3, 63, 64, 65 tokens: a document has the bits, forward and backward, that it has alone.
TEST(attention, packed_equals_separate) {
  const std::vector<int64_t> lengths{1, 3, 63, 0, 64, 65, 130};
  Batch batch = Batch::of_lengths(lengths);
  Inputs in(batch.tokens(), shape(4, 2, 16, 24));
  Step step;
  Call all = run(step, in, batch);
  step.backward(all.y, in.dy);
  for (int64_t s = 0; s < batch.sequences(); ++s) {
    int64_t a = batch.begin(s), n = batch.length(s);
    Step alone;
    Inputs mine = in.rows(a, n);
    Call r = run(alone, mine, Batch::one(n));
    alone.backward(r.y, mine.dy);
    EXPECT_TRUE(testing::same_bits(r.y.value(), all.y.value().row_range(a, a + n))) << "y of " << n;
    EXPECT_TRUE(testing::same_bits(r.q.grad(), all.q.grad().row_range(a, a + n))) << "dq of " << n;
    EXPECT_TRUE(testing::same_bits(r.k.grad(), all.k.grad().row_range(a, a + n))) << "dk of " << n;
    EXPECT_TRUE(testing::same_bits(r.v.grad(), all.v.grad().row_range(a, a + n))) << "dv of " << n;
  }
}

TEST(attention, another_document_changes_nothing_and_gets_no_gradient) {
  for (int64_t border : {1, 3, 63, 64, 65}) {
    Batch batch = Batch::of_lengths({border, 70});
    Inputs in(batch.tokens(), shape(3, 1, 16, 16)), other = in;
    for (int64_t i = 0; i < border * 48; ++i) other.q[i] = -other.q[i];
    for (int64_t i = 0; i < border * 16; ++i) other.k[i] *= 3, other.v[i] *= -2;
    for (int64_t i = 0; i < border * 48; ++i) in.dy[i] = 0;  // a loss over the second document only
    Step a, b;
    Call ra = run(a, in, batch), rb = run(b, other, batch);
    a.backward(ra.y, in.dy);
    EXPECT_TRUE(testing::same_bits(ra.y.value().row_range(border, border + 70), rb.y.value().row_range(border, border + 70)));
    for (const Var& x : {ra.q, ra.k, ra.v})
      for (int64_t i = 0; i < border * x.cols(); ++i) ASSERT_EQ(x.grad().f32()[i], 0.0f);
  }
}

// Padding on either side, full of NaN: the others' bits are as without it; padding gives 0 and gets no gradient.
TEST(attention, padding_is_no_key) {
  const int64_t n = 130, left = 2, right = 3, all = n + left + right;
  Inputs real(n, shape(4, 2, 16, 24)), padded(all, real.s);
  auto place = [&](Values& to, const Values& from) {
    int64_t width = from.size() / n;
    for (int64_t i = 0; i < to.size(); ++i) to[i] = NAN;
    for (int64_t i = 0; i < from.size(); ++i) to[left * width + i] = from[i];
  };
  place(padded.q, real.q), place(padded.k, real.k), place(padded.v, real.v), place(padded.dy, real.dy);
  Batch batch = Batch::one(all);
  batch.padding.assign(size_t(all), 0);
  for (int64_t i : {int64_t(0), int64_t(1), all - 3, all - 2, all - 1}) batch.padding[size_t(i)] = 1;
  Step a, b;
  Call want = run(a, real, Batch::one(n)), got = run(b, padded, batch);
  a.backward(want.y, real.dy), b.backward(got.y, padded.dy);
  EXPECT_TRUE(testing::same_bits(got.y.value().row_range(left, left + n), want.y.value()));
  EXPECT_TRUE(testing::same_bits(got.k.grad().row_range(left, left + n), want.k.grad()));
  EXPECT_TRUE(testing::same_bits(got.q.grad().row_range(left, left + n), want.q.grad()));
  for (int64_t i = 0; i < left * got.y.cols(); ++i) ASSERT_EQ(got.y.f32()[i], 0.0f);
  for (int64_t i = 0; i < left * got.k.cols(); ++i) ASSERT_EQ(got.k.grad().f32()[i], 0.0f);
  KvCache cache(1, real.s);
  Step c(false);
  run(c, padded, at_slots(batch, {0}), &cache);
  EXPECT_EQ(cache.tokens(0), n);
}

TEST(attention, one_thread_equals_many) {
  Batch batch = Batch::of_lengths({150, 1, 70});
  Inputs in(batch.tokens(), shape(4, 2, 16, 24));
  testing::expect_same_bits_at_any_thread_count([&](Step& step) {
    Tensor top = step.arena().lend(DType::f32, {4});
    Call r = run(step, in, batch, nullptr, &top);
    step.backward(r.y, in.dy);
    return std::vector<Tensor>{r.y.value(), r.q.grad(), r.k.grad(), r.v.grad(), top};
  });
}

TEST(attention, a_row_does_not_depend_on_later_rows) {
  const int64_t n = 200;
  Inputs in(n, shape(3, 1, 16, 24));
  Step step(false);
  Tensor whole = run(step, in, Batch::one(n)).y.value();
  for (int64_t t : {1, 2, 63, 64, 65, 127, 128, 129, 199}) {
    Tensor part = run(step, in.rows(0, t), Batch::one(t)).y.value();
    EXPECT_TRUE(testing::same_bits(part, whole.row_range(0, t))) << t;
  }
}

TEST(attention, huge_logits_stay_finite) {
  const int64_t n = 140;
  Inputs in(n, shape(2, 1, 16, 16));
  for (int64_t i = 0; i < in.q.size(); ++i) in.q[i] *= 1e15f;
  for (int64_t i = 0; i < in.k.size(); ++i) in.k[i] *= 1e15f;
  Step step;
  Tensor top = step.arena().lend(DType::f32, {2});
  Call r = run(step, in, Batch::one(n), nullptr, &top);
  step.backward(r.y, in.dy);
  for (const Tensor& t : {r.y.value(), r.v.grad(), top})
    for (int64_t i = 0; i < t.size(); ++i) ASSERT_TRUE(std::isfinite(t.f32()[i]));
  for (const Tensor& t : {r.q.grad(), r.k.grad()})
    for (int64_t i = 0; i < t.size(); ++i) ASSERT_TRUE(std::isfinite(t.f32()[i]));
}

TEST(attention, the_gradient_is_added_to_what_is_there) {
  const int64_t n = 20;
  Inputs in(n, shape(2, 1, 16, 16));
  Step once, twice;
  Call a = run(once, in, Batch::one(n)), b = run(twice, in, Batch::one(n));
  once.backward(a.y, in.dy);
  for (const Var& x : {b.q, b.k, b.v})
    for (int64_t i = 0; i < x.size(); ++i) x.grad().f32()[i] = 1;
  twice.backward(b.y, in.dy);
  for (auto [x, y] : {std::pair{a.q, b.q}, {a.k, b.k}, {a.v, b.v}})
    for (int64_t i = 0; i < x.size(); ++i) ASSERT_NEAR(x.grad().f32()[i] + 1, y.grad().f32()[i], 1e-5);
}

TEST(attention, other_shapes_are_refused_by_name) {
  Step step;
  Inputs in(4, shape(4, 2, 16, 8));
  EXPECT_THAT([&] { run(step, in, Batch::one(3)); }, testing::throws_error("[attention] q has 4 rows but the batch has 3 tokens"));
  Inputs odd = in;
  odd.s.kv_heads = 3;
  EXPECT_THAT([&] { run(step, odd, Batch::one(4)); }, testing::throws_error("[attention] 4 heads can't share 3 key heads evenly"));
  Var q = step.input(in.q, {4, 64}), k = step.input(in.k, {4, 32});
  EXPECT_THAT([&] { attention(q, k, k, in.s, Batch::one(4)); },
              testing::throws_error("[attention] v is (4 x 32) but 4 rows of 2 heads of 8 are wanted"));
  EXPECT_THAT([&] { run(step, Inputs(1, shape(1, 1, 257, 8)), Batch::one(1)); },
              testing::throws_error("[attention] heads of 257 key and 8 value channels; both must be 1 to 256"));
  KvCache cache(2, in.s), other(2, shape(4, 2, 16, 16));
  EXPECT_THAT([&] { run(step, in, at_slots(Batch::one(4), {0}), &cache); }, testing::throws_error("a cache can't be used with a tape"));
  Step infer(false);
  EXPECT_THAT([&] { run(infer, in, Batch::one(4), &cache); }, testing::throws_error("a cache needs a slot for each of 1 sequences"));
  EXPECT_THAT([&] { run(infer, in, at_slots(Batch::one(4), {2}), &cache); }, testing::throws_error("slot 2 of a cache with 2 slots"));
  EXPECT_THAT(
      [&] {
        run(infer, in, at_slots(Batch::of_lengths({2, 2}), {1, 1}), &cache);
      },
      testing::throws_error("two sequences of the batch have slot 1"));
  EXPECT_THAT([&] { run(infer, in, at_slots(Batch::one(4), {0}), &other); },
              testing::throws_error("the cache is a key-value cache of 2 heads of 16 / 16, not a key-value cache of 2 heads of 16 / 8"));
}

// The planner's device: the same memory, no data.
TEST(attention, the_null_device_needs_the_same_memory_to_the_byte) {
  Batch batch = at_slots(Batch::of_lengths({150, 3}), {0, 1});
  auto peak = [&](Device device, bool training) {
    Arena arena(device == Device::null ? 0 : size_t(1) << 26, device);
    Tape tape;
    Context c;
    c.device = device, c.arena = &arena, c.tape = training ? &tape : nullptr;
    double flops = 0;
    c.on_cost = [&](std::string_view, const Cost& cost) { flops += cost.flops; };
    AttentionShape s = shape(4, 2, 16, 24);
    KvCache cache(2, s, device);
    auto input = [&](int64_t cols) { return Var(c, arena.lend_zeroed(DType::f32, {153, cols})); };
    Var q = input(64), k = input(32), v = input(48);
    Var y = attention(q, k, v, s, batch, training ? nullptr : &cache);
    if (training) y.grad(), tape.run_backward();
    EXPECT_GT(flops, 0);
    return arena.peak();
  };
  for (bool training : {false, true}) EXPECT_EQ(peak(Device::null, training), peak(Device::cpu, training));
}

}  // namespace
}  // namespace k3
