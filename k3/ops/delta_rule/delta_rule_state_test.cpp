// What must not change a single bit: how the tokens are cut into calls, the batch around them, threads, padding, other documents, later
// tokens; and what the state promises: going on, forking, taking back, saving.
#include <gtest/gtest.h>

#include "k3/ops/delta_rule/delta_rule_kernels.h"
#include "k3/ops/delta_rule/delta_rule_testing.h"

namespace k3 {
namespace {

using testing::Decay;
using testing::DeltaGate;
using testing::DeltaInputs;
using testing::same_bits;
using testing::Values;

Batch in_slots(std::vector<int64_t> lengths, std::vector<int32_t> slots) {
  Batch b = Batch::of_lengths(lengths);
  b.slots = std::move(slots);
  return b;
}
bool rows_equal(const Tensor& a, int64_t at_a, const Tensor& b, int64_t at_b, int64_t n) {
  return same_bits(a.row_range(at_a, at_a + n), b.row_range(at_b, at_b + n));
}
std::vector<float> dense(const DeltaState& state, int64_t slot, const DeltaInputs& in) {
  std::vector<float> s(size_t(in.H * in.K * in.V));
  state.dense(slot, s.data());
  return s;
}
// Feeds tokens from..to to the slot in one call.
Tensor feed(testing::Step& step, DeltaState& state, int32_t slot, const DeltaInputs& in, int64_t from, int64_t to) {
  return testing::run_delta(step, in.part(from, to), in_slots({to - from}, {slot}), &state).o.value();
}

TEST(delta_rule_state, training_forward_equals_prefill_equals_decode) {
  for (auto isa : testing::levels())
    for (auto gate : {DeltaGate::none, DeltaGate::head, DeltaGate::channel}) {
      testing::ForceIsa force(isa);
      const int64_t T = 83;
      DeltaInputs in(T, 3, 48, 40, gate);
      testing::Step training, inference(false);
      Tensor trained = testing::run_delta(training, in, Batch::one(T)).o.value();
      DeltaState whole(in.shape(), 1), stepped(in.shape(), 1);
      EXPECT_TRUE(same_bits(trained, feed(inference, whole, 0, in, 0, T)));
      for (int64_t t = 0; t < T; ++t) EXPECT_TRUE(rows_equal(trained, t, feed(inference, stepped, 0, in, t, t + 1), 0, 1)) << "token " << t;
      EXPECT_EQ(dense(whole, 0, in), dense(stepped, 0, in));
    }
}

TEST(delta_rule_state, any_cut_equals_whole) {
  const int64_t T = 70;
  for (auto isa : testing::levels()) {
    testing::ForceIsa force(isa);
    DeltaInputs in(T, 2, 32, 32);
    testing::Step step(false);
    DeltaState state(in.shape(), 2);
    Tensor whole = feed(step, state, 0, in, 0, T);
    for (int64_t cut = 0; cut <= T; ++cut) {
      Scratch scratch(step.arena());
      state.reset(1);
      Tensor a = feed(step, state, 1, in, 0, cut), b = feed(step, state, 1, in, cut, T);
      EXPECT_TRUE(rows_equal(a, 0, whole, 0, cut) && rows_equal(b, 0, whole, cut, T - cut)) << "cut at " << cut;
      EXPECT_EQ(dense(state, 0, in), dense(state, 1, in)) << "cut at " << cut;
    }
    for (int64_t piece : {1, 2, 3, 7, 16, 31, 64}) {
      state.reset(1);
      for (int64_t at = 0; at < T; at += piece) {
        int64_t n = std::min(piece, T - at);
        EXPECT_TRUE(rows_equal(feed(step, state, 1, in, at, at + n), 0, whole, at, n)) << "pieces of " << piece << " at " << at;
      }
    }
  }
}

TEST(delta_rule_state, a_sequence_does_not_depend_on_its_batch) {
  std::vector<int64_t> lengths{100, 37, 0, 64, 5, 1};
  Batch batch = Batch::of_lengths(lengths);
  for (auto isa : testing::levels()) {
    testing::ForceIsa force(isa);
    DeltaInputs in(batch.tokens(), 2, 16, 32);
    testing::Step step(false), packed;
    Tensor all = testing::run_delta(packed, in, batch).o.value();
    DeltaState state(in.shape(), 9);
    Tensor slotted = testing::run_delta(step, in, in_slots(lengths, {8, 1, 3, 0, 5, 7}), &state).o.value();
    EXPECT_TRUE(same_bits(all, slotted));
    for (int64_t s = 0; s < batch.sequences(); ++s) {
      Tensor alone = testing::run_delta(step, in.part(batch.begin(s), batch.cu_seqlens[s + 1]), Batch::one(lengths[s])).o.value();
      EXPECT_TRUE(rows_equal(alone, 0, all, batch.begin(s), lengths[s])) << "sequence " << s;
    }
  }
}

TEST(delta_rule_state, one_thread_equals_many) {
  DeltaInputs in(150, 3, 32, 48);
  testing::expect_same_bits_at_any_thread_count([&](testing::Step& step) {
    auto x = testing::run_delta(step, in, Batch::of_lengths({90, 1, 59}));
    step.backward(x.o, in.d_o);
    return std::vector<Tensor>{x.o.value(), x.q.grad(), x.k.grad(), x.v.grad(), x.g.grad(), x.beta.grad()};
  });
}

// Rows before a change keep their bits; a loss on them has no gradient at all in what comes later.
TEST(delta_rule_state, a_later_token_changes_nothing_before_it) {
  for (auto isa : testing::levels())
    for (auto [T, P] : {std::pair<int64_t, int64_t>{22, 21}, {130, 64}, {130, 127}}) {
      testing::ForceIsa force(isa);
      DeltaInputs in(T, 1, 32, 32);
      testing::Step step;
      auto before = testing::run_delta(step, in, Batch::one(T));
      for (int64_t i = P * 32; i < T * 32; ++i) in.d_o[i] = 0;
      step.backward(before.o, in.d_o);
      for (const Var& x : {before.q, before.k, before.v, before.g, before.beta})
        for (int64_t i = P * x.cols(); i < x.size(); ++i) ASSERT_EQ(x.grad().f32()[i], 0) << "T " << T << " P " << P << " element " << i;
      for (int what = 0; what < 5; ++what) {
        DeltaInputs changed = in;
        Values* x[] = {&changed.q, &changed.k, &changed.v, &changed.g, &changed.beta};
        int64_t width = what == 4 ? 1 : 32;
        for (int64_t i = 0; i < width; ++i) (*x[what])[P * width + i] = what == 3 ? -4.9f * float(i % 2) : what == 4 ? 0.01f : 100.0f;
        Tensor after = testing::run_delta(step, changed, Batch::one(T)).o.value();
        EXPECT_TRUE(rows_equal(after, 0, before.o.value(), 0, P)) << "T " << T << " P " << P << " input " << what;
        EXPECT_FALSE(rows_equal(after, P, before.o.value(), P, 1)) << "the change was none";
      }
    }
}

TEST(delta_rule_state, packed_documents_do_not_see_each_other) {
  const int64_t T = 140;
  for (int64_t border : {1, 3, 15, 16, 63, 64, 65}) {
    DeltaInputs in(T, 2, 16, 16), other(T, 2, 16, 16, DeltaGate::channel, Decay::mixed, 50);
    Batch batch = Batch::of_lengths({border, T - border});
    // another first document, the same second one; a loss on the second only
    DeltaInputs changed = other;
    for (auto [to, from] : {std::pair{&changed.q, &in.q}, {&changed.k, &in.k}, {&changed.v, &in.v}, {&changed.g, &in.g}, {&changed.beta, &in.beta}})
      for (int64_t i = border * (to->size() / T); i < to->size(); ++i) (*to)[i] = (*from)[i];
    for (int64_t i = 0; i < border * 32; ++i) in.d_o[i] = 0;
    testing::Step step, again, alone;
    auto a = testing::run_delta(step, in, batch), b = testing::run_delta(again, changed, batch);
    auto c = testing::run_delta(alone, in.part(border, T), Batch::one(T - border));
    step.backward(a.o, in.d_o), again.backward(b.o, in.d_o), alone.backward(c.o, in.d_o.slice(border * 32, (T - border) * 32));
    EXPECT_TRUE(rows_equal(a.o.value(), border, b.o.value(), border, T - border)) << border;
    for (auto [x, y, z] : {std::tuple{a.q, b.q, c.q}, {a.k, b.k, c.k}, {a.v, b.v, c.v}, {a.g, b.g, c.g}, {a.beta, b.beta, c.beta}}) {
      for (int64_t i = 0; i < border * x.cols(); ++i) ASSERT_EQ(x.grad().f32()[i], 0) << border;
      EXPECT_TRUE(rows_equal(x.grad(), border, y.grad(), border, T - border)) << border;
      EXPECT_TRUE(rows_equal(x.grad(), border, z.grad(), 0, T - border)) << border;
    }
  }
}

TEST(delta_rule_state, a_loss_on_one_sequence_stays_in_it) {
  std::vector<int64_t> lengths{100, 37, 64, 5};
  Batch batch = Batch::of_lengths(lengths);
  DeltaInputs in(batch.tokens(), 2, 16, 16);
  for (int64_t s = 0; s < 4; ++s) {
    DeltaInputs one = in;
    int64_t first = batch.begin(s), last = batch.cu_seqlens[s + 1];
    for (int64_t i = 0; i < in.d_o.size(); ++i)
      if (i / 32 < first || i / 32 >= last) one.d_o[i] = 0;
    testing::Step step, lone;
    auto x = testing::run_delta(step, one, batch), y = testing::run_delta(lone, in.part(first, last), Batch::one(lengths[s]));
    step.backward(x.o, one.d_o), lone.backward(y.o, in.part(first, last).d_o);
    for (auto [a, b] : {std::pair{x.q, y.q}, {x.k, y.k}, {x.v, y.v}, {x.g, y.g}, {x.beta, y.beta}}) {
      EXPECT_TRUE(rows_equal(a.grad(), first, b.grad(), 0, lengths[s])) << "sequence " << s;
      for (int64_t i = 0; i < a.size(); ++i)
        if (i / a.cols() < first || i / a.cols() >= last) { ASSERT_EQ(a.grad().f32()[i], 0) << "sequence " << s; }
    }
  }
}

// Padding of NaN at either side and in the middle: output zero, no gradient, and the sequence is as if alone.
TEST(delta_rule_state, padding_touches_nothing) {
  const int64_t T = 40, H = 2;
  DeltaInputs in(T, H, 16, 32), padded(2 * T, H, 16, 32);
  Batch batch = in_slots({T, T}, {1, 0});
  batch.padding.assign(2 * T, 0);
  std::vector<int64_t> real;
  for (int64_t i = 0; i < 2 * T; ++i) {
    batch.padding[i] = i < 7 || (i >= 20 && i < 23) || i >= T + 27;
    if (!batch.padding[i]) real.push_back(i);
  }
  int64_t in_first = std::count_if(real.begin(), real.end(), [](int64_t i) { return i < T; });
  std::pair<Values*, Values*> tensors[] = {{&padded.q, &in.q},       {&padded.k, &in.k},     {&padded.v, &in.v},
                                           {&padded.beta, &in.beta}, {&padded.d_o, &in.d_o}, {&padded.g, &in.g}};
  DeltaInputs packed = in.part(0, 0);  // the real rows alone
  std::pair<Values*, Values*> targets[] = {{&packed.q, &padded.q},       {&packed.k, &padded.k},     {&packed.v, &padded.v},
                                           {&packed.beta, &padded.beta}, {&packed.d_o, &padded.d_o}, {&packed.g, &padded.g}};
  for (int i = 0; i < 6; ++i) {
    Values& x = *tensors[i].first;
    int64_t width = x.size() / (2 * T);
    std::vector<float> rows;
    for (int64_t r : real) rows.insert(rows.end(), x.data() + r * width, x.data() + (r + 1) * width);
    *targets[i].first = Values(rows);
    for (int64_t j = 0; j < x.size(); ++j)
      if (batch.padding[j / width]) x[j] = NAN;
  }
  packed.tokens = int64_t(real.size());
  Batch lone = in_slots({in_first, packed.tokens - in_first}, {1, 0});
  testing::Step step, alone, inference(false);
  auto x = testing::run_delta(step, padded, batch), y = testing::run_delta(alone, packed, lone);
  step.backward(x.o, padded.d_o), alone.backward(y.o, packed.d_o);
  DeltaState a(in.shape(), 2), b(in.shape(), 2);
  Tensor with_state = testing::run_delta(inference, padded, batch, &a).o.value();
  testing::run_delta(inference, packed, lone, &b);
  EXPECT_TRUE(same_bits(with_state, x.o.value()));
  for (int64_t slot : {0, 1}) EXPECT_EQ(dense(a, slot, in), dense(b, slot, in));
  EXPECT_EQ(a.tokens(1), in_first);
  for (auto [p, q] : {std::pair{x.o.value(), y.o.value()},
                      {x.q.grad(), y.q.grad()},
                      {x.k.grad(), y.k.grad()},
                      {x.v.grad(), y.v.grad()},
                      {x.g.grad(), y.g.grad()},
                      {x.beta.grad(), y.beta.grad()}}) {
    for (size_t i = 0; i < real.size(); ++i) EXPECT_TRUE(rows_equal(p, real[i], q, int64_t(i), 1));
    for (int64_t r = 0; r < 2 * T; ++r)
      for (int64_t i = 0; i < p.cols() && batch.padding[r]; ++i) EXPECT_EQ(p.f32()[r * p.cols() + i], 0);
  }
}

TEST(delta_rule_state, a_dropped_guess_was_never_read) {
  const int64_t T = 80;
  DeltaInputs in(T, 2, 32, 32), guess(T, 2, 32, 32, DeltaGate::channel, Decay::mixed, 30);
  testing::Step step(false);
  DeltaState state(in.shape(), 3);
  for (int64_t read : {0, 1, 5, 8, 14, 15, 16, 17, 24, 31, 32, 33, 48})
    for (int64_t drafted : {1, 2, 3, 8}) {
      Scratch scratch(step.arena());
      state.reset(0), state.reset(1);
      feed(step, state, 0, in, 0, read), feed(step, state, 1, in, 0, read);
      feed(step, state, 1, guess, 0, drafted);
      bool crossed = read > 0 && (read - 1) / 16 != (read + drafted - 1) / 16;  // the guess's first tokens went to the chunk before
      bool fits = !crossed || read % 16 == 0;
      ASSERT_EQ(state.drop(1, drafted), fits) << read << " + " << drafted;
      if (!fits) {
        EXPECT_EQ(state.tokens(1), read + drafted);
        continue;
      }
      EXPECT_EQ(dense(state, 0, in), dense(state, 1, in)) << read << " + " << drafted;
      Tensor a = feed(step, state, 0, in, read, read + 30), b = feed(step, state, 1, in, read, read + 30);
      EXPECT_TRUE(same_bits(a, b)) << read << " + " << drafted;
    }
}

TEST(delta_rule_state, a_fork_and_a_saved_state_go_on_as_the_original) {
  DeltaInputs in(170, 2, 16, 48);
  testing::Step step(false);
  for (int64_t n : {0, 1, 3, 4, 16, 63, 64, 65, 130}) {
    DeltaState state(in.shape(), 3), elsewhere(in.shape(), 2);
    feed(step, state, 2, in, 0, 40);  // what was there before must not show
    state.reset(2);
    feed(step, state, 0, in, 0, n);
    state.copy(2, 0);
    Blob blob;
    state.save(0, blob);
    feed(step, elsewhere, 1, in, 100, 120);
    elsewhere.load(1, blob);
    EXPECT_TRUE(blob.at_end());
    EXPECT_EQ(elsewhere.tokens(1), n);
    Tensor a = feed(step, state, 0, in, n, n + 40), b = feed(step, state, 2, in, n, n + 40), c = feed(step, elsewhere, 1, in, n, n + 40);
    EXPECT_TRUE(same_bits(a, b) && same_bits(a, c)) << n;
  }
}

TEST(delta_rule_state, another_or_damaged_state_is_refused) {
  DeltaInputs in(20, 2, 16, 32);
  testing::Step step(false);
  DeltaState state(in.shape(), 1), swapped({2, 32, 16, 1}, 1);
  feed(step, state, 0, in, 0, 20);
  Blob blob;
  state.save(0, blob);
  Blob again = blob, cut = blob, turned = blob;
  EXPECT_THAT([&] { swapped.load(0, again); },
              testing::throws_error("the saved state is of 2 heads of 16 x 32 (keys x values), this model's of 2 of 32 x 16"));
  cut.bytes.resize(cut.bytes.size() - 4);
  EXPECT_THAT([&] { state.load(0, cut); }, testing::throws_error("[state] the bytes end before part delta_rule.state"));
  turned.bytes[30] ^= 1;
  EXPECT_THAT([&] { state.load(0, turned); }, testing::throws_error("the saved state has another layout"));
  EXPECT_EQ(state.tokens(0), 20);
}

TEST(delta_rule_state, wrong_calls_are_refused) {
  DeltaInputs in(4, 2, 16, 32);
  testing::Step step, inference(false);
  auto x = testing::run_delta(step, in, Batch::one(4));
  EXPECT_THAT([&] { delta_rule(x.q, x.v, x.v, x.g, x.beta, in.shape(), Batch::one(4), nullptr); },
              testing::throws_error("[delta_rule] k is 4 x 64 but 4 tokens of 2 heads of 16 x 32 (keys x values) take 4 x 32"));
  EXPECT_THAT([&] { delta_rule(x.q, x.k, x.v, x.v, x.beta, in.shape(), Batch::one(4), nullptr); },
              testing::throws_error("[delta_rule] g is 4 x 64 but 4 tokens of 2 heads of 16 x 32 (keys x values) take 4 x 32"));
  EXPECT_THAT([&] { delta_rule(x.q, x.k, x.v, x.g, x.beta, in.shape(), Batch::one(5), nullptr); }, testing::throws_error("q is 4 x 32 but 5 tokens"));
  DeltaState state(in.shape(), 2), other({2, 32, 16, 1}, 2);
  EXPECT_THAT([&] { testing::run_delta(step, in, in_slots({4}, {0}), &state); }, testing::throws_error("[delta_rule] a state under a tape"));
  EXPECT_THAT([&] { testing::run_delta(inference, in, in_slots({4}, {0}), &other); },
              testing::throws_error("[delta_rule] the state is of 2 heads of 32 x 16 (keys x values), the call of 2 of 16 x 32"));
  EXPECT_THAT([&] { testing::run_delta(inference, in, in_slots({4}, {2}), &state); }, testing::throws_error("[delta_rule] slot 2 of 2"));
  EXPECT_THAT(
      [&] {
        testing::run_delta(inference, in, in_slots({2, 2}, {1, 1}), &state);
      },
      testing::throws_error("[delta_rule] slot 1 is named twice"));
  EXPECT_THAT([&] { testing::run_delta(inference, in, Batch::one(4), &state); }, testing::throws_error("[delta_rule] 0 slots named for 1 sequences"));
}

TEST(delta_rule_state, the_null_device_needs_the_same_memory_and_counts) {
  DeltaInputs in(100, 2, 32, 48);
  testing::Step step;
  auto x = testing::run_delta(step, in, Batch::one(100));
  step.backward(x.o, in.d_o);
  Arena arena(0, Device::null);
  Tape tape;
  Context c;
  c.device = Device::null, c.arena = &arena, c.tape = &tape;
  double flops = 0;
  c.on_cost = [&](std::string_view, const Cost& cost) { flops += cost.flops; };
  auto var = [&](int64_t cols) { return Var(c, DType::f32, {100, cols}); };
  Var q = var(64), k = var(64), v = var(96), beta = var(2), g = var(64);
  Var o = delta_rule(q, k, v, g, beta, in.shape(), Batch::one(100), nullptr);
  o.grad();
  tape.run_backward();
  EXPECT_EQ(arena.peak(), step.arena().peak());
  EXPECT_DOUBLE_EQ(flops, 200 * (19.5 * 32 * 48 + 15 * 16 * 80));
  c.tape = nullptr;
  DeltaState state(in.shape(), 1, Device::null);
  delta_rule(q, k, v, g, beta, in.shape(), in_slots({100}, {0}), &state);
  EXPECT_EQ(state.tokens(0), 100);
  EXPECT_EQ(state.bytes_per_slot(), 2 * 4 * (32 * 64 + 16 * (32 + 32 + 64)));
}

}  // namespace
}  // namespace k3
