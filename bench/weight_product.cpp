// How fast are products with weights as they are stored? Decode (1 row) against a plain read of as many bytes; batch 64 and a prefill of 512
// against oneDNN's bfloat16 product of the same shape. Same threads, same run, the sides take turns; medians of several rounds.
//
//   bench_weight_product [threads]
#include <fmt/core.h>
#include <oneapi/dnnl/dnnl.hpp>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "bench/stopwatch.h"
#include "k3/core/buffer.h"
#include "k3/core/isa.h"
#include "k3/core/plain_read.h"
#include "k3/core/rng.h"
#include "k3/core/threads.h"
#include "k3/ops/linear/linear.h"
#include "k3/ops/linear/weight_product.h"
#include "k3/tape/tape.h"

using namespace k3;

namespace {

constexpr int kRounds = 9;
constexpr int64_t kBytes = int64_t(192) << 20;  // of weights: several times the caches

// As many weights (out, in) as fill kBytes.
struct Weights {
  std::vector<Param> list;
  Buffer memory;
  int64_t bytes = 0;
  Weights(Stored stored, int64_t out, int64_t in, int64_t at_most) {
    const int64_t value = out * (stored == Stored::f32 ? 4 * in : stored == Stored::bf16 ? 2 * in : stored == Stored::q8 ? in : in / 2);
    const int64_t scale = stored == Stored::q8 ? out * in / kGroupQ8 * 4 : stored == Stored::mxfp4 ? out * in / kGroupMxfp4 : 0;
    const int64_t count = std::clamp<int64_t>(kBytes / (value + scale), 1, at_most);
    bytes = count * (value + scale);
    memory = Buffer(size_t(bytes), Device::cpu);
    char* p = static_cast<char*>(memory.data());
    parallel_blocks(bytes, 1 << 20, [&](int64_t a, int64_t b) {
      for (int64_t i = a; i < b; i += 8) {
        uint64_t r = Rng{1, 2}.below(uint64_t(1) << 62, uint64_t(i));
        if (stored == Stored::f32 || stored == Stored::bf16) r = (r & 0x80ff80ff80ff80ffu) | 0x3c003c003c003c00u;  // 0.008 to 0.03
        std::memcpy(p + i, &r, size_t(std::min<int64_t>(8, b - i)));
      }
    });
    for (int64_t i = 0; i < count; ++i, p += value + scale) {
      Param w;
      w.shape = {out, in};
      if (stored == Stored::f32 || stored == Stored::bf16) w.value = Tensor(p, stored == Stored::f32 ? DType::f32 : DType::bf16, {out, in});
      if (stored == Stored::q8) w.value = Tensor(p, DType::u8, {out, in}), w.scale = Tensor(p + value, DType::f32, {out, in / kGroupQ8});
      if (stored == Stored::mxfp4) w.value = Tensor(p, DType::u8, {out, in / 2}), w.scale = Tensor(p + value, DType::u8, {out, in / kGroupMxfp4});
      if (stored == Stored::q8)
        for (int64_t s = 0; s < w.scale.size(); ++s) w.scale.f32()[s] = 0.001f;
      if (stored == Stored::mxfp4) std::memset(w.scale.data(), 120, w.scale.bytes());
      w.scales_checked = true;
      list.push_back(w);
    }
  }
};

struct Linear {
  Arena arena{size_t(2) << 30};
  Context context;
  Var x;
  Linear(int64_t rows, int64_t in) {
    context.arena = &arena;
    x = Var(context, DType::f32, {rows, in});
    for (int64_t i = 0; i < rows * in; ++i) x.f32()[i] = float(Rng{1, 1}.uniform(uint64_t(i)) - 0.5);
  }
  void run(Weights& w) {
    for (Param& p : w.list) {
      Scratch scratch(arena);
      linear(x, p);
    }
  }
};

const char* name_of(Stored s) { return s == Stored::f32 ? "f32" : s == Stored::bf16 ? "bf16" : s == Stored::q8 ? "q8" : "mxfp4"; }

void decode(Stored stored, int64_t out, int64_t in, int64_t rows) {
  Weights w(stored, out, in, 1 << 20);
  Linear x(rows, in);
  std::vector<double> ours, plain;
  PlainRead read{uint64_t(w.bytes)};
  x.run(w);
  for (int r = 0; r < kRounds; ++r) {
    plain.push_back(read.rate());
    ours.push_back(double(w.bytes) / timed([&] { x.run(w); }));
  }
  fmt::print("  {:<6} {:>5} x {:<5} rows {:<3} {:6.1f} GB/s of weights, plain read {:6.1f}: {:4.0f} %\n", name_of(stored), out, in, rows,
             median(ours) / 1e9, median(plain) / 1e9, 100 * median(ours) / median(plain));
}

// oneDNN's bfloat16 product x W^T with float32 results, its weights in the layout that it likes best.
struct Bf16Product {
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  dnnl::memory x, w, y;
  dnnl::matmul product;
  Bf16Product(int64_t m, int64_t n, int64_t k) {
    using dnnl::memory;
    const auto bf16 = memory::data_type::bf16;
    dnnl::matmul::desc shapes(memory::desc({m, k}, bf16, memory::format_tag::ab), memory::desc({k, n}, bf16, memory::format_tag::any),
                              memory::desc({m, n}, memory::data_type::f32, memory::format_tag::ab));
    dnnl::matmul::primitive_desc d(shapes, engine);
    product = dnnl::matmul(d);
    x = memory(d.src_desc(), engine), w = memory(d.weights_desc(), engine), y = memory(d.dst_desc(), engine);
    for (auto* t : {&x, &w}) std::memset(t->get_data_handle(), 0x3c, t->get_desc().get_size());
  }
  void run() {
    product.execute(stream, {{DNNL_ARG_SRC, x}, {DNNL_ARG_WEIGHTS, w}, {DNNL_ARG_DST, y}});
    stream.wait();
  }
};

void many_rows(Stored stored, int64_t out, int64_t in, int64_t rows, int64_t count) {
  Weights w(stored, out, in, count);
  Linear x(rows, in);
  Bf16Product peer(rows, out, in);
  std::vector<float> narrow_x(size_t(rows * in), 0.5f), wide_w(size_t(out * in), 0.5f), y(size_t(rows * out));
  std::vector<double> ours, bf16, f32;
  const double flops = 2.0 * double(rows) * double(out) * double(in);
  x.run(w), peer.run();
  for (int r = 0; r < kRounds; ++r) {
    bf16.push_back(flops / timed([&] { peer.run(); }));
    f32.push_back(flops / timed([&] { product(x_wt(narrow_x.data(), wide_w.data(), y.data(), rows, out, in)); }));
    ours.push_back(flops * double(w.list.size()) / timed([&] { x.run(w); }));
  }
  fmt::print("  {:<6} {:>5} x {:<5} rows {:<3} {:6.0f} GFLOP/s; oneDNN bf16 {:6.0f}: {:4.0f} %; float32 weights {:6.0f}: {:4.0f} %\n",
             name_of(stored), out, in, rows, median(ours) / 1e9, median(bf16) / 1e9, 100 * median(ours) / median(bf16), median(f32) / 1e9,
             100 * median(ours) / median(f32));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) set_thread_count(std::atoi(argv[1]));
  fmt::print("{} threads, {}\n", thread_count(), cpu::name_of(cpu::isa()));
  const std::string only = argc > 2 ? argv[2] : "";
  if (only != "many")
    for (Stored s : {Stored::mxfp4, Stored::bf16, Stored::q8}) {
      decode(s, 3072, 3584, 1);
      decode(s, 7168, 7168, 1);
    }
  if (only != "many") decode(Stored::mxfp4, 3072, 3584, 4), decode(Stored::mxfp4, 3072, 3584, 16);
  if (only != "decode")
    for (Stored s : {Stored::mxfp4, Stored::bf16, Stored::q8}) {
      many_rows(s, 3072, 3584, 64, 4);
      many_rows(s, 4096, 4096, 512, 1);
    }
}
