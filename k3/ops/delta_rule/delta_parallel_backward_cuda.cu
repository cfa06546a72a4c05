// Backward of delta_parallel.cuh: 3, gradients.
#include "k3/core/enqueue.cuh"
#include "k3/ops/delta_rule/delta_parallel.cuh"

namespace k3::cuda {
namespace {

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
  follow();
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

}  // namespace

const char* delta_parallel_backward(const DeltaParallel& p, void* s) {
  return run<true>(p, s, [&]<int K, bool kExact>(dim3 chunks) { return launch(gradients_kernel<K, kExact>, chunks, kThreads<K>, sizeof(Gradients<K>), s, p); });
}

}  // namespace k3::cuda
