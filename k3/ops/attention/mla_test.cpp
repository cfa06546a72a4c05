#include <gtest/gtest.h>

#include "k3/ops/attention/attention.h"
#include "k3/ops/attention/attention_ref.h"
#include "k3/ops/testing.h"

namespace k3 {
namespace {

using testing::Step;
using testing::Values;

// As in attention_test.cpp, with the product over the rank before it.
double tolerance(int64_t t, const MlaShape& s) { return 16 * 6e-8 * std::sqrt(double(t + s.nope + s.rope + s.rank)); }

MlaShape shape(int64_t heads, int64_t nope, int64_t rope, int64_t value, int64_t rank) {
  return {heads, nope, rope, value, rank, 1 / std::sqrt(float(nope + rope))};
}
ref::Mla ref_shape(const MlaShape& s) { return {s.heads, s.nope, s.rope, s.value, s.rank, double(s.scale)}; }

struct Inputs {
  MlaShape s;
  Values q, c, k_pe, kv_b, dy;
  Inputs(int64_t n, MlaShape m)
      : s(m),
        q(n * m.heads * (m.nope + m.rope), 1),
        c(n * m.rank, 2),
        k_pe(n * m.rope, 3),
        kv_b(m.heads * (m.nope + m.value) * m.rank, 4, 1 / std::sqrt(double(m.rank))),
        dy(n * m.heads * m.value, 5) {}
  int64_t tokens() const { return c.size() / s.rank; }
  Inputs rows(int64_t first, int64_t n) const {
    Inputs r = *this;
    auto cut = [&](const Values& x) { return x.slice(first * (x.size() / tokens()), n * (x.size() / tokens())); };
    r.q = cut(q), r.c = cut(c), r.k_pe = cut(k_pe), r.dy = cut(dy);
    return r;
  }
};

struct Call {
  Var q, c, k_pe, y;
  Param* kv_b;
};
Call run(Step& step, const Inputs& in, const Batch& batch, LatentCache* cache = nullptr, Tensor* max_logit = nullptr) {
  int64_t n = in.tokens();
  const MlaShape& s = in.s;
  Call r;
  r.q = step.input(in.q, {n, s.heads * (s.nope + s.rope)});
  r.c = step.input(in.c, {n, s.rank});
  r.k_pe = step.input(in.k_pe, {n, s.rope});
  r.kv_b = &step.keep(step.param("kv_b_proj.weight", in.kv_b, {s.heads * (s.nope + s.value), s.rank}));
  r.y = mla_attention(r.q, r.c, r.k_pe, *r.kv_b, s, batch, cache, max_logit);
  return r;
}
Batch at_slots(Batch b, std::vector<int32_t> slots) {
  b.slots = std::move(slots);
  return b;
}
std::vector<double> reference(const Inputs& in, std::vector<double>* max_logit = nullptr) {
  std::vector<double> y(in.dy.size());
  if (max_logit) max_logit->resize(in.s.heads);
  ref::mla_attention(in.q.as_double().data(), in.c.as_double().data(), in.k_pe.as_double().data(), in.kv_b.as_double().data(), y.data(), in.tokens(),
                     ref_shape(in.s), max_logit ? max_logit->data() : nullptr);
  return y;
}

TEST(mla, backward_equals_complex_step) {
  const int64_t n = 4;
  const ref::Mla m{3, 3, 2, 2, 5, 0.5};
  testing::expect_complex_step(
      {{n * 3 * 5}, {n * 5}, {n * 2}, {3 * 5 * 5}},
      [&]<class S>(const std::vector<const S*>& in, S* out) { ref::mla_attention<S>(in[0], in[1], in[2], in[3], out, n, m); }, n * 3 * 2,
      [&](auto in, const double* dy, auto grad) {
        ref::mla_attention_backward<double>(in[0], in[1], in[2], in[3], dy, grad[0], grad[1], grad[2], grad[3], n, m);
      });
}

TEST(mla, cpu_equals_reference_at_every_level) {
  const std::pair<int64_t, MlaShape> cases[] = {{1, shape(1, 16, 8, 16, 24)},
                                                {2, shape(3, 17, 5, 9, 20)},
                                                {65, shape(4, 32, 16, 24, 48)},
                                                {130, shape(3, 16, 16, 40, 33)},
                                                {300, shape(1, 24, 8, 32, 64)}};
  for (auto& [n, s] : cases) {
    Inputs in(n, s);
    std::vector<double> logit, y = reference(in, &logit), dq(in.q.size()), dc(in.c.size()), dk_pe(in.k_pe.size()), dkv_b(in.kv_b.size());
    ref::mla_attention_backward(in.q.as_double().data(), in.c.as_double().data(), in.k_pe.as_double().data(), in.kv_b.as_double().data(),
                                in.dy.as_double().data(), dq.data(), dc.data(), dk_pe.data(), dkv_b.data(), n, ref_shape(s));
    for (auto isa : testing::levels()) {
      testing::ForceIsa force(isa);
      Step step;
      Tensor top = step.arena().lend(DType::f32, {s.heads});
      Call r = run(step, in, Batch::one(n), nullptr, &top);
      step.backward(r.y, in.dy);
      std::string what = std::to_string(n) + " tokens: ";
      testing::expect_near(r.y.value(), y, tolerance(n, s), what + "y");
      testing::expect_near(r.c.grad(), dc, tolerance(n, s), what + "dc");
      testing::expect_near(r.kv_b->grad, dkv_b, tolerance(n, s), what + "dkv_b");
      testing::expect_near(top, logit, tolerance(1, s), what + "max_logit");
      if (n == 1) {  // one key: the weight is 1 whatever q and k are; what is left of dy . v - D is rounding
        for (int64_t i = 0; i < r.q.size(); ++i) EXPECT_NEAR(r.q.grad().f32()[i], 0, 1e-6);
        for (int64_t i = 0; i < r.k_pe.size(); ++i) EXPECT_NEAR(r.k_pe.grad().f32()[i], 0, 1e-6);
        continue;
      }
      testing::expect_near(r.q.grad(), dq, tolerance(n, s), what + "dq");
      testing::expect_near(r.k_pe.grad(), dk_pe, tolerance(n, s), what + "dk_pe");
    }
  }
}

// Prefill, then a piece of 3, then decode across tile borders, on every level; both ways of keeping the cache.
TEST(mla, any_cut_equals_whole_and_training) {
  const int64_t n = 270;
  for (auto isa : testing::levels()) {
    testing::ForceIsa force(isa);
    Inputs in(n, shape(3, 16, 8, 20, 40));
    Step training, step(false);
    Tensor whole = run(training, in, Batch::one(n)).y.value();
    EXPECT_TRUE(testing::same_bits(run(step, in, Batch::one(n)).y.value(), whole));
    for (bool keep_expanded : {false, true})
      for (std::vector<int64_t> cut : {std::vector<int64_t>{124, 3, 1, 1, 1, 140}, {1, 63, 65, 141}, {270}}) {
        LatentCache cache(2, in.s, keep_expanded);
        int64_t at = 0;
        for (int64_t size : cut) {
          Tensor part = run(step, in.rows(at, size), at_slots(Batch::one(size), {1}), &cache).y.value();
          EXPECT_TRUE(testing::same_bits(part, whole.row_range(at, at + size))) << "tokens " << at << " to " << at + size << " " << keep_expanded;
          at += size;
        }
      }
  }
}

TEST(mla, decode_equals_prefill_beside_other_sequences) {
  const int64_t n = 133;
  Inputs in(n, shape(4, 16, 16, 16, 32)), other(n, in.s);
  for (int64_t i = 0; i < other.c.size(); ++i) other.c[i] = 2 - other.c[i];
  Step step(false);
  Tensor whole = run(step, in, Batch::one(n)).y.value();
  for (bool keep_expanded : {false, true}) {
    LatentCache cache(3, in.s, keep_expanded);
    run(step, other.rows(0, 57), at_slots(Batch::one(57), {0}), &cache);
    run(step, in.rows(0, 126), at_slots(Batch::one(126), {2}), &cache);
    for (int64_t t = 126; t < n; ++t) {
      Inputs both = in.rows(t, 1), two = other.rows(t, 1);
      auto join = [](Values& a, const Values& b) {
        std::vector<float> all(a.data(), a.data() + a.size());
        all.insert(all.end(), b.data(), b.data() + b.size());
        a = Values(all);
      };
      join(both.q, two.q), join(both.c, two.c), join(both.k_pe, two.k_pe);
      Tensor y = run(step, both, at_slots(Batch::of_lengths({1, 1}), {2, 0}), &cache).y.value();
      EXPECT_TRUE(testing::same_bits(y.row_range(0, 1), whole.row_range(t, t + 1))) << t;
    }
  }
}

// The absorbed form rounds differently: the same tolerance against the reference as the expanded one.
TEST(mla, absorbed_equals_expanded) {
  for (auto& [n, s] : {std::pair{int64_t(150), shape(3, 16, 8, 20, 40)}, {1100, shape(2, 16, 8, 24, 32)}, {5, shape(1, 17, 3, 9, 20)}}) {
    Inputs in(n, s);
    std::vector<double> logit, want = reference(in, &logit);
    for (auto isa : testing::levels()) {
      testing::ForceIsa force(isa);
      Step step(false);
      step.context.deterministic = false;
      LatentCache cache(1, s);
      Tensor top = step.arena().lend(DType::f32, {s.heads});
      std::vector<double> seen(s.heads, -INFINITY);
      int64_t at = 0;
      for (int64_t size : {n - 4, int64_t(1), int64_t(2), int64_t(1)}) {
        Tensor y = run(step, in.rows(at, size), at_slots(Batch::one(size), {0}), &cache, &top).y.value();
        std::vector<double> part(want.begin() + at * s.heads * s.value, want.begin() + (at + size) * s.heads * s.value);
        testing::expect_near(y, part, tolerance(n, s), std::to_string(size) + " tokens after " + std::to_string(at));
        for (int64_t h = 0; h < s.heads; ++h) seen[h] = std::max(seen[h], double(top.f32()[h]));
        at += size;
      }
      for (int64_t h = 0; h < s.heads; ++h) EXPECT_NEAR(seen[h], logit[h], 1e-4);
    }
  }
}

TEST(mla, absorbed_rows_do_not_depend_on_the_batch_or_the_threads) {
  const MlaShape s = shape(3, 16, 8, 20, 40);
  Inputs a(700, s), b(90, s);
  auto decode = [&](Step& step, bool together) {
    step.context.deterministic = false;
    LatentCache cache(2, s);
    run(step, a.rows(0, 699), at_slots(Batch::one(699), {0}), &cache);
    run(step, b.rows(0, 80), at_slots(Batch::one(80), {1}), &cache);
    if (!together) return run(step, a.rows(699, 1), at_slots(Batch::one(1), {0}), &cache).y.value();
    Inputs both = a.rows(699, 1), more = b.rows(80, 3);
    auto join = [](Values& x, const Values& y) {
      std::vector<float> all(x.data(), x.data() + x.size());
      all.insert(all.end(), y.data(), y.data() + y.size());
      x = Values(all);
    };
    join(both.q, more.q), join(both.c, more.c), join(both.k_pe, more.k_pe);
    return run(step, both, at_slots(Batch::of_lengths({1, 3}), {0, 1}), &cache).y.value();
  };
  Step one(false), two(false);
  EXPECT_TRUE(testing::same_bits(decode(one, false), decode(two, true).row_range(0, 1)));
  testing::expect_same_bits_at_any_thread_count([&](Step& step) {
    step.context.tape = nullptr;
    return std::vector<Tensor>{decode(step, true)};
  });
}

TEST(mla, a_bfloat16_weight_is_read_as_its_float32) {
  const MlaShape s = shape(2, 16, 8, 12, 33);
  Inputs in(140, s);
  std::vector<bf16> half(in.kv_b.size());
  for (int64_t i = 0; i < in.kv_b.size(); ++i) half[i] = to_bf16(in.kv_b[i]), in.kv_b[i] = to_float(half[i]);
  for (bool deterministic : {true, false}) {
    Step step(false);
    step.context.deterministic = deterministic;
    LatentCache cache(2, s);
    Param p;
    p.name = "kv_b_proj.weight";
    p.value = Tensor(half.data(), DType::bf16, {s.heads * (s.nope + s.value), s.rank});
    int64_t at = 0;
    for (int64_t n : {138, 2}) {
      Inputs part = in.rows(at, n);
      Call f = run(step, part, at_slots(Batch::one(n), {0}), &cache);
      Var y = mla_attention(f.q, f.c, f.k_pe, p, s, at_slots(Batch::one(n), {1}), &cache);
      EXPECT_TRUE(testing::same_bits(y.value(), f.y.value())) << n << " tokens";
      at += n;
    }
  }
}

TEST(mla, packed_equals_separate) {
  Batch batch = Batch::of_lengths({1, 3, 63, 64, 65});
  Inputs in(batch.tokens(), shape(3, 16, 8, 20, 40));
  Step step;
  Call all = run(step, in, batch);
  step.backward(all.y, in.dy);
  for (int64_t s = 0; s < batch.sequences(); ++s) {
    int64_t a = batch.begin(s), n = batch.length(s);
    Step alone;
    Inputs mine = in.rows(a, n);
    Call r = run(alone, mine, Batch::one(n));
    alone.backward(r.y, mine.dy);
    EXPECT_TRUE(testing::same_bits(r.y.value(), all.y.value().row_range(a, a + n))) << n;
    EXPECT_TRUE(testing::same_bits(r.q.grad(), all.q.grad().row_range(a, a + n))) << n;
    EXPECT_TRUE(testing::same_bits(r.c.grad(), all.c.grad().row_range(a, a + n))) << n;
    EXPECT_TRUE(testing::same_bits(r.k_pe.grad(), all.k_pe.grad().row_range(a, a + n))) << n;
  }
}

TEST(mla, padding_stays_out_of_the_cache) {
  const MlaShape s = shape(2, 16, 8, 12, 24);
  Inputs in(20, s), padded(22, s);
  auto place = [&](Values& to, const Values& from) {
    int64_t width = from.size() / 20;
    for (int64_t i = 0; i < 2 * width; ++i) to[i] = NAN;
    for (int64_t i = 0; i < from.size(); ++i) to[2 * width + i] = from[i];
  };
  place(padded.q, in.q), place(padded.c, in.c), place(padded.k_pe, in.k_pe);
  Batch batch = Batch::one(22);
  batch.padding.assign(22, 0);
  batch.padding[0] = batch.padding[1] = 1;
  for (int mode = 0; mode < 3; ++mode) {
    Step step(false);
    step.context.deterministic = mode != 2;
    LatentCache cache(2, s, mode == 1);
    Tensor want = run(step, in, at_slots(Batch::one(20), {0}), &cache).y.value();
    Tensor got = run(step, padded, at_slots(batch, {1}), &cache).y.value();
    EXPECT_EQ(cache.tokens(1), 20);
    EXPECT_TRUE(testing::same_bits(got.row_range(2, 22), want)) << mode;
    for (int64_t i = 0; i < 2 * got.cols(); ++i) EXPECT_EQ(got.f32()[i], 0.0f);
  }
}

TEST(mla, one_thread_equals_many) {
  Batch batch = Batch::of_lengths({150, 1, 70});
  Inputs in(batch.tokens(), shape(3, 16, 8, 20, 40));
  testing::expect_same_bits_at_any_thread_count([&](Step& step) {
    Call r = run(step, in, batch);
    step.backward(r.y, in.dy);
    return std::vector<Tensor>{r.y.value(), r.q.grad(), r.c.grad(), r.k_pe.grad(), r.kv_b->grad};
  });
}

// Expanding a long context anew takes pieces of fixed size.
TEST(mla, scratch_does_not_grow_with_the_context) {
  const MlaShape s = shape(4, 16, 8, 16, 32);
  auto peak = [&](int64_t context) {
    Arena arena(0, Device::null);
    Context c;
    c.device = Device::null, c.arena = &arena;
    LatentCache cache(1, s, false, Device::null);
    auto call = [&](int64_t n) {
      Param p;
      p.name = "kv_b_proj.weight", p.value = Tensor(nullptr, DType::f32, {4 * 32, 32}, Device::null);
      Var q(c, DType::f32, {n, 4 * 24}), latent(c, DType::f32, {n, 32}), k_pe(c, DType::f32, {n, 8});
      mla_attention(q, latent, k_pe, p, s, at_slots(Batch::one(n), {0}), &cache);
    };
    for (int64_t at = 0; at < context; at += 256) arena.rewind(0), call(256);
    return arena.peak();
  };
  EXPECT_EQ(peak(2048), peak(8192));
}

TEST(mla, other_shapes_are_refused_by_name) {
  const MlaShape s = shape(2, 16, 8, 12, 24);
  Step step(false);
  Inputs in(3, s);
  Call r = run(step, in, Batch::one(3));
  EXPECT_THAT([&] { mla_attention(r.q, r.c, r.c, *r.kv_b, s, Batch::one(3)); },
              testing::throws_error("[mla_attention] k_pe is (3 x 24) but must be (3 x 8): 2 heads of 16+8 / 12, rank 24"));
  MlaShape other = s;
  other.rank = 32;
  LatentCache wrong(1, other);
  EXPECT_THAT([&] { run(step, in, at_slots(Batch::one(3), {0}), &wrong); },
              testing::throws_error("[mla_attention] the cache is a latent cache of rank 32+8, not a latent cache of rank 24+8"));
}

}  // namespace
}  // namespace k3
