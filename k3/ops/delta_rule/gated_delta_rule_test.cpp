// The gated delta rule of a layer: the operators in turn, and the kernels over chunks that a GPU has for heads of 128 in bfloat16.
#include <gtest/gtest.h>

#include "k3/ops/delta_rule/delta_rule_testing.h"
#include "k3/ops/activation/activation.h"
#include "k3/ops/decay/decay.h"
#include "k3/ops/delta_rule/gated_delta_rule.h"
#include "k3/ops/norm/norm.h"

namespace k3 {
namespace {

using testing::bytes_of;
using testing::Step;
using testing::Values;

constexpr int64_t kHeads = 3, kDim = 128;
// A rounding to bfloat16 is 2^-9 at most, evenly spread: 2^-9 / sqrt 3. On the way to a result lie about sixteen (inputs, decayed rows, products with
// the memory, the inverse, what is written), to a gradient twice as many, all independent; half as much again is left for what is not.
constexpr double kForward = 1.5 * 4 * 0x1p-9 / 1.732, kBackward = 1.42 * kForward;

// |got - want| <= limit * scale, in L2; scale: |want| where nothing else is said
void expect_close(const Tensor& got, const double* want, double limit, const std::string& what, double scale = 0) {
  const HostCopy here(got);
  double error = 0, size = 0;
  for (int64_t i = 0; i < got.size(); ++i) error += std::pow(here.f32()[i] - want[i], 2), size += want[i] * want[i];
  EXPECT_LE(std::sqrt(error), limit * std::max(scale, std::sqrt(size))) << what << ": " << std::sqrt(error / size);
}

enum class Gates { ordinary, slow, shut, mixed_channels, mixed_tokens, aligned_keys };

struct Layer {
  int64_t tokens;
  std::optional<float> lower_bound;
  Values q, k, v, z, b, d_o, A_log, dt_bias;
  Layer(int64_t tokens, bool bounded, Gates gates = Gates::ordinary)
      : tokens(tokens),
        q(tokens * kHeads * kDim, 1),
        k(tokens * kHeads * kDim, 2),
        v(tokens * kHeads * kDim, 3),
        z(tokens * kHeads * kDim, 4),
        b(tokens * kHeads, 5),
        d_o(tokens * kHeads * kDim, 6),
        A_log(kHeads + 2, 7, 0.1),
        dt_bias(kHeads * kDim, 8, 0.1) {
    if (bounded) lower_bound = -5.0f;
    for (int64_t i = 0; i < z.size(); ++i) {
      const int64_t t = i / (kHeads * kDim);
      if (gates == Gates::slow) z[i] -= 4;
      if (gates == Gates::shut) z[i] = 25;
      if (gates == Gates::mixed_channels) z[i] = i % 2 ? 25.0f : -8.0f;
      if (gates == Gates::mixed_tokens) z[i] = t / 20 % 2 ? 25.0f : -8.0f;
      if (gates == Gates::aligned_keys) z[i] = -5.3f + 0.2f * z[i], k[i] = k[i % (kHeads * kDim)] + 1e-3f * k[i];
    }
    for (int64_t i = 0; gates == Gates::aligned_keys && i < b.size(); ++i) b[i] = 3 + std::abs(b[i]);
  }
  Layer part(int64_t from, int64_t to) const {
    Layer p = *this;
    const int64_t n = to - from, w = kHeads * kDim;
    p.tokens = n;
    for (Values Layer::*x : {&Layer::q, &Layer::k, &Layer::v, &Layer::z, &Layer::d_o}) p.*x = (this->*x).slice(from * w, n * w);
    p.b = b.slice(from * kHeads, n * kHeads);
    return p;
  }
};
DeltaShape shape() { return {kHeads, kDim, kDim, float(1 / std::sqrt(double(kDim))), true}; }

struct Call {
  Var q, k, v, z, b, o;
  Param *A_log, *dt_bias;
};
Call call(Step& step, const Layer& in, const Batch& batch, DeltaState* state = nullptr, bool narrow = true) {
  step.context.bf16_products = narrow;
  const int64_t w = kHeads * kDim, n = in.tokens;
  Call x{step.input(in.q, {n, w}),
         step.input(in.k, {n, w}),
         step.input(in.v, {n, w}),
         step.input(in.z, {n, w}),
         step.input(in.b, {n, kHeads}),
         {},
         &step.keep(step.param("A_log", in.A_log, {in.A_log.size()})),
         &step.keep(step.param("dt_bias", in.dt_bias, {w}))};
  x.o = gated_delta_rule(x.q, x.k, x.v, x.z, x.b, {x.A_log, x.dt_bias, in.lower_bound}, shape(), batch, state);
  return x;
}
Batch in_slots(const std::vector<int64_t>& lengths, std::vector<int32_t> slots) {
  Batch b = Batch::of_lengths(lengths);
  b.slots = std::move(slots);
  return b;
}

// The operator is its parts, to the bit, and so are its gradients.
TEST(gated_delta_rule, is_its_operators_in_turn) {
  for (bool bounded : {true, false}) {
    const Layer in(37, bounded);
    Step one, other;
    Call x = call(one, in, Batch::of_lengths({20, 0, 17}));
    one.backward(x.o, in.d_o);
    const int64_t w = kHeads * kDim;
    Var q = other.input(in.q, {37, w}), k = other.input(in.k, {37, w}), v = other.input(in.v, {37, w}), z = other.input(in.z, {37, w}),
        b = other.input(in.b, {37, kHeads});
    Param &A_log = other.keep(other.param("A_log", in.A_log, {in.A_log.size()})), &dt_bias = other.keep(other.param("dt_bias", in.dt_bias, {w}));
    Var g = bounded ? bounded_decay(z, A_log, dt_bias, kHeads, -5) : softplus_decay(z, A_log, dt_bias, kHeads);
    Var o = delta_rule(l2_norm(q, kDim), l2_norm(k, kDim), v, g, sigmoid(b), shape(), Batch::of_lengths({20, 0, 17}), nullptr);
    other.backward(o, in.d_o);
    EXPECT_TRUE(testing::same_bits(x.o.value(), o.value()));
    for (auto [a, c] : {std::pair{x.q, q}, {x.k, k}, {x.v, v}, {x.z, z}, {x.b, b}}) EXPECT_TRUE(testing::same_bits(a.grad(), c.grad()));
    EXPECT_TRUE(testing::same_bits(x.A_log->grad, A_log.grad));
    EXPECT_TRUE(testing::same_bits(x.dt_bias->grad, dt_bias.grad));
  }
}

std::vector<Tensor> trained(Step& step, const Layer& in, const Batch& batch) {
  Call x = call(step, in, batch);
  step.backward(x.o, in.d_o);
  return {x.o.value(), x.q.grad(), x.k.grad(), x.v.grad(), x.z.grad(), x.b.grad(), x.A_log->grad, x.dt_bias->grad};
}

TEST(gated_delta_rule, cuda_in_bfloat16_is_near_float32) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  for (Gates gates : {Gates::ordinary, Gates::slow, Gates::shut, Gates::mixed_channels, Gates::mixed_tokens, Gates::aligned_keys})
    for (const std::vector<int64_t>& lengths : {std::vector<int64_t>{0, 100, 37, 0, 64, 5, 1, 0}, {1}, {32}, {33}}) {
      if (testing::few_shapes() && (gates != Gates::mixed_channels || lengths.size() == 1)) continue;
      const Batch batch = Batch::of_lengths(lengths);
      const int64_t N = batch.tokens(), w = kHeads * kDim;
      SCOPED_TRACE(fmt::format("gates {}, {} tokens", int(gates), N));
      const double more = gates == Gates::aligned_keys ? 4 : 1;  // keys that repeat: what each adds is the small difference of large parts
      for (bool bounded : {true, false}) {
        SCOPED_TRACE(bounded ? "bounded" : "softplus");
        const Layer in(N, bounded, gates);
        Step once(false), there(false, size_t(1) << 30, Device::cuda);
        expect_close(call(there, in, batch).o.value(), testing::as_double(call(once, in, batch).o.value()).data(), more * kForward, "without a tape");
        Step host, step(true, size_t(1) << 30, Device::cuda), again(true, size_t(1) << 30, Device::cuda);
        const std::vector<Tensor> want = trained(host, in, batch), got = trained(step, in, batch), twice = trained(again, in, batch);
        // Sums over tokens are as far off as their parts together, and twice that: a token's gate takes in what the later ones of its chunk add, so
        // they share errors. One token has no gate that matters.
        double dz = 0, dA = 0, d_o = 0;
        for (int64_t i = 0; i < N * w; ++i) {
          const double x = in.z[i] + in.dt_bias[i % w], by_A = bounded ? x : std::log1p(std::exp(x)) * (1 + std::exp(-x));  // dg/dA_log : dg/dz
          dz += std::pow(want[4].f32()[i], 2), dA += std::pow(want[4].f32()[i] * by_A, 2), d_o += in.d_o[i] * in.d_o[i];
        }
        const double least = 1e-4 * std::sqrt(d_o),
                     scales[] = {0, 0, 0, 0, least, least, std::max(least, std::sqrt(dA)), std::max(least, std::sqrt(dz))};
        constexpr const char* kNames[] = {"o", "dq", "dk", "dv", "dz", "db", "dA_log", "ddt_bias"};
        for (size_t i = 0; i < want.size(); ++i) {
          expect_close(got[i], testing::as_double(want[i]).data(), more * (i > 5 ? 2 * kBackward : i ? kBackward : kForward), kNames[i], scales[i]);
          EXPECT_EQ(bytes_of(got[i]), bytes_of(twice[i])) << kNames[i] << ": two runs differ";
        }
      }
    }
}

// Gradients are added to what is there, and a gradient that exists already is not overwritten.
TEST(gated_delta_rule, cuda_adds_to_gradients) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  for (bool bounded : {true, false}) {
    const Layer in(70, bounded);
    auto grads = [&](Step& step, bool before) {
      Call x = call(step, in, Batch::one(70));
      for (const Var& y : {x.q, x.k, x.v, x.z, x.b})
        if (before) {
          std::vector<float> threes(size_t(y.size()), 3.0f);
          write(y.grad(), threes.data());
        }
      step.backward(x.o, in.d_o);
      std::vector<std::vector<double>> all;
      for (const Var& y : {x.q, x.k, x.v, x.z, x.b}) all.push_back(testing::as_double(HostCopy(y.grad()).tensor()));
      return all;
    };
    Step a(true, size_t(1) << 30, Device::cuda), b(true, size_t(1) << 30, Device::cuda);
    const auto plain = grads(a, false), more = grads(b, true);
    for (size_t i = 0; i < plain.size(); ++i)
      for (size_t j = 0; j < plain[i].size(); ++j) ASSERT_NEAR(more[i][j], plain[i][j] + 3, 1e-6 * (4 + std::abs(plain[i][j]))) << i << " " << j;
  }
}

class OnGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
    step = std::make_unique<Step>(false, size_t(2) << 30, Device::cuda);
    state = std::make_unique<DeltaState>(shape(), 4, Device::cuda);
  }
  std::vector<char> feed(int32_t slot, const Layer& in, int64_t from, int64_t to) {
    return bytes_of(call(*step, in.part(from, to), in_slots({to - from}, {slot}), state.get()).o.value());
  }
  std::vector<float> dense(const DeltaState& of, int64_t slot) const {
    std::vector<float> s(size_t(kHeads * kDim * kDim));
    of.dense(slot, s.data());
    return s;
  }
  static void expect_near_rows(const std::vector<char>& got, const std::vector<double>& want, int64_t from, double limit, const std::string& where) {
    expect_close(Tensor(const_cast<char*>(got.data()), DType::f32, {int64_t(got.size() / sizeof(float))}), want.data() + from * kHeads * kDim, limit,
                 where);
  }
  // All results of a layer in float32 on the CPU, and its last memory.
  static std::vector<double> on_the_cpu(const Layer& in, std::vector<double>* memory = nullptr) {
    Step host(false);
    DeltaState there(shape(), 1);
    auto o = testing::as_double(call(host, in, in_slots({in.tokens}, {0}), &there, false).o.value());
    if (memory) {
      std::vector<float> s(size_t(kHeads * kDim * kDim));
      there.dense(0, s.data());
      memory->assign(s.begin(), s.end());
    }
    return o;
  }
  std::unique_ptr<Step> step;
  std::unique_ptr<DeltaState> state;
};

TEST_F(OnGpu, cuda_prompt_cut_after_whole_chunks_has_the_same_bits_and_any_other_cut_is_near) {
  const int64_t T = 257, w = kHeads * kDim * int64_t(sizeof(float));
  for (bool bounded : {true, false}) {
    const Layer in(T, bounded);
    for (int32_t slot : {0, 1, 2}) state->reset(slot);
    std::vector<double> memory;
    const std::vector<double> want = on_the_cpu(in, &memory);
    const std::vector<char> whole = feed(0, in, 0, T);
    expect_near_rows(whole, want, 0, kForward, "whole");
    const std::vector<float> last = dense(*state, 0);
    expect_close(Tensor(const_cast<float*>(last.data()), DType::f32, {int64_t(last.size())}), memory.data(), kForward, "S");
    for (int64_t cut : {32, 64, 96, 224}) {
      if (testing::few_shapes() && cut != 96) continue;
      state->reset(1);
      EXPECT_EQ(feed(1, in, 0, cut), std::vector<char>(whole.begin(), whole.begin() + cut * w)) << cut;
      EXPECT_EQ(feed(1, in, cut, T), std::vector<char>(whole.begin() + cut * w, whole.end())) << cut;
      EXPECT_EQ(dense(*state, 1), last) << cut;
    }
    for (int64_t cut : {1, 15, 31, 33, 100, 226, 250}) {  // 31 tokens or fewer go one by one
      if (testing::few_shapes() && cut != 33 && cut != 250) continue;
      state->reset(1);
      expect_near_rows(feed(1, in, 0, cut), want, 0, kForward, fmt::format("{} before the cut", cut));
      expect_near_rows(feed(1, in, cut, T), want, cut, kForward, fmt::format("after the cut at {}", cut));
      EXPECT_EQ(state->tokens(1), T);
    }
    EXPECT_EQ(feed(2, in, 0, T), whole) << "two runs differ";
  }
}

TEST_F(OnGpu, cuda_decode_goes_on_where_a_prompt_ended_in_the_middle_of_a_chunk) {
  const int64_t T = 101, prompt = 37;
  const Layer in(T, true);
  std::vector<double> memory;
  const std::vector<double> want = on_the_cpu(in, &memory);
  feed(0, in, 0, prompt);
  EXPECT_EQ(state->open(0), 0);
  EXPECT_FALSE(state->drop(0, 1));
  for (int64_t t = prompt; t < T - 10; ++t) expect_near_rows(feed(0, in, t, t + 1), want, t, kForward, fmt::format("token {}", t));
  state->copy(1, 0);
  feed(0, in, 0, 5);  // guesses
  EXPECT_TRUE(state->drop(0, 5));
  Blob blob;
  state->save(0, blob);
  DeltaState there(shape(), 1);
  there.load(0, blob);
  Step host(false);
  const Layer rest = in.part(T - 10, T);
  const Tensor moved = call(host, rest, in_slots({10}, {0}), &there, false).o.value();
  expect_close(moved, want.data() + (T - 10) * kHeads * kDim, kForward, "a saved state on the CPU");
  const std::vector<char> after = feed(0, in, T - 10, T);
  expect_near_rows(after, want, T - 10, kForward, "after guesses");
  EXPECT_EQ(feed(1, in, T - 10, T), after) << "a fork";
  const std::vector<float> last = dense(*state, 0);
  expect_close(Tensor(const_cast<float*>(last.data()), DType::f32, {int64_t(last.size())}), memory.data(), kForward, "S");
}

// One batch of a long prompt, a token of decode, nothing, another prompt: each as if it were alone.
TEST_F(OnGpu, cuda_sequence_does_not_depend_on_its_neighbours) {
  const std::vector<int64_t> lengths{50, 1, 0, 64, 7};
  const Layer in(122, true), before(21, true, Gates::slow);
  DeltaState together(shape(), 5, Device::cuda), alone(shape(), 5, Device::cuda);
  for (DeltaState* s : {&together, &alone})
    for (int32_t slot : {0, 3}) call(*step, before, in_slots({21}, {slot}), s);
  const std::vector<int32_t> named{3, 0, 1, 2, 4};
  const std::vector<char> all = bytes_of(call(*step, in, in_slots(lengths, named), &together).o.value());
  const int64_t w = kHeads * kDim * int64_t(sizeof(float));
  for (int64_t s = 0, at = 0; s < 5; at += lengths[size_t(s++)]) {
    if (lengths[size_t(s)] == 0) continue;
    const auto one =
        bytes_of(call(*step, in.part(at, at + lengths[size_t(s)]), in_slots({lengths[size_t(s)]}, {named[size_t(s)]}), &alone).o.value());
    EXPECT_EQ(one, std::vector<char>(all.begin() + at * w, all.begin() + (at + lengths[size_t(s)]) * w)) << s;
    EXPECT_EQ(dense(together, named[size_t(s)]), dense(alone, named[size_t(s)])) << s;
    EXPECT_EQ(together.tokens(named[size_t(s)]), alone.tokens(named[size_t(s)]));
  }
  EXPECT_EQ(together.tokens(1), 0);
  // and in training
  Step packed(true, size_t(1) << 30, Device::cuda), single(true, size_t(1) << 30, Device::cuda);
  const auto a = trained(packed, in, Batch::of_lengths(lengths)), b = trained(single, in.part(51, 115), Batch::one(64));
  for (size_t i = 0; i < 6; ++i) EXPECT_EQ(bytes_of(a[i].row_range(51, 115)), bytes_of(b[i])) << i;
}

TEST(gated_delta_rule, wrong_calls_are_refused) {
  const Layer in(4, true);
  Step step;
  Call x = call(step, in, Batch::one(4));
  EXPECT_THAT(
      [&] {
        gated_delta_rule(x.q, x.b, x.v, x.z, x.b, {x.A_log, x.dt_bias, -5.0f}, shape(), Batch::one(4), nullptr);
      },
      testing::throws_error("[l2_norm] 3 columns"));
}

}  // namespace
}  // namespace k3
