// How fast is the delta rule, against what this machine can do? Limits are measured in the same run: oneDNN's float32 product and a plain
// read of memory, on all threads. Medians of several runs.
//
//   bench_delta_rule [threads] [gates]      gates: only KDA against GDN and DeltaNet
#include <fmt/core.h>
#include <oneapi/dnnl/dnnl.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bench/stopwatch.h"
#include "k3/core/isa.h"
#include "k3/core/plain_read.h"
#include "k3/core/rng.h"
#include "k3/core/threads.h"
#include "k3/ops/delta_rule/delta_rule.h"
#include "k3/tape/tape.h"

using namespace k3;

namespace {

double median_of(int runs, const std::function<double()>& seconds) {
  std::vector<double> t;
  for (int i = 0; i < runs; ++i) t.push_back(seconds());
  return median(t);
}
double product_rate() {  // FLOP/s
  const int64_t n = 1536;
  std::vector<float> a(n * n, 1), b(n * n, 1), c(n * n);
  auto once = [&] { return timed([&] { dnnl_sgemm('N', 'N', n, n, n, 1, a.data(), n, b.data(), n, 0, c.data(), n); }); };
  once();
  return 2.0 * n * n * n / median_of(7, once);
}
double read_rate() {  // bytes/s
  PlainRead plain(uint64_t(256) << 20);
  return 1 / median_of(9, [&] { return 1 / plain.rate(); });
}

// The rule itself, token by token, one read and one write of S a token: what there was before chunks.
__attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4"), optimize("O3"))) void plain_step(float* __restrict s, const float* q,
                                                                                                              const float* k, const float* v,
                                                                                                              const float* g, float beta, float scale,
                                                                                                              float* __restrict o, int64_t K,
                                                                                                              int64_t V) {
  float m[256] = {}, p[256] = {}, u[256], kq = 0;
  for (int64_t i = 0; i < K; ++i) {
    float d = std::exp(g[i]), ki = d * k[i], qi = d * q[i];
    kq += k[i] * q[i];
    for (int64_t j = 0; j < V; ++j) m[j] += ki * s[i * V + j], p[j] += qi * s[i * V + j];
  }
  for (int64_t j = 0; j < V; ++j) u[j] = beta * (v[j] - m[j]), o[j] = scale * (p[j] + kq * u[j]);
  for (int64_t i = 0; i < K; ++i) {
    float d = std::exp(g[i]), ki = k[i];
    for (int64_t j = 0; j < V; ++j) s[i * V + j] = d * s[i * V + j] + ki * u[j];
  }
}

struct Problem {
  int64_t N, H, D, G;
  Arena arena;
  Tape tape;
  Context c;
  Var q, k, v, g, beta;
  double flops = 0;

  Problem(int64_t N, int64_t H, int64_t D, int64_t G, bool train) : N(N), H(H), D(D), G(G), arena(size_t(3) << 30) {
    c.arena = &arena, c.tape = train ? &tape : nullptr;
    c.on_cost = [this](std::string_view, const Cost& cost) { flops += cost.flops; };
    auto values = [&](int64_t cols, uint64_t seed, auto f) {
      Var x(c, DType::f32, {N, cols});
      for (int64_t i = 0; i < x.size(); ++i) x.f32()[i] = f(float(Rng{seed, 1}.normal(i)));
      return x;
    };
    float unit = 1 / std::sqrt(float(D));
    q = values(H * D, 1, [&](float x) { return x * unit; }), k = values(H * D, 2, [&](float x) { return x * unit; });
    v = values(H * D, 3, [](float x) { return x; }), beta = values(H, 5, [](float x) { return 1 / (1 + std::exp(-x)); });
    if (G) g = values(H * G, 4, [](float x) { return -5 / (1 + std::exp(-x + 3)); });
  }
  DeltaShape shape() const { return {H, D, D, 1 / std::sqrt(float(D))}; }
};

void train_row(const char* name, int64_t sequences, int64_t T, int64_t H, int64_t D, int64_t G, double limit) {
  Problem p(sequences * T, H, D, G, true);
  Batch batch = Batch::of_lengths(std::vector<int64_t>(sequences, T));
  std::vector<double> forward, backward;
  double f_flops = 0, b_flops = 0;
  for (const Var& x : {p.q, p.k, p.v, p.beta}) x.grad();
  if (G) p.g.grad();
  size_t mark = p.arena.mark();
  for (int run = 0; run < 8; ++run) {
    p.arena.rewind(mark);
    p.flops = 0;
    Var o;
    forward.push_back(timed([&] { o = delta_rule(p.q, p.k, p.v, p.g, p.beta, p.shape(), batch, nullptr); }));
    f_flops = p.flops;
    o.grad();
    backward.push_back(timed([&] { p.tape.run_backward(); }));
    b_flops = p.flops - f_flops;
  }
  std::sort(forward.begin(), forward.end()), std::sort(backward.begin(), backward.end());
  double f = forward[forward.size() / 2], b = backward[backward.size() / 2];
  fmt::print("{:26} forward {:7.2f} ms {:6.1f} GFLOP/s {:4.0f} %   backward {:7.2f} ms {:6.1f} GFLOP/s {:4.0f} %\n", name, f * 1e3, f_flops / f / 1e9,
             100 * f_flops / f / limit, b * 1e3, b_flops / b / 1e9, 100 * b_flops / b / limit);
}

void step_row(int64_t T, int64_t H, int64_t D) {
  Problem p(T, H, D, D, false);
  std::vector<float> s(H * D * D), o(H * T * D);
  double t = median_of(3, [&] {
    return timed([&] {
      parallel_for(H, [&](int64_t h) {
        float* sh = &s[h * D * D];
        std::fill(sh, sh + D * D, 0.0f);
        for (int64_t t = 0; t < T; ++t) {
          int64_t r = t * H + h;
          plain_step(sh, p.q.f32() + r * D, p.k.f32() + r * D, p.v.f32() + r * D, p.g.f32() + r * D, p.beta.f32()[r], 0.1f, &o[r * D], D, D);
        }
      });
    });
  });
  fmt::print("{:26} forward {:7.2f} ms   (token by token, no chunks)\n", "  plain step loop", t * 1e3);
}

void decode(int64_t B, int64_t H, int64_t D, double limit) {
  const double KV = double(D) * D;
  Problem p(B, H, D, D, false);
  Batch batch = Batch::of_lengths(std::vector<int64_t>(B, 1));
  for (int64_t b = 0; b < B; ++b) batch.slots.push_back(int32_t(b));
  DeltaState state(p.shape(), B);
  fmt::print("decode, {} sequences x {} heads of {} ({:.0f} MB of state), mean of 16 steps\n", B, H, D, double(B * state.bytes_per_slot()) / 1e6);
  for (int64_t context : {1, 16, 128, 1024, 8192, 32768}) {
    {
      Problem long_one(context, H, D, D, false);
      Batch one = Batch::one(context);
      one.slots = {0};
      state.reset(0);
      delta_rule(long_one.q, long_one.k, long_one.v, long_one.g, long_one.beta, p.shape(), one, &state);
      for (int64_t b = 1; b < B; ++b) state.copy(b, 0);
    }
    auto sixteen = [&] {
      return timed([&] {
        for (int i = 0; i < 16; ++i) {
          Scratch scratch(p.arena);
          delta_rule(p.q, p.k, p.v, p.g, p.beta, p.shape(), batch, &state);
        }
      });
    };
    double t = median_of(5, sixteen) / 16;
    // S read each step and written once in 16 (context 1 has none before its 17th token); half the rows read; one row written; q, k, v, g, o
    double bytes = double(B * H) * 4 * (KV * (1 + 1.0 / 16) + 8 * 3 * D + 3 * D + 5 * D);
    fmt::print("  context {:6}   {:7.3f} ms a step  {:6.2f} us a head  {:5.1f} GB/s {:4.0f} %\n", context, t * 1e3,
               t * 1e6 / double(B * H) * thread_count(), bytes / t / 1e9, 100 * bytes / t / limit);
  }
  std::vector<float> s(B * H * D * D), o(B * H * D);
  double t = median_of(9, [&] {
    return timed([&] {
      parallel_for(B * H, [&](int64_t r) {
        plain_step(&s[r * D * D], p.q.f32() + r * D, p.k.f32() + r * D, p.v.f32() + r * D, p.g.f32() + r * D, p.beta.f32()[r], 0.1f, &o[r * D], D, D);
      });
    });
  });
  double bytes = double(B * H) * 4 * (2 * KV + 5 * D);
  fmt::print("  plain step       {:7.3f} ms a step  {:6.2f} us a head  {:5.1f} GB/s {:4.0f} %\n", t * 1e3, t * 1e6 / double(B * H) * thread_count(),
             bytes / t / 1e9, 100 * bytes / t / limit);
}

// GDN (a gate a head) and DeltaNet (no gate) run on the kernel of KDA (a gate a channel): forward and backward against KDA's, in turns, so that
// what else the machine does strikes all three alike.
void gates(int64_t T, int64_t H, int64_t D) {
  std::vector<double> seconds[3], ratio[3];
  std::vector<std::unique_ptr<Problem>> problems;
  size_t mark[3];
  for (int i = 0; i < 3; ++i) {
    Problem& p = *problems.emplace_back(std::make_unique<Problem>(T, H, D, i == 0 ? D : i == 1 ? 1 : 0, true));
    for (const Var& x : {p.q, p.k, p.v, p.beta}) x.grad();
    if (i < 2) p.g.grad();
    mark[i] = p.arena.mark();
  }
  for (int run = 0; run < 9; ++run)
    for (int i = 0; i < 3; ++i) {
      Problem& p = *problems[size_t(i)];
      p.arena.rewind(mark[i]);
      seconds[i].push_back(timed([&] {
        delta_rule(p.q, p.k, p.v, p.g, p.beta, p.shape(), Batch::one(T), nullptr).grad();
        p.tape.run_backward();
      }));
      ratio[i].push_back(seconds[i].back() / seconds[0].back());
    }
  for (auto* list : {&seconds, &ratio})
    for (auto& v : *list) std::sort(v.begin(), v.end());
  fmt::print("{} tokens, {} x {}, forward and backward: KDA {:.1f} ms, GDN {:.1f} ms ({:.2f} of it), DeltaNet {:.1f} ms ({:.2f})\n", T, H, D,
             seconds[0][4] * 1e3, seconds[1][4] * 1e3, ratio[1][4], seconds[2][4] * 1e3, ratio[2][4]);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) set_thread_count(std::atoi(argv[1]));
  if (argc > 2 && std::string(argv[2]) == "gates") {
    for (int64_t D : {32, 64, 128}) gates(2048, 1024 / D, D);
    return 0;
  }
  auto best = cpu::isa();
  double flops = product_rate(), bytes = read_rate();
  fmt::print("{} threads, {}: oneDNN product {:.0f} GFLOP/s, plain read {:.1f} GB/s\n\n", thread_count(), cpu::name_of(best), flops / 1e9,
             bytes / 1e9);
  train_row("4096 tokens, 8 x 128, KDA", 1, 4096, 8, 128, 128, flops);
  step_row(4096, 8, 128);
  train_row("4096 tokens, 8 x 128, GDN", 1, 4096, 8, 128, 1, flops);
  train_row("4096 tokens, 8 x 128, none", 1, 4096, 8, 128, 0, flops);
  train_row("32 x 128 tokens, 8 x 128", 32, 128, 8, 128, 128, flops);
  train_row("4096 tokens, 8 x 64", 1, 4096, 8, 64, 64, flops);
  train_row("4096 tokens, 8 x 32", 1, 4096, 8, 32, 32, flops);
  train_row("1024 tokens, 4 x 256", 1, 1024, 4, 256, 256, flops);
  for (auto isa : {cpu::Isa::avx2, cpu::Isa::plain})
    if (isa < best) {
      cpu::force_isa(isa);
      train_row(fmt::format("8 x 128, KDA, {}", cpu::name_of(isa)).c_str(), 1, 4096, 8, 128, 128, flops);
    }
  cpu::force_isa(best);
  fmt::print("\n");
  decode(256, 8, 128, bytes);
}
