// The delta rule on the GPU against the CPU and the recurrence, and what must not change a bit there.
#include <gtest/gtest.h>

#include "k3/ops/delta_rule/delta_rule_float_cuda.h"
#include "k3/ops/delta_rule/delta_rule_kernels.h"
#include "k3/ops/delta_rule/delta_rule_testing.h"

namespace k3 {
namespace {

using testing::bytes_of;
using testing::Decay;
using testing::DeltaGate;
using testing::DeltaInputs;
using testing::Step;
using testing::Values;

// Twice the larger tolerance of delta_rule_test.cpp: both devices may be that far from double.
double tolerance(int64_t K, int64_t T) { return 2 * 32 * 6e-8 * std::sqrt(double(K + T)); }

Batch in_slots(std::vector<int64_t> lengths, std::vector<int32_t> slots) {
  Batch b = Batch::of_lengths(lengths);
  b.slots = std::move(slots);
  return b;
}

void expect_equal(const DeltaInputs& in, const Batch& batch, double limit, const std::string& where) {
  SCOPED_TRACE(where);
  testing::expect_cuda_equals_cpu(limit, [&](Step& step) {
    auto x = testing::run_delta(step, in, batch);
    step.backward(x.o, in.d_o);
    std::vector<Tensor> out{x.o.value(), x.q.grad(), x.k.grad(), x.v.grad(), x.beta.grad()};
    if (!x.g.empty()) out.push_back(x.g.grad());
    return out;
  });
}

TEST(delta_rule, cuda_equals_cpu) {
  for (int64_t T : {1, 15, 16, 17, 63, 64, 65, 130, 257}) {
    if (testing::few_shapes() && T != 17 && T != 65) continue;
    const int64_t K = T % 2 ? 32 : 16, V = T % 3 ? 32 : 48;
    expect_equal(DeltaInputs(T, testing::few_shapes() ? 1 : 2, K, V), Batch::one(T), tolerance(K, T), "T " + std::to_string(T));
  }
  for (int64_t K : {1, 7, 48, 64, 96, 128, 192, 256})
    for (int64_t V : {1, 16, 33, 64, 96, 128, 256})
      if (!testing::few_shapes() || (K == 7 && V == 33) || (K == 64 && V == 64))
        expect_equal(DeltaInputs(testing::few_shapes() ? 35 : 70, 1, K, V), Batch::one(testing::few_shapes() ? 35 : 70), tolerance(K, 70),
                     "K " + std::to_string(K) + " V " + std::to_string(V));
}

// Every length to eight chunks of the CPU's and a bit; what lies behind the last row is NaN.
TEST(delta_rule, cuda_equals_cpu_at_every_length) {
  for (int64_t T = 1; T <= (testing::few_shapes() ? 18 : 130); T += testing::few_shapes() ? 17 : 1) {
    const int64_t K = T % 3 ? 64 : 128, V = T % 2 ? 64 : 128;
    expect_equal(DeltaInputs(T, 1, K, V), Batch::one(T), tolerance(K, T), fmt::format("T {} K {} V {}", T, K, V));
  }
}

// Beyond 2^16 tokens that nothing forgets, through a state, against the recurrence in double: no row and no memory falls off.
TEST(delta_rule, cuda_holds_beyond_65536_tokens_without_decay) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  const int64_t T = testing::few_shapes() ? 300 : 65536 + 7, head = T - 7, K = 32, V = 48;
  for (auto gate : {DeltaGate::none, DeltaGate::channel}) {
    const DeltaInputs in(T, 1, K, V, gate, Decay::open);
    const auto want = testing::delta_answer(in, Batch::one(T), {}, {}, false);
    Step step(false, size_t(1) << 30, Device::cuda);
    DeltaState state(in.shape(), 1, Device::cuda);
    for (auto [from, to] : {std::pair{int64_t(0), head}, {head, T}}) {
      const HostCopy o(testing::run_delta(step, in.part(from, to), in_slots({to - from}, {0}), &state).o.value());
      testing::expect_near(o.tensor(), std::vector<double>(want.o.begin() + from * V, want.o.begin() + to * V), tolerance(K, T),
                           "rows from " + std::to_string(from));
    }
    std::vector<float> memory(size_t(K * V));
    state.dense(0, memory.data());
    testing::expect_near(Tensor(memory.data(), DType::f32, {K * V}), want.s, tolerance(K, T), "memory");
  }
}

TEST(delta_rule, cuda_equals_cpu_with_every_gate_and_packing) {
  const bool few = testing::few_shapes();
  for (auto gate : {DeltaGate::none, DeltaGate::head, DeltaGate::channel}) {
    for (auto decay : {Decay::spread, Decay::bound, Decay::mixed, Decay::open})
      if (!few || decay == Decay::mixed)
        expect_equal(DeltaInputs(83, few ? 1 : 3, 32, 16, gate, decay), Batch::one(83), tolerance(32, 83),
                     "gate " + std::to_string(int(gate)) + " decay " + std::to_string(int(decay)));
    const Batch packed = Batch::of_lengths(few ? std::vector<int64_t>{20, 17, 0, 5, 1, 0} : std::vector<int64_t>{100, 37, 0, 64, 5, 1, 0});
    expect_equal(DeltaInputs(packed.tokens(), few ? 1 : 2, 16, 32, gate), packed, tolerance(16, 100), "packed");
    Batch padded = Batch::of_lengths(few ? std::vector<int64_t>{20, 17, 10} : std::vector<int64_t>{100, 37, 70});
    const int64_t N = padded.tokens(), first = padded.length(0);
    padded.padding.assign(size_t(N), 0);
    for (int64_t i : {int64_t(0), first / 2, first - 1, first, N - 1}) padded.padding[size_t(i)] = 1;
    expect_equal(DeltaInputs(N, few ? 1 : 2, 48, 40, gate), padded, tolerance(48, 100), "padded");
  }
  std::vector<int64_t> lengths;
  for (int64_t s = 0; s < (few ? 10 : 100); ++s) lengths.push_back(s * 7 % 23);
  const Batch batch = Batch::of_lengths(lengths);
  expect_equal(DeltaInputs(batch.tokens(), 3, 16, 16), batch, tolerance(16, 23), "short");
}

// Repeated keys written at full strength; forgetting far beyond the bound, and in turns. (The chunked CPU kernel and the recurrence.)
TEST(delta_rule, cuda_stays_exact_on_adversarial_gates_and_keys) {
  for (int64_t K : {64, 128}) {
    if (testing::few_shapes() && K == 128) continue;
    const int64_t T = testing::few_shapes() ? 40 : 256;
    DeltaInputs in(T, 1, K, K);
    Values noise(T * K, 11, 1e-3);
    for (int64_t t = T - 1; t >= 0; --t) {
      for (int64_t i = 0; i < K; ++i) in.k[t * K + i] = in.k[i] + noise[t * K + i];
      in.normalise(in.k, t);
      in.beta[t] = 0.95f + 0.05f * float(Rng{3, 4}.uniform(t));
      for (int64_t i = 0; i < K; ++i) in.g[t * K + i] = -0.03f + 0.02f * float(Rng{5, 6}.uniform(t * K + i));
    }
    expect_equal(in, Batch::one(T), 1e-4, "aligned");
  }
  for (auto gate : {DeltaGate::head, DeltaGate::channel})
    for (float strength : {-5.0f, -8.0f, -20.0f, -60.0f, -1000.0f, 0.0f})
      for (int64_t T : {1, 15, 16, 17, 63, 64, 65, 257}) {
        if (testing::few_shapes() && (T != 17 || gate == DeltaGate::head)) continue;
        DeltaInputs in(T, testing::few_shapes() ? 1 : 2, 16, 16, gate);
        for (int64_t i = 0; i < in.g.size(); ++i) in.g[i] = strength != 0 ? strength : i % 2 ? -0.001f : -20.0f;
        expect_equal(in, Batch::one(T), tolerance(16, T), fmt::format("g {} T {}", strength, T));
      }
  const int64_t T = testing::few_shapes() ? 60 : 200;
  DeltaInputs in(T, 1, 32, 32);
  for (int64_t i = 0; i < in.g.size(); ++i) in.g[i] = i / 32 / 20 % 2 ? -5.0f : -1e-4f;
  expect_equal(in, Batch::one(T), tolerance(32, T), "alternating");
}

// On the GPU: training = prefill = decode = any cut, to the bit, and the state too; a fork, guesses taken back, a saved state that goes on there.
TEST(delta_rule_state, cuda_any_cut_equals_whole) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  const int64_t T = 83;
  for (auto gate : {DeltaGate::none, DeltaGate::head, DeltaGate::channel}) {
    if (testing::few_shapes() && gate != DeltaGate::channel) continue;
    const DeltaInputs in(T, testing::few_shapes() ? 1 : 3, 48, 40, gate);
    Step training(true, size_t(1) << 30, Device::cuda), step(false, size_t(1) << 30, Device::cuda);
    const Tensor trained = testing::run_delta(training, in, Batch::one(T)).o.value();
    DeltaState state(in.shape(), 3, Device::cuda);
    auto feed = [&](int32_t slot, int64_t from, int64_t to) {
      return bytes_of(testing::run_delta(step, in.part(from, to), in_slots({to - from, 0}, {slot, 2}), &state).o.value());
    };
    auto rows = [&](int64_t from, int64_t to) { return bytes_of(trained.row_range(from, to)); };
    auto dense = [&](int64_t slot) {
      std::vector<float> s(size_t(in.H * in.K * in.V));
      state.dense(slot, s.data());
      return s;
    };
    EXPECT_EQ(feed(0, 0, T), rows(0, T));
    for (int64_t cut : testing::few_shapes() ? std::vector<int64_t>{17} : std::vector<int64_t>{0, 1, 15, 16, 17, 32, 33, 64, 82, 83}) {
      state.reset(1);
      EXPECT_EQ(feed(1, 0, cut), rows(0, cut)) << cut;
      EXPECT_EQ(feed(1, cut, T), rows(cut, T)) << cut;
      EXPECT_EQ(dense(1), dense(0)) << cut;
    }
    for (int64_t piece : testing::few_shapes() ? std::vector<int64_t>{31} : std::vector<int64_t>{1, 3, 7, 31}) {
      state.reset(1);
      for (int64_t at = 0; at < T; at += piece)
        EXPECT_EQ(feed(1, at, std::min(T, at + piece)), rows(at, std::min(T, at + piece))) << piece << " at " << at;
    }
    state.reset(1);
    feed(1, 0, 40);
    state.copy(2, 1);
    feed(1, 60, 66);  // guesses
    EXPECT_TRUE(state.drop(1, 6));
    EXPECT_EQ(feed(1, 40, 70), rows(40, 70));
    EXPECT_EQ(bytes_of(testing::run_delta(step, in.part(40, 70), in_slots({30}, {2}), &state).o.value()), rows(40, 70));
    Blob blob;
    state.save(1, blob);
    DeltaState there(in.shape(), 1);
    there.load(0, blob);
    Step host(false);
    const Tensor near = testing::run_delta(host, in.part(70, T), in_slots({T - 70}, {0}), &there).o.value();
    testing::expect_near(HostCopy(trained.row_range(70, T)).tensor(), testing::as_double(near), tolerance(48, T), "after the move");
    std::vector<float> far(size_t(in.H * in.K * in.V)), there_now(far);
    feed(1, 70, T);
    state.dense(1, far.data()), there.dense(0, there_now.data());
    testing::expect_near(Tensor(far.data(), DType::f32, {int64_t(far.size())}), std::vector<double>(there_now.begin(), there_now.end()),
                         tolerance(48, T), "S");
  }
}

// Gradients through the first and the last memory, at the kernel.
TEST(delta_rule, cuda_memory_gradients_equal_reference) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  if constexpr (gpu::kBuilt) {
    const int64_t H = 2, K = 32, V = 32;
    for (std::vector<int64_t> lengths : {std::vector<int64_t>{1}, {16}, {17}, {64, 3}, {65, 0, 130}}) {
      const Batch batch = Batch::of_lengths(lengths);
      const int64_t N = batch.tokens(), S = batch.sequences(), M = H * K * V, size = S * M;
      const DeltaInputs in(N, H, K, V);
      const Values s0(size, 21), d_final(size, 22);  // V = one panel, so the kernel's layout is the plain one
      const auto want = testing::delta_answer(in, batch, s0.as_double(), d_final.as_double());
      Step step(false, size_t(1) << 30, Device::cuda);
      auto lend = [&](int64_t n) { return step.arena().lend(DType::f32, {n}); };
      auto zeroed = [&](int64_t n) { return step.arena().lend_zeroed(DType::f32, {n}); };
      auto there = [&](const Values& v) { return step.input(v, {v.size()}).f32(); };
      auto list = [&](const std::vector<int32_t>& v) {
        Tensor t = step.arena().lend(DType::i32, {int64_t(v.size())});
        write(t, v.data());
        return t.i32();
      };
      std::vector<int32_t> kept{0};
      int64_t longest = 0;
      for (int64_t n : lengths) kept.push_back(kept.back() + int32_t(cpu::delta_kept(n))), longest = std::max(longest, n);
      Tensor o = lend(N * H * V), ds = lend(size);
      std::vector<Tensor> grads{zeroed(N * H * K), zeroed(N * H * K), zeroed(N * H * V), zeroed(N * H * K), zeroed(N * H)};
      cuda::DeltaFloatBackward b{};
      cpu::DeltaArgs& a = b.a;
      a.heads = H, a.key_dim = K, a.value_dim = V, a.scale = in.shape().scale, a.gate_columns = K;
      a.q = there(in.q), a.k = there(in.k), a.v = there(in.v), a.g = there(in.g), a.beta = there(in.beta);
      a.sequences = S, a.first = list({batch.cu_seqlens.begin(), batch.cu_seqlens.end()}), a.out = o.f32(), a.kept_first = list(kept);
      a.kept = lend(kept.back() * M).f32(), a.errors = lend(N * H * V).f32();
      a.initial = there(s0), a.d_final = there(d_final), a.d_initial = ds.f32(), a.d_out = there(in.d_o);
      a.dq = grads[0].f32(), a.dk = grads[1].f32(), a.dv = grads[2].f32(), a.dg = grads[3].f32(), a.dbeta = grads[4].f32();
      gpu::check(cuda::delta_float_forward(a, gpu::stream()));
      b.tokens = N, b.longest = longest, b.du = lend(N * H * V).f32(), b.d_kept = lend(kept.back() * M).f32();
      gpu::check(cuda::delta_float_backward(b, gpu::stream()));
      const double limit = tolerance(K, N);
      testing::expect_near(HostCopy(o).tensor(), want.o, limit, "o");
      testing::expect_near(HostCopy(grads[0]).tensor(), want.dq, limit, "dq");
      testing::expect_near(HostCopy(grads[1]).tensor(), want.dk, limit, "dk");
      testing::expect_near(HostCopy(grads[2]).tensor(), want.dv, limit, "dv");
      testing::expect_near(HostCopy(grads[3]).tensor(), want.dg, limit, "dg");
      testing::expect_near(HostCopy(grads[4]).tensor(), want.dbeta, limit, "dbeta");
      testing::expect_near(HostCopy(ds).tensor(), want.ds, limit, "dS_0");
    }
  }
}

}  // namespace
}  // namespace k3
