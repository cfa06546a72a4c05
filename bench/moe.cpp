// How fast are the experts and the Newton-Schulz iteration, against what oneDNN's float32 product reaches here? Two limits, measured in the
// same run on all threads: one large product, and as many independent products of one expert's (or one block's) own shape as there are.
// Medians of several runs; the two sides take turns, so that a busy machine slows both.
//
//   bench_moe [threads]
#include <fmt/core.h>
#include <oneapi/dnnl/dnnl.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <deque>
#include <functional>
#include <vector>

#include "bench/stopwatch.h"
#include "k3/core/rng.h"
#include "k3/core/threads.h"
#include "k3/ops/activation/activation_kernels.h"
#include "k3/ops/moe/balance.h"
#include "k3/ops/moe/moe.h"
#include "k3/ops/update/update.h"
#include "k3/tape/tape.h"

using namespace k3;

namespace {

constexpr int kRuns = 9;

// count independent products (m, n, k), FLOP/s
struct Plain {
  int64_t count, m, n, k;
  std::vector<float> a, b, c;
  Plain(int64_t count, int64_t m, int64_t n, int64_t k)
      : count(count), m(m), n(n), k(k), a(count * m * k, 1), b(count * n * k, 1), c(count * m * n) {}
  double rate() {
    double t = timed([&] {
      parallel_for(
          count, [&](int64_t i) { dnnl_sgemm('N', 'T', m, n, k, 1, a.data() + i * m * k, k, b.data() + i * n * k, k, 0, c.data() + i * m * n, n); });
    });
    return 2.0 * double(count) * double(m * n * k) / t;
  }
};

void fill(const Tensor& t, uint64_t seed, double scale) {
  parallel_blocks(t.size(), 1 << 14, [&](int64_t a, int64_t b) {
    for (int64_t i = a; i < b; ++i) t.f32()[i] = float(scale * (Rng{seed, 1}.uniform(uint64_t(i)) - 0.5));
  });
}

void bench_experts(int64_t n, int64_t e, int64_t k, int64_t l, int64_t m, Plain& large) {
  Arena weights(size_t(1) << 30), arena(size_t(4) << 30);
  std::deque<Param> params;
  auto param = [&](Shape s, double scale) {
    Param p;
    p.value = weights.lend(DType::f32, s), p.grad = weights.lend_zeroed(DType::f32, s);
    fill(p.value, params.size(), scale);
    return &params.emplace_back(p);
  };
  ExpertWeights w;
  for (int64_t i = 0; i < e; ++i) w.gate.push_back(param({m, l}, 0.2)), w.up.push_back(param({m, l}, 0.2)), w.down.push_back(param({l, m}, 0.2));
  Param *gate = param({e, l}, 0.2), *bias = param({e}, 0);
  Plain same(e, n * k / e, m, l);
  std::vector<double> forward, backward, router, observed, peak, grouped;
  for (int run = 0; run < kRuns + 1; ++run) {
    Scratch step(arena);
    Context c;
    Tape tape;
    c.arena = &arena, c.tape = &tape;
    Var z(c, DType::f32, {n, l});
    fill(z.value(), 77, 2);
    Routing r;
    MarginHistogram h(bias->value);
    double t_route = timed([&] { r = route(z, *gate, *bias, {.top_k = k}, Batch::one(n)); });
    double t_observe = timed([&] { observe(h, r, Batch::one(n)); });
    Var u;
    double t_forward = timed([&] { u = experts(z, r, w, {}); });
    fill(u.grad(), 78, 1), fill(r.weights.grad(), 79, 0), fill(z.grad(), 80, 0);
    double t_backward = timed([&] { tape.run_backward(); });
    double p = large.rate(), g = same.rate();
    if (run == 0) continue;  // pages become resident
    router.push_back(t_route), observed.push_back(t_observe), forward.push_back(t_forward), backward.push_back(t_backward);
    peak.push_back(p), grouped.push_back(g);
  }
  double flops = 6.0 * double(n * k) * double(l * m), f = flops / median(forward), b = 2 * flops / median(backward);
  double both = 3 * flops / (median(forward) + median(backward)), p = median(peak), g = median(grouped);
  fmt::print("experts: {} tokens, top {} of {}, l {}, m {}; oneDNN {:.0f} GFLOP/s large, {:.0f} on {} of ({}, {}, {})\n", n, k, e, l, m, p / 1e9,
             g / 1e9, e, n * k / e, m, l);
  auto line = [&](const char* what, double seconds, double rate) {
    fmt::print("  {:18} {:8.2f} ms {:7.0f} GFLOP/s  {:4.0f}% of large, {:4.0f}% of the experts' own shape\n", what, seconds * 1e3, rate / 1e9,
               100 * rate / p, 100 * rate / g);
  };
  line("forward", median(forward), f);
  line("backward (+router)", median(backward), b);
  line("both", median(forward) + median(backward), both);
  fmt::print("  {:18} {:8.2f} ms\n  {:18} {:8.2f} ms\n", "route", median(router) * 1e3, "observe", median(observed) * 1e3);
}

// One to eight tokens: bound by reading the weights of the experts they chose.
void bench_decode(DType type, int64_t n, int64_t e, int64_t k, int64_t l, int64_t m) {
  Arena weights(size_t(2) << 30), arena(size_t(1) << 30);
  std::deque<Param> params;
  auto param = [&](Shape s) {
    Param p;
    p.value = weights.lend(type, s);
    if (type == DType::f32)
      fill(p.value, params.size(), 0.2);
    else
      parallel_blocks(s.size(), 1 << 14, [&](int64_t a, int64_t b) {
        for (int64_t i = a; i < b; ++i) p.value.as<bf16>()[i] = to_bf16(float(i % 13) * 0.01f - 0.06f);
      });
    return &params.emplace_back(p);
  };
  ExpertWeights w;
  for (int64_t i = 0; i < e; ++i) w.gate.push_back(param({m, l})), w.up.push_back(param({m, l})), w.down.push_back(param({l, m}));
  std::vector<double> time;
  for (int run = 0; run < 41; ++run) {
    Scratch step(arena);
    Context c;
    c.arena = &arena;
    Var z(c, DType::f32, {n, l}), p(c, DType::f32, {n, k});
    fill(z.value(), 77, 2), fill(p.value(), 78, 1);
    Routing r;
    r.weights = p, r.experts = arena.lend(DType::i32, {n, k}), r.scores = arena.lend(DType::f32, {n, e});
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j < k; ++j) r.experts.i32()[i * k + j] = int32_t((run * 17 + i * 5 + j * 7) % e);  // others each time
    time.push_back(timed([&] { experts(z, r, w, {}); }));
  }
  double bytes = double(n * k) * 3 * double(l * m) * double(bytes_of(type));
  fmt::print("decode: {} tokens, top {} of {}, l {}, m {}, {:4}: {:7.2f} ms, {:5.1f} GB/s of weights if no expert is shared\n", n, k, e, l, m,
             name_of(type), median(time) * 1e3, bytes / median(time) / 1e9);
}

void bench_newton_schulz(int64_t blocks, int64_t rows, int64_t cols, Plain& large) {
  Arena arena(size_t(1) << 30), memory(size_t(1) << 30);
  Context c;
  c.arena = &arena;
  double flops = 0;
  c.on_cost = [&](std::string_view, const Cost& cost) { flops += cost.flops; };
  Tensor x = memory.lend(DType::f32, {blocks, rows, cols});
  int64_t m = std::min(rows, cols), n = std::max(rows, cols);
  Plain same(blocks, m, n, m);
  std::vector<double> time, peak, grouped;
  for (int run = 0; run < kRuns + 1; ++run) {
    fill(x, 5, 1);
    flops = 0;
    double t = timed([&] { newton_schulz(c, x); }), p = large.rate(), g = same.rate();
    if (run) time.push_back(t), peak.push_back(p), grouped.push_back(g);
  }
  double plain = double(blocks) * 5 * (4.0 * double(m * m) * double(n) + 2.0 * double(m * m * m)), t = median(time);
  fmt::print(
      "newton_schulz: {:3} of ({}, {}) {:8.2f} ms {:7.0f} GFLOP/s = {:3.0f}% of large, {:3.0f}% of own shape; as the textbook iteration {:5.0f} = "
      "{:3.0f}%\n",
      blocks, rows, cols, t * 1e3, flops / t / 1e9, 100 * flops / t / median(peak), 100 * flops / t / median(grouped), plain / t / 1e9,
      100 * plain / t / median(peak));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) set_thread_count(std::atoi(argv[1]));
  fmt::print("{} threads\n", thread_count());
  Plain large(thread_count(), 768, 768, 768);
  bench_experts(2048, 32, 4, 128, 128, large);
  bench_experts(4096, 64, 8, 256, 256, large);
  for (DType type : {DType::f32, DType::bf16})
    for (int64_t n : {1, 4}) bench_decode(type, n, 64, 8, 512, 512);
  for (auto [blocks, rows, cols] : {std::array<int64_t, 3>{96, 128, 128}, {96, 256, 128}, {16, 64, 512}, {16, 128, 1024}, {4, 512, 768}})
    bench_newton_schulz(blocks, rows, cols, large);
}
