// What the operators of a training step cost on the GPU, through the same calls as the model's: forward, then backward, float32 and with operands in
// bfloat16. 16 heads, 4096 tokens; experts of a 0.4B K3 shape.
#include <fmt/format.h>

#include <memory>

#include "bench/gpu/gpu.h"
#include "k3/core/gpu.h"
#include "k3/ops/activation/activation.h"
#include "k3/ops/attention/attention.h"
#include "k3/ops/delta_rule/delta_rule.h"
#include "k3/ops/moe/moe.h"
#include "k3/ops/update/update.h"
#include "k3/tape/tape.h"

using namespace k3;

namespace {

struct Step {
  Arena arena{size_t(64) << 30, Device::cuda};
  Tape tape;
  Context c{.device = Device::cuda, .arena = &arena, .tape = &tape};

  Tensor random(Shape s, double deviation, uint64_t seed) {
    gpu::Rng rng(seed);
    std::vector<float> table(4096), v(size_t(s.size()));
    for (float& x : table) x = float(deviation * rng.normal());
    for (float& x : v) x = table[rng.next() % 4096];
    Tensor t = arena.lend(DType::f32, s);
    write(t, v.data());
    return t;
  }
};

double now_us(cudaEvent_t a, cudaEvent_t b) {
  GPU(cudaEventSynchronize(b));
  float ms;
  GPU(cudaEventElapsedTime(&ms, a, b));
  return ms * 1e3;
}
// Medians of forward() -> Var and of its backward; everything they lend is given back each time.
template <class F>
void time_both(Step& s, const std::string& what, double forward_flops, double backward_flops, F forward) {
  cudaEvent_t e[3];
  for (auto& x : e) GPU(cudaEventCreate(&x));
  const auto stream = static_cast<cudaStream_t>(gpu::stream());
  std::vector<double> f, b;
  for (int i = 0; i < 7; ++i) {
    const size_t mark = s.arena.mark();
    GPU(cudaEventRecord(e[0], stream));
    Var y = forward();
    y.grad();
    write(y.grad(), std::vector<float>(size_t(y.size()), 0.01f).data());
    GPU(cudaEventRecord(e[1], stream));
    s.tape.run_backward();
    GPU(cudaEventRecord(e[2], stream));
    const double back = now_us(e[1], e[2]);
    b.push_back(back);
    s.arena.rewind(mark);
    GPU(cudaEventRecord(e[0], stream));
    forward();
    GPU(cudaEventRecord(e[1], stream));
    f.push_back(now_us(e[0], e[1]));
    while (!s.tape.empty()) s.tape = Tape();
    s.arena.rewind(mark);
  }
  std::sort(f.begin(), f.end()), std::sort(b.begin(), b.end());
  std::printf("time %-58s forward %9.1f us (%6.1f TFLOP/s)   backward %9.1f us (%6.1f)\n", what.c_str(), f[3], forward_flops / f[3] * 1e-6, b[3],
              backward_flops / b[3] * 1e-6);
  std::fflush(stdout);
}

}  // namespace

// With an argument: that part only (attention, delta, experts, update).
int main(int argc, char** argv) {
  auto wanted = [&](const std::string& part) { return argc < 2 || part == argv[1]; };
  const int64_t T = 4096, H = 16;
  Step s;
  for (bool narrow : {false, true}) {
    s.c.bf16_products = narrow;
    const std::string how = narrow ? ", bf16" : ", float32";
    const size_t mark = s.arena.mark();
    if (wanted("attention")) {
      Var q(s.c, s.random({T, H * 192}, 1, 1)), kv(s.c, s.random({T, H * 192}, 1, 2)), v(s.c, s.random({T, H * 128}, 1, 3));
      const double pairs = double(H) * double(T) * double(T) / 2, both = 2 * pairs * 320;
      q.grad(), kv.grad(), v.grad();
      time_both(s, "attention 16 x 192 / 128, T 4096" + how, both, 2.5 * both, [&] {
        return attention(q, kv, v, {H, H, 192, 128, 0.07f}, Batch::one(T));
      });
    }
    s.arena.rewind(mark);
    for (auto [heads, D] : {std::pair<int64_t, int64_t>{8, 32}, {8, 64}, {H, 128}}) {
      if (!wanted("delta")) break;
      Var q(s.c, s.random({T, heads * D}, 0.09, 1)), k(s.c, s.random({T, heads * D}, 0.09, 2)), v(s.c, s.random({T, heads * D}, 1, 3));
      Var g(s.c, s.random({T, heads * D}, 0, 4)), beta(s.c, s.random({T, heads}, 0.3, 5));
      q.grad(), k.grad(), v.grad(), g.grad(), beta.grad();
      const double flops = double(T * heads) * 6 * double(D * D);
      for (int64_t sequences : {1, 8})
        time_both(s, fmt::format("delta rule {} x {} x {}, {} of {}", heads, D, D, sequences, T / sequences) + how, flops, 2 * flops, [&] {
          return delta_rule(q, k, v, g, beta, {heads, D, D, 0.09f}, Batch::of_lengths(std::vector<int64_t>(size_t(sequences), T / sequences)),
                            nullptr);
        });
      s.arena.rewind(mark);
    }
    s.arena.rewind(mark);
    if (wanted("experts")) {
      const int64_t l = 512, m = 768, E = 8, k = 2;
      std::vector<std::unique_ptr<Param>> params;
      auto weight = [&](Shape shape) {
        params.push_back(std::make_unique<Param>());
        params.back()->value = s.random(shape, 0.04, 9), params.back()->grad = s.random(shape, 0, 9);
        return params.back().get();
      };
      ExpertWeights w;
      for (int64_t e = 0; e < E; ++e) w.gate.push_back(weight({m, l})), w.up.push_back(weight({m, l})), w.down.push_back(weight({l, m}));
      Var z(s.c, s.random({T, l}, 1, 7));
      Routing r;
      r.weights = Var(s.c, s.random({T, k}, 1, 8));
      r.scores = s.arena.lend(DType::f32, {T, E});
      r.experts = s.arena.lend(DType::i32, {T, k});
      std::vector<int32_t> chosen;
      for (int32_t i = 0; i < T * k; ++i) chosen.push_back((i * 5 + i / 16) % 8);
      write(r.experts, chosen.data());
      z.grad(), r.weights.grad();
      const double flops = 6.0 * double(T * k * l * m);
      time_both(s, "8 experts, top 2, 512 x 768, T 4096" + how, flops, 2 * flops, [&] {
        return experts(z, r, w, {Activation::Kind::situ, 4, 25, 0});
      });
    }
    s.arena.rewind(mark);
  }
  for (int n = 0; n < 6 && wanted("update"); ++n) {
    constexpr int64_t kShapes[3][3] = {{16, 128, 2048}, {4, 1024, 1024}, {1, 2048, 8192}};
    const auto& [blocks, rows, cols] = kShapes[n / 2];
    s.c.bf16_products = n % 2;
    const size_t mark = s.arena.mark();
    Tensor x = s.random({blocks, rows, cols}, 1, 3);
    cudaEvent_t a, b;
    GPU(cudaEventCreate(&a));
    GPU(cudaEventCreate(&b));
    std::vector<double> t;
    for (int i = 0; i < 5; ++i) {
      GPU(cudaEventRecord(a, static_cast<cudaStream_t>(gpu::stream())));
      newton_schulz(s.c, x);
      GPU(cudaEventRecord(b, static_cast<cudaStream_t>(gpu::stream())));
      t.push_back(now_us(a, b));
    }
    std::sort(t.begin(), t.end());
    std::printf("time Newton-Schulz%s, %lld x %lld x %lld: %.1f us\n", n % 2 ? ", two bf16" : ", float32", static_cast<long long>(blocks),
                static_cast<long long>(rows), static_cast<long long>(cols), t[2]);
    s.arena.rewind(mark);
  }
  return 0;
}
