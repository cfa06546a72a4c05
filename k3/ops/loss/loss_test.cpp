#include "k3/ops/loss/loss.h"

#include <gtest/gtest.h>

#include "k3/ops/loss/loss_ref.h"
#include "k3/ops/sample/sample.h"
#include "k3/ops/testing.h"

namespace k3 {
namespace {

using testing::Values;

Tensor tensor_of(std::vector<int32_t>& v) { return Tensor(v.data(), DType::i32, {int64_t(v.size())}); }

std::vector<int32_t> some_targets(int64_t n, int64_t vocabulary, bool some_ignored = true) {
  std::vector<int32_t> t(n);
  for (int64_t i = 0; i < n; ++i) t[i] = some_ignored && i % 3 == 1 ? kIgnored : int32_t(Rng{3, 3}.below(uint64_t(vocabulary), i));
  return t;
}

TEST(loss, cross_entropy_backward_equals_complex_step) {
  std::vector<int32_t> targets = {2, -100, 0, 6};
  testing::expect_complex_step(
      {{4 * 3}, {7 * 3}},
      [&]<class S>(const std::vector<const S*>& in, S* out) {
        std::vector<S> loss(4);
        ref::cross_entropy<S>(in[0], in[1], targets.data(), loss.data(), 4, 3, 7);
        *out = loss[0] + loss[1] + loss[2] + loss[3];
      },
      1, [&](auto in, const double* dy, auto grad) { ref::cross_entropy_backward(in[0], in[1], targets.data(), dy[0], grad[0], grad[1], 4, 3, 7); });
}

// A logit is a chain of d roundings, an exponential turns its error into a relative one, gradients are chains over V and N of such.
double tolerance(int64_t d, int64_t terms) { return 8 * 6e-8 * (std::sqrt(double(d) + 4) + std::sqrt(double(terms) + 4)); }

// From 65,536 tokens on a piece is 32 rows, so 40 rows are two; 4,096 and 4,099 are the border of a part of the sum.
constexpr std::array<int64_t, 3> kSizes[] = {{1, 1, 1}, {3, 5, 2}, {40, 33, 65}, {5, 8, 4096}, {5, 8, 4099}, {40, 2, 66000}, {4100, 3, 5}};

TEST(loss, cpu_equals_reference_at_every_level) {
  for (auto [n, d, vocabulary] : kSizes) {
    std::vector<int32_t> targets = some_targets(n, vocabulary);
    Values x(n * d, 1), head(vocabulary * d, 2);
    std::vector<double> rl(n), rdx(n * d), rdh(vocabulary * d);
    ref::cross_entropy(x.as_double().data(), head.as_double().data(), targets.data(), rl.data(), n, d, vocabulary);
    ref::cross_entropy_backward(x.as_double().data(), head.as_double().data(), targets.data(), 0.25, rdx.data(), rdh.data(), n, d, vocabulary);
    for (auto isa : testing::levels()) {
      testing::ForceIsa force(isa);
      testing::Step step;
      Param p = step.param("lm_head.weight", head, {vocabulary, d});
      Var vx = step.input(x, {n, d});
      Loss loss = cross_entropy(vx, p, tensor_of(targets), 0.25f);
      testing::expect_near(loss.per_token, rl, tolerance(d, 1), "per_token");
      testing::expect_near(vx.grad(), rdx, tolerance(d, vocabulary), "dx");
      testing::expect_near(p.grad, rdh, tolerance(d, n), "dhead");
      double sum = 0;
      int64_t count = 0;
      for (int64_t i = 0; i < n; ++i) sum += double(loss.per_token.f32()[i]), count += targets[i] != kIgnored;
      EXPECT_EQ(loss.sum, sum);
      EXPECT_EQ(loss.count, count);
    }
  }
}

// Two micro-batches weighed as parts of one step add up to the step, in both gradients.
TEST(loss, micro_batches_add_up) {
  int64_t n = 12, d = 9, vocabulary = 30;
  std::vector<int32_t> targets = some_targets(n, vocabulary, false), a(targets.begin(), targets.begin() + 5), b(targets.begin() + 5, targets.end());
  Values x(n * d, 1), head(vocabulary * d, 2);
  testing::Step whole, parts;
  Param p = whole.param("w", head, {vocabulary, d}), q = parts.param("w", head, {vocabulary, d});
  Var vx = whole.input(x, {n, d}), xa = parts.input(x.slice(0, 5 * d), {5, d}), xb = parts.input(x.slice(5 * d, 7 * d), {7, d});
  Loss one = cross_entropy(vx, p, tensor_of(targets), 1.0f / 12);
  Loss first = cross_entropy(xa, q, tensor_of(a), 1.0f / 12), second = cross_entropy(xb, q, tensor_of(b), 1.0f / 12);
  EXPECT_DOUBLE_EQ(one.sum, first.sum + second.sum);
  testing::expect_near(q.grad, testing::as_double(p.grad), tolerance(d, n), "dhead");
  EXPECT_TRUE(testing::same_bits(xa.grad(), vx.grad().row_range(0, 5)));
  EXPECT_TRUE(testing::same_bits(xb.grad(), vx.grad().row_range(5, 12)));
  Loss again = cross_entropy(xa, q, tensor_of(a), 1.0f / 12);  // a value with two losses gets both gradients
  EXPECT_EQ(again.sum, first.sum);
  for (int64_t i = 0; i < 5 * d; ++i) EXPECT_EQ(xa.grad().f32()[i], 2 * vx.grad().f32()[i]);
}

// dx flows on through the tape to what made x.
TEST(loss, the_gradient_reaches_what_made_x) {
  std::vector<int32_t> targets = {1, 2};
  testing::Step step;
  Param p = step.param("w", Values(12, 1), {4, 3});
  Var a = step.input(Values(6, 2), {2, 3}), x(step.context, DType::f32, {2, 3});
  std::memcpy(x.f32(), a.f32(), a.value().bytes());
  on_backward(x, [=] {
    for (int64_t i = 0; i < 6; ++i) a.grad().f32()[i] += x.grad().f32()[i];
  });
  cross_entropy(x, p, tensor_of(targets), 1);
  step.context.tape->run_backward();
  EXPECT_TRUE(testing::same_bits(a.grad(), x.grad()));
  EXPECT_NE(a.grad().f32()[0], 0);
}

TEST(loss, ignored_rows_may_hold_nan_and_change_no_bit) {
  int64_t n = 9, d = 7, vocabulary = 50;
  std::vector<int32_t> real = some_targets(n, vocabulary, false), padded;
  Values x(n * d, 1), head(vocabulary * d, 2);
  std::vector<float> rows;
  for (int64_t i = 0; i < n; ++i) {
    for (int k = 0; k < int(i % 3); ++k) padded.push_back(kIgnored), rows.insert(rows.end(), d, NAN);
    padded.push_back(real[i]), rows.insert(rows.end(), x.data() + i * d, x.data() + (i + 1) * d);
  }
  testing::Step alone, among;
  Param p = alone.param("w", head, {vocabulary, d}), q = among.param("w", head, {vocabulary, d});
  Var vx = alone.input(x, {n, d}), vr = among.input(Values(rows), {int64_t(padded.size()), d});
  Loss a = cross_entropy(vx, p, tensor_of(real), 0.1f), b = cross_entropy(vr, q, tensor_of(padded), 0.1f);
  EXPECT_EQ(a.sum, b.sum);
  EXPECT_EQ(a.count, b.count);
  EXPECT_TRUE(testing::same_bits(p.grad, q.grad));
  for (size_t i = 0, k = 0; i < padded.size(); ++i) {
    bool counted = padded[i] != kIgnored;
    EXPECT_EQ(b.per_token.f32()[i], counted ? a.per_token.f32()[k] : 0);
    for (int64_t j = 0; j < d; ++j) EXPECT_EQ(vr.grad().f32()[i * d + j], counted ? vx.grad().f32()[k * d + j] : 0);
    k += counted;
  }
}

TEST(loss, nothing_counted_gives_zero) {
  std::vector<int32_t> targets = {kIgnored, kIgnored}, none;
  testing::Step step;
  Param p = step.param("w", Values(12, 1), {4, 3});
  Loss loss = cross_entropy(step.input(Values(6, 2), {2, 3}), p, tensor_of(targets), 1),
       empty = cross_entropy(step.input(Values(0, 2), {0, 3}), p, tensor_of(none), 1);
  EXPECT_TRUE(loss.sum == 0 && loss.count == 0 && empty.sum == 0 && empty.count == 0);
  for (int i = 0; i < 12; ++i) EXPECT_EQ(p.grad.f32()[i], 0);
}

// Logits of thousands: the maximum is taken out before the exponential. A sure prediction costs exactly nothing, and a nearly sure one keeps
// its digits: the loss is a small number, not the difference of two large ones.
TEST(loss, large_logits_stay_finite_and_small_losses_exact) {
  for (auto isa : testing::levels()) {
    testing::ForceIsa force(isa);
    testing::Step step;
    std::vector<int32_t> targets = {0, 1, 0};
    Param p = step.param("w", Values(std::vector<float>{1, -1}), {2, 1});
    Var x = step.input(Values(std::vector<float>{5000, 5000, 6}), {3, 1});
    Loss loss = cross_entropy(x, p, tensor_of(targets), 1);
    EXPECT_EQ(loss.per_token.f32()[0], 0);
    EXPECT_EQ(loss.per_token.f32()[1], 10000);
    EXPECT_NEAR(loss.per_token.f32()[2] / std::log1p(std::exp(-12.0)), 1, 0.01);  // 1 + 6e-6 is held to 6e-8
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(std::isfinite(x.grad().f32()[i]));
  }
}

TEST(loss, a_bf16_head_gives_what_its_float32_copy_gives) {
  int64_t n = 10, d = 5000, vocabulary = 600;  // 384 rows of the head at a time
  std::vector<int32_t> targets = some_targets(n, vocabulary);
  std::vector<bf16> narrow(vocabulary * d);
  Values wide(vocabulary * d, 2, 0.02), x(n * d, 1);
  for (int64_t i = 0; i < vocabulary * d; ++i) narrow[i] = to_bf16(wide[i]), wide[i] = to_float(narrow[i]);
  testing::Step one, two, inference(false);
  Param p = one.param("w", wide, {vocabulary, d}), q{.name = "w", .value = Tensor(narrow.data(), DType::bf16, {vocabulary, d})};
  Var a = one.input(x, {n, d}), b = two.input(x, {n, d});
  Loss want = cross_entropy(a, p, tensor_of(targets), 1), got = cross_entropy(b, q, tensor_of(targets), 1);
  EXPECT_TRUE(testing::same_bits(got.per_token, want.per_token));
  EXPECT_TRUE(testing::same_bits(b.grad(), a.grad()));
  Loss evaluated = cross_entropy(inference.input(x, {n, d}), q, tensor_of(targets), 1);
  EXPECT_TRUE(testing::same_bits(evaluated.per_token, want.per_token));
}

TEST(loss, a_row_does_not_depend_on_its_neighbours) {
  int64_t n = 40, d = 6, vocabulary = 66'001;  // two pieces
  std::vector<int32_t> targets = some_targets(n, vocabulary, false);
  Values x(n * d, 1), head(vocabulary * d, 2);
  for (auto isa : testing::levels()) {
    testing::ForceIsa force(isa);
    testing::Step step;
    Param p = step.param("w", head, {vocabulary, d}, false);
    Var all = step.input(x, {n, d});
    Loss loss = cross_entropy(all, p, tensor_of(targets), 1);
    for (int64_t i : {0, 31, 32, 39}) {
      std::vector<int32_t> target = {targets[i]};
      Var one = step.input(x.slice(i * d, d), {1, d});
      Loss alone = cross_entropy(one, p, tensor_of(target), 1);
      EXPECT_TRUE(testing::same_bits(alone.per_token, loss.per_token.row_range(i, i + 1)));
      EXPECT_TRUE(testing::same_bits(one.grad(), all.grad().row_range(i, i + 1)));
    }
  }
}

// What training calls the loss of a token and what generation calls its log-probability are one number.
TEST(loss, equals_the_log_probability_that_generation_prints) {
  int64_t n = 60, d = 20, vocabulary = 5003;
  std::vector<int32_t> targets = some_targets(n, vocabulary, false);
  Values x(n * d, 1), head(vocabulary * d, 2);
  for (auto isa : testing::levels()) {
    testing::ForceIsa force(isa);
    testing::Step step;
    Param p = step.param("w", head, {vocabulary, d});
    Var v = step.input(x, {n, d});
    Loss loss = cross_entropy(v, p, tensor_of(targets), 1);
    Tensor rows = logits(v, p);
    for (int64_t i = 0; i < n; ++i) {
      std::vector<float> out(vocabulary);
      log_probabilities(rows.f32() + i * vocabulary, vocabulary, out.data());
      EXPECT_EQ(-out[targets[i]], loss.per_token.f32()[i]);
    }
  }
}

TEST(loss, one_thread_equals_many) {
  int64_t n = 50, d = 10, vocabulary = 66'001;
  std::vector<int32_t> targets = some_targets(n, vocabulary);
  Values x(n * d, 1), head(vocabulary * d, 2);
  testing::expect_same_bits_at_any_thread_count([&](testing::Step& step) {
    Param& p = step.keep(step.param("w", head, {vocabulary, d}));
    Var v = step.input(x, {n, d});
    Loss loss = cross_entropy(v, p, tensor_of(targets), 1);
    return std::vector<Tensor>{loss.per_token, v.grad(), p.grad};
  });
}

// 163,840 tokens: the null device tells what a step lends, to the byte; ten times the rows need no more scratch.
TEST(loss, memory_does_not_grow_with_the_rows) {
  auto scratch = [](int64_t n, DType type) {
    Arena arena(1, Device::null);
    Tape tape;
    Context c{.device = Device::null, .arena = &arena, .tape = &tape};
    Param p{.name = "lm_head.weight", .value = Tensor(nullptr, type, {163840, 7168}, Device::null)};
    Var x(c, DType::f32, {n, 7168});
    x.grad();
    size_t before = arena.mark();
    Loss loss = cross_entropy(x, p, Tensor(nullptr, DType::i32, {n}, Device::null), 1);
    EXPECT_EQ(loss.count, n);
    return arena.peak() - before - size_t(n) * 4;
  };
  EXPECT_EQ(scratch(1 << 10, DType::f32), scratch(1 << 14, DType::f32));
  EXPECT_LT(scratch(1 << 14, DType::f32), size_t(24) << 20);
  EXPECT_LT(scratch(1 << 14, DType::bf16), size_t(40) << 20);
}

TEST(loss, the_null_device_lends_the_same_and_touches_nothing) {
  auto run = [](Device device) {
    Arena arena(1 << 22, device), weights(1 << 16, device);
    Tape tape;
    Context c{.device = device, .arena = &arena, .tape = &tape};
    double flops = 0;
    c.on_cost = [&](std::string_view, const Cost& cost) { flops += cost.flops; };
    Param p{.name = "w", .value = weights.lend_zeroed(DType::f32, {70, 8}), .grad = weights.lend_zeroed(DType::f32, {70, 8})};
    Var x(c, weights.lend_zeroed(DType::f32, {10, 8}));
    cross_entropy(x, p, weights.lend_zeroed(DType::i32, {10}), 1);
    logits(x, p);
    return std::pair(arena.peak(), flops);
  };
  EXPECT_EQ(run(Device::null), run(Device::cpu));
  EXPECT_EQ(run(Device::null).second, 10 * 70 * 8 * (6.0 + 2.0));
}

TEST(loss, what_does_not_fit_is_refused) {
  testing::Step step;
  std::vector<int32_t> high = {0, 5, 9}, low = {0, -1, 2}, two = {0, 1};
  Param p = step.param("lm_head.weight", Values(20, 1), {5, 4});
  Var x = step.input(Values(12, 1), {3, 4}), y = step.input(Values(9, 1), {3, 3});
  EXPECT_THAT([&] { cross_entropy(x, p, tensor_of(high), 1); },
              testing::throws_error("[cross_entropy] the target at position 1 is 5, but lm_head.weight has rows 0 to 4 (-100 marks an ignored one)"));
  EXPECT_THAT([&] { cross_entropy(x, p, tensor_of(low), 1); }, testing::throws_error("[cross_entropy] the target at position 1 is -1"));
  EXPECT_THAT([&] { cross_entropy(x, p, tensor_of(two), 1); }, testing::throws_error("[cross_entropy] x has 3 rows but there are 2 targets"));
  EXPECT_THAT([&] { cross_entropy(y, p, tensor_of(high), 1); },
              testing::throws_error("[cross_entropy] x has 3 columns but lm_head.weight (5 x 4) takes 4"));
}

// Operands and logits rounded to bfloat16: 2^-9 of a logit, twice in its gradient.
TEST(loss, cuda_in_bfloat16_is_near_cpu) {
  for (auto [n, d, vocabulary] : {std::array<int64_t, 3>{1, 8, 16}, {70, 64, 504}, {300, 128, 2048}, {9, 16, 32776}, {5, 16, 163840}}) {
    if (testing::few_shapes() && n > 70) continue;
    SCOPED_TRACE(fmt::format("{} x {} x {}", n, d, vocabulary));
    std::vector<int32_t> targets = some_targets(n, vocabulary);
    Values x(n * d, 1), head(vocabulary * d, 2, 1 / std::sqrt(double(d)));
    testing::expect_cuda_equals_cpu(5 * 4 / 512.0, [&, n = n, d = d, vocabulary = vocabulary](testing::Step& step) {
      step.context.bf16_products = true;
      Param& p = step.keep(step.param("lm_head.weight", head, {vocabulary, d}));
      Var vx = step.input(x, {n, d});
      Loss loss = cross_entropy(vx, p, tensor_of(targets), 0.25f);
      return std::vector<Tensor>{loss.per_token, vx.grad(), p.grad};
    });
  }
}

TEST(loss, cuda_equals_cpu) {
  for (auto [n, d, vocabulary] : kSizes) {
    if (testing::few_shapes() && (n > 1000 || vocabulary > 5000)) continue;
    std::vector<int32_t> targets = some_targets(n, vocabulary);
    Values x(n * d, 1), head(vocabulary * d, 2);
    double sum[2];
    int run = 0;
    testing::expect_cuda_equals_cpu(2 * tolerance(d, std::max(n, vocabulary)), [&, n = n, d = d, vocabulary = vocabulary](testing::Step& step) {
      Param& p = step.keep(step.param("lm_head.weight", head, {vocabulary, d}));
      Var vx = step.input(x, {n, d});
      Loss loss = cross_entropy(vx, p, tensor_of(targets), 0.25f);
      sum[run > 0] = loss.sum, ++run;
      return std::vector<Tensor>{loss.per_token, vx.grad(), p.grad};
    });
    if (run > 1) { EXPECT_NEAR(sum[1], sum[0], 1e-5 * std::abs(sum[0])); }
  }
}

}  // namespace
}  // namespace k3
