// The operator against the recurrence: reference by complex step, kernels by reference, at every instruction set.
#include <gtest/gtest.h>

#include <memory>

#include "k3/ops/delta_rule/delta_rule_kernels.h"
#include "k3/ops/delta_rule/delta_rule_testing.h"

namespace k3 {
namespace {

using testing::Decay;
using testing::DeltaGate;
using testing::DeltaInputs;
using testing::Values;

// An output is a sum over K of a memory that is a sum over T tokens, each rounded to 2^-24 of the running size: sqrt(K + T) eps as a random
// walk, with a margin of 8 for the worst element. A gradient is two such passes, met once more in a product.
double forward_tolerance(int64_t K, int64_t T) { return 8 * 6e-8 * std::sqrt(double(K + T)); }
double backward_tolerance(int64_t K, int64_t T) { return 4 * forward_tolerance(K, T); }

void expect_equals_reference(const DeltaInputs& in, const Batch& batch, double forward, double backward, const std::string& where) {
  auto want = testing::delta_answer(in, batch);
  for (auto isa : testing::levels()) {
    testing::ForceIsa force(isa);
    testing::Step step;
    auto x = testing::run_delta(step, in, batch);
    step.backward(x.o, in.d_o);
    testing::expect_delta(x, want, forward, backward, where + " " + cpu::name_of(isa));
  }
}
void expect_equals_reference(const DeltaInputs& in, const Batch& batch, const std::string& where) {
  expect_equals_reference(in, batch, forward_tolerance(in.K, in.tokens), backward_tolerance(in.K, in.tokens), where);
}

TEST(delta_rule, recurrent_backward_equals_complex_step) {
  const int64_t T = 6, K = 3, V = 4;
  for (auto gate : {DeltaGate::none, DeltaGate::head, DeltaGate::channel}) {
    int64_t G = ref::gate_columns(gate, K);
    // q, k, v, beta, the first memory, g; out: o, then the last memory
    testing::expect_complex_step(
        {{T * K}, {T * K}, {T * V}, {T}, {K * V}, {T * G}},
        [=]<class S>(const std::vector<const S*>& in, S* out) {
          std::copy(in[4], in[4] + K * V, out + T * V);
          ref::delta_rule<S>(gate, in[0], in[1], in[2], in[5], in[3], out + T * V, out, T, K, V, 0.7);
        },
        T * V + K * V,
        [=](auto in, const double* dy, auto grad) {
          std::vector<double> ds(dy + T * V, dy + T * V + K * V);
          ref::delta_rule_backward<double>(gate, in[0], in[1], in[2], in[5], in[3], in[4], dy, ds.data(), grad[0], grad[1], grad[2], grad[5], grad[3],
                                           T, K, V, 0.7);
          for (int64_t i = 0; i < K * V; ++i) grad[4][i] += ds[i];
        },
        1e-12, [](size_t input, int64_t, double x) { return input == 5 ? -std::abs(x) : x; });
  }
}

// Small enough to follow on paper.
TEST(delta_rule, two_tokens_by_hand) {
  testing::Step step(false);
  DeltaInputs in(2, 1, 2, 2);
  in.q = Values(std::vector<float>{0.6f, 0.8f, 1, 0}), in.k = Values(std::vector<float>{1, 0, 0.6f, 0.8f}),
  in.v = Values(std::vector<float>{1, 2, 3, -1});
  in.g = Values(std::vector<float>{-0.1f, -0.2f, -0.3f, -0.4f}), in.beta = Values(std::vector<float>{0.5f, 0.25f});
  DeltaState state(in.shape(), 1);
  Batch batch = Batch::one(2);
  batch.slots = {0};
  auto x = testing::run_delta(step, in, batch, &state);
  testing::expect_near(x.o.value(), {0.212132, 0.424264, 0.556544, 0.370626}, 1e-6, "o");
  Tensor s = step.arena().lend(DType::f32, {1, 2, 2});
  state.dense(0, s.f32());
  testing::expect_near(s, {0.787072, 0.524145, 0.555551, -0.288898}, 1e-6, "S");
}

TEST(delta_rule, equals_reference_at_every_length) {
  for (int64_t T : {1, 15, 16, 17, 63, 64, 65, 130, 257}) {
    int64_t K = T % 2 ? 32 : 16, V = T % 3 ? 32 : 48;
    expect_equals_reference(DeltaInputs(T, 2, K, V), Batch::one(T), "T " + std::to_string(T));
  }
}

TEST(delta_rule, equals_reference_with_every_gate) {
  for (auto gate : {DeltaGate::none, DeltaGate::head, DeltaGate::channel})
    for (auto decay : {Decay::spread, Decay::bound, Decay::mixed, Decay::open})
      expect_equals_reference(DeltaInputs(83, 3, 32, 16, gate, decay), Batch::one(83),
                              "gate " + std::to_string(int(gate)) + " decay " + std::to_string(int(decay)));
}

TEST(delta_rule, equals_reference_at_every_head_size) {
  for (int64_t K : {1, 7, 16, 32, 48, 64, 96, 128, 192, 256})
    for (int64_t V : {1, 16, 33, 64, 96, 128, 256}) {
      DeltaInputs in(35, 1, K, V);
      expect_equals_reference(in, Batch::one(35), "K " + std::to_string(K) + " V " + std::to_string(V));
    }
}

TEST(delta_rule, packed_sequences_equal_reference) {
  for (auto gate : {DeltaGate::none, DeltaGate::head, DeltaGate::channel})
    expect_equals_reference(DeltaInputs(207, 2, 16, 32, gate), Batch::of_lengths({100, 37, 0, 64, 5, 1, 0}), "packed");
}

// More heads and sequences than pieces of work, so that one piece goes through several: nothing may be carried from one to the next.
TEST(delta_rule, many_short_sequences_equal_reference) {
  std::vector<int64_t> lengths;
  for (int64_t s = 0; s < 100; ++s) lengths.push_back(s * 7 % 23);
  Batch batch = Batch::of_lengths(lengths);
  ASSERT_GT(batch.sequences() * 3, 2 * cpu::kDeltaTasks);
  expect_equals_reference(DeltaInputs(batch.tokens(), 3, 16, 16), batch, "short");
}

// Keys that repeat, writing at full strength, next to no forgetting: an inverse made from powers would blow up here.
TEST(delta_rule, aligned_keys_stay_exact) {
  for (int64_t K : {64, 128}) {
    const int64_t T = 256;
    DeltaInputs in(T, 1, K, K);
    Values noise(T * K, 11, 1e-3);
    for (int64_t t = T - 1; t >= 0; --t) {
      for (int64_t i = 0; i < K; ++i) in.k[t * K + i] = in.k[i] + noise[t * K + i];
      in.normalise(in.k, t);
      in.beta[t] = 0.95f + 0.05f * float(Rng{3, 4}.uniform(t));
      for (int64_t i = 0; i < K; ++i) in.g[t * K + i] = -0.03f + 0.02f * float(Rng{5, 6}.uniform(t * K + i));
    }
    expect_equals_reference(in, Batch::one(T), 1e-5, 1e-4, "K " + std::to_string(K));
  }
}

// Far beyond K3's bound, as a softplus gate may go: finite, exact, and what has gone is gone.
TEST(delta_rule, very_strong_forgetting_stays_exact) {
  for (auto gate : {DeltaGate::head, DeltaGate::channel})
    for (float strength : {-5.0f, -8.0f, -20.0f, -60.0f, -1000.0f, 0.0f})
      for (int64_t T : {1, 15, 16, 17, 65}) {
        DeltaInputs in(T, 2, 16, 16, gate);
        for (int64_t i = 0; i < in.g.size(); ++i) in.g[i] = strength != 0 ? strength : i % 2 ? -0.001f : -20.0f;
        auto where = "g " + std::to_string(strength) + " T " + std::to_string(T);
        // the gate's gradient is as small as e^g, so its scale in the comparison is its own
        expect_equals_reference(in, Batch::one(T), where);
      }
}

TEST(delta_rule, alternating_forgetting_stays_exact) {
  DeltaInputs in(200, 1, 32, 32);
  for (int64_t t = 0; t < 200; ++t)
    for (int64_t i = 0; i < 32; ++i) in.g[t * 32 + i] = t / 20 % 2 ? -5.0f : -1e-4f;
  expect_equals_reference(in, Batch::one(200), "alternating");
}

// 65,543 tokens with the gate open: the memory must neither drift nor wrap.
TEST(delta_rule, no_cliff_at_any_length) {
  const int64_t T = 65536 + 7;
  DeltaInputs in(T, 1, 16, 16, DeltaGate::channel, Decay::open);
  Batch batch = Batch::one(T);
  batch.slots = {0};
  auto want = testing::delta_answer(in, batch, {}, {}, false);
  testing::Step step(false);
  DeltaState state(in.shape(), 1);
  auto x = testing::run_delta(step, in, batch, &state);
  for (int64_t n : {1000, 4000, 16000, int(T)}) {
    std::vector<double> tail(want.o.begin() + (n - 500) * 16, want.o.begin() + n * 16);
    testing::expect_near(x.o.value().row_range(n - 500, n), tail, 1e-5, "until " + std::to_string(n));
  }
  Tensor s = step.arena().lend(DType::f32, {1, 16, 16});
  state.dense(0, s.f32());
  testing::expect_near(s, want.s, 1e-5, "memory");
}

// Gradients through the first and the last memory: what context parallelism and truncated training would need. Kernel level.
TEST(delta_rule, memory_gradients_equal_reference) {
  const int64_t H = 2, K = 32, V = 32;
  for (auto isa : testing::levels())
    for (std::vector<int64_t> lengths : {std::vector<int64_t>{1}, {16}, {17}, {64, 3}, {65, 0, 130}}) {
      testing::ForceIsa force(isa);
      Batch batch = Batch::of_lengths(lengths);
      int64_t N = batch.tokens(), S = batch.sequences(), M = H * K * V, size = S * M;
      DeltaInputs in(N, H, K, V);
      Values s0(size, 21), d_final(size, 22);  // V = one panel, so the kernel's layout is the plain one
      auto want = testing::delta_answer(in, batch, s0.as_double(), d_final.as_double());
      testing::Step step;
      auto lend = [&](int64_t n) { return step.arena().lend(DType::f32, {n}); };
      std::vector<int32_t> first(batch.cu_seqlens.begin(), batch.cu_seqlens.end()), kept{0};
      for (int64_t n : lengths) kept.push_back(kept.back() + int32_t(cpu::delta_kept(n)));
      Tensor o = lend(N * H * V), ds = lend(size);
      std::vector<Tensor> grads;
      for (int64_t n : {N * H * K, N * H * K, N * H * V, N * H * K, N * H}) grads.push_back(step.arena().lend_zeroed(DType::f32, {n}));
      cpu::DeltaArgs a{};
      a.heads = H, a.key_dim = K, a.value_dim = V, a.scale = in.shape().scale, a.gate_columns = K;
      a.q = in.q.data(), a.k = in.k.data(), a.v = in.v.data(), a.g = in.g.data(), a.beta = in.beta.data();
      a.sequences = S, a.first = first.data(), a.out = o.f32(), a.kept_first = kept.data();
      a.kept = lend(kept.back() * M).f32(), a.errors = lend(N * H * V).f32();
      a.initial = s0.data(), a.d_final = d_final.data(), a.d_initial = ds.f32(), a.d_out = in.d_o.data();
      a.dq = grads[0].f32(), a.dk = grads[1].f32(), a.dv = grads[2].f32(), a.dg = grads[3].f32(), a.dbeta = grads[4].f32();
      a.scratch = lend(cpu::delta_tasks(S * H) * cpu::delta_forward_scratch(K, V)).f32();
      cpu::delta().forward(a);
      a.scratch = lend(cpu::delta_tasks(S * H) * cpu::delta_backward_scratch(K, V)).f32();
      cpu::delta().backward(a);
      double tolerance = backward_tolerance(K, N);
      testing::expect_near(o, want.o, forward_tolerance(K, N), "o");
      testing::expect_near(grads[0], want.dq, tolerance, "dq");
      testing::expect_near(grads[1], want.dk, tolerance, "dk");
      testing::expect_near(grads[2], want.dv, tolerance, "dv");
      testing::expect_near(grads[3], want.dg, tolerance, "dg");
      testing::expect_near(grads[4], want.dbeta, tolerance, "dbeta");
      testing::expect_near(ds, want.ds, tolerance, "dS_0");
    }
}

}  // namespace
}  // namespace k3
