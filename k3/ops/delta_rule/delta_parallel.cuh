#pragma once
// The gated delta rule over whole sequences, chunk by chunk. In a chunk of 32 tokens, G_i the running sum of log gates (base 2) per key channel, S the
// memory entering, D(i..j) = 2^{G_i - G_j}:
//   A_ij = k_i . D(i..j) k_j (j < i)    M_ij = q_i . D(i..j) k_j (j <= i)    K^_i = 2^{G_i} k_i    Q^_i = 2^{G_i} q_i    K~_j = 2^{G_31 - G_j} k_j
//   W = X diag(b) K^    U' = X diag(b) V    X = (I + diag(b) A)^-1, by substitution    Z = Q^ - M W
//   S' = diag(2^{G_31}) S + P S + K~^T U'    P = -K~^T W             o = scale (Z S + M U')
// so all but S' is known without S. With dO, and D the gradient of the memory leaving:
//   D' = diag(2^{G_31}) D + P^T D + scale Z^T dO
// and then each chunk by itself: e = X' (V - K^ S), U = b e, dR = (I + diag(b) A)^-T (scale M^T dO + K~ D), and what gradients_kernel lists.
//
// Off the diagonal blocks of 8 tokens, decays are split at the border of the row's block, so both factors are <= 1; on it in the middle, where 20 a
// token cannot overflow.
//
// Bound: latency of the chain of S, one product of K x K with K x 16 columns a chunk; then instruction issue.
// Split: 1 prepare: a block a (chunk, head). 2 scan: a block 16 columns of V (32 at head size 128) of one head of one sequence; lanes hold S^T as
// accumulators, which are the next step's left operand as they are; P and K~^T U' lie in the order of its fragments and come by bulk copies, some
// chunks ahead. 3 results or gradients: a block a (chunk, head).
// Precision: gates, decays, substitution, memories float32; operands tf32, or two of them.
#include "k3/core/enqueue.cuh"
#include "k3/core/tile.cuh"
#include "k3/ops/delta_rule/delta_parallel_cuda.h"

namespace k3::cuda {
namespace {  // a copy for each of the two files: forward and backward

using cpu::DeltaArgs;

constexpr int C = kParallelChunk, kSmall = C + 4;
template <int K>
constexpr int kThreads = K == 128 ? 512 : 256;
template <int K>
constexpr int kAcross = K / 4 / (kThreads<K> / 32);  // tiles of 8 columns a warp takes, so that a product of C x K has work for each

// ---- products of a warp: D[16, 8] += A[16, 8] B[8, 8] ---------------------------------------------------------------------------------------
struct Operand {
  uint32_t high, low;
};
template <bool kExact>
__device__ __forceinline__ Operand operand(float x) {
  const uint32_t high = to_tf32(x);
  return {high, kExact ? to_tf32(x - __uint_as_float(high)) : 0};
}
template <bool kExact>
__device__ __forceinline__ void multiply_add(float (&d)[4], const Operand (&a)[4], const Operand (&b)[2]) {
  const uint32_t high[4] = {a[0].high, a[1].high, a[2].high, a[3].high};
  if constexpr (kExact) {
    const uint32_t low[4] = {a[0].low, a[1].low, a[2].low, a[3].low};
    mma_tf32(d, low, b[0].high, b[1].high);
    mma_tf32(d, high, b[0].low, b[1].low);
  }
  mma_tf32(d, high, b[0].high, b[1].high);
}

// out(i, j, x_ij, x_i,j+1) for x = a b, by warps `warp` of `warps`; a(i, k), b(k, j) give values, with kPairs those of k and k + 1.
template <int kRows, int kColumns, int kDepth, int N, bool kExact, bool kPairs, class A, class B, class Out>
__device__ __forceinline__ void product(int warp, int warps, A a, B b, Out out) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  constexpr int kTiles = kColumns / (8 * N);
#pragma unroll 1
  for (int tile = warp; tile < kRows / 16 * kTiles; tile += warps) {
    const int i = tile / kTiles * 16 + g, j = tile % kTiles * 8 * N;
    float d[N][4] = {};
#pragma unroll
    for (int k = 0; k < kDepth; k += 8) {
      Operand fa[4], fb[2];
      if constexpr (kPairs) {
        const float2 x = a(i, k + 2 * t), y = a(i + 8, k + 2 * t);
        fa[0] = operand<kExact>(x.x), fa[1] = operand<kExact>(y.x), fa[2] = operand<kExact>(x.y), fa[3] = operand<kExact>(y.y);
      } else {
        fa[0] = operand<kExact>(a(i, k + t)), fa[1] = operand<kExact>(a(i + 8, k + t));
        fa[2] = operand<kExact>(a(i, k + t + 4)), fa[3] = operand<kExact>(a(i + 8, k + t + 4));
      }
#pragma unroll
      for (int n = 0; n < N; ++n) {
        if constexpr (kPairs) {
          const float2 x = b(k + 2 * t, j + 8 * n + g);
          fb[0] = operand<kExact>(x.x), fb[1] = operand<kExact>(x.y);
        } else {
          fb[0] = operand<kExact>(b(k + t, j + 8 * n + g)), fb[1] = operand<kExact>(b(k + t + 4, j + 8 * n + g));
        }
        multiply_add<kExact>(d[n], fa, fb);
      }
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
      out(i, j + 8 * n + 2 * t, d[n][0], d[n][1]);
      out(i + 8, j + 8 * n + 2 * t, d[n][2], d[n][3]);
    }
  }
}

__device__ __forceinline__ float2 pair(const float* p) { return *reinterpret_cast<const float2*>(p); }

// ---- a chunk in shared memory ----------------------------------------------------------------------------------------------------------------
struct Place {
  int64_t first;  // of the chunk's tokens, among those that exist
  int n, head;
  __device__ Place(const DeltaParallel& p) : head(blockIdx.y) {
    const int number = blockIdx.x;
    int s = 0;
    for (int hi = int(p.a.sequences) - 1; s < hi;) {
      const int mid = (s + hi + 1) >> 1;
      if (p.chunk_first[mid] <= number) s = mid; else hi = mid - 1;
    }
    first = p.a.first[s] + int64_t(number - p.chunk_first[s]) * C;
    n = int(min(int64_t(C), p.a.first[s + 1] - first));
  }
  __device__ int64_t row(const DeltaArgs& a, int t) const { return int64_t(a.rows ? a.rows[first + t] : first + t) * a.heads + head; }
};

template <int K>
struct Chunk {
  float q[C][K + 4], k[C][K + 4], G[C][K + 4];
  float A[C][kSmall], below[C][kSmall], M[C][kSmall];  // below: A transposed
  float beta[C];

  __device__ void load(const DeltaArgs& a, const Place& p) {
    for (int e = threadIdx.x; e < C * K; e += kThreads<K>) {
      const int t = e / K, c = e % K;
      const bool there = t < p.n && c < a.key_dim;
      const int64_t row = there ? p.row(a, t) : 0, at = row * a.key_dim + c;
      q[t][c] = there ? a.q[at] : 0.f, k[t][c] = there ? a.k[at] : 0.f;
      G[t][c] = there && a.gate_columns ? fmaxf(a.g[a.gate_columns == 1 ? row : at], -20.f) * kLog2e : 0.f;
    }
    for (int e = threadIdx.x; e < C * kSmall; e += kThreads<K>) A[0][e] = below[0][e] = M[0][e] = 0.f;
    if (threadIdx.x < C) beta[threadIdx.x] = threadIdx.x < p.n ? a.beta[p.row(a, threadIdx.x)] : 0.f;
    __syncthreads();
    if (threadIdx.x < K) {
      float x[C];
#pragma unroll
      for (int t = 0; t < C; ++t) x[t] = G[t][threadIdx.x];
#pragma unroll
      for (int t = 1; t < C; ++t) G[t][threadIdx.x] = x[t] += x[t - 1];
    }
    __syncthreads();
  }
  __device__ void load_values(const DeltaArgs& a, const Place& p, const float* from, float* to, int pitch) const {
    for (int e = threadIdx.x; e < C * K; e += kThreads<K>) {
      const int t = e / K, c = e % K;
      to[t * pitch + c] = t < p.n && c < a.value_dim ? from[p.row(a, t) * a.value_dim + c] : 0.f;
    }
  }

  // A and M, as blocks of 8 x 8 with K and Q rows together
  template <bool kExact>
  __device__ void scores() {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll 1
    for (int pair = threadIdx.x >> 5; pair < 10; pair += kThreads<K> / 32) {
      const int bi = pair < 1 ? 0 : pair < 3 ? 1 : pair < 6 ? 2 : 3, bj = pair - bi * (bi + 1) / 2;
      const int i = bi * 8 + g, j = bj * 8 + g, n = bi == bj ? bi * 8 + 3 : bi * 8 - 1;
      float d[4] = {};
#pragma unroll
      for (int c0 = 0; c0 < K; c0 += 8) {
        const int c = c0 + t;
        const float p0 = ex2(G[i][c] - G[n][c]), p1 = ex2(G[i][c + 4] - G[n][c + 4]);
        const Operand fa[4] = {operand<kExact>(k[i][c] * p0), operand<kExact>(q[i][c] * p0), operand<kExact>(k[i][c + 4] * p1),
                               operand<kExact>(q[i][c + 4] * p1)};
        const Operand fb[2] = {operand<kExact>(k[j][c] * ex2(G[n][c] - G[j][c])), operand<kExact>(k[j][c + 4] * ex2(G[n][c + 4] - G[j][c + 4]))};
        multiply_add<kExact>(d, fa, fb);
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = bj * 8 + 2 * t + e;
        A[i][column] = below[column][i] = column < i ? d[e] : 0.f;
        M[i][column] = column <= i ? d[2 + e] : 0.f;
      }
    }
  }
  // y_i = r_i - sum_{j < i} A_ij beta_j y_j, for one column
  __device__ __forceinline__ void substitute(float (&y)[C]) const {
#pragma unroll
    for (int j = 0; j < C - 1; ++j) {
      const float u = beta[j] * y[j];
#pragma unroll
      for (int i = (j + 1) / 4 * 4; i < C; i += 4) {  // what is not below the diagonal is zero
        const float4 l = *reinterpret_cast<const float4*>(&below[j][i]);
        y[i] = __fmaf_rn(-l.x, u, y[i]), y[i + 1] = __fmaf_rn(-l.y, u, y[i + 1]), y[i + 2] = __fmaf_rn(-l.z, u, y[i + 2]), y[i + 3] = __fmaf_rn(-l.w, u, y[i + 3]);
      }
    }
  }
  // y_j = r_j - sum_{i > j} A_ij beta_i y_i
  __device__ __forceinline__ void substitute_back(float (&y)[C]) const {
#pragma unroll
    for (int i = C - 1; i > 0; --i) {
      const float u = beta[i] * y[i];
#pragma unroll
      for (int j = 0; j < i; j += 4) {
        const float4 l = *reinterpret_cast<const float4*>(&A[i][j]);
        y[j] = __fmaf_rn(-l.x, u, y[j]), y[j + 1] = __fmaf_rn(-l.y, u, y[j + 1]), y[j + 2] = __fmaf_rn(-l.z, u, y[j + 2]), y[j + 3] = __fmaf_rn(-l.w, u, y[j + 3]);
      }
    }
  }
};

// ---- 1 -----------------------------------------------------------------------------------------------------------------------------------------
template <int K>
struct Work {  // of a chunk and head; `step` and `add` in the order of the scan's fragments
  float *step, *add, *z, *decay;
  __device__ Work(const DeltaParallel& p, int64_t chunk, int64_t head) {
    step = p.work + (chunk * p.a.heads + head) * (2 * K * K + (C + 1) * K), add = step + K * K, z = add + K * K, decay = z + C * K;
  }
};

template <int K>
struct Prepared : Chunk<K> {
  float w[C][K + 8], u[C][K + 8];
};

template <int K, bool kExact, bool kBack>
__global__ void __launch_bounds__(kThreads<K>) prepare_kernel(const __grid_constant__ DeltaParallel p) {
  follow();
  extern __shared__ __align__(16) float shared[];
  Prepared<K>& x = *reinterpret_cast<Prepared<K>*>(shared);
  const DeltaArgs& a = p.a;
  const Place place(p);
  const Work<K> to(p, blockIdx.x, place.head);
  constexpr int kWarps = kThreads<K> / 32;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  x.load_values(a, place, kBack ? a.d_out : a.v, x.u[0], K + 8);
  x.load(a, place);
  x.template scores<kExact>();
  for (int e = threadIdx.x; e < C * K; e += kThreads<K>) x.w[e / K][e % K] = x.k[e / K][e % K] * ex2(x.G[e / K][e % K]);
  __syncthreads();
  for (int column = threadIdx.x; column < (kBack ? K : 2 * K); column += kThreads<K>) {
    float* r = column < K ? &x.w[0][column] : &x.u[0][column - K];
    float y[C];
#pragma unroll
    for (int i = 0; i < C; ++i) y[i] = r[i * (K + 8)];
    x.substitute(y);
#pragma unroll
    for (int i = 0; i < C; ++i) r[i * (K + 8)] = x.beta[i] * y[i];
  }
  for (int e = threadIdx.x; e < C * K; e += kThreads<K>) {
    const int t = e / K, c = e % K;
    x.q[t][c] *= ex2(x.G[t][c]), x.k[t][c] *= ex2(x.G[C - 1][c] - x.G[t][c]);
  }
  if (threadIdx.x < K) to.decay[threadIdx.x] = ex2(x.G[C - 1][threadIdx.x]);
  __syncthreads();
  // the lane that has a pair of a product's results here takes the same pair as an operand there
  auto step = [&](int i, int j, float x0, float x1) {
    auto rounded = [](float v) { return kExact ? v : __uint_as_float(to_tf32(v)); };
    *reinterpret_cast<float2*>(to.step + ((i / 8 * (K / 8) + j / 8) * 32 + lane) * 2) = make_float2(rounded(x0), rounded(x1));
  };
  auto add = [&](int i, int j, float x0, float x1) {
    *reinterpret_cast<float2*>(to.add + ((i / 16 * (K / 8) + j / 8) * 32 + lane) * 4 + i / 8 % 2 * 2) = make_float2(x0, x1);
  };
  auto value = [&](int i, int j) { return x.u[j][i]; };
  if constexpr (kBack) {
    product<C, K, C, kAcross<K>, kExact, false>(warp, kWarps, [&](int i, int k) { return x.M[i][k]; }, [&](int k, int j) { return x.w[k][j]; },
                                             [&](int i, int j, float x0, float x1) {
                                               const float z0 = x.q[i][j] - x0, z1 = x.q[i][j + 1] - x1;
                                               x.q[i][j] = a.scale * z0, x.q[i][j + 1] = a.scale * z1;
                                             });
    product<K, K, C, kAcross<K>, kExact, false>(warp, kWarps, [&](int i, int k) { return -x.w[k][i]; }, [&](int k, int j) { return x.k[k][j]; }, step);
    __syncthreads();
    product<K, K, C, kAcross<K>, kExact, false>(warp, kWarps, value, [&](int k, int j) { return x.q[k][j]; }, add);
  } else {
    product<K, K, C, kAcross<K>, kExact, false>(warp, kWarps, [&](int i, int k) { return -x.k[k][i]; }, [&](int k, int j) { return x.w[k][j]; }, step);
    product<K, K, C, kAcross<K>, kExact, false>(warp, kWarps, value, [&](int k, int j) { return x.k[k][j]; }, add);
    product<C, K, C, kAcross<K>, kExact, false>(warp, kWarps, [&](int i, int k) { return x.M[i][k]; }, [&](int k, int j) { return x.w[k][j]; },
                                             [&](int i, int j, float x0, float x1) {
                                               *reinterpret_cast<float2*>(to.z + i * K + j) = make_float2(x.q[i][j] - x0, x.q[i][j + 1] - x1);
                                             });
    product<C, K, C, kAcross<K>, kExact, false>(warp, kWarps, [&](int i, int k) { return x.M[i][k]; }, [&](int k, int j) { return x.u[k][j]; },
                                             [&](int i, int j, float x0, float x1) {
                                               if (i >= place.n) return;
                                               float* o = a.out + place.row(a, i) * a.value_dim + j;
                                               if (j < a.value_dim) o[0] = a.scale * x0;
                                               if (j + 1 < a.value_dim) o[1] = a.scale * x1;
                                             });
  }
}

// ---- 2 -----------------------------------------------------------------------------------------------------------------------------------------
template <int K>
struct Scan {
  static constexpr int kWarps = K == 32 ? 1 : K == 64 ? 4 : 8, kTiles = K == 128 ? 2 : 1, kStages = K == 32 ? 8 : K == 64 ? 4 : 2;
  static constexpr int kOwn = K / 8 / kWarps, kDeep = K / 8, kSlices = K / 16 / kTiles;
  struct Stage {
    float step[K * K], add[kTiles * 16 * K], decay[K];
  };
  Stage stages[kStages];
  float4 exchange[kWarps == 1 ? 1 : 2][kTiles][kDeep][32];
  uint64_t full[kStages], empty[kStages];
};

template <int K, bool kExact, bool kBack>
__global__ void __launch_bounds__(Scan<K>::kWarps * 32 + 32) scan_kernel(const __grid_constant__ DeltaParallel p) {
  follow();
  using Scan = Scan<K>;
  extern __shared__ __align__(128) char memory[];
  Scan& s = *reinterpret_cast<Scan*>(memory);
  constexpr int kOwn = Scan::kOwn, kDeep = Scan::kDeep, kTiles = Scan::kTiles, kStages = Scan::kStages;
  const int slice = blockIdx.x % Scan::kSlices, head = blockIdx.x / Scan::kSlices % p.a.heads, sequence = blockIdx.x / Scan::kSlices / p.a.heads;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int begin = p.chunk_first[sequence], chunks = p.chunk_first[sequence + 1] - begin;
  if (threadIdx.x == 0) {
    for (uint64_t& b : s.full) barrier_init(shared_address(&b), 1);
    for (uint64_t& b : s.empty) barrier_init(shared_address(&b), Scan::kWarps * kWarpArrivals);
    barrier_init_done();
  }
  __syncthreads();
  auto chunk = [&](int i) { return begin + (kBack ? chunks - 1 - i : i); };
  if (warp == Scan::kWarps) {  // feeds the others
    if (lane) return;
    for (int i = 0; i < chunks; ++i) {
      const Work<K> from(p, chunk(i), head);
      typename Scan::Stage& to = s.stages[i % kStages];
      const uint32_t full = shared_address(&s.full[i % kStages]);
      wait(shared_address(&s.empty[i % kStages]), (i / kStages & 1) ^ 1);
      arrive_expect(full, sizeof(typename Scan::Stage));
      bulk_load(shared_address(to.step), from.step, sizeof to.step, full);
      bulk_load(shared_address(to.add), from.add + slice * kTiles * 16 * K, sizeof to.add, full);
      bulk_load(shared_address(to.decay), from.decay, sizeof to.decay, full);
    }
    return;
  }

  float S[kTiles][kOwn][4] = {};  // rows v, columns k: the warp's tiles of 8
  float2 step[kOwn][kDeep], decay[kOwn];
  float4 add[kTiles][kOwn];
  auto fetch = [&](int i) {
    if (i >= chunks) return;
    wait(shared_address(&s.full[i % kStages]), i / kStages & 1);
    const typename Scan::Stage& from = s.stages[i % kStages];
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      const int own = warp * kOwn + n;
#pragma unroll
      for (int j = 0; j < kDeep; ++j) step[n][j] = *reinterpret_cast<const float2*>(from.step + ((own * kDeep + j) * 32 + lane) * 2);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) add[m][n] = *reinterpret_cast<const float4*>(from.add + ((m * kDeep + own) * 32 + lane) * 4);
      decay[n] = *reinterpret_cast<const float2*>(from.decay + own * 8 + 2 * t);
    }
    __syncwarp();
    arrive_warp(shared_address(&s.empty[i % kStages]));
  };
  fetch(0);
  float* memories = kBack ? p.d_memories : p.memories;
  for (int i = 0; i < chunks; ++i) {
    float* to = memories + (int64_t(chunk(i)) * p.a.heads + head) * K * K;
    Operand left[kTiles][kDeep][4];
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int n = 0; n < kOwn; ++n) {
        const int own = warp * kOwn + n, v = (slice * kTiles + m) * 16 + g;
        *reinterpret_cast<float2*>(to + v * K + own * 8 + 2 * t) = make_float2(S[m][n][0], S[m][n][1]);
        *reinterpret_cast<float2*>(to + (v + 8) * K + own * 8 + 2 * t) = make_float2(S[m][n][2], S[m][n][3]);
        const float4 mine = make_float4(S[m][n][0], S[m][n][2], S[m][n][1], S[m][n][3]);  // depths 2t and 2t + 1 of the tile
        if constexpr (Scan::kWarps > 1) s.exchange[i & 1][m][own][lane] = mine;
        else left[m][n][0] = operand<kExact>(mine.x), left[m][n][1] = operand<kExact>(mine.y), left[m][n][2] = operand<kExact>(mine.z), left[m][n][3] = operand<kExact>(mine.w);
        S[m][n][0] = __fmaf_rn(decay[n].x, S[m][n][0], add[m][n].x), S[m][n][1] = __fmaf_rn(decay[n].y, S[m][n][1], add[m][n].y);
        S[m][n][2] = __fmaf_rn(decay[n].x, S[m][n][2], add[m][n].z), S[m][n][3] = __fmaf_rn(decay[n].y, S[m][n][3], add[m][n].w);
      }
    if constexpr (Scan::kWarps > 1) named_barrier(1, Scan::kWarps * 32);
#pragma unroll
    for (int j = 0; j < kDeep; ++j)
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        if constexpr (Scan::kWarps > 1) {
          const float4 x = s.exchange[i & 1][m][j][lane];
          left[m][j][0] = operand<kExact>(x.x), left[m][j][1] = operand<kExact>(x.y), left[m][j][2] = operand<kExact>(x.z), left[m][j][3] = operand<kExact>(x.w);
        }
#pragma unroll
        for (int n = 0; n < kOwn; ++n) {
          Operand right[2] = {{__float_as_uint(step[n][j].x), 0}, {__float_as_uint(step[n][j].y), 0}};  // tf32 already
          if constexpr (kExact) right[0] = operand<true>(step[n][j].x), right[1] = operand<true>(step[n][j].y);
          multiply_add<kExact>(S[m][n], left[m][j], right);
        }
      }
    fetch(i + 1);
  }
}

// ---- launches ----------------------------------------------------------------------------------------------------------------------------------
template <class... Args>
cudaError_t launch(void (*kernel)(Args...), dim3 grid, int threads, int bytes, void* stream, const DeltaParallel& p) {
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes); e != cudaSuccess) return e;
  enqueue(kernel, grid, threads, bytes, static_cast<cudaStream_t>(stream), p);
  return cudaGetLastError();
}

// 1 and 2, then `last`, which is 3: last.template operator()<K, exact>(grid of a block a chunk and head)
template <bool kBack, class Last>
const char* run(const DeltaParallel& p, void* s, Last last) {
  if (p.chunks == 0 || p.a.heads == 0) return nullptr;
  if (!delta_parallel_serves(p.a.key_dim, p.a.value_dim)) return "[delta_rule] the chunk kernels serve heads of up to 128 key and 128 value channels";
  if (p.a.heads > 65535 || p.a.sequences * p.a.heads * 8 > 0x7fffffff) return "[delta_rule] more sequences times heads than a launch takes";
  auto all = [&]<int K, bool kExact>() {
    const dim3 chunks(unsigned(p.chunks), unsigned(p.a.heads)), chains(unsigned(p.a.sequences * p.a.heads * Scan<K>::kSlices));
    cudaError_t e = launch(prepare_kernel<K, kExact, kBack>, chunks, kThreads<K>, sizeof(Prepared<K>), s, p);
    if (e == cudaSuccess) e = launch(scan_kernel<K, kExact, kBack>, chains, Scan<K>::kWarps * 32 + 32, sizeof(Scan<K>), s, p);
    return e == cudaSuccess ? last.template operator()<K, kExact>(chunks) : e;
  };
  cudaError_t e;
  switch (delta_parallel_size(p.a.key_dim, p.a.value_dim)) {
    case 32: e = p.exact ? all.template operator()<32, true>() : all.template operator()<32, false>(); break;
    case 64: e = p.exact ? all.template operator()<64, true>() : all.template operator()<64, false>(); break;
    default: e = p.exact ? all.template operator()<128, true>() : all.template operator()<128, false>();
  }
  return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}

}  // namespace
}  // namespace k3::cuda
