// The chunked gated delta rule on Hopper's warpgroup products.
//
// In a chunk of 32 tokens, G_i the running sum of log gates (base 2) per key channel, a = rint(G_15) an anchor, S the state entering:
//   K+_i = 2^{G_i - a} k_i    Q+_i = 2^{G_i - a} q_i    K-_j = 2^{a - G_j} k_j      (raw k, q; their norms r, s go to token scalars)
//   A = tril(K+ K-^T, -1)     M = tril(Q+ K-^T)         S~ = 2^a S
//   X = (I + diag(beta r) A diag(r))^-1                 R = V - diag(r) K+ S~       U = diag(r) X diag(beta) R
//   O = scale diag(s) (Q+ S~ + M U)                     S' = 2^{G_31 - a} (S~ + K-^T U)
// The anchor is a power of two, so it shifts exponents and nothing else: a later token's gate does not move an earlier token's result by more
// than a rare last bit of an operand. |g| <= 5 bounds every exponent by 16 * 5 * log2(e) + 1 < 117. Gates without a bound: see the template.
//
// Bound: bytes 237 us at T 8192, 96 heads; the chain of T / 32 dependent steps and instruction issue (~1800 slots a step) come first.
// Split: a block is one head of one sequence, 512 threads. Two scan warpgroups hold 64 rows each of S^T (v, k) in float32 accumulators; two
// prep warpgroups take turns at building the operands of a chunk, one chunk ahead.
// Precision: operands of products bf16; gates, sums, norms, state, inverse float32.
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
  static constexpr int pre = lower + C * 36 * 4;       // [128] float: 2^a
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

template <bool kBounded>
__device__ void prepare(const DeltaChunkArgs& a, const Chunk seq, char* shared, int turn, uint32_t full, uint32_t empty) {
  const int tid = threadIdx.x & 127, warp = tid >> 5, half = warp >> 1, head = blockIdx.x, barrier = 1 + turn;
  int lane = tid & 31, channel = (warp & 1) * 64 + lane * 2;
  char* s = shared + turn * kHalfBytes<kBounded>;
  float* middle = reinterpret_cast<float*>(s + Half::middle);
  float* last = reinterpret_cast<float*>(s + Half::last);
  float* norms = reinterpret_cast<float*>(s + Half::norms);
  float* lower = reinterpret_cast<float*>(s + Half::lower);
  float* sums = reinterpret_cast<float*>(s + Half::sums);
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
  auto load = [&](int c) {  // raw rows of chunk c; rows past the end become zeros
    if (c < seq.chunks) load_rows(c, 0, a.q, a.q_stride), load_rows(c, 1, a.k, a.k_stride), load_rows(c, 2, a.x, a.x_stride);
    copy_commit();
  };
  auto beta_logit = [&](int c) {
    int t = c * C + lane;
    return t < seq.length ? to_f32(betas[(seq.begin + t) * a.b_stride + head]) : 0.f;
  };

  const float rate = expf(a.gate.A_log[head]);
  const float bias[2] = {a.gate.dt_bias[head * D + channel], a.gate.dt_bias[head * D + channel + 1]};
  load(turn);
  float b_next = beta_logit(turn);

  int round = 0;
  for (int c = turn; c < seq.chunks; c += 2, ++round) {
    lane = opaque(lane), channel = opaque(channel);  // or else a hundred addresses are spilled
    const float beta = sigmoid(b_next);
    b_next = beta_logit(c + 2);
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
    const float beta_r = beta * r;
    auto keep = [&](int i, int j, float product, bool of_k) {  // one entry of A or M, tokens i, j of the chunk; all lanes call
      if (of_k) lower[j * 36 + i] = j < i ? product : 0.f;
      else *reinterpret_cast<nv_bf16*>(s + Half::xm + swizzle128(i, 64 + j * 2)) = __float2bfloat16_rn(j <= i ? product : 0.f);
    };
    if constexpr (kBounded) {
      load(c + 2);
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
    if constexpr (!kBounded) load(c + 2);

    // 4. X = (I + L)^-1 by substitution, column by column (lane = column)
    if (warp == 0) {
      float x[C];
#pragma unroll
      for (int i = 0; i < C; ++i) x[i] = i == lane ? 1.f : 0.f;
#pragma unroll
      for (int m = 0; m < C - 1; ++m) {
#pragma unroll
        for (int i = (m + 1) / 4 * 4; i < C; i += 4) {
          float4 l = *reinterpret_cast<const float4*>(lower + m * 36 + i);  // entries up to m are zero: A is kept strictly lower
          x[i] -= l.x * x[m], x[i + 1] -= l.y * x[m], x[i + 2] -= l.z * x[m], x[i + 3] -= l.w * x[m];
        }
      }
      const float* token = reinterpret_cast<const float*>(s + Half::token);
#pragma unroll
      for (int i = 0; i < C; ++i) *reinterpret_cast<nv_bf16*>(s + Half::xm + swizzle128(i, lane * 2)) = __float2bfloat16_rn(token[i] * x[i] * beta);
    }
    publish();
    arrive(full);
  }
  copy_wait<0>();
}

template <bool kBounded>
__device__ void scan(const DeltaChunkArgs& a, const Chunk seq, char* shared, uint32_t full, uint32_t empty) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, head = blockIdx.x;  // warps 0-7; a warp owns 16 rows of S^T
  const int v0 = warp * 16, row = v0 + (lane >> 2), two = (lane & 3) * 2;
  char* slices = shared + 2 * kHalfBytes<kBounded> + warp * kStages * kSlice;
  const nv_bf16* v = static_cast<const nv_bf16*>(a.v) + head * D + v0;
  nv_bf16* o = static_cast<nv_bf16*>(a.o) + head * D + v0;
  const int64_t slot = a.slots ? a.slots[blockIdx.y] : blockIdx.y;

  auto load = [&](int c) {
    if (c < seq.chunks) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int token = (lane >> 1) + 16 * i, part = lane & 1;
        bool valid = c * C + token < seq.length;
        copy16(shared_address(slices + (c % kStages) * kSlice + slice_offset(token, part)), v + (seq.begin + (valid ? c * C + token : 0)) * a.v_stride + part * 8, valid);
      }
    }
    copy_commit();
  };
  load(0), load(1), load(2);

  float state[64];  // state[4j + 2h + e]: v = row + 8h, k = 8j + two + e
  if (a.state_in && slot >= 0) {
    const float* from = a.state_in + (slot * a.heads + head) * D * D + row;
#pragma unroll
    for (int i = 0; i < 64; ++i) state[i] = from[((i >> 2) * 8 + two + (i & 1)) * D + ((i >> 1) & 1) * 8];
  } else {
#pragma unroll
    for (int i = 0; i < 64; ++i) state[i] = 0.f;
  }

  for (int c = 0; c < seq.chunks; ++c) {
    const int turn = c & 1, round = c >> 1;
    char* s = shared + turn * kHalfBytes<kBounded>;
    char* slice = slices + (c % kStages) * kSlice;
    __syncwarp();
    load(c + 3);
    if (a.snapshots && turn == 0) {  // the state entering 64 tokens, as the backward wants it: rows v, columns k
      nv_bf16* to = static_cast<nv_bf16*>(a.snapshots) + (int64_t(a.snapshot_begins[blockIdx.y] + round) * a.heads + head) * D * D + row * D + two;
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        *reinterpret_cast<uint32_t*>(to + j * 8) = pack(state[4 * j], state[4 * j + 1]);
        *reinterpret_cast<uint32_t*>(to + 8 * D + j * 8) = pack(state[4 * j + 2], state[4 * j + 3]);
      }
    }
    wait(full + turn * 8, round & 1);

    // 1. S~ = 2^a S, packed as a left operand
    uint32_t packed[8][4];
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      if constexpr (kBounded) {
        float2 m = *reinterpret_cast<const float2*>(s + Half::pre + (j * 8 + two) * 4);
        state[4 * j] *= m.x, state[4 * j + 1] *= m.y, state[4 * j + 2] *= m.x, state[4 * j + 3] *= m.y;
      }
      packed[j >> 1][(j & 1) * 2] = pack(state[4 * j], state[4 * j + 1]);
      packed[j >> 1][(j & 1) * 2 + 1] = pack(state[4 * j + 2], state[4 * j + 3]);
    }
    // 2. (K+ S~)^T, then (Q+ S~)^T
    float left[16], right[16];
    const uint64_t stack = describe(shared_address(s + Half::stack));
    warpgroup_fence();
#pragma unroll
    for (int k = 0; k < 8; ++k) wgmma<32, 0>(left, packed[k], stack + (k >> 2) * (64 * 128 / 16) + (k & 3) * 2, k > 0);
    warpgroup_commit();
#pragma unroll
    for (int k = 0; k < 8; ++k) wgmma<32, 0>(right, packed[k], stack + C * 128 / 16 + (k >> 2) * (64 * 128 / 16) + (k & 3) * 2, k > 0);
    warpgroup_commit();
    // 3. R = V - r (K+ S~)
    copy_wait<3>();
    __syncwarp();
    uint32_t vs[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) ldmatrix4_transposed(vs[i], shared_address(slice + slice_offset((2 * i + (lane >> 4)) * 8 + (lane & 7), (lane >> 3) & 1)));
    float2 scales[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) scales[n] = *reinterpret_cast<const float2*>(s + Half::token + (n * 8 + two) * 4);
    warpgroup_wait<1>();
    pin(left);
    uint32_t operand[2][4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float2 r = scales[n];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint32_t u = vs[n >> 1][(n & 1) * 2 + h];
        operand[n >> 1][(n & 1) * 2 + h] = pack(low(u) - r.x * left[4 * n + 2 * h], high(u) - r.y * left[4 * n + 2 * h + 1]);
      }
    }
    // 4. U^T = R^T (diag(r) X diag(beta))^T
    const uint64_t xm = describe(shared_address(s + Half::xm));
    warpgroup_fence();
    wgmma<32, 0>(left, operand[0], xm, 0);
    wgmma<32, 0>(left, operand[1], xm + 2, 1);
    warpgroup_commit();
    if constexpr (!kBounded) {
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        float2 m = *reinterpret_cast<const float2*>(s + Half::post + (j * 8 + two) * 4);
        state[4 * j] *= m.x, state[4 * j + 1] *= m.y, state[4 * j + 2] *= m.x, state[4 * j + 3] *= m.y;
      }
    }
    warpgroup_wait<0>();
    pin(left), pin(right);
#pragma unroll
    for (int n = 0; n < 4; ++n) operand[n >> 1][(n & 1) * 2] = pack(left[4 * n], left[4 * n + 1]), operand[n >> 1][(n & 1) * 2 + 1] = pack(left[4 * n + 2], left[4 * n + 3]);
    // 5. (Q+ S~ + M U)^T and S~^T += U^T K-
    const uint64_t minus = describe(shared_address(s + Half::minus), 1024, C * 128);
    warpgroup_fence();
    wgmma<32, 0>(right, operand[0], xm + 4, 1);
    wgmma<32, 0>(right, operand[1], xm + 6, 1);
    warpgroup_commit();
    wgmma<128, 1>(state, operand[0], minus, 1);
    wgmma<128, 1>(state, operand[1], minus + 2048 / 16, 1);
    warpgroup_commit();
    // 6. store O through the slice that held V
#pragma unroll
    for (int n = 0; n < 4; ++n) scales[n] = *reinterpret_cast<const float2*>(s + Half::token + (C + n * 8 + two) * 4);
    warpgroup_wait<1>();
    pin(right);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        int n = 2 * i + m;
        const float2 q = scales[n];
        vs[i][2 * m] = pack(q.x * right[4 * n], q.y * right[4 * n + 1]), vs[i][2 * m + 1] = pack(q.x * right[4 * n + 2], q.y * right[4 * n + 3]);
      }
      stmatrix4_transposed(shared_address(slice + slice_offset((2 * i + (lane >> 4)) * 8 + (lane & 7), (lane >> 3) & 1)), vs[i]);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int token = (lane >> 1) + 16 * i, part = lane & 1;
      uint4 u = *reinterpret_cast<const uint4*>(slice + slice_offset(token, part));
      if (c * C + token < seq.length) *reinterpret_cast<uint4*>(o + (seq.begin + c * C + token) * a.o_stride + part * 8) = u;
    }
    // 7. S' = 2^{G_31 - a} (S~ + K-^T U)
    float2 m[16];
    if constexpr (kBounded) {
#pragma unroll
      for (int j = 0; j < 16; ++j) m[j] = *reinterpret_cast<const float2*>(s + Half::post + (j * 8 + two) * 4);
    }
    warpgroup_wait<0>();
    pin(state);
    if constexpr (kBounded) {
#pragma unroll
      for (int j = 0; j < 16; ++j) state[4 * j] *= m[j].x, state[4 * j + 1] *= m[j].y, state[4 * j + 2] *= m[j].x, state[4 * j + 3] *= m[j].y;
    }
    __syncwarp();
    if (lane == 0) arrive(empty + turn * 8);
  }
  copy_wait<0>();

  if (a.state_out && slot >= 0) {
    float* to = a.state_out + (slot * a.heads + head) * D * D + row;
#pragma unroll
    for (int i = 0; i < 64; ++i) to[((i >> 2) * 8 + two + (i & 1)) * D + ((i >> 1) & 1) * 8] = state[i];
  }
}

template <bool kBounded>
__global__ void __launch_bounds__(512, 1) delta_chunk_kernel(const __grid_constant__ DeltaChunkArgs a) {
  extern __shared__ char memory[];
  char* shared = memory + (1024 - (shared_address(memory) & 1023) & 1023);
  const uint32_t barriers = shared_address(shared + 2 * kHalfBytes<kBounded> + kScanBytes);  // full[2], empty[2]
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) barrier_init(barriers + i * 8, 128), barrier_init(barriers + 16 + i * 8, 8);
    barrier_init_done();
  }
  __syncthreads();
  Chunk seq;
  seq.begin = a.begins ? a.begins[blockIdx.y] : 0;
  seq.length = a.begins ? a.begins[blockIdx.y + 1] - int(seq.begin) : int(a.tokens);
  seq.chunks = (seq.length + C - 1) / C;
  const int group = threadIdx.x >> 7;
  if (group < 2) {
    more_registers<168>();
    scan<kBounded>(a, seq, shared, barriers, barriers + 16);
  } else {
    fewer_registers<88>();
    prepare<kBounded>(a, seq, shared, group - 2, barriers + (group - 2) * 8, barriers + 16 + (group - 2) * 8);
  }
}

// One block a (head, sequence); thread = column v, the state's column in registers would be 128 values: kept in shared memory [k][v].
__global__ void __launch_bounds__(128) delta_plain_kernel(const DeltaChunkArgs a) {
  extern __shared__ char memory[];
  float* S = reinterpret_cast<float*>(memory);           // [128][128]
  float *q = S + D * D, *k = q + D, *decay = k + D, *part = decay + D;
  const int t = threadIdx.x, head = blockIdx.x;
  const int64_t begin = a.begins ? a.begins[blockIdx.y] : 0, end = a.begins ? a.begins[blockIdx.y + 1] : a.tokens;
  const int64_t slot = a.slots ? a.slots[blockIdx.y] : blockIdx.y;
  const bool resume = a.state_in && slot >= 0;
  for (int i = 0; i < D; ++i) S[i * D + t] = resume ? a.state_in[((slot * a.heads + head) * D + i) * D + t] : 0.f;
  const float rate = expf(a.gate.A_log[head]), bias = a.gate.dt_bias[head * D + t];
  auto sum = [&](float x) {
    x = warp_sum(x);
    __syncthreads();
    if ((t & 31) == 0) part[t >> 5] = x;
    __syncthreads();
    return part[0] + part[1] + part[2] + part[3];
  };
  for (int64_t n = begin; n < end; ++n) {
    float qt = static_cast<const float*>(a.q)[n * a.q_stride + head * D + t], kt = static_cast<const float*>(a.k)[n * a.k_stride + head * D + t];
    float vt = static_cast<const float*>(a.v)[n * a.v_stride + head * D + t], z = static_cast<const float*>(a.x)[n * a.x_stride + head * D + t] + bias;
    float g = a.gate.bounded ? a.gate.bound / (1.f + expf(-rate * z)) : fmaxf(-rate * (fmaxf(z, 0.f) + log1pf(expf(-fabsf(z)))), -20.f);
    float beta = 1.f / (1.f + expf(-static_cast<const float*>(a.b)[n * a.b_stride + head]));
    q[t] = qt * rsqrtf(sum(qt * qt) + 1e-6f), k[t] = kt * rsqrtf(sum(kt * kt) + 1e-6f), decay[t] = expf(g);
    __syncthreads();
    float read = 0.f, out = 0.f;
    for (int i = 0; i < D; ++i) read += k[i] * (S[i * D + t] *= decay[i]);
    float u = beta * (vt - read);
    for (int i = 0; i < D; ++i) out += q[i] * (S[i * D + t] += k[i] * u);
    static_cast<float*>(a.o)[n * a.o_stride + head * D + t] = a.scale * out;
    __syncthreads();
  }
  if (a.state_out && slot >= 0)
    for (int i = 0; i < D; ++i) a.state_out[((slot * a.heads + head) * D + i) * D + t] = S[i * D + t];
}

const char* error_of(cudaError_t e) { return e == cudaSuccess ? nullptr : cudaGetErrorString(e); }

template <bool kBounded>
const char* launch(const DeltaChunkArgs& a, cudaStream_t stream) {
  cudaError_t e = cudaFuncSetAttribute(delta_chunk_kernel<kBounded>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes<kBounded>);
  if (e != cudaSuccess) return cudaGetErrorString(e);
  delta_chunk_kernel<kBounded><<<dim3(a.heads, a.sequences), 512, kSharedBytes<kBounded>, stream>>>(a);
  return error_of(cudaGetLastError());
}

}  // namespace

const char* delta_chunk_forward(const DeltaChunkArgs& a, void* stream) {
  for (int64_t s : {a.q_stride, a.k_stride, a.v_stride, a.x_stride, a.o_stride})
    if (s % 8) return "[delta_rule] row strides must be multiples of 8 elements (16-byte loads); copy the view first";
  if (a.gate.bounded && !(a.gate.bound < 0.f && a.gate.bound >= -5.f)) return "[delta_rule] gate.bound must lie in [-5, 0); use the softplus gate's kernel";
  if (a.sequences == 0 || a.heads == 0) return nullptr;
  return a.gate.bounded ? launch<true>(a, cudaStream_t(stream)) : launch<false>(a, cudaStream_t(stream));
}

const char* delta_plain_forward(const DeltaChunkArgs& a, void* stream) {
  if (a.sequences == 0 || a.heads == 0) return nullptr;
  constexpr int bytes = (D * D + 3 * D + 4) * 4;
  cudaError_t e = cudaFuncSetAttribute(delta_plain_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e != cudaSuccess) return cudaGetErrorString(e);
  delta_plain_kernel<<<dim3(a.heads, a.sequences), 128, bytes, cudaStream_t(stream)>>>(a);
  return error_of(cudaGetLastError());
}

}  // namespace k3::cuda
