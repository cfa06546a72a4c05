//   A = Diag(exp g_t) S;   u_t = beta_t (v_t - A^T k_t);   S = A + k_t u_t^T;   o_t = scale (A^T q_t + (q_t . k_t) u_t)     forward
//   G += scale q_t do_t^T;   du_t = G^T k_t;   G = Diag(exp g_t) (G - beta_t k_t du_t^T)                                  backward, part 1
//   dq_t = scale S do_t;   dk_t = G u_t - A de_t;   dg_t = rowsum((G - k_t de_t^T) * A),   de = beta du, u = beta e       backward, part 2
//
// Bound: the latency of the chain of tokens (a sum over the warp each); S and G never leave registers. Columns of S are independent of each other
// in the forward and in part 1, rows in part 2, where u and de are known.
// Split: forward and part 1: a block is 32 columns (a panel) of one head of one sequence, a warp 8 of them; lane l has columns
// 2 (l % 4), + 1 and rows 4 (l / 4) .. + 3 of every 32, so that a sum over rows is three steps over eight lanes; sixteen
// tokens at a time come in while the sixteen before are worked on. Part 2: a block is 64 tokens of one head, between two memories that were kept; a
// warp has one or two rows, lane l columns l, l + 32, ...; 1 forward through the 64, keeping S at every eighth; 2 eight at a time, the last first:
// forward again with A in registers, then backward.
#include "k3/core/tile.cuh"
#include "k3/ops/delta_rule/delta_rule_float_cuda.h"

namespace k3::cuda {
namespace {

using cpu::DeltaArgs;

constexpr int kPanel = cpu::kDeltaPanel, kChunk = cpu::kDeltaChunk, kSegment = cpu::kDeltaChunk * cpu::kDeltaKept;
constexpr int kScanThreads = 128, kColumns = 8, kStage = 16;

struct Sizes {
  int64_t k, v, memory, head;  // padded widths; floats of a memory, and of a head of a slot
};
__host__ __device__ Sizes sizes_of(const DeltaArgs& a) {
  const int64_t k = (a.key_dim + 15) / 16 * 16, v = (a.value_dim + kPanel - 1) / kPanel * kPanel;
  return {k, v, k * v, k * v + kChunk * (2 * k + v)};
}
__device__ __forceinline__ int64_t kept_of(int64_t n) { return n == 0 ? 0 : (n - 1) / kSegment; }
// Where a pair's memory at token `n`, a multiple of kSegment, is kept.
__device__ __forceinline__ int64_t kept_at(const DeltaArgs& a, const Sizes& z, int64_t s, int64_t h, int64_t length, int64_t n) {
  return (a.kept_first[s] * a.heads + h * kept_of(length) + n / kSegment - 1) * z.memory;
}

__device__ __forceinline__ void copy4(float* to, const float* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid ? 4 : 0) : "memory");
}

// Sixteen tokens of one head and panel in shared memory.
template <int R>  // 32 R channels
struct Stage {
  alignas(16) float k[kStage][32 * R], q[kStage][32 * R], d[kStage][32 * R], v[kStage][kPanel], beta[kStage], qk[kStage];
};

template <int R>
struct Scan {
  const DeltaArgs& a;
  const int64_t s, h;
  const int panel, warp, lane;
  const Sizes z;
  Stage<R>* stage;
  int64_t begin, length;

  __device__ Scan(const DeltaArgs& args, void* shared)
      : a(args), s(blockIdx.x / (sizes_of(args).v / kPanel) / args.heads), h(blockIdx.x / (sizes_of(args).v / kPanel) % args.heads),
        panel(int(blockIdx.x % (sizes_of(args).v / kPanel))), warp(threadIdx.x >> 5), lane(threadIdx.x & 31), z(sizes_of(args)),
        stage(static_cast<Stage<R>*>(shared)), begin(args.first[s]), length(args.first[s + 1] - begin) {}

  __device__ int64_t row(int64_t i) const { return int64_t(a.rows ? a.rows[begin + i] : begin + i) * a.heads + h; }

  // Asks for tokens i .. i + 15 (those that exist); `value` (N, H*V) is v or the output's gradient.
  __device__ void ask(Stage<R>& to, int64_t i, const float* value) const {
    const int n = int(min(int64_t(kStage), length - i));
    for (int j = warp; j < kStage; j += kScanThreads / 32) {
      const int64_t r = j < n ? row(i + j) : 0;
      const float *k = a.k + r * a.key_dim, *q = a.q + r * a.key_dim, *g = a.g + r * a.gate_columns;
#pragma unroll
      for (int c = lane; c < 32 * R; c += 32) {
        const bool there = j < n && c < a.key_dim;
        copy4(&to.k[j][c], there ? k + c : a.k, there);
        copy4(&to.q[j][c], there ? q + c : a.q, there);
        if (a.gate_columns) copy4(&to.d[j][c], there ? g + (a.gate_columns == 1 ? 0 : c) : a.g, there);
      }
    }
    for (int e = threadIdx.x; e < kStage * kPanel; e += kScanThreads) {
      const int j = e / kPanel, c = panel * kPanel + e % kPanel;
      const bool there = j < n && c < a.value_dim;
      copy4(&to.v[j][e % kPanel], value + (there ? row(i + j) * a.value_dim + c : 0), there);
    }
    if (threadIdx.x < kStage) copy4(&to.beta[threadIdx.x], a.beta + (threadIdx.x < n ? row(i + threadIdx.x) : 0), threadIdx.x < n);
    copy_commit();
  }
  // They have come, each row to the warp that asked for it: decays from their logs, and q . k.
  template <int kPending>
  __device__ void have(Stage<R>& st) const {
    copy_wait<kPending>();
    for (int j = warp; j < kStage; j += kScanThreads / 32) {
      float sum = 0.f;
#pragma unroll
      for (int c = lane; c < 32 * R; c += 32) {
        st.d[j][c] = a.gate_columns ? expf(st.d[j][c]) : 1.f;
        sum = __fmaf_rn(st.q[j][c], st.k[j][c], sum);
      }
      sum = warp_sum(sum);
      if (lane == 0) st.qk[j] = sum;
    }
    __syncthreads();
  }

  // This lane's share of S: rows row_of(r), r < 4 R, and two columns.
  __device__ int row_of(int r) const { return r / 4 * 32 + lane / 4 * 4 + r % 4; }
  __device__ int column_of(int c) const { return warp * kColumns + lane % 4 * 2 + c; }
  __device__ float2* at(float* memory, int r) const { return reinterpret_cast<float2*>(memory + panel * z.k * kPanel + row_of(r) * kPanel + column_of(0)); }
  __device__ bool exists(int r) const { return row_of(r) < z.k; }
  __device__ void load(float (&S)[4 * R][2], const float* memory) const {
#pragma unroll
    for (int r = 0; r < 4 * R; ++r)
      if (exists(r)) {
        const float2 x = *at(const_cast<float*>(memory), r);
        S[r][0] = x.x, S[r][1] = x.y;
      }
  }
  __device__ void store(float* memory, const float (&S)[4 * R][2]) const {
#pragma unroll
    for (int r = 0; r < 4 * R; ++r)
      if (exists(r)) *at(memory, r) = make_float2(S[r][0], S[r][1]);
  }
  // This lane's rows of a token's vector.
  static __device__ __forceinline__ void rows_of(float (&x)[4 * R], const float (&from)[32 * R]) {
#pragma unroll
    for (int r = 0; r < R; ++r) *reinterpret_cast<float4*>(x + 4 * r) = *reinterpret_cast<const float4*>(from + r * 32 + (threadIdx.x & 31) / 4 * 4);
  }
};

// Of the sums over rows of x (for columns 0 and 1) a lane gets that of column (lane >> 3) & 1.
__device__ __forceinline__ float halves(const float (&x)[2]) {
  const bool upper = threadIdx.x & 8;
  const float y = (upper ? x[1] : x[0]) + __shfl_xor_sync(~0u, upper ? x[0] : x[1], 8);
  return y + __shfl_xor_sync(~0u, y, 4);
}
__device__ __forceinline__ float one_sum(const float (&x)[2]) {
  const float y = halves(x);
  return y + __shfl_xor_sync(~0u, y, 16);
}
// Two such sums at once: lanes 0-15 get x's, lanes 16-31 y's.
__device__ __forceinline__ float two_sums(const float (&x)[2], const float (&y)[2]) {
  const bool upper = threadIdx.x & 16;
  float mine[2];
#pragma unroll
  for (int c = 0; c < 2; ++c) mine[c] = (upper ? y[c] : x[c]) + __shfl_xor_sync(~0u, upper ? x[c] : y[c], 16);
  return halves(mine);
}

template <int R>
__global__ void __launch_bounds__(kScanThreads) forward_kernel(const DeltaArgs a) {
  extern __shared__ __align__(16) float shared[];
  const Scan<R> w(a, shared);
  if (w.length == 0) return;
  const int lane = w.lane, column = w.column_of(lane >> 3 & 1);  // the one whose sums this lane gets
  const int64_t pair = w.s * a.heads + w.h;
  const Sizes& z = w.z;
  float S[4 * R][2] = {};
  w.ask(w.stage[0], 0, a.v);

  float *head = nullptr, *open_u = nullptr;
  int64_t read = 0, closed = -1, last_closed = 0;  // the memory is to be written when `closed` tokens have been read; -1: never
  if (a.initial) w.load(S, a.initial + pair * z.memory);
  if (a.slots) {
    const int64_t open = a.open[w.s];
    read = a.read[w.s];
    head = a.slots[w.s] + w.h * z.head;
    const float *k = head + z.memory, *d = k + kChunk * z.k;
    open_u = head + z.memory + 2 * kChunk * z.k;
    if (read > open) w.load(S, head);
    for (int64_t t = 0; t < open; ++t)  // the rows of the open chunk, as they were read
#pragma unroll
      for (int r = 0; r < 4 * R; ++r) {
        const float kr = w.exists(r) ? k[t * z.k + w.row_of(r)] : 0.f, dr = w.exists(r) ? d[t * z.k + w.row_of(r)] : 1.f;
#pragma unroll
        for (int c = 0; c < 2; ++c) S[r][c] = __fmaf_rn(kr, open_u[t * z.v + w.panel * kPanel + w.column_of(c)], __fmul_rn(dr, S[r][c]));
      }
    last_closed = read + w.length - ((read + w.length - 1) % kChunk + 1);  // closed chunks are whole, so read - open is a multiple of 16
    if (last_closed > read - open) closed = last_closed;
    __syncwarp();
  }

  for (int64_t i0 = 0, half = 0; i0 < w.length; i0 += kStage, half ^= 1) {
    Stage<R>& st = w.stage[half];
    if (i0 + kStage < w.length) {
      w.ask(w.stage[half ^ 1], i0 + kStage, a.v);
      w.template have<1>(st);
    } else {
      w.template have<0>(st);
    }
    const int n = int(min(int64_t(kStage), w.length - i0));
    for (int j = 0; j < n; ++j) {
      const int64_t i = i0 + j;
      if (a.kept && i && i % kSegment == 0) w.store(a.kept + kept_at(a, z, w.s, w.h, w.length, i), S);
      if (read + i == closed) w.store(head, S);
      float k[4 * R], q[4 * R], d[4 * R], Ak[2] = {}, Aq[2] = {}, us[2];
      w.rows_of(k, st.k[j]), w.rows_of(q, st.q[j]), w.rows_of(d, st.d[j]);
#pragma unroll
      for (int r = 0; r < 4 * R; ++r)
#pragma unroll
        for (int c = 0; c < 2; ++c) S[r][c] = __fmul_rn(d[r], S[r][c]), Ak[c] = __fmaf_rn(k[r], S[r][c], Ak[c]), Aq[c] = __fmaf_rn(q[r], S[r][c], Aq[c]);
      const float sum = two_sums(Ak, Aq), e = st.v[j][column] - sum, u = __fmul_rn(st.beta[j], e);  // e and u: lanes 0-15
#pragma unroll
      for (int c = 0; c < 2; ++c) us[c] = __shfl_sync(~0u, u, (lane & 3) + 8 * c);
#pragma unroll
      for (int r = 0; r < 4 * R; ++r)
#pragma unroll
        for (int c = 0; c < 2; ++c) S[r][c] = __fmaf_rn(k[r], us[c], S[r][c]);
      if (const int64_t c = w.panel * kPanel + column; !(lane & 4)) {
        if (lane & 16) {
          if (c < a.value_dim) a.out[w.row(i) * a.value_dim + c] = a.scale * __fmaf_rn(st.qk[j], lane & 8 ? us[1] : us[0], sum);
        } else {
          if (a.errors && c < a.value_dim) a.errors[w.row(i) * a.value_dim + c] = e;
          if (a.slots && read + i >= last_closed) open_u[(read + i - last_closed) * z.v + c] = u;
        }
      }
    }
    __syncthreads();
  }
}

// The open chunk's keys and decays, after every block of forward_kernel has read the old ones.
__global__ void __launch_bounds__(128) open_rows_kernel(const DeltaArgs a) {
  const Sizes z = sizes_of(a);
  const int64_t s = blockIdx.x / a.heads, h = blockIdx.x % a.heads, begin = a.first[s], length = a.first[s + 1] - begin, all = a.read[s] + length;
  if (length == 0) return;
  const int64_t open = (all - 1) % kChunk + 1, from = max(int64_t(0), open - length);
  float *k = a.slots[s] + h * z.head + z.memory, *d = k + kChunk * z.k;
  for (int64_t t = from; t < open; ++t) {
    const int64_t i = length - open + t, row = int64_t(a.rows ? a.rows[begin + i] : begin + i) * a.heads + h;
    for (int64_t c = threadIdx.x; c < z.k; c += 128) {
      k[t * z.k + c] = c < a.key_dim ? a.k[row * a.key_dim + c] : 0.f;
      d[t * z.k + c] = c < a.key_dim && a.gate_columns ? expf(a.g[a.gate_columns == 1 ? row : row * a.key_dim + c]) : 1.f;
    }
  }
}

template <int R>
__global__ void __launch_bounds__(kScanThreads) scan_back_kernel(const DeltaArgs a, float* du, float* d_kept) {
  extern __shared__ __align__(16) float shared[];
  const Scan<R> w(a, shared);
  const int lane = w.lane, column = w.column_of(lane >> 3 & 1);
  const int64_t pair = w.s * a.heads + w.h;
  const Sizes& z = w.z;
  float G[4 * R][2] = {};
  if (a.d_final) w.load(G, a.d_final + pair * z.memory);
  const int64_t last = (w.length - 1) / kStage * kStage;
  if (w.length) w.ask(w.stage[0], last, a.d_out);
  for (int64_t i0 = last, half = 0; w.length && i0 >= 0; i0 -= kStage, half ^= 1) {
    Stage<R>& st = w.stage[half];
    if (i0 > 0) {
      w.ask(w.stage[half ^ 1], i0 - kStage, a.d_out);
      w.template have<1>(st);
    } else {
      w.template have<0>(st);
    }
    for (int j = int(min(int64_t(kStage), w.length - i0)) - 1; j >= 0; --j) {
      const int64_t i = i0 + j;
      float k[4 * R], q[4 * R], decay[4 * R], Gk[2] = {}, des[2];
      w.rows_of(k, st.k[j]), w.rows_of(q, st.q[j]), w.rows_of(decay, st.d[j]);
      const float dos[2] = {a.scale * st.v[j][w.column_of(0)], a.scale * st.v[j][w.column_of(1)]};
#pragma unroll
      for (int r = 0; r < 4 * R; ++r)
#pragma unroll
        for (int c = 0; c < 2; ++c) G[r][c] = __fmaf_rn(q[r], dos[c], G[r][c]), Gk[c] = __fmaf_rn(k[r], G[r][c], Gk[c]);
      const float d = one_sum(Gk), de = st.beta[j] * d;
      if (!(lane & 20) && w.panel * kPanel + column < a.value_dim) {
        const int64_t at = w.row(i) * a.value_dim + w.panel * kPanel + column;
        du[at] = d, a.dv[at] += de;
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) des[c] = __shfl_sync(~0u, de, (lane & 3) + 8 * c);
#pragma unroll
      for (int r = 0; r < 4 * R; ++r)
#pragma unroll
        for (int c = 0; c < 2; ++c) G[r][c] = decay[r] * __fmaf_rn(-k[r], des[c], G[r][c]);
      if (i && i % kSegment == 0) w.store(d_kept + kept_at(a, z, w.s, w.h, w.length, i), G);
    }
    __syncthreads();
  }
  if (a.d_initial) w.store(a.d_initial + pair * z.memory, G);
}

constexpr int kGradThreads = 256;
template <int P, int N>  // 32 P columns; N rows a warp
struct Segment {
  float u[kSegment][32 * P], de[kSegment][32 * P], d_o[kSegment][32 * P];  // u = beta e, de = beta du, d_o with the scale
  float k[kSegment][8 * N + 1], q[kSegment][8 * N + 1], d[kSegment][8 * N + 1], out[3][kSegment][8 * N + 1];
};

template <int P, int N>
__global__ void __launch_bounds__(kGradThreads) gradients_kernel(const DeltaArgs a, const float* du, const float* d_kept, float* dg, bool dg_adds) {
  extern __shared__ __align__(16) float shared[];
  Segment<P, N>& x = *reinterpret_cast<Segment<P, N>*>(shared);
  const Sizes z = sizes_of(a);
  const int64_t s = blockIdx.x / a.heads, h = blockIdx.x % a.heads, begin = a.first[s], length = a.first[s + 1] - begin, start = int64_t(blockIdx.y) * kSegment;
  if (start >= length) return;
  const int n = int(min(int64_t(kSegment), length - start)), lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  auto row = [&](int t) { return int64_t(a.rows ? a.rows[begin + start + t] : begin + start + t) * a.heads + h; };
  for (int e = threadIdx.x; e < kSegment * 32 * P; e += kGradThreads) {
    const int t = e / (32 * P), c = e % (32 * P);
    const bool there = t < n && c < a.value_dim;
    const int64_t at = there ? row(t) * a.value_dim + c : 0;
    const float beta = there ? a.beta[row(t)] : 0.f;
    x.u[t][c] = there ? beta * a.errors[at] : 0.f;
    x.de[t][c] = there ? beta * du[at] : 0.f;
    x.d_o[t][c] = there ? a.scale * a.d_out[at] : 0.f;
  }
  const float* S0 = start ? a.kept + kept_at(a, z, s, h, length, start) : a.initial ? a.initial + (s * a.heads + h) * z.memory : nullptr;
  const float* G0 = start + n < length ? d_kept + kept_at(a, z, s, h, length, start + kSegment) : a.d_final ? a.d_final + (s * a.heads + h) * z.memory : nullptr;
  for (int64_t i0 = 0; i0 < a.key_dim; i0 += 8 * N) {
    __syncthreads();
    for (int e = threadIdx.x; e < kSegment * 8 * N; e += kGradThreads) {
      const int t = e / (8 * N), i = e % (8 * N);
      const bool there = t < n && i0 + i < a.key_dim;
      const int64_t at = there ? row(t) * a.key_dim + i0 + i : 0;
      x.k[t][i] = there ? a.k[at] : 0.f, x.q[t][i] = there ? a.q[at] : 0.f;
      x.d[t][i] = !there || !a.gate_columns ? 1.f : expf(a.g[a.gate_columns == 1 ? row(t) : at]);
    }
    __syncthreads();
    float S[N][P], G[N][P], kept[kSegment / 8][N][P];
#pragma unroll
    for (int r = 0; r < N; ++r)
#pragma unroll
      for (int p = 0; p < P; ++p) {
        const int64_t i = i0 + warp * N + r, at = p * z.k * kPanel + i * kPanel + lane;
        const bool there = i < a.key_dim && p * kPanel < z.v;
        S[r][p] = S0 && there ? S0[at] : 0.f, G[r][p] = G0 && there ? G0[at] : 0.f;
      }
    const int groups = (n + 7) / 8;
    for (int b = 0; b < groups; ++b) {  // 1: tokens past the end have u = 0 and decay 1, which leaves S as it is
#pragma unroll
      for (int r = 0; r < N; ++r)
#pragma unroll
        for (int p = 0; p < P; ++p) kept[b][r][p] = S[r][p];
      if (b + 1 == groups) break;
      for (int t = b * 8; t < b * 8 + 8; ++t)
#pragma unroll
        for (int p = 0; p < P; ++p) {
          const float u = x.u[t][p * 32 + lane];
#pragma unroll
          for (int r = 0; r < N; ++r) S[r][p] = __fmaf_rn(x.k[t][warp * N + r], u, __fmul_rn(x.d[t][warp * N + r], S[r][p]));
        }
    }
    for (int b = groups - 1; b >= 0; --b) {  // 2
      float A[8][N][P], sums[N][32] = {};
#pragma unroll
      for (int r = 0; r < N; ++r)
#pragma unroll
        for (int p = 0; p < P; ++p) S[r][p] = kept[b][r][p];
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int p = 0; p < P; ++p) {
          const int t = b * 8 + j;
          const float u = x.u[t][p * 32 + lane], d_o = x.d_o[t][p * 32 + lane];
#pragma unroll
          for (int r = 0; r < N; ++r) {
            A[j][r][p] = __fmul_rn(x.d[t][warp * N + r], S[r][p]);
            S[r][p] = __fmaf_rn(x.k[t][warp * N + r], u, A[j][r][p]);
            sums[r][j] = __fmaf_rn(S[r][p], d_o, sums[r][j]);
          }
        }
#pragma unroll
      for (int j = 7; j >= 0; --j)
#pragma unroll
        for (int p = 0; p < P; ++p) {
          const int t = b * 8 + j;
          const float u = x.u[t][p * 32 + lane], d_o = x.d_o[t][p * 32 + lane], de = x.de[t][p * 32 + lane];
#pragma unroll
          for (int r = 0; r < N; ++r) {
            const float k = x.k[t][warp * N + r], g = __fmaf_rn(x.q[t][warp * N + r], d_o, G[r][p]), da = __fmaf_rn(-k, de, g);
            sums[r][8 + j] = __fmaf_rn(g, u, __fmaf_rn(-A[j][r][p], de, sums[r][8 + j]));
            sums[r][16 + j] = __fmaf_rn(da, A[j][r][p], sums[r][16 + j]);
            G[r][p] = x.d[t][warp * N + r] * da;
          }
        }
#pragma unroll
      for (int r = 0; r < N; ++r) {
        const float sum = warp_sums(sums[r]);
        if (lane < 24) x.out[lane >> 3][b * 8 + (lane & 7)][warp * N + r] = sum;
      }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < n * 8 * N; e += kGradThreads) {
      const int t = e / (8 * N), i = e % (8 * N);
      if (i0 + i >= a.key_dim) continue;
      const int64_t at = row(t) * a.key_dim + i0 + i;
      a.dq[at] += x.out[0][t][i], a.dk[at] += x.out[1][t][i];
      if (dg) dg[at] = dg_adds ? dg[at] + x.out[2][t][i] : x.out[2][t][i];
    }
  }
}

// A warp a (token, head) that exists: dbeta += du . e, and a head's gate gets the sum of its channels.
__global__ void __launch_bounds__(256) row_sums_kernel(const DeltaArgs a, const float* du, const float* dg, int64_t rows) {
  const int64_t i = int64_t(blockIdx.x) * 8 + (threadIdx.x >> 5);
  if (i >= rows * a.heads) return;
  const int64_t row = int64_t(a.rows ? a.rows[i / a.heads] : i / a.heads) * a.heads + i % a.heads;
  float beta = 0.f, gate = 0.f;
  for (int64_t c = threadIdx.x & 31; c < a.value_dim; c += 32) beta = __fmaf_rn(du[row * a.value_dim + c], a.errors[row * a.value_dim + c], beta);
  beta = warp_sum(beta);
  if (dg) {
    for (int64_t c = threadIdx.x & 31; c < a.key_dim; c += 32) gate += dg[row * a.key_dim + c];
    gate = warp_sum(gate);
  }
  if ((threadIdx.x & 31) == 0) {
    a.dbeta[row] += beta;
    if (dg) a.dg[row] += gate;
  }
}

template <int R>
cudaError_t forward(const DeltaArgs& a, unsigned blocks, cudaStream_t stream) {
  constexpr int bytes = 2 * sizeof(Stage<R>);
  if (cudaError_t e = cudaFuncSetAttribute(forward_kernel<R>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes); e != cudaSuccess) return e;
  forward_kernel<R><<<blocks, kScanThreads, bytes, stream>>>(a);
  return cudaGetLastError();
}
template <int R>
cudaError_t scan_back(const DeltaFloatBackward& b, unsigned blocks, cudaStream_t stream) {
  constexpr int bytes = 2 * sizeof(Stage<R>);
  if (cudaError_t e = cudaFuncSetAttribute(scan_back_kernel<R>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes); e != cudaSuccess) return e;
  scan_back_kernel<R><<<blocks, kScanThreads, bytes, stream>>>(b.a, b.du, b.d_kept);
  return cudaGetLastError();
}
template <int P, int N>
cudaError_t gradients(const DeltaFloatBackward& b, cudaStream_t stream) {
  constexpr int bytes = sizeof(Segment<P, N>);
  if (cudaError_t e = cudaFuncSetAttribute(gradients_kernel<P, N>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes); e != cudaSuccess) return e;
  const dim3 grid{unsigned(b.a.sequences * b.a.heads), unsigned((b.longest + kSegment - 1) / kSegment)};
  const bool adds = b.a.gate_columns > 1 || b.a.key_dim == 1;  // one value a channel: straight into the gradient
  float* dg = b.a.gate_columns == 0 ? nullptr : adds ? b.a.dg : b.dg;
  gradients_kernel<P, N><<<grid, kGradThreads, bytes, stream>>>(b.a, b.du, b.d_kept, dg, adds);
  return cudaGetLastError();
}

const char* check(const DeltaArgs& a, int64_t widest_value) {
  if (a.key_dim > 256 || a.value_dim > widest_value) return "[delta_rule] the GPU serves heads of up to 256 key and 256 value channels";
  if (a.sequences * a.heads * (sizes_of(a).v / kPanel) > 0x7fffffff) return "[delta_rule] more sequences times heads than a launch takes";
  return nullptr;
}

}  // namespace

const char* delta_float_forward(const DeltaArgs& a, void* stream) {
  if (a.sequences == 0) return nullptr;
  if (const char* e = check(a, 1 << 20)) return e;
  const cudaStream_t s = cudaStream_t(stream);
  const unsigned blocks = unsigned(a.sequences * a.heads * (sizes_of(a).v / kPanel));
  const int64_t r = (a.key_dim + 31) / 32;
  cudaError_t e = r <= 1 ? forward<1>(a, blocks, s) : r <= 2 ? forward<2>(a, blocks, s) : r <= 4 ? forward<4>(a, blocks, s) : forward<8>(a, blocks, s);
  if (e == cudaSuccess && a.slots) {
    open_rows_kernel<<<unsigned(a.sequences * a.heads), 128, 0, s>>>(a);
    e = cudaGetLastError();
  }
  return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}

const char* delta_float_backward(const DeltaFloatBackward& b, void* stream) {
  const DeltaArgs& a = b.a;
  if (a.sequences == 0) return nullptr;
  if (const char* e = check(a, 256)) return e;
  if (b.longest > int64_t(65535) * kSegment) return "[delta_rule] a sequence is longer than 4 million tokens";
  const cudaStream_t s = cudaStream_t(stream);
  const unsigned blocks = unsigned(a.sequences * a.heads * (sizes_of(a).v / kPanel));
  const int64_t r = (a.key_dim + 31) / 32, p = sizes_of(a).v / kPanel;
  cudaError_t e = r <= 1 ? scan_back<1>(b, blocks, s) : r <= 2 ? scan_back<2>(b, blocks, s) : r <= 4 ? scan_back<4>(b, blocks, s) : scan_back<8>(b, blocks, s);
  if (e == cudaSuccess && b.longest > 0) e = p <= 1 ? gradients<1, 2>(b, s) : p <= 2 ? gradients<2, 2>(b, s) : p <= 4 ? gradients<4, 2>(b, s) : gradients<8, 1>(b, s);
  if (e == cudaSuccess && b.tokens > 0) {
    const bool sums = a.gate_columns == 1 && a.key_dim > 1;
    row_sums_kernel<<<unsigned((b.tokens * a.heads + 7) / 8), 256, 0, s>>>(a, b.du, sums ? b.dg : nullptr, b.tokens);
    e = cudaGetLastError();
  }
  return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}

}  // namespace k3::cuda
