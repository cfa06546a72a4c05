// How fast are attention and the mix over depth, against what this machine can do? Limits are measured in the same run, in turns with what they
// limit: oneDNN's float32 product and a plain read of memory. Medians of several runs.
//
//   bench_attention [threads [plain|avx2|avx512]]      with one thread the clock is that thread's processor time, so that a busy machine
//                                                      disturbs little
#include <fmt/core.h>
#include <oneapi/dnnl/dnnl.h>
#include <time.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <string_view>
#include <vector>

#include "bench/stopwatch.h"
#include "k3/core/isa.h"
#include "k3/core/rng.h"
#include "k3/core/plain_read.h"
#include "k3/core/threads.h"
#include "k3/ops/attention/attention.h"
#include "k3/ops/depth_mix/depth_mix.h"
#include "k3/tape/tape.h"

using namespace k3;

namespace {

constexpr int kRuns = 7;

double product_seconds(double& flops) {
  const int64_t n = 1024;
  static std::vector<float> a(n * n, 1), b(n * n, 1), c(n * n);
  flops = 2.0 * n * n * n;
  return timed([&] { dnnl_sgemm('N', 'N', n, n, n, 1, a.data(), n, b.data(), n, 0, c.data(), n); });
}
double read_rate() {  // bytes/s; also empties the caches
  static PlainRead plain(uint64_t(128) << 20);
  return plain.rate();
}

class Step {
 public:
  Step() : arena_(size_t(4) << 30) { context.arena = &arena_, context.tape = &tape_; }
  Var input(Shape s, uint64_t seed) {
    Var x(context, DType::f32, s);
    for (int64_t i = 0; i < x.size(); ++i) x.f32()[i] = float(Rng{seed, 1}.uniform(uint64_t(i)) - 0.5);
    return x;
  }
  Param param(Shape s, uint64_t seed) {
    Param p;
    p.name = "weight", p.value = input(s, seed).value(), p.grad = arena_.lend_zeroed(DType::f32, s);
    return p;
  }
  void backward() { tape_.run_backward(); }
  Arena& arena() { return arena_; }
  Context context;

 private:
  Arena arena_;
  Tape tape_;
};

void prefill(int64_t tokens) {
  const AttentionShape s{8, 8, 192, 128, 0.0722f};
  Step step;
  Var q = step.input({tokens, 8 * 192}, 1), k = step.input({tokens, 8 * 192}, 2), v = step.input({tokens, 8 * 128}, 3);
  q.grad(), k.grad(), v.grad();
  const size_t mark = step.arena().mark();
  std::vector<double> forward, backward, limit;
  double product_flops = 0;
  for (int i = 0; i < kRuns; ++i) {
    step.arena().rewind(mark);
    Var y;
    limit.push_back(product_seconds(product_flops));
    forward.push_back(timed([&] { y = attention(q, k, v, s, Batch::one(tokens)); }));
    y.grad();
    backward.push_back(timed([&] { step.backward(); }));
  }
  const double pairs = 8.0 * double(tokens) * double(tokens + 1) / 2, rate = product_flops / median(limit);
  const double f = 2 * pairs * (192 + 128) / median(forward), b = 2 * pairs * (3 * 192 + 2 * 128) / median(backward);
  fmt::print(
      "attention, 8 heads of 192 / 128, {:5} tokens   forward {:6.1f} GFLOP/s = {:3.0f} %   backward {:6.1f} = {:3.0f} %   of dnnl_sgemm {:.1f}\n",
      tokens, f / 1e9, 100 * f / rate, b / 1e9, 100 * b / rate, rate / 1e9);
}

void decode(int64_t context, int64_t heads, bool keep_expanded) {
  const MlaShape s{heads, 128, 64, 128, 512, 0.0722f};
  Step step;
  step.context.tape = nullptr, step.context.deterministic = keep_expanded;
  LatentCache cache(1, s, keep_expanded);
  cache.extend(0, context);
  const int64_t floats = TokenCache::kBlockTokens * int64_t(cache.bytes_per_token() / sizeof(float));
  for (int64_t i = 0; i * TokenCache::kBlockTokens < context; ++i)
    for (int64_t j = 0; j < floats; ++j) cache.block(0, i)[j] = float(j % 7) * 0.1f;
  Var q = step.input({1, heads * 192}, 1), c = step.input({1, 512}, 2), k_pe = step.input({1, 64}, 3);
  Param kv_b = step.param({heads * 256, 512}, 4);
  Batch batch = Batch::one(1);
  batch.slots = {0};
  std::vector<double> time, limit, product;
  double product_flops = 0;
  const size_t mark = step.arena().mark();
  for (int i = 0; i < 3 * kRuns; ++i) {
    step.arena().rewind(mark);
    product.push_back(product_seconds(product_flops));
    limit.push_back(read_rate());
    time.push_back(timed([&] { mla_attention(q, c, k_pe, kv_b, s, batch, &cache); }));
  }
  const double bytes = double(context) * double(cache.bytes_per_token()) + double(kv_b.value.bytes());
  const double flops = 2.0 * double(heads) * (double(context) * (keep_expanded ? 320 : 1088) + 2 * 128 * 512);
  const double rate = bytes / median(time), plain = median(limit), most = product_flops / median(product);
  fmt::print(
      "mla decode, {}, {:2} heads, context {:5}   {:8.1f} us   {:5.1f} GB/s = {:3.0f} % of a plain read {:.1f}   {:5.1f} GFLOP/s = {:3.0f} %\n",
      keep_expanded ? "expanded" : "absorbed", heads, context, 1e6 * median(time), rate / 1e9, 100 * rate / plain, plain / 1e9,
      flops / median(time) / 1e9, 100 * flops / median(time) / most);
}

void mix(int64_t sources, int64_t tokens, int64_t d) {
  Step step;
  std::vector<Var> v;
  for (int64_t i = 0; i < sources; ++i) v.push_back(step.input({tokens, d}, uint64_t(i))), v.back().grad();
  Param w = step.param({d}, 50), p = step.param({d}, 51);
  const size_t mark = step.arena().mark();
  std::vector<double> forward, backward, limit;
  for (int i = 0; i < 3 * kRuns; ++i) {
    step.arena().rewind(mark);
    Var h;
    limit.push_back(read_rate());
    forward.push_back(timed([&] { h = depth_mix(v, w, p, 1e-5f); }));
    h.grad();
    backward.push_back(timed([&] { step.backward(); }));
  }
  const double row = 4.0 * double(tokens * d), plain = median(limit);
  const double f = row * double(sources + 1) / median(forward), b = row * double(3 * sources + 1) / median(backward);
  fmt::print("depth_mix, {} sources of {} x {}   forward {:5.1f} GB/s = {:3.0f} %   backward {:5.1f} = {:3.0f} %   of a plain read {:.1f}\n", sources,
             tokens, d, f / 1e9, 100 * f / plain, b / 1e9, 100 * b / plain, plain / 1e9);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) set_thread_count(std::atoi(argv[1]));
  if (argc > 2)
    for (auto isa : {cpu::Isa::plain, cpu::Isa::avx2, cpu::Isa::avx512})
      if (argv[2] == std::string_view(cpu::name_of(isa))) cpu::force_isa(isa);
  fmt::print("{} threads, {}\n", thread_count(), cpu::name_of(cpu::isa()));
  for (int64_t tokens : {1024, 4096}) prefill(tokens);
  for (int64_t heads : {8, 32})
    for (int64_t context : {1024, 4096, 8192, 32768}) decode(context, heads, false);
  for (int64_t context : {1024, 4096, 8192}) decode(context, 8, true);
  for (int64_t sources : {3, 9}) mix(sources, 512, 2304);
  mix(9, 256, 7168);
}
