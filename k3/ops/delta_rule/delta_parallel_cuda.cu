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
#include "k3/core/tile.cuh"
#include "k3/ops/delta_rule/delta_parallel_cuda.h"

namespace k3::cuda {
namespace {

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
  using Scan = Scan<K>;
  extern __shared__ __align__(128) char memory[];
  Scan& s = *reinterpret_cast<Scan*>(memory);
  constexpr int kOwn = Scan::kOwn, kDeep = Scan::kDeep, kTiles = Scan::kTiles, kStages = Scan::kStages;
  const int slice = blockIdx.x % Scan::kSlices, head = blockIdx.x / Scan::kSlices % p.a.heads, sequence = blockIdx.x / Scan::kSlices / p.a.heads;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int begin = p.chunk_first[sequence], chunks = p.chunk_first[sequence + 1] - begin;
  if (threadIdx.x == 0) {
    for (uint64_t& b : s.full) barrier_init(shared_address(&b), 1);
    for (uint64_t& b : s.empty) barrier_init(shared_address(&b), Scan::kWarps);
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
    if (lane == 0) arrive(shared_address(&s.empty[i % kStages]));
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

// ---- 3 -----------------------------------------------------------------------------------------------------------------------------------------
template <int K, bool kExact>
__global__ void __launch_bounds__(kThreads<K>) results_kernel(const __grid_constant__ DeltaParallel p) {
  const DeltaArgs& a = p.a;
  const Place place(p);
  const float* z = Work<K>(p, blockIdx.x, place.head).z;
  const float* S = p.memories + (int64_t(blockIdx.x) * a.heads + place.head) * K * K;
  product<C, K, K, kAcross<K>, kExact, true>(threadIdx.x >> 5, kThreads<K> / 32, [&](int i, int k) { return pair(z + i * K + k); }, [&](int k, int j) { return pair(S + j * K + k); },
                                         [&](int i, int j, float x0, float x1) {
                                           if (i >= place.n) return;
                                           float* o = a.out + place.row(a, i) * a.value_dim + j;
                                           if (j < a.value_dim) o[0] += a.scale * x0;
                                           if (j + 1 < a.value_dim) o[1] += a.scale * x1;
                                         });
}

template <int K>
struct Gradients : Chunk<K> {
  float e[C][K + 4], d_o[C][K + 4], dr[C][K + 4];        // v, then e; scale dO; dU, then dR
  float dq[C][K + 4], row[C][K + 4], column[C][K + 4];  // gradients of q; of k as a row and as a column of A and M
  float dM[C][kSmall], dA[C][kSmall], own[C], last[K];     // own: the diagonal of dM, through which no gate passes
};

// dM = tril(scale dO U^T)   dA = tril(-diag(b) dR U^T, -1)   dv = b dR   db_i = dR_i . e_i
// dq_i  = 2^{G_i} scale dO S^T + sum_{j <= i} dM_ij D(i..j) k_j
// row_i = -2^{G_i} b dR S^T + sum_{j < i} dA_ij D(i..j) k_j            column_j = 2^{G_31 - G_j} U D^T + sum_i D(i..j) (dM_ij q_i + dA_ij k_i)
// dk = row + column   dG = q dq + k (row - column)   dG_31 += 2^{G_31} rowsum(S D) + sum_j k_j 2^{G_31 - G_j} (U D^T)_j   dg_t = sum_{i >= t} dG_i
template <int K, bool kExact>
__global__ void __launch_bounds__(kThreads<K>) gradients_kernel(const __grid_constant__ DeltaParallel p) {
  extern __shared__ __align__(16) float shared[];
  Gradients<K>& x = *reinterpret_cast<Gradients<K>*>(shared);
  const DeltaArgs& a = p.a;
  const Place place(p);
  constexpr int kWarps = kThreads<K> / 32, kSolve = K / 32;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const float* S = p.memories + (int64_t(blockIdx.x) * a.heads + place.head) * K * K;
  const float* D = p.d_memories + (int64_t(blockIdx.x) * a.heads + place.head) * K * K;
  x.load_values(a, place, a.v, x.e[0], K + 4);
  x.load_values(a, place, a.d_out, x.d_o[0], K + 4);
  x.load(a, place);
  x.template scores<kExact>();
  product<C, K, K, kAcross<K>, kExact, true>(warp, kWarps, [&](int i, int k) { return make_float2(x.k[i][k] * ex2(x.G[i][k]), x.k[i][k + 1] * ex2(x.G[i][k + 1])); },
                                          [&](int k, int j) { return pair(S + j * K + k); },
                                          [&](int i, int j, float x0, float x1) { x.e[i][j] -= x0, x.e[i][j + 1] -= x1; });
  for (int e = threadIdx.x; e < C * K; e += kThreads<K>) x.d_o[e / K][e % K] *= a.scale;
  __syncthreads();
  if (warp < kSolve) {
    float y[C];
#pragma unroll
    for (int i = 0; i < C; ++i) y[i] = x.e[i][threadIdx.x];
    x.substitute(y);
#pragma unroll
    for (int i = 0; i < C; ++i) x.e[i][threadIdx.x] = y[i];
  } else {
    product<C, K, C + K, kAcross<K>, kExact, true>(warp - kSolve, kWarps - kSolve,
                                                [&](int i, int k) {
                                                  const int c = k - C;
                                                  if (k < C) return make_float2(x.M[k][i], x.M[k + 1][i]);
                                                  return make_float2(x.k[i][c] * ex2(x.G[C - 1][c] - x.G[i][c]), x.k[i][c + 1] * ex2(x.G[C - 1][c + 1] - x.G[i][c + 1]));
                                                },
                                                [&](int k, int j) { return k < C ? make_float2(x.d_o[k][j], x.d_o[k + 1][j]) : pair(D + j * K + k - C); },
                                                [&](int i, int j, float x0, float x1) { x.dr[i][j] = x0, x.dr[i][j + 1] = x1; });
  }
  __syncthreads();
  auto wrote = [&](int k, int j) { return x.beta[j] * x.e[j][k]; };  // U^T
  if (warp < kSolve) {
    float y[C];
#pragma unroll
    for (int i = 0; i < C; ++i) y[i] = x.dr[i][threadIdx.x];
    x.substitute_back(y);
#pragma unroll
    for (int i = 0; i < C; ++i) x.dr[i][threadIdx.x] = y[i];
  } else {
    product<C, C, K, 1, kExact, false>(warp - kSolve, kWarps - kSolve, [&](int i, int k) { return x.d_o[i][k]; }, wrote, [&](int i, int j, float x0, float x1) {
      x.dM[i][j] = j < i ? x0 : 0.f, x.dM[i][j + 1] = j + 1 < i ? x1 : 0.f;
      if (j == i) x.own[i] = x0;
      if (j + 1 == i) x.own[i] = x1;
    });
    product<C, K, K, kAcross<K>, kExact, false>(warp - kSolve, kWarps - kSolve, [&](int i, int k) { return x.d_o[i][k]; }, [&](int k, int j) { return S[k * K + j]; },
                                             [&](int i, int j, float x0, float x1) { x.dq[i][j] = ex2(x.G[i][j]) * x0, x.dq[i][j + 1] = ex2(x.G[i][j + 1]) * x1; });
    product<C, K, K, kAcross<K>, kExact, false>(warp - kSolve, kWarps - kSolve, [&](int i, int k) { return x.beta[i] * x.e[i][k]; },
                                             [&](int k, int j) { return D[k * K + j]; }, [&](int i, int j, float x0, float x1) {
                                               x.column[i][j] = ex2(x.G[C - 1][j] - x.G[i][j]) * x0, x.column[i][j + 1] = ex2(x.G[C - 1][j + 1] - x.G[i][j + 1]) * x1;
                                             });
  }
  __syncthreads();
  auto d_read = [&](int i, int k) { return -x.beta[i] * x.dr[i][k]; };
  product<C, C, K, 1, kExact, false>(warp, kWarps, d_read, wrote, [&](int i, int j, float x0, float x1) {
    x.dA[i][j] = j < i ? x0 : 0.f, x.dA[i][j + 1] = j + 1 < i ? x1 : 0.f;
  });
  product<C, K, K, kAcross<K>, kExact, false>(warp, kWarps, d_read, [&](int k, int j) { return S[k * K + j]; },
                                           [&](int i, int j, float x0, float x1) { x.row[i][j] = ex2(x.G[i][j]) * x0, x.row[i][j + 1] = ex2(x.G[i][j + 1]) * x1; });
  for (int i = warp; i < place.n; i += kWarps) {
    const int64_t row = place.row(a, i);
    float sum = 0.f;
#pragma unroll
    for (int c = lane; c < K; c += 32) {
      sum = __fmaf_rn(x.dr[i][c], x.e[i][c], sum);
      if (c < a.value_dim) a.dv[row * a.value_dim + c] += x.beta[i] * x.dr[i][c];
    }
    sum = warp_sum(sum);
    if (lane == 0) a.dbeta[row] += sum;
  }
  if (a.gate_columns && threadIdx.x < K) {
    const int c = threadIdx.x;
    float held = 0.f, come = 0.f;
#pragma unroll 8
    for (int v = 0; v < K; ++v) held = __fmaf_rn(S[v * K + c], D[v * K + c], held);
#pragma unroll 8
    for (int j = 0; j < C; ++j) come = __fmaf_rn(x.k[j][c], x.column[j][c], come);
    x.last[c] = __fmaf_rn(ex2(x.G[C - 1][c]), held, come);
  }
  __syncthreads();
  // Within the chunk, below the diagonal; first rows: [dA; dM] of 8 tokens times k, then columns: channels times [dM; dA]. What a pair of tokens adds
  // to dG as a row it takes away as a column, and only what a decay lies between is left: so these products are always exact.
#pragma unroll 1
  for (int item = warp; item < 4 * (K / 8); item += kWarps) {
    const int block = item / (K / 8), i = block * 8 + g, c = item % (K / 8) * 8;
    float sums[2][2] = {};
#pragma unroll
    for (int diagonal = 0; diagonal < 2; ++diagonal) {
      if (!diagonal && !block) continue;
      const int n = diagonal ? block * 8 + 3 : block * 8 - 1;
      float d[4] = {};
      for (int j = (diagonal ? block * 8 : 0) + t; j < (diagonal ? block + 1 : block) * 8; j += 8) {
        const Operand fa[4] = {operand<true>(x.dA[i][j]), operand<true>(x.dM[i][j]), operand<true>(x.dA[i][j + 4]), operand<true>(x.dM[i][j + 4])};
        const Operand fb[2] = {operand<true>(x.k[j][c + g] * ex2(x.G[n][c + g] - x.G[j][c + g])),
                               operand<true>(x.k[j + 4][c + g] * ex2(x.G[n][c + g] - x.G[j + 4][c + g]))};
        multiply_add<true>(d, fa, fb);
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float f = ex2(x.G[i][c + 2 * t + e] - x.G[n][c + 2 * t + e]);
        sums[0][e] = __fmaf_rn(f, d[e], sums[0][e]), sums[1][e] = __fmaf_rn(f, d[2 + e], sums[1][e]);
      }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) x.row[i][c + 2 * t + e] += sums[0][e], x.dq[i][c + 2 * t + e] += sums[1][e];
  }
#pragma unroll 1
  for (int item = warp; item < 4 * (K / 16); item += kWarps) {
    const int block = item / (K / 16), c = item % (K / 16) * 16 + g;
    float sums[4] = {};
#pragma unroll
    for (int diagonal = 0; diagonal < 2; ++diagonal) {
      if (!diagonal && block == 3) continue;
      const int n = diagonal ? block * 8 + 3 : block * 8 + 7;
      float d[4] = {};
      for (int i = (diagonal ? block : block + 1) * 8 + t; i < (diagonal ? (block + 1) * 8 : C); i += 8) {
        const float f[4] = {ex2(x.G[i][c] - x.G[n][c]), ex2(x.G[i][c + 8] - x.G[n][c + 8]), ex2(x.G[i + 4][c] - x.G[n][c]),
                            ex2(x.G[i + 4][c + 8] - x.G[n][c + 8])};
        const Operand fq[4] = {operand<true>(x.q[i][c] * f[0]), operand<true>(x.q[i][c + 8] * f[1]), operand<true>(x.q[i + 4][c] * f[2]),
                               operand<true>(x.q[i + 4][c + 8] * f[3])};
        const Operand fk[4] = {operand<true>(x.k[i][c] * f[0]), operand<true>(x.k[i][c + 8] * f[1]), operand<true>(x.k[i + 4][c] * f[2]),
                               operand<true>(x.k[i + 4][c + 8] * f[3])};
        const Operand fm[2] = {operand<true>(x.dM[i][block * 8 + g]), operand<true>(x.dM[i + 4][block * 8 + g])};
        const Operand fa[2] = {operand<true>(x.dA[i][block * 8 + g]), operand<true>(x.dA[i + 4][block * 8 + g])};
        multiply_add<true>(d, fq, fm);
        multiply_add<true>(d, fk, fa);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int j = block * 8 + 2 * t + (e & 1), channel = c + (e >> 1) * 8;
        sums[e] = __fmaf_rn(ex2(x.G[n][channel] - x.G[j][channel]), d[e], sums[e]);
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) x.column[block * 8 + 2 * t + (e & 1)][c + (e >> 1) * 8] += sums[e];
  }
  __syncthreads();
  if (a.gate_columns && threadIdx.x < K) {
    const int c = threadIdx.x;
    float later = x.last[c];
#pragma unroll
    for (int i = C - 1; i >= 0; --i) x.G[i][c] = later += x.q[i][c] * x.dq[i][c] + x.k[i][c] * (x.row[i][c] - x.column[i][c]);
  }
  __syncthreads();
  const bool one = a.gate_columns == 1 && a.key_dim > 1;  // a gate a head
  for (int e = threadIdx.x; e < place.n * K; e += kThreads<K>) {
    const int i = e / K, c = e % K;
    if (c >= a.key_dim) continue;
    const int64_t at = place.row(a, i) * a.key_dim + c;
    a.dq[at] += __fmaf_rn(x.own[i], x.k[i][c], x.dq[i][c]), a.dk[at] += __fmaf_rn(x.own[i], x.q[i][c], x.row[i][c] + x.column[i][c]);
    if (a.gate_columns && !one) a.dg[at] += x.G[i][c];
  }
  if (one)
    for (int i = warp; i < place.n; i += kWarps) {
      float sum = 0.f;
#pragma unroll
      for (int c = lane; c < K; c += 32) sum += x.G[i][c];
      sum = warp_sum(sum);
      if (lane == 0) a.dg[place.row(a, i)] += sum;
    }
}

template <class... Args>
cudaError_t launch(void (*kernel)(Args...), dim3 grid, int threads, int bytes, void* stream, const DeltaParallel& p) {
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes); e != cudaSuccess) return e;
  kernel<<<grid, threads, bytes, static_cast<cudaStream_t>(stream)>>>(p);
  return cudaGetLastError();
}

template <int K, bool kExact>
cudaError_t run(const DeltaParallel& p, bool back, void* s) {
  const dim3 all(unsigned(p.chunks), unsigned(p.a.heads)), chains(unsigned(p.a.sequences * p.a.heads * Scan<K>::kSlices));
  cudaError_t e = launch(back ? prepare_kernel<K, kExact, true> : prepare_kernel<K, kExact, false>, all, kThreads<K>, sizeof(Prepared<K>), s, p);
  if (e == cudaSuccess) e = launch(back ? scan_kernel<K, kExact, true> : scan_kernel<K, kExact, false>, chains, Scan<K>::kWarps * 32 + 32, sizeof(Scan<K>), s, p);
  if (e == cudaSuccess) e = back ? launch(gradients_kernel<K, kExact>, all, kThreads<K>, sizeof(Gradients<K>), s, p) : launch(results_kernel<K, kExact>, all, kThreads<K>, 0, s, p);
  return e;
}

const char* run(const DeltaParallel& p, bool back, void* s) {
  if (p.chunks == 0 || p.a.heads == 0) return nullptr;
  if (!delta_parallel_serves(p.a.key_dim, p.a.value_dim)) return "[delta_rule] the chunk kernels serve heads of up to 128 key and 128 value channels";
  if (p.a.heads > 65535 || p.a.sequences * p.a.heads * 8 > 0x7fffffff) return "[delta_rule] more sequences times heads than a launch takes";
  cudaError_t e;
  switch (delta_parallel_size(p.a.key_dim, p.a.value_dim)) {
    case 32: e = p.exact ? run<32, true>(p, back, s) : run<32, false>(p, back, s); break;
    case 64: e = p.exact ? run<64, true>(p, back, s) : run<64, false>(p, back, s); break;
    default: e = p.exact ? run<128, true>(p, back, s) : run<128, false>(p, back, s);
  }
  return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}

}  // namespace

const char* delta_parallel_forward(const DeltaParallel& p, void* stream) { return run(p, false, stream); }
const char* delta_parallel_backward(const DeltaParallel& p, void* stream) { return run(p, true, stream); }

}  // namespace k3::cuda
