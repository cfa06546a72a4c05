// The GPU kernels at K3's own shapes (7168 wide, 96 heads of 128, 896 experts): medians of replayed graphs, inputs random, gates of both kinds.
#include "k3/cli/bench_ops.h"
#include "k3/core/error.h"

#ifdef K3_CUDA
#include <fmt/format.h>

#include <cmath>

#include "k3/cli/bench_gpu.h"
#include "k3/core/rates_cuda.h"
#include "k3/ops/attention/attention_cuda.h"
#include "k3/ops/delta_rule/delta_rule_cuda.h"
#include "k3/ops/depth_mix/depth_mix_cuda.h"
#include "k3/ops/linear/blas_cuda.h"
#include "k3/ops/loss/loss_cuda.h"
#include "k3/ops/moe/expert_product_cuda.h"
#include "k3/ops/moe/experts_narrow_cuda.h"
#include "k3/ops/moe/route_cuda.h"
#include "k3/ops/update/adamw_cuda.h"
#include "k3/ops/update/newton_schulz_cuda.h"
#endif

namespace k3 {

#ifdef K3_CUDA

namespace {

struct Gates {
  const char* name;
  bool bounded;
  double mean;
};
constexpr Gates kGates[] = {{"N(0,1)", true, 0}, {"slow", true, -4}, {"softplus, N(0,1)", false, 0}, {"softplus, slow", false, -4}};
constexpr int D = cuda::kDeltaHead;

void linears(OpTable& t, Room& m) {
  struct Size {
    int64_t rows, in, out;
  };
  for (const Size& s : {Size{8192, 7168, 12288}, Size{8192, 12288, 7168}}) {
    const bf16 *x = m.narrow(s.rows * s.in), *w = m.narrow(s.in * s.out, 0.01);
    float* y = m.blank<float>(s.rows * s.out);
    const Product p{.m = s.rows, .n = s.out, .k = s.in, .lda = s.in, .ldb = s.in, .b_transposed = true, .c = y, .ldc = s.out};
    t.add({"linear", fmt::format("T {}, {} -> {}", s.rows, s.in, s.out),
           median_us([&](int, void* st) { return cuda::blas_product(p, x, w, st); }, 1, 20),
           2.0 * double(s.rows * s.in + s.in * s.out) + 4.0 * double(s.rows * s.out), 2.0 * double(s.rows * s.in) * double(s.out), true});
    m.end();
  }
}

struct DeltaInputs {
  bf16 *q, *k, *v, *x, *b, *o;
  float *A, *bias, *state;
};
DeltaInputs delta_inputs(Room& m, int64_t tokens, int heads, int sequences, const Gates& g) {
  const int64_t w = int64_t(heads) * D, n = tokens * w;
  return {m.narrow(n),      m.narrow(n),           m.narrow(n),      m.narrow(n, 1, g.mean),           m.narrow(tokens * heads),
          m.blank<bf16>(n), m.floats(heads, 0.05), m.floats(w, 0.1), m.blank<float>(sequences * w * D)};
}

void kda(OpTable& t, Room& m) {
  struct Size {
    const char* lead;
    int sequences, tokens, heads;
  };
  for (const Size& s : {Size{"T", 1, 8192, 96}, Size{"T", 1, 2048, 96}, Size{"8 x", 8, 1024, 96}, Size{"T", 1, 32768, 12}})
    for (const Gates& g : kGates) {
      const int64_t w = s.heads * D, N = int64_t(s.sequences) * s.tokens, chunks = int64_t(s.sequences) * s.tokens / cuda::kDeltaChunk;
      const DeltaInputs in = delta_inputs(m, N, s.heads, s.sequences, g);
      std::vector<int> begins, chunk_begins;
      for (int i = 0; i <= s.sequences; ++i) begins.push_back(i * s.tokens), chunk_begins.push_back(i * s.tokens / cuda::kDeltaChunk);
      cuda::DeltaChunkArgs a{.q = in.q,
                             .k = in.k,
                             .v = in.v,
                             .x = in.x,
                             .b = in.b,
                             .q_stride = w,
                             .k_stride = w,
                             .v_stride = w,
                             .x_stride = w,
                             .b_stride = s.heads,
                             .o_stride = w,
                             .o = in.o,
                             .gate = {g.bounded, -5.f, in.A, in.bias},
                             .scale = 0.0884f,
                             .begins = m.integers(begins),
                             .sequences = s.sequences,
                             .heads = s.heads,
                             .tokens = N,
                             .state_out = in.state,
                             .ahead = m.blank<char>(cuda::delta_ahead_bytes(s.heads, s.sequences))};
      const std::string shape = fmt::format("{} {}, {} heads, {}", s.lead, s.tokens, s.heads, g.name);
      // q, k, v, gate read and o written in bf16, the final states; chunks of 32: kernels.md's count of operations
      const double bytes = 10.0 * double(N * w) + 2.0 * double(N * s.heads) + 4.0 * double(s.sequences * w * D),
                   flops = 110e9 * double(N * s.heads) / (8192.0 * 96);
      t.add({"kda forward", shape, median_us([&](int, void* st) { return delta_chunk_forward(a, st); }, 1, 15), bytes, flops, true});
      if (s.tokens == 8192) {
        a.snapshots = m.blank<bf16>(chunks * w * D), a.u = m.blank<bf16>(N * w), a.chunk_begins = m.integers(chunk_begins);
        const cuda::DeltaBackwardArgs b{.forward = a,
                                        .chunks = int(chunks),
                                        .d_o = m.narrow(N * w),
                                        .dq = m.blank<bf16>(N * w),
                                        .dk = m.blank<bf16>(N * w),
                                        .dv = m.blank<bf16>(N * w),
                                        .dx = m.blank<bf16>(N * w),
                                        .db = m.blank<bf16>(N * s.heads),
                                        .dA_log = m.blank<float>(s.heads),
                                        .ddt_bias = m.blank<float>(w),
                                        .d_snapshots = m.blank<bf16>(chunks * w * D),
                                        .partial = m.blank<float>(cuda::delta_backward_partial(chunks, s.heads))};
        t.add({"kda forward + backward", shape,
               median_us(
                   [&](int, void* st) {
                     const char* e = delta_chunk_forward(a, st);
                     return e ? e : delta_chunk_backward(b, st);
                   },
                   1, 12),
               bytes + 1.8e9 + 8.0 * double(chunks * w * D), flops + 450e9, true});
      }
      m.end();
    }
}

void decode(OpTable& t, Room& m) {
  struct Size {
    int rows, heads, sets;
  };
  for (const Size& s : {Size{1, 96, 24}, Size{64, 96, 2}, Size{128, 12, 4}})
    for (const Gates& g : {kGates[0], kGates[1]}) {
      const int64_t w = s.heads * D, slots = s.rows * s.sets;
      bf16* in = m.narrow(5 * s.rows * w);
      bf16* x = m.narrow(s.rows * w, 1, g.mean);
      float* conv = m.floats(w * 12, 0.5);
      std::vector<int*> sets;
      for (int i = 0; i < s.sets; ++i) {
        std::vector<int> v;
        for (int r = 0; r < s.rows; ++r) v.push_back(i * s.rows + r);
        sets.push_back(m.integers(v));
      }
      cuda::DeltaStepArgs a{.q = in,
                            .k = in + s.rows * w,
                            .v = in + 2 * s.rows * w,
                            .x = x,
                            .g = in + 4 * s.rows * w,
                            .b = m.narrow(s.rows * s.heads),
                            .q_stride = w,
                            .k_stride = w,
                            .v_stride = w,
                            .x_stride = w,
                            .g_stride = w,
                            .b_stride = s.heads,
                            .y_stride = w,
                            .q_conv = conv,
                            .k_conv = conv + w * 4,
                            .v_conv = conv + w * 8,
                            .window = m.narrow(slots * 9 * w),
                            .state = m.floats(slots * w * D, 0.3),
                            .gate = {true, -5.f, m.floats(s.heads, 0.05), m.floats(w, 0.1)},
                            .scale = 0.0884f,
                            .norm = m.floats(D, 0.1, 1),
                            .eps = 1e-5f,
                            .y = m.blank<bf16>(s.rows * w),
                            .rows = s.rows,
                            .heads = s.heads};
      for (bool chained : {false, true}) {
        a.chained = chained;
        t.add({"kda decode", fmt::format("B {}, {} heads, {}", s.rows, s.heads, g.name),
               median_us(
                   [&](int i, void* st) {
                     a.slots = sets[size_t(i % s.sets)];
                     return delta_step(a, st);
                   },
                   24),
               double(s.rows) * double(w) * (8.0 * D + 36 + 12), 0, false, chained ? "chained launches" : ""});
      }
      m.end();
    }
}

void prefill(OpTable& t, Room& m) {
  for (bool gated : {false, true}) {
    const int64_t T = 8192, H = 96;
    const bf16 *q = m.narrow(T * H * 192), *kv = m.narrow(T * H * 256), *shared = m.narrow(T * 64), *gate = m.narrow(T * H * 128);
    const int* begins = m.integers({0, int(T)});
    const cuda::PrefillArgs a{.q = q,
                              .k = kv,
                              .v = kv + 128,
                              .shared = shared,
                              .q_stride = H * 192,
                              .kv_stride = H * 256,
                              .kv_head_stride = 256,
                              .shared_stride = 64,
                              .gate_stride = H * 128,
                              .q_begins = begins,
                              .k_begins = begins,
                              .sequences = 1,
                              .heads = int(H),
                              .longest_q = int(T),
                              .q_rows = T,
                              .k_rows = T,
                              .scale = 0.0722f,
                              .gate = gated ? gate : nullptr,
                              .o = m.blank<bf16>(T * H * 128),
                              .lse = m.blank<float>(T * H)};
    t.add({"mla prefill", gated ? "T 8192, 96 heads, gated" : "T 8192, 96 heads",
           median_us([&](int, void* st) { return prefill_forward(a, st); }, 1, 15), 2.0 * double(T * H) * (192 + 256 + 128 + (gated ? 128 : 0)),
           double(H) * double(T) * double(T) * 320, true});
    if (!gated) {
      const cuda::PrefillBackwardArgs b{.q = q,
                                        .k = kv,
                                        .v = kv + 128,
                                        .shared = shared,
                                        .dy = gate,
                                        .q_stride = H * 192,
                                        .kv_stride = H * 256,
                                        .kv_head_stride = 256,
                                        .shared_stride = 64,
                                        .begins = begins,
                                        .sequences = 1,
                                        .heads = int(H),
                                        .longest = int(T),
                                        .rows = T,
                                        .scale = a.scale,
                                        .lse = a.lse,
                                        .d = m.blank<float>(T * H),
                                        .dq = m.blank<float>(T * H * 192),
                                        .dk = m.blank<float>(T * H * 256),
                                        .dv = m.blank<float>(T * H * 256),
                                        .dshared = m.blank<float>(H * T * 64)};
      t.add({"mla prefill backward", "T 8192, 96 heads", median_us([&](int, void* st) { return prefill_backward(b, st); }, 1, 7),
             double(T * H) * (2 * 704 + 4 * (192 + 256 + 64)), double(H) * double(T) * double(T) * 832, true});
    }
    m.end();
  }
}

void latent(OpTable& t, Room& m) {
  struct Size {
    int rows, length, heads;
  };
  for (const Size& s : {Size{64, 8192, 96}, Size{128, 4096, 96}, Size{64, 8192, 12}, Size{1, 131072, 96}, Size{1, 8192, 96}}) {
    const int pages = s.length / cuda::kPageTokens, split = cuda::latent_decode_split(s.rows, s.heads, s.length, 132);
    std::vector<int> table(size_t(s.rows * pages));
    for (size_t i = 0; i < table.size(); ++i) table[i] = int(i);
    for (size_t i = table.size(); i-- > 1;) std::swap(table[i], table[Rng{5, 5}.below(i + 1, i)]);
    const cuda::LatentDecodeArgs a{.q = m.narrow(int64_t(s.rows) * s.heads * 576),
                                   .q_stride = s.heads * 576,
                                   .pages = m.narrow(int64_t(s.rows) * pages * 64 * 576),
                                   .page_count = int64_t(s.rows) * pages,
                                   .table = m.integers(table),
                                   .table_stride = pages,
                                   .lengths = m.integers(std::vector<int>(size_t(s.rows), s.length)),
                                   .rows = s.rows,
                                   .heads = s.heads,
                                   .longest = s.length,
                                   .scale = 0.0722f,
                                   .split_pages = split,
                                   .partial = m.blank<float>(cuda::latent_decode_workspace(s.rows, s.heads, s.length, split)),
                                   .out = m.blank<bf16>(int64_t(s.rows) * s.heads * 512)};
    const double keys = double(s.rows) * s.length;
    t.add({"mla decode", fmt::format("B {}, L {}, {} heads", s.rows, s.length, s.heads),
           median_us([&](int, void* st) { return latent_decode(a, st); }, 4), 1152 * keys + 2.0 * s.rows * s.heads * (576 + 512),
           2 * keys * s.heads * (576 + 512), true});
    m.end();
  }
}

void experts(OpTable& t, Room& m) {
  struct Size {
    const char* name;
    int experts, rows, sets;
  };
  constexpr int L = 3584, F = 3072;
  for (const Size& s : {Size{"1 token, 16 experts", 16, 16, 3}, Size{"56 experts, 56 rows", 56, 56, 1}, Size{"56 experts, 8192 rows", 56, 8192, 1}}) {
    std::vector<int> counts(size_t(s.experts), s.rows == s.experts ? 1 : 0), begins{0}, active, gather, where;
    for (int i = 0; s.rows != s.experts && i < s.rows; ++i) ++counts[size_t(Rng{6, 6}.below(uint64_t(s.experts), uint64_t(i)))];
    for (int e = 0; e < s.experts; ++e) {
      begins.push_back(begins.back() + counts[size_t(e)]);
      if (counts[size_t(e)]) active.push_back(e);
    }
    const int tokens = std::max(1, s.rows / 16);
    for (int i = 0; i < s.rows; ++i) gather.push_back(i % tokens);
    for (int i = 0; i < tokens * 16; ++i) where.push_back(std::min(i, s.rows - 1));
    auto codes = [&](int64_t bytes) { return reinterpret_cast<const uint8_t*>(m.narrow(bytes / 2)); };
    const int64_t up = int64_t(s.experts) * 2 * F * L, down = int64_t(s.experts) * L * F;
    std::vector<const uint8_t*> gate_up, downs;
    for (int i = 0; i < s.sets; ++i) gate_up.push_back(codes(up / 2)), downs.push_back(codes(down / 2));
    const uint8_t* scales = m.upload(std::vector<uint8_t>(size_t(up / 32), 120), DType::u8);
    bf16 *h = m.blank<bf16>(int64_t(s.rows) * F), *y = m.blank<bf16>(int64_t(s.rows) * L);
    cuda::ExpertProductArgs a{.x = m.narrow(int64_t(tokens) * L),
                              .gather = m.integers(gather),
                              .begins = m.integers(begins),
                              .active = m.integers(active),
                              .packed_scales = scales,
                              .experts = s.experts,
                              .actives = int(active.size()),
                              .rows = s.rows,
                              .R = 2 * F,
                              .K = L,
                              .situ = true,
                              .beta = 4,
                              .linear_beta = 25,
                              .y = h};
    cuda::ExpertProductArgs b{.x = h,
                              .begins = a.begins,
                              .active = a.active,
                              .packed_scales = scales,
                              .experts = s.experts,
                              .actives = a.actives,
                              .rows = s.rows,
                              .R = L,
                              .K = F,
                              .beta = 4,
                              .linear_beta = 25,
                              .weight = m.floats(s.rows, 0, 0.06),
                              .y = y};
    const cuda::ExpertCombineArgs sum{y, m.integers(where), tokens, 16, L, m.floats(L, 0, 1), 1e-5f, m.blank<bf16>(int64_t(tokens) * L)};
    const bool stream = s.rows <= s.experts;
    const double used = double(active.size()) / s.experts;
    t.add({"experts", s.name,
           median_us(
               [&](int i, void* st) {
                 a.packed = gate_up[size_t(i % s.sets)], b.packed = downs[size_t(i % s.sets)];
                 const char* e = stream ? expert_stream(a, st) : expert_product(a, st);
                 if (!e) e = stream ? expert_stream(b, st) : expert_product(b, st);
                 return e ? e : cuda::expert_combine(sum, st);
               },
               s.sets > 1 ? 2 * s.sets : 1, 15),
           used * double(up + down) * (0.5 + 1 / 32.0) + 2.0 * s.rows * (2 * L + 2 * F + L), 2.0 * s.rows * 3 * double(L) * F, true, "MXFP4"});

    // What a model does with a prompt: codes as they are stored, results in float32.
    std::vector<int64_t> offsets(begins.begin(), begins.end());
    std::vector<const void*> at;
    for (int kind = 0; kind < 3; ++kind)
      for (int e = 0; e < s.experts; ++e) at.push_back((kind < 2 ? gate_up[0] + kind * up / 4 : downs[0]) + int64_t(e) * F * L / 2);
    for (int e = 0; e < s.experts; ++e) at.push_back(scales + int64_t(e) * F * L / 32);
    std::vector<int> pairs;
    for (int i = 0; i < s.rows; ++i) pairs.push_back(i);
    const void* const* lists = m.upload(at, DType::i64);
    const int64_t* first = m.upload(offsets, DType::i64);
    int* tiles = m.blank<int>(s.experts + 1);
    const cuda::ExpertsNarrow groups{first, tiles, s.experts, s.rows};
    float *g = m.blank<float>(int64_t(s.rows) * F), *u = m.blank<float>(int64_t(s.rows) * F), *result = m.blank<float>(int64_t(s.rows) * L);
    const void *x = m.narrow(int64_t(s.rows) * L), *const *scale = lists + 3 * s.experts;
    const cuda::ExpertProduct both[2] = {{x, nullptr, lists, g, scale}, {x, nullptr, lists + s.experts, u, scale}};
    const cuda::ExpertProduct last{h, nullptr, lists + 2 * s.experts, result, scale};
    const cuda::NarrowGlu glu{{Activation::Kind::situ, 4, 25, 0}, m.integers(pairs), first + s.experts, s.rows, F, g, u, h};
    t.add({"experts", s.name,
           median_us(
               [&](int, void* st) {
                 const char* e = cuda::expert_tiles(groups, tiles, st);
                 if (!e) e = cuda::expert_forward(groups, both, 2, F, L, st);
                 if (!e) e = cuda::glu_narrow(glu, st);
                 return e ? e : cuda::expert_forward(groups, &last, 1, L, F, st);
               },
               1, 15),
           used * double(up + down) * (0.5 + 1 / 32.0) + double(s.rows) * (2 * L + 16 * F + 2 * F + 4 * L), 2.0 * s.rows * 3 * double(L) * F, true,
           "MXFP4 as stored, in a model"});
    m.end();
  }
}

void depth_mix(OpTable& t, Room& m) {
  struct Size {
    int64_t rows;
    int sources;
  };
  constexpr int d = cuda::kDepthWidth;
  for (const Size& s : {Size{8192, 9}, Size{8192, 4}, Size{1024, 9}}) {
    cuda::DepthMixArgs a{};
    for (int i = 0; i < s.sources; ++i) a.v[i] = m.narrow(s.rows * d), a.dv[i] = m.blank<bf16>(s.rows * d);
    a.sources = s.sources, a.w = m.floats(d, 0, 1), a.p = m.floats(d, 0.02), a.eps = 1e-5f, a.rows = s.rows, a.d = d, a.y = m.blank<bf16>(s.rows * d);
    a.stats = m.blank<float>(s.rows * 32), a.dy = m.narrow(s.rows * d), a.dw = m.blank<float>(d), a.dp = m.blank<float>(d);
    a.partial = m.blank<float>(cuda::depth_mix_partial(d));
    const std::string shape = fmt::format("T {}, {} sources", s.rows, s.sources);
    const double row = 2.0 * double(s.rows) * d;
    t.add({"depth mix forward", shape, median_us([&](int, void* st) { return depth_mix_forward(a, st); }, 1, 20), row * (s.sources + 1), 0});
    t.add({"depth mix backward", shape, median_us([&](int, void* st) { return depth_mix_backward(a, st); }, 1, 20), row * (2 * s.sources + 1), 0});
    m.end();
  }
}

void others(OpTable& t, Room& m) {
  constexpr int64_t T = 8192, d = 7168;
  if (t.wants("newton-schulz")) {
    constexpr float kFive[5][3] = {{3.4445f, -4.7750f, 2.0315f},
                                   {3.4445f, -4.7750f, 2.0315f},
                                   {3.4445f, -4.7750f, 2.0315f},
                                   {3.4445f, -4.7750f, 2.0315f},
                                   {3.4445f, -4.7750f, 2.0315f}};
    const int64_t n = 96 * 128 * d;
    const cuda::NewtonSchulzArgs a{m.narrow(n),     96, int(d), 5, kFive, 1.01f, m.blank<float>(96 * 128 * 128), m.blank<bf16>(96 * 2 * 128 * 128),
                                   m.blank<bf16>(n)};
    t.add({"newton-schulz", "96 x 128 x 7168", median_us([&](int, void* st) { return newton_schulz(a, st); }, 1, 15), 6.0 * double(n), 88e9, true});
    m.end();
  }
  if (t.wants("route")) {
    int* chosen = m.blank<int>(T * 16);
    float* weights = m.blank<float>(T * 16);
    const cuda::RouteArgs a{m.floats(T * 896), m.floats(896, 0), nullptr, T, 896, 16, true, 1.f, chosen, weights, m.blank<float>(T)};
    t.add({"route", "8192 tokens, 16 of 896", median_us([&](int, void* st) { return cuda::route(a, st); }), 4.0 * T * 896 + 8.0 * T * 16, 0});
    const cuda::SortRowsArgs s{chosen,
                               weights,
                               T,
                               896,
                               16,
                               m.blank<int>(897),
                               m.blank<int>(T * 16),
                               m.blank<float>(T * 16),
                               m.blank<int>(T * 16),
                               m.blank<int>(cuda::sort_rows_counts(T, 16, 896))};
    t.add({"order of rows", "8192 tokens, 16 of 896", median_us([&](int, void* st) { return cuda::sort_rows(s, st); }), 20.0 * T * 16, 0});
    m.end();
  }
  if (t.wants("cross entropy")) {
    const int64_t rows = 1024, V = 163840;
    const cuda::CrossEntropyArgs a{m.narrow(rows * V), m.integers(std::vector<int>(size_t(rows), 7)), rows, int(V), 1e-3f, m.blank<float>(rows)};
    t.add(
        {"cross entropy in place", "1024 x 163840", median_us([&](int, void* st) { return cuda::cross_entropy(a, st); }), 4.0 * double(rows * V), 0});
    m.end();
  }
  if (t.wants("adamw")) {
    const int64_t n = 1 << 26;
    const cuda::AdamwArgs a{
        m.blank<float>(n), m.blank<float>(n), m.blank<float>(n), m.blank<float>(n), m.blank<bf16>(n), n, 3, 1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.f};
    t.add({"adamw", "67 M weights", median_us([&](int, void* st) { return cuda::adamw(a, st); }), 30.0 * double(n), 0});
    m.end();
  }
}

}  // namespace

double gpu_seconds(const std::function<void()>& enqueue) {
  Events events;
  return events.seconds(static_cast<cudaStream_t>(gpu::stream()), enqueue);
}

std::string gpu_name() {
  cudaDeviceProp p;
  check_call(cudaGetDeviceProperties(&p, 0));
  return p.name;
}

MachineRates gpu_rates() {
  Room m;
  const int64_t bytes = int64_t(4) << 30, n = 8192;
  MachineRates r;
  {
    char *from = m.blank<char>(bytes), *to = m.blank<char>(bytes);
    double best = 1e-6 * median_us([&](int, void* st) { return cuda::copy_through_memory(from, to, bytes, st); }, 1, 15);
    for (int i = 0; i < 5; ++i) best = std::min(best, gpu_seconds([&] { gpu::copy(to, from, size_t(bytes)); }));  // the driver's own
    r.bytes = 2.0 * double(bytes) / best;
    m.end();
  }
  const bf16 *a = m.narrow(n * n), *b = m.narrow(n * n);
  const Product p{.m = n, .n = n, .k = n, .lda = n, .ldb = n, .b_transposed = true, .c = m.blank<float>(n * n), .ldc = n};
  r.tensor_flops =
      2.0 * double(n) * double(n) * double(n) / (1e-6 * median_us([&](int, void* st) { return cuda::blas_product(p, a, b, st); }, 1, 15));
  r.flops = 132.0 * 32 * 256 * 16 * 4096 * 2 / (1e-6 * median_us([&](int, void* st) { return cuda::multiply_adds(p.c, 132 * 32, 4096, st); }, 1, 15));
  return r;
}

void gpu_kernel_lines(OpTable& t) {
  Room m;
  if (t.wants("linear")) linears(t, m);
  if (t.wants("kda forward") || t.wants("kda forward + backward")) kda(t, m);
  if (t.wants("kda decode")) decode(t, m);
  if (t.wants("mla prefill")) prefill(t, m);
  if (t.wants("mla decode")) latent(t, m);
  if (t.wants("experts")) experts(t, m);
  if (t.wants("depth mix")) depth_mix(t, m);
  others(t, m);
}

#else

double gpu_seconds(const std::function<void()>&) { fail("[bench] this program was built without CUDA"); }
std::string gpu_name() { fail("[bench] this program was built without CUDA"); }
MachineRates gpu_rates() { fail("[bench] this program was built without CUDA"); }
void gpu_kernel_lines(OpTable&) {}

#endif

}  // namespace k3
