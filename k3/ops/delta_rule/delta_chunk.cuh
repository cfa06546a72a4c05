#pragma once
// What the chunk kernels of the delta rule share: the layout of a chunk's operands in shared memory and the warpgroup that builds them.
#include "k3/core/tile.cuh"
#include "k3/core/wgmma.cuh"
#include "k3/ops/delta_rule/delta_rule_cuda.h"

namespace k3::cuda {
namespace {

constexpr int C = kDeltaChunk, D = kDeltaHead;
constexpr int kRawRow = D * 2 + 16;  // bytes of a raw row in shared memory: padded, so that 8 rows hit 8 bank groups

// One prep warpgroup's half of shared memory. Offsets in bytes; the first three hold swizzled tiles and are 1024-byte aligned.
struct Half {
  static constexpr int stack = 0;                      // 2 panels of [64][64] bf16: K+ over Q+
  static constexpr int minus = stack + 2 * 64 * 128;   // 2 panels of [32][64] bf16: K-
  static constexpr int xm = minus + 2 * C * 128;       // [32][64] bf16: columns 0-31 diag(r) X diag(beta), 32-63 M
  static constexpr int pre = xm + C * 128;             // [128] float: 2^a
  static constexpr int post = pre + D * 4;             // [128] float: 2^{G_31 - a}
  static constexpr int token = post + D * 4;           // [2][32] float: r, scale * s
  static constexpr int given = token + 2 * C * 4;      // to here a scan reads
  static constexpr int raw = given;                    // q, k, x: [32] rows each
  static constexpr int lower = raw + 3 * C * kRawRow;  // [32][36] float, transposed: lower[m][i] = L_im
  static constexpr int inverse = lower + C * 36 * 4;   // [32][20] float: the two diagonal blocks' inverses; [16][20] scratch
  static constexpr int middle = inverse + 48 * 20 * 4;  // [128] float: G_15
  static constexpr int last = middle + D * 4;          // [128] float: sum over the second half (unbounded gates)
  static constexpr int norms = last + D * 4;           // [2][32] float: sums of squares of q, k
  static constexpr int betas = norms + 2 * C * 4;      // [32] float, for whoever inverts
  static constexpr int sums = betas + C * 4;           // [32][136] float: G (unbounded gates)
};
template <bool kBounded>  // gates without a bound also keep the sums
constexpr int kHalfBytes = (Half::sums + (kBounded ? 0 : C * 136 * 4) + 1023) / 1024 * 1024;
constexpr int kStages = 4;                            // chunks of V in flight
constexpr int kSlice = C * 32;                        // bytes of a warp's 16 columns of V for one chunk
constexpr int kScanBytes = 8 * kStages * kSlice;

struct Chunk {  // what every thread knows about its block's sequence
  int64_t begin;
  int length, chunks, head, sequence;
};

// Columns of V that a scan warp owns, [32 tokens][16] bf16 with the two 16-byte halves of a row swapped in every other group of four rows.
__device__ __forceinline__ uint32_t slice_offset(int token, int half) { return token * 32 + ((half ^ ((token >> 2) & 1)) << 4); }

// An arrival when this thread's copies so far are there, one of those the barrier was made for.
__device__ __forceinline__ void copies_arrive(uint32_t barrier) { asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory"); }
// To tf32, nearest, for a finite x: the products drop the bits below.
__device__ __forceinline__ uint32_t nearest_tf32(float x) { return __float_as_uint(x) + 0x1000; }

// A chunk to build operands of: number `chunk` of a sequence; below 0: there is none.
struct Item {
  int64_t begin;
  int length, chunk, head;
};
// Of every `period` chunks that are taken in turn, the `own` at the places of `mask` are built by the block that scans them: spread evenly, the first
// always among them where there are any.
struct Share {
  int period, own;
  uint32_t mask, own_at, item_at;  // _at: four bits for each, the place in a period
};
// The chunks that a group builds in the block that scans: the first-th of the block's own, the first + step-th, ..., from the last chunk back with
// kReverse.
template <bool kReverse>
struct Own {
  const Chunk& seq;
  const Share& share;
  const int step;
  int before, k;  // chunks of whole periods before; which of the block's own in this period
  __device__ Own(const Chunk& seq, const Share& share, int first, int step) : seq(seq), share(share), step(step), before(0), k(first - step) {}
  __device__ Item next() {
    for (k += step; k >= share.own; k -= share.own) before += share.period;
    const int i = before + int(share.own_at >> 4 * k & 15);
    return {seq.begin, seq.length, i >= seq.chunks ? -1 : kReverse ? seq.chunks - 1 - i : i, seq.head};
  }
};
struct Alone {  // one chunk
  Item item;
  __device__ Item next() {
    const Item now = item;
    item.chunk = -1;
    return now;
  }
};

enum class Part { all, all_but_inverse, operands };  // operands: without X and M; all_but_inverse: what invert() needs, and M

// X = (I + L)^-1, one warp: the two diagonal blocks column by column (lane = column), then X21 = -X22 L21 X11; kept as diag(r) X diag(beta), lane =
// token.
template <class Half>
__device__ __forceinline__ void invert(char* s, int lane, float r, float beta) {
  const float* lower = reinterpret_cast<const float*>(s + Half::lower);
  float* inverse = reinterpret_cast<float*>(s + Half::inverse);
  const int block = lane >> 4, column = lane & 15;
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = i == column ? 1.f : 0.f;
#pragma unroll
  for (int m = 0; m < 15; ++m) {
    const float* l = lower + (block * 16 + m) * 36 + block * 16;
#pragma unroll
    for (int i4 = (m + 1) / 4; i4 < 4; ++i4) {
      float4 v = *reinterpret_cast<const float4*>(l + i4 * 4);  // entries up to m are zero: A is kept strictly lower
      x[i4 * 4] -= v.x * x[m], x[i4 * 4 + 1] -= v.y * x[m], x[i4 * 4 + 2] -= v.z * x[m], x[i4 * 4 + 3] -= v.w * x[m];
    }
  }
  float* z = inverse + 32 * 20;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    inverse[(block * 16 + i) * 20 + column] = x[i];
    float row_scale = __shfl_sync(~0u, r, block * 16 + i);
    *reinterpret_cast<nv_bf16*>(s + Half::xm + swizzle128(block * 16 + i, (block * 16 + column) * 2)) = __float2bfloat16_rn(row_scale * x[i] * beta);
  }
  __syncwarp();
  const int g = lane >> 2, t = lane & 3;
  float d[2][4] = {};
#pragma unroll
  for (int k = 0; k < 16; k += 8) {  // Z = L21 X11
    uint32_t fa[4] = {nearest_tf32(lower[(k + t) * 36 + 16 + g]), nearest_tf32(lower[(k + t) * 36 + 24 + g]), nearest_tf32(lower[(k + t + 4) * 36 + 16 + g]),
                      nearest_tf32(lower[(k + t + 4) * 36 + 24 + g])};
#pragma unroll
    for (int n = 0; n < 2; ++n) mma_tf32(d[n], fa, nearest_tf32(inverse[(k + t) * 20 + n * 8 + g]), nearest_tf32(inverse[(k + t + 4) * 20 + n * 8 + g]));
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    *reinterpret_cast<float2*>(z + g * 20 + n * 8 + 2 * t) = make_float2(d[n][0], d[n][1]);
    *reinterpret_cast<float2*>(z + (g + 8) * 20 + n * 8 + 2 * t) = make_float2(d[n][2], d[n][3]);
    d[n][0] = d[n][1] = d[n][2] = d[n][3] = 0.f;
  }
  __syncwarp();
  const float* x22 = inverse + 16 * 20;
#pragma unroll
  for (int k = 0; k < 16; k += 8) {
    uint32_t fa[4] = {nearest_tf32(x22[g * 20 + k + t]), nearest_tf32(x22[(g + 8) * 20 + k + t]), nearest_tf32(x22[g * 20 + k + t + 4]), nearest_tf32(x22[(g + 8) * 20 + k + t + 4])};
#pragma unroll
    for (int n = 0; n < 2; ++n) mma_tf32(d[n], fa, nearest_tf32(z[(k + t) * 20 + n * 8 + g]), nearest_tf32(z[(k + t + 4) * 20 + n * 8 + g]));
  }
  float row0 = -__shfl_sync(~0u, r, 16 + g), row1 = -__shfl_sync(~0u, r, 24 + g);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    int j = n * 8 + 2 * t;
    float c0 = __shfl_sync(~0u, beta, j), c1 = __shfl_sync(~0u, beta, j + 1);
    *reinterpret_cast<uint32_t*>(s + Half::xm + swizzle128(16 + g, j * 2)) = pack(row0 * d[n][0] * c0, row0 * d[n][1] * c1);
    *reinterpret_cast<uint32_t*>(s + Half::xm + swizzle128(24 + g, j * 2)) = pack(row1 * d[n][2] * c0, row1 * d[n][3] * c1);
  }
}

// Builds the operands of the chunks that `items` gives, one after the other, at s, for whoever waits on `full`. kMany: of
// more than one head. Half: where things lie. then(round) is one thread's, which has time while the triangle is inverted.
template <bool kBounded, Part kPart, bool kMany, class Half = k3::cuda::Half, class Items, class Then>
__device__ void prepare(const DeltaChunkArgs& a, Items items, char* s, int barrier, uint32_t arrived, uint32_t full, uint32_t empty, Then then) {
  const int tid = threadIdx.x & 127, warp = tid >> 5, half = warp >> 1;
  int lane = tid & 31, channel = (warp & 1) * 64 + lane * 2;
  float* middle = reinterpret_cast<float*>(s + Half::middle);
  float* last = reinterpret_cast<float*>(s + Half::last);
  float* norms = reinterpret_cast<float*>(s + Half::norms);
  float* lower = reinterpret_cast<float*>(s + Half::lower);
  float* sums = reinterpret_cast<float*>(s + Half::sums);
  const char* raw = s + Half::raw;

  const nv_bf16* betas = static_cast<const nv_bf16*>(a.b);
  auto load_rows = [&](const Item& of, int which, const void* source, int64_t stride) {
    const int first = of.chunk * C + (tid >> 4);
    const nv_bf16* from = static_cast<const nv_bf16*>(source) + (of.begin + first) * stride + of.head * D + (tid & 15) * 8;
    uint32_t to = shared_address(raw + (which * C + (tid >> 4)) * kRawRow + (tid & 15) * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool valid = first + i * 8 < of.length;
      copy16(to + i * 8 * kRawRow, valid ? from + i * 8 * stride : source, valid);
    }
  };
  auto load = [&](const Item& of) {  // raw rows; those past the end become zeros
    if (of.chunk < 0) return;
    load_rows(of, 0, a.q, a.q_stride), load_rows(of, 1, a.k, a.k_stride), load_rows(of, 2, a.x, a.x_stride);
    copies_arrive(arrived);
  };
  auto beta_logit = [&](const Item& of) {
    int t = of.chunk * C + lane;
    return of.chunk >= 0 && t < of.length ? to_f32(betas[(of.begin + t) * a.b_stride + of.head]) : 0.f;
  };

  Item item = items.next(), next = items.next();
  auto rate_of = [&](const Item& of) { return expf(a.gate.A_log[of.head]); };
  auto bias_of = [&](const Item& of) { return *reinterpret_cast<const float2*>(a.gate.dt_bias + of.head * D + channel); };
  float rate = rate_of(item);
  float2 bias = bias_of(item);
  // rows 0-15, columns 16-31 of X stay zero
  for (int i = tid; kPart != Part::operands && i < 16 * 8; i += 128) *reinterpret_cast<uint32_t*>(s + Half::xm + swizzle128(i >> 3, 32 + (i & 7) * 4)) = 0;
  load(item);
  float b_next = beta_logit(item);

  for (int round = 0; item.chunk >= 0; ++round, item = next, next = items.next()) {
    lane = opaque(lane), channel = opaque(channel);  // or else a hundred addresses are spilled
    const float beta = sigmoid(b_next);
    b_next = beta_logit(next);
    if constexpr (kMany) rate = rate_of(item), bias = bias_of(item);
    wait(arrived, round & 1);

    // 1. sums of squares: of 16 rows a warp, q then k, the diagonal of their products with each other
    {
      const uint32_t rows = shared_address(raw + (warp * 16 + (lane & 15)) * kRawRow + (lane >> 4) * 16);
      float first[4] = {}, second[4] = {};
      uint32_t x[8][4];
#pragma unroll
      for (int k = 0; k < 8; ++k) ldmatrix4(x[k], rows + k * 32);
#pragma unroll
      for (int k = 0; k < 8; ++k) mma(first, x[k], x[k][0], x[k][2]), mma(second, x[k], x[k][1], x[k][3]);
      const int g = lane >> 2;
      if ((lane & 3) == g >> 1) norms[warp * 16 + g] = g & 1 ? first[1] : first[0], norms[warp * 16 + 8 + g] = g & 1 ? second[3] : second[2];
    }
    // log gates, summed along each channel; a thread has two channels of 16 tokens
    float sum[16][2];
    {
      const int valid = item.length - item.chunk * C - half * 16;
      float run0 = 0.f, run1 = 0.f;
      const char* row = raw + (2 * C + half * 16) * kRawRow + channel * 2;
      if constexpr (kBounded) {
        const float m = -rate * kLog2e, n0 = m * bias.x, n1 = m * bias.y, bound = a.gate.bound * kLog2e;
#pragma unroll
        for (int t = 0; t < 16; ++t) {
          uint32_t u = *reinterpret_cast<const uint32_t*>(row + t * kRawRow);
          float w = t < valid ? bound : 0.f;
          run0 += w * rcp(1.f + ex2(low(u) * m + n0));
          run1 += w * rcp(1.f + ex2(high(u) * m + n1));
          sum[t][0] = run0, sum[t][1] = run1;
        }
      } else {
#pragma unroll
        for (int t = 0; t < 16; ++t) {
          uint32_t u = *reinterpret_cast<const uint32_t*>(row + t * kRawRow);
          float z0 = (low(u) + bias.x) * kLog2e, z1 = (high(u) + bias.y) * kLog2e, w = t < valid ? -rate : 0.f;
          run0 += fmaxf(w * (fmaxf(z0, 0.f) + lg2(1.f + ex2(-fabsf(z0)))), -20.f * kLog2e);
          run1 += fmaxf(w * (fmaxf(z1, 0.f) + lg2(1.f + ex2(-fabsf(z1)))), -20.f * kLog2e);
          sum[t][0] = run0, sum[t][1] = run1;
        }
      }
      float* end = half == 0 ? middle : last;
      *reinterpret_cast<float2*>(end + channel) = make_float2(run0, run1);
    }
    named_barrier(barrier, 128);

    // 2. decayed operands, packed to bf16
    wait(empty, (round & 1) ^ 1);
    {
      float2 mid = *reinterpret_cast<float2*>(middle + channel), end = *reinterpret_cast<float2*>(last + channel);
      float anchor0 = kBounded ? rintf(mid.x) : 0.f, anchor1 = kBounded ? rintf(mid.y) : 0.f;
      float from0 = (half ? mid.x : 0.f) - anchor0, from1 = (half ? mid.y : 0.f) - anchor1;
      float total0 = mid.x + end.x, total1 = mid.y + end.y;
      if (half == 0) {
        *reinterpret_cast<float2*>(s + Half::pre + channel * 4) = make_float2(ex2(anchor0), ex2(anchor1));
        *reinterpret_cast<float2*>(s + Half::post + channel * 4) = make_float2(ex2(total0 - anchor0), ex2(total1 - anchor1));
      }
      const char* row = raw + half * 16 * kRawRow + channel * 2;
      char* plus = s + Half::stack + (warp & 1) * 64 * 128 + half * 16 * 128;
      char* minus = s + Half::minus + (warp & 1) * C * 128 + half * 16 * 128;
#pragma unroll
      for (int t0 = 0; t0 < 16; t0 += 4) {  // reads, then writes: a read does not wait for the writes before it
        uint32_t uq[4], uk[4], k_plus[4], q_plus[4], k_minus[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          uq[i] = *reinterpret_cast<const uint32_t*>(row + (t0 + i) * kRawRow), uk[i] = *reinterpret_cast<const uint32_t*>(row + (C + t0 + i) * kRawRow);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float e0 = sum[t0 + i][0] + from0, e1 = sum[t0 + i][1] + from1, p0 = ex2(e0), p1 = ex2(e1);
          const float m0 = kBounded ? ex2(-e0) : ex2(total0 - e0), m1 = kBounded ? ex2(-e1) : ex2(total1 - e1);
          k_plus[i] = pack(low(uk[i]) * p0, high(uk[i]) * p1), q_plus[i] = pack(low(uq[i]) * p0, high(uq[i]) * p1);
          k_minus[i] = pack(low(uk[i]) * m0, high(uk[i]) * m1);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int t = t0 + i;
          const uint32_t at = swizzle128(t, lane * 4);
          *reinterpret_cast<uint32_t*>(plus + at) = k_plus[i];
          *reinterpret_cast<uint32_t*>(plus + C * 128 + at) = q_plus[i];
          *reinterpret_cast<uint32_t*>(minus + at) = k_minus[i];
          if constexpr (!kBounded) *reinterpret_cast<float2*>(sums + (half * 16 + t) * 136 + channel) = make_float2(sum[t][0] + from0, sum[t][1] + from1);
        }
      }
    }
    publish();
    named_barrier(barrier, 128);

    // 3. token scalars (lane = token), A and M
    const float r = rsqrtf(norms[C + lane] + 1e-6f), q_norm = rsqrtf(norms[lane] + 1e-6f);
    if (warp == 0) {
      float* token = reinterpret_cast<float*>(s + Half::token);
      token[lane] = r, token[C + lane] = a.scale * q_norm;
      if constexpr (kPart == Part::all_but_inverse) reinterpret_cast<float*>(s + Half::betas)[lane] = beta;
    }
    if constexpr (kPart == Part::operands) {
      load(next);
      arrive(full);
      continue;
    }
    const float beta_r = beta * r;
    auto keep = [&](int i, int j, float product, bool of_k) {  // one entry of A or M, tokens i, j of the chunk; all lanes call
      if (of_k) lower[j * 36 + i] = j < i ? product : 0.f;
      else *reinterpret_cast<nv_bf16*>(s + Half::xm + swizzle128(i, 64 + j * 2)) = __float2bfloat16_rn(j <= i ? product : 0.f);
    };
    if constexpr (kBounded) {
      load(next);
      float d[16];
      const uint32_t tiles = opaque(shared_address(s));
      const uint64_t stack = describe(tiles + Half::stack), minus = describe(tiles + Half::minus);
      warpgroup_fence();
#pragma unroll
      for (int k = 0; k < 8; ++k)
        wgmma<32, 0, 0>(d, stack + (k >> 2) * (64 * 128 / 16) + (k & 3) * 2, minus + (k >> 2) * (C * 128 / 16) + (k & 3) * 2, k > 0);
      warpgroup_commit();
      warpgroup_wait<0>();
      pin(d);
      const int i0 = (warp & 1) * 16 + (lane >> 2);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          int i = i0 + 8 * h, j = n * 8 + (lane & 3) * 2;
          float row = __shfl_sync(~0u, beta_r, i), r0 = __shfl_sync(~0u, r, j), r1 = __shfl_sync(~0u, r, j + 1);
          if (warp < 2) {
            keep(i, j, row * r0 * d[4 * n + 2 * h], true), keep(i, j + 1, row * r1 * d[4 * n + 2 * h + 1], true);
          } else {
            float m0 = j <= i ? d[4 * n + 2 * h] : 0.f, m1 = j + 1 <= i ? d[4 * n + 2 * h + 1] : 0.f;
            *reinterpret_cast<uint32_t*>(s + Half::xm + swizzle128(i, 64 + j * 2)) = pack(m0, m1);
          }
        }
      }
    } else {
      // Blocks of 8 tokens, K and Q rows together as one product of 16 rows; the anchor lies between row and column block (or in the middle of a
      // diagonal one), so every factor off the diagonal is <= 1 and 20 a token cannot overflow on it.
      for (int i = tid; i < C * C / 2; i += 128) {  // blocks above the diagonal
        int row = i >> 4, column = (i & 15) * 2;
        if ((column >> 3) > (row >> 3)) *reinterpret_cast<uint32_t*>(s + Half::xm + swizzle128(row, 64 + column * 2)) = 0;
      }
#pragma unroll 1
      for (int pair = warp; pair < 10; pair += 4) {
        int bi = pair < 1 ? 0 : pair < 3 ? 1 : pair < 6 ? 2 : 3, bj = pair - bi * (bi + 1) / 2;
        int i = bi * 8 + (lane >> 2), j = bj * 8 + (lane >> 2), n = bi == bj ? bi * 8 + 3 : bi * 8 - 1;
        const char *qi = raw + i * kRawRow, *ki = raw + (C + i) * kRawRow, *kj = raw + (C + j) * kRawRow;
        float d[4] = {0, 0, 0, 0};
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          uint32_t fa[4], fb[2];
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            int ch = k * 16 + h * 8 + (lane & 3) * 2;
            float2 gi = *reinterpret_cast<float2*>(sums + i * 136 + ch), gj = *reinterpret_cast<float2*>(sums + j * 136 + ch);
            float2 gn = *reinterpret_cast<float2*>(sums + n * 136 + ch);
            uint32_t uk = *reinterpret_cast<const uint32_t*>(ki + ch * 2), uq = *reinterpret_cast<const uint32_t*>(qi + ch * 2);
            uint32_t uj = *reinterpret_cast<const uint32_t*>(kj + ch * 2);
            float p0 = ex2(gi.x - gn.x), p1 = ex2(gi.y - gn.y), m0 = ex2(gn.x - gj.x), m1 = ex2(gn.y - gj.y);
            fa[2 * h] = pack(low(uk) * p0, high(uk) * p1), fa[2 * h + 1] = pack(low(uq) * p0, high(uq) * p1);
            fb[h] = pack(low(uj) * m0, high(uj) * m1);
          }
          mma(d, fa, fb[0], fb[1]);
        }
        int column = bj * 8 + (lane & 3) * 2;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          keep(i, column + e, __shfl_sync(~0u, beta_r, i) * __shfl_sync(~0u, r, column + e) * d[e], true);
          keep(i, column + e, d[2 + e], false);
        }
      }
    }
    if constexpr (!kBounded) publish();  // of reads: the next raw rows may come
    named_barrier(barrier, 128);
    if constexpr (!kBounded) load(next);

    if (kPart == Part::all && warp == (barrier & 1)) invert<Half>(s, lane, r, beta);
    publish();
    arrive(full);
    if (tid == 96) then(round);
    __syncwarp();
  }
}

}  // namespace
}  // namespace k3::cuda
