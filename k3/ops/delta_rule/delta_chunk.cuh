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
  static constexpr int raw = xm + C * 128;             // q, k, x: [32] rows each
  static constexpr int lower = raw + 3 * C * kRawRow;  // [32][36] float, transposed: lower[m][i] = L_im
  static constexpr int inverse = lower + C * 36 * 4;   // [32][20] float: the two diagonal blocks' inverses; [16][20] scratch
  static constexpr int pre = inverse + 48 * 20 * 4;    // [128] float: 2^a
  static constexpr int post = pre + D * 4;             // [128] float: 2^{G_31 - a}
  static constexpr int middle = post + D * 4;          // [128] float: G_15
  static constexpr int last = middle + D * 4;          // [128] float: sum over the second half (unbounded gates)
  static constexpr int norms = last + D * 4;           // [2 halves][2 warps][32] float: partial sums of squares
  static constexpr int token = norms + 128 * 4;        // [2][32] float: r, scale * s
  static constexpr int sums = token + 2 * C * 4;       // [32][136] float: G (unbounded gates)
};
template <bool kBounded>  // gates without a bound also keep the sums
constexpr int kHalfBytes = (Half::sums + (kBounded ? 0 : C * 136 * 4) + 1023) / 1024 * 1024;
constexpr int kStages = 4;                            // chunks of V in flight
constexpr int kSlice = C * 32;                        // bytes of a warp's 16 columns of V for one chunk
constexpr int kScanBytes = 8 * kStages * kSlice;
template <bool kBounded>
constexpr int kSharedBytes = 1024 + 2 * kHalfBytes<kBounded> + kScanBytes + 64;

struct Chunk {  // what every thread knows about its block's sequence
  int64_t begin;
  int length, chunks;
};

// Columns of V that a scan warp owns, [32 tokens][16] bf16 with the two 16-byte halves of a row swapped in every other group of four rows.
__device__ __forceinline__ uint32_t slice_offset(int token, int half) { return token * 32 + ((half ^ ((token >> 2) & 1)) << 4); }

// The operands of chunks turn, turn + 2, ... (from the last chunk back with kReverse) for whoever waits on `full`; kOperands: without X and M.
template <bool kBounded, bool kReverse = false, bool kOperands = false>
__device__ void prepare(const DeltaChunkArgs& a, const Chunk seq, char* shared, int turn, uint32_t full, uint32_t empty) {
  auto chunk = [&](int i) { return kReverse ? seq.chunks - 1 - i : i; };
  const int tid = threadIdx.x & 127, warp = tid >> 5, half = warp >> 1, head = blockIdx.x, barrier = 1 + turn;
  int lane = tid & 31, channel = (warp & 1) * 64 + lane * 2;
  char* s = shared + turn * kHalfBytes<kBounded>;
  float* middle = reinterpret_cast<float*>(s + Half::middle);
  float* last = reinterpret_cast<float*>(s + Half::last);
  float* norms = reinterpret_cast<float*>(s + Half::norms);
  float* lower = reinterpret_cast<float*>(s + Half::lower);
  float* sums = reinterpret_cast<float*>(s + Half::sums);
  float* inverse = reinterpret_cast<float*>(s + Half::inverse);
  const char* raw = s + Half::raw;

  const nv_bf16* betas = static_cast<const nv_bf16*>(a.b);
  auto load_rows = [&](int c, int which, const void* source, int64_t stride) {
    const nv_bf16* from = static_cast<const nv_bf16*>(source) + seq.begin * stride + head * D + (tid & 15) * 8;
    uint32_t to = shared_address(raw + (which * C + (tid >> 4)) * kRawRow + (tid & 15) * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int token = c * C + i * 8 + (tid >> 4);
      bool valid = token < seq.length;
      copy16(to + i * 8 * kRawRow, from + (valid ? token : 0) * stride, valid);
    }
  };
  auto load = [&](int i) {  // raw rows of the i-th chunk; rows past the end become zeros
    const int c = chunk(i);
    if (i < seq.chunks) load_rows(c, 0, a.q, a.q_stride), load_rows(c, 1, a.k, a.k_stride), load_rows(c, 2, a.x, a.x_stride);
    copy_commit();
  };
  auto beta_logit = [&](int i) {
    int t = chunk(i) * C + lane;
    return i < seq.chunks && t < seq.length ? to_f32(betas[(seq.begin + t) * a.b_stride + head]) : 0.f;
  };

  const float rate = expf(a.gate.A_log[head]);
  const float bias[2] = {a.gate.dt_bias[head * D + channel], a.gate.dt_bias[head * D + channel + 1]};
  // rows 0-15, columns 16-31 of X stay zero
  for (int i = tid; i < 16 * 8; i += 128) *reinterpret_cast<uint32_t*>(s + Half::xm + swizzle128(i >> 3, 32 + (i & 7) * 4)) = 0;
  load(turn);
  float b_next = beta_logit(turn);

  int round = 0;
  for (int i = turn; i < seq.chunks; i += 2, ++round) {
    const int c = chunk(i);
    lane = opaque(lane), channel = opaque(channel);  // or else a hundred addresses are spilled
    const float beta = sigmoid(b_next);
    b_next = beta_logit(i + 2);
    copy_wait<0>();
    named_barrier(barrier, 128);

    // 1. log gates, summed along each channel; a thread has two channels of 16 tokens
    float sum[16][2];
    {
      const int valid = seq.length - c * C - half * 16;
      float run0 = 0.f, run1 = 0.f;
      const char* row = raw + (2 * C + half * 16) * kRawRow + channel * 2;
      if constexpr (kBounded) {
        const float m = -rate * kLog2e, n0 = m * bias[0], n1 = m * bias[1], bound = a.gate.bound * kLog2e;
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
          float z0 = (low(u) + bias[0]) * kLog2e, z1 = (high(u) + bias[1]) * kLog2e, w = t < valid ? -rate : 0.f;
          run0 += fmaxf(w * (fmaxf(z0, 0.f) + lg2(1.f + ex2(-fabsf(z0)))), -20.f * kLog2e);
          run1 += fmaxf(w * (fmaxf(z1, 0.f) + lg2(1.f + ex2(-fabsf(z1)))), -20.f * kLog2e);
          sum[t][0] = run0, sum[t][1] = run1;
        }
      }
      float* end = half == 0 ? middle : last;
      *reinterpret_cast<float2*>(end + channel) = make_float2(run0, run1);
    }
    named_barrier(barrier, 128);

    // 2. decayed operands, packed to bf16; sums of squares on the way
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
      float squares[16];
      const char* row = raw + half * 16 * kRawRow + channel * 2;
      char* plus = s + Half::stack + (warp & 1) * 64 * 128 + half * 16 * 128;
      char* minus = s + Half::minus + (warp & 1) * C * 128 + half * 16 * 128;
#pragma unroll
      for (int t = 0; t < 16; ++t) {
        uint32_t uq = *reinterpret_cast<const uint32_t*>(row + t * kRawRow), uk = *reinterpret_cast<const uint32_t*>(row + (C + t) * kRawRow);
        float q0 = low(uq), q1 = high(uq), k0 = low(uk), k1 = high(uk);
        float e0 = sum[t][0] + from0, e1 = sum[t][1] + from1;
        float p0 = ex2(e0), p1 = ex2(e1);
        float m0 = kBounded ? ex2(-e0) : ex2(total0 - e0), m1 = kBounded ? ex2(-e1) : ex2(total1 - e1);
        uint32_t at = swizzle128(t, lane * 4);
        *reinterpret_cast<uint32_t*>(plus + at) = pack(k0 * p0, k1 * p1);
        *reinterpret_cast<uint32_t*>(plus + C * 128 + at) = pack(q0 * p0, q1 * p1);
        *reinterpret_cast<uint32_t*>(minus + at) = pack(k0 * m0, k1 * m1);
        squares[t & 7] = k0 * k0 + k1 * k1, squares[8 + (t & 7)] = q0 * q0 + q1 * q1;
        if constexpr (!kBounded) *reinterpret_cast<float2*>(sums + (half * 16 + t) * 136 + channel) = make_float2(e0, e1);
        if ((t & 7) == 7) {
          float total = warp_sums_complete(squares);  // lanes 0-7 k, lanes 8-15 q
          if (lane < 16) norms[warp * 32 + (lane & 8) * 2 + (t & 8) + (lane & 7)] = total;
        }
      }
    }
    publish();
    named_barrier(barrier, 128);

    // 3. token scalars (lane = token), A and M
    const float* mine = norms + (lane >> 4) * 64 + (lane & 15);
    const float r = rsqrtf(mine[0] + mine[32] + 1e-6f), q_norm = rsqrtf(mine[16] + mine[48] + 1e-6f);
    if (warp == 0) {
      float* token = reinterpret_cast<float*>(s + Half::token);
      token[lane] = r, token[C + lane] = a.scale * q_norm;
    }
    if constexpr (kOperands) {
      load(i + 2);
      arrive(full);
      continue;
    }
    const float beta_r = beta * r;
    auto keep = [&](int i, int j, float product, bool of_k) {  // one entry of A or M, tokens i, j of the chunk; all lanes call
      if (of_k) lower[j * 36 + i] = j < i ? product : 0.f;
      else *reinterpret_cast<nv_bf16*>(s + Half::xm + swizzle128(i, 64 + j * 2)) = __float2bfloat16_rn(j <= i ? product : 0.f);
    };
    if constexpr (kBounded) {
      load(i + 2);
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
    named_barrier(barrier, 128);
    if constexpr (!kBounded) load(i + 2);

    // 4. X = (I + L)^-1: the two diagonal blocks column by column (lane = column), then X21 = -X22 L21 X11
    if (warp == 0) {
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
        uint32_t fa[4] = {to_tf32(lower[(k + t) * 36 + 16 + g]), to_tf32(lower[(k + t) * 36 + 24 + g]), to_tf32(lower[(k + t + 4) * 36 + 16 + g]),
                          to_tf32(lower[(k + t + 4) * 36 + 24 + g])};
#pragma unroll
        for (int n = 0; n < 2; ++n) mma_tf32(d[n], fa, to_tf32(inverse[(k + t) * 20 + n * 8 + g]), to_tf32(inverse[(k + t + 4) * 20 + n * 8 + g]));
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
        uint32_t fa[4] = {to_tf32(x22[g * 20 + k + t]), to_tf32(x22[(g + 8) * 20 + k + t]), to_tf32(x22[g * 20 + k + t + 4]), to_tf32(x22[(g + 8) * 20 + k + t + 4])};
#pragma unroll
        for (int n = 0; n < 2; ++n) mma_tf32(d[n], fa, to_tf32(z[(k + t) * 20 + n * 8 + g]), to_tf32(z[(k + t + 4) * 20 + n * 8 + g]));
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
    publish();
    arrive(full);
  }
  copy_wait<0>();
}

}  // namespace
}  // namespace k3::cuda
