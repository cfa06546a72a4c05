// The chunk kernels of the delta rule for training against the recurrence in double: every head size, gate and packing, adversarial gates and keys.
#include <gtest/gtest.h>

#include "k3/ops/delta_rule/delta_parallel_cuda.h"
#include "k3/ops/delta_rule/delta_rule_testing.h"

namespace k3 {
namespace {

using testing::Decay;
using testing::DeltaGate;
using testing::DeltaInputs;
using testing::Step;
using testing::Values;

// Operands as sums of two tf32: 2^-22 each, the float32 sums and 2^x as for the float kernels; running sums of gates to 32 * 29 of 2^-24 relative.
constexpr double kExact = 1e-4;
// tf32 operands: 2^-11 each, four products deep, the worst element of thousands at five standard deviations of a sum of such errors.
constexpr double kNarrow = 4 * 5 / 2048.0;

struct Results {
  Tensor o, dq, dk, dv, dg, dbeta;
  std::vector<Tensor> all() const { return dg.size() ? std::vector<Tensor>{o, dq, dk, dv, dbeta, dg} : std::vector<Tensor>{o, dq, dk, dv, dbeta}; }
};

// The kernels as the operator calls them; gradients begin as zeros.
Results run(Step& step, const DeltaInputs& in, const Batch& batch, bool exact) {
  Results r;
  if constexpr (gpu::kBuilt) {
    const size_t mark = step.arena().mark();
    step.arena().lend(DType::f32, {int64_t(32) << 20});  // one mapping, for the memory checker takes a copy over the border of two as an error
    step.arena().rewind(mark);
    const int64_t N = in.tokens, H = in.H, K = in.K, V = in.V, S = batch.sequences(), size = cuda::delta_parallel_size(K, V);
    auto there = [&](const Values& v) { return step.input(v, {v.size()}).f32(); };
    auto zeroed = [&](int64_t n) { return step.arena().lend_zeroed(DType::f32, {n}); };
    auto floats = [&](int64_t n) { return step.arena().lend(DType::f32, {n}).f32(); };
    auto list = [&](const std::vector<int32_t>& v) {
      Tensor t = step.arena().lend(DType::i32, {int64_t(v.size())});
      write(t, v.data());
      return t.i32();
    };
    std::vector<int32_t> chunks{0};
    for (int64_t s = 0; s < S; ++s) chunks.push_back(chunks.back() + int32_t((batch.length(s) + 31) / 32));
    r = {step.arena().lend(DType::f32, {N * H * V}), zeroed(N * H * K), zeroed(N * H * K), zeroed(N * H * V), zeroed(N * H * in.G()), zeroed(N * H)};
    cuda::DeltaParallel p{};
    cpu::DeltaArgs& a = p.a;
    a.heads = H, a.key_dim = K, a.value_dim = V, a.scale = in.shape().scale, a.gate_columns = in.G();
    a.q = there(in.q), a.k = there(in.k), a.v = there(in.v), a.g = in.G() ? there(in.g) : nullptr, a.beta = there(in.beta);
    a.sequences = S, a.first = list({batch.cu_seqlens.begin(), batch.cu_seqlens.end()}), a.out = r.o.f32(), a.d_out = there(in.d_o);
    a.dq = r.dq.f32(), a.dk = r.dk.f32(), a.dv = r.dv.f32(), a.dg = r.dg.f32(), a.dbeta = r.dbeta.f32();
    p.chunk_first = list(chunks), p.chunks = chunks.back(), p.exact = exact;
    p.memories = floats(p.chunks * H * size * size), p.d_memories = floats(p.chunks * H * size * size);
    p.work = floats(p.chunks * H * cuda::delta_parallel_work(size));
    gpu::check(cuda::delta_parallel_forward(p, gpu::stream()));
    gpu::check(cuda::delta_parallel_backward(p, gpu::stream()));
  }
  return r;
}

void expect_answer(const DeltaInputs& in, const Batch& batch, bool exact, double limit, const std::string& where) {
  SCOPED_TRACE(where + (exact ? ", exact" : ", tf32"));
  DeltaInputs bounded = in;
  for (int64_t i = 0; i < bounded.g.size(); ++i) bounded.g[i] = std::max(bounded.g[i], -20.0f);  // as the kernels do: e^-20 is what they forget to
  const testing::DeltaAnswer want = testing::delta_answer(bounded, batch);
  std::vector<std::vector<char>> first;
  for (int again = 0; again < (testing::few_shapes() ? 1 : 2); ++again) {
    Step step(false, size_t(4) << 30, Device::cuda);
    const Results r = run(step, in, batch, exact);
    const std::vector<const std::vector<double>*> wanted{&want.o, &want.dq, &want.dk, &want.dv, &want.dbeta, &want.dg};
    for (size_t i = 0; i < r.all().size(); ++i) {
      constexpr const char* kNames[] = {"o", "dq", "dk", "dv", "dbeta", "dg"};
      if (again) {
        EXPECT_EQ(testing::bytes_of(r.all()[i]), first[i]) << kNames[i] << ": two runs differ";
        continue;
      }
      first.push_back(testing::bytes_of(r.all()[i]));
      testing::expect_near(HostCopy(r.all()[i]).tensor(), *wanted[i], limit, kNames[i]);
    }
  }
}

#define NEEDS_GPU() \
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why

TEST(delta_parallel, cuda_equals_the_recurrence) {
  NEEDS_GPU();
  for (bool exact : {true, false}) {
    const double limit = exact ? kExact : kNarrow;
    const bool few = testing::few_shapes();  // of each size of kernel one that uses its stages of the scan more than once
    if (few && exact) continue;
    for (int64_t T : {1, 7, 8, 9, 31, 32, 33, 64, 100, 257, 700})
      if (!few || T == 257) expect_answer(DeltaInputs(T, few ? 1 : 2, 32, 32), Batch::one(T), exact, limit, "T " + std::to_string(T));
    for (auto [K, V] : {std::pair{1, 1}, {16, 16}, {32, 33}, {33, 7}, {48, 64}, {64, 64}, {65, 20}, {96, 128}, {128, 128}})
      if (!few || (K == V && K >= 64))
        expect_answer(DeltaInputs(few ? 240 - K : 130, few ? 1 : 2, K, V), Batch::one(few ? 240 - K : 130), exact, limit,
                      fmt::format("K {} V {}", K, V));
  }
}

TEST(delta_parallel, cuda_equals_the_recurrence_with_every_gate_and_packing) {
  NEEDS_GPU();
  const bool few = testing::few_shapes();
  const std::vector<int64_t> lengths{0, few ? 40 : 100, 37, 0, few ? 0 : 64, 5, 1, 0};
  const int64_t N = Batch::of_lengths(lengths).tokens();
  for (bool exact : {true, false})
    for (auto gate : {DeltaGate::none, DeltaGate::head, DeltaGate::channel}) {
      if (few && exact) continue;
      for (auto decay : {Decay::spread, Decay::bound, Decay::mixed, Decay::open})
        if (!few || decay == Decay::mixed)
          expect_answer(DeltaInputs(83, few ? 1 : 3, 32, 16, gate, decay), Batch::one(83), exact, exact ? kExact : kNarrow,
                        fmt::format("gate {} decay {}", int(gate), int(decay)));
      for (int64_t K : {32, 64, 128})
        if (!few || K == 32)
          expect_answer(DeltaInputs(N, few ? 1 : 2, K, K, gate), Batch::of_lengths(lengths), exact, exact ? kExact : kNarrow,
                        fmt::format("packed, K {}", K));
    }
}

// Repeated keys written at full strength, slow gates over a thousand tokens, forgetting far beyond what float32 holds, and in turns.
TEST(delta_parallel, cuda_stays_near_on_adversarial_gates_and_keys) {
  NEEDS_GPU();
  const bool few = testing::few_shapes();
  for (bool exact : {true, false})
    for (int64_t K : {32, 64, 128}) {
      if (few && (exact || K > 32)) continue;
      const int64_t T = few ? 100 : 256, long_T = few ? 130 : 1000, turns_T = few ? 70 : 200;
      DeltaInputs in(T, 1, K, K);
      Values noise(T * K, 11, 1e-3);
      for (int64_t t = T - 1; t >= 0; --t) {
        for (int64_t i = 0; i < K; ++i) in.k[t * K + i] = in.k[i] + noise[t * K + i];
        in.normalise(in.k, t);
        in.beta[t] = 0.95f + 0.05f * float(Rng{3, 4}.uniform(t));
        for (int64_t i = 0; i < K; ++i) in.g[t * K + i] = -0.03f + 0.02f * float(Rng{5, 6}.uniform(t * K + i));
      }
      expect_answer(in, Batch::one(T), exact, exact ? 4 * kExact : 8 * kNarrow, fmt::format("aligned, K {}", K));
      DeltaInputs slow(long_T, 1, K, K);
      for (int64_t i = 0; i < slow.g.size(); ++i) slow.g[i] = -0.0002f * float(1 + i % 7);
      expect_answer(slow, Batch::one(long_T), exact, exact ? kExact : 2 * kNarrow, fmt::format("slow, K {}", K));
      DeltaInputs turns(turns_T, 1, K, K);
      for (int64_t i = 0; i < turns.g.size(); ++i) turns.g[i] = i / K / 20 % 2 ? -5.0f : -1e-4f;
      expect_answer(turns, Batch::one(turns_T), exact, exact ? kExact : kNarrow, fmt::format("alternating, K {}", K));
    }
  for (bool exact : {true, false})
    for (auto gate : {DeltaGate::head, DeltaGate::channel})
      if (!few || !exact)
        for (float strength : {-5.0f, -8.0f, -20.0f, -60.0f, -1000.0f, 0.0f}) {
          if (few && strength != 0.0f && strength != -1000.0f) continue;
          DeltaInputs in(65, few ? 1 : 2, 16, 16, gate);
          for (int64_t i = 0; i < in.g.size(); ++i) in.g[i] = strength != 0 ? strength : i % 2 ? -0.001f : -20.0f;
          expect_answer(in, Batch::one(65), exact, exact ? 4 * kExact : kNarrow, fmt::format("g {}", strength));
        }
}

// Through the operator, with rows that do not exist: under bf16_products the GPU takes these kernels.
TEST(delta_parallel, cuda_operator_in_training_is_near_float32) {
  for (auto gate : {DeltaGate::none, DeltaGate::head, DeltaGate::channel}) {
    if (testing::few_shapes() && gate != DeltaGate::channel) continue;
    const DeltaInputs in(207, testing::few_shapes() ? 1 : 2, 48, 40, gate);
    Batch padded = Batch::of_lengths({100, 37, 70});
    padded.padding.assign(207, 0);
    for (int64_t i : {0, 50, 99, 100, 206}) padded.padding[size_t(i)] = 1;
    testing::expect_cuda_equals_cpu(kNarrow, [&](Step& step) {
      step.context.bf16_products = true;
      auto x = testing::run_delta(step, in, padded);
      step.backward(x.o, in.d_o);
      std::vector<Tensor> out{x.o.value(), x.q.grad(), x.k.grad(), x.v.grad(), x.beta.grad()};
      if (!x.g.empty()) out.push_back(x.g.grad());
      return out;
    });
  }
}

// A sequence's bits are the same alone and in a batch, and a row's do not depend on later chunks.
TEST(delta_parallel, cuda_row_does_not_depend_on_its_neighbours) {
  NEEDS_GPU();
  const int64_t T = 150, from = 40, n = 75;
  for (int64_t K : {32, 64, 128}) {
    if (testing::few_shapes() && K == 64) continue;
    const DeltaInputs in(T, testing::few_shapes() ? 1 : 2, K, K);
    Step packed(false, size_t(4) << 30, Device::cuda), alone(false, size_t(4) << 30, Device::cuda), cut(false, size_t(4) << 30, Device::cuda);
    const std::vector<Tensor> a = run(packed, in, Batch::of_lengths({from, n, T - from - n}), false).all();
    const std::vector<Tensor> b = run(alone, in.part(from, from + n), Batch::one(n), false).all();
    for (size_t i = 0; i < a.size(); ++i) {
      const int64_t width = a[i].size() / T;
      EXPECT_EQ(testing::bytes_of(Tensor(a[i].f32() + from * width, DType::f32, {n * width}, Device::cuda)), testing::bytes_of(b[i])) << i;
    }
    const Tensor o = run(cut, in.part(from, from + 64), Batch::one(64), false).o;
    EXPECT_EQ(testing::bytes_of(o), testing::bytes_of(Tensor(b[0].f32(), DType::f32, {o.size()}, Device::cuda)));
  }
}

}  // namespace
}  // namespace k3
