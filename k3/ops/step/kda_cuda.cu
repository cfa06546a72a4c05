// Bound: at one row latency; at many the state, once. Split: a block is a head of a row; four warps share the 32 columns of a panel of S, a lane a
// column, each warp a quarter of the rows, in registers.
//   1 before the kernel in front has ended: the memory, the open rows put upon it, the convolutions' taps, the low-rank gates' weights
//   2 convolutions, gates   3 S^T k and S^T q   4 what is written, kept as an open row   5 the output
#include "k3/ops/delta_rule/delta_rule_kernels.h"
#include "k3/ops/step/kda_cuda.h"
#include "k3/ops/step/step.cuh"

namespace k3::cuda {
namespace {

constexpr int kChunk = cpu::kDeltaChunk, kPanel = cpu::kDeltaPanel, kWidth = 8;

// cpu::delta_head_floats(d, d) where device code may use it
__host__ __device__ constexpr int64_t head_floats(int64_t d) {
  const int64_t v = (d + kPanel - 1) / kPanel * kPanel;
  return d * v + kChunk * (2 * d + v);
}
static_assert(head_floats(16) == cpu::delta_head_floats(16, 16) && head_floats(64) == cpu::delta_head_floats(64, 64));

__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))); }

template <int D>
__global__ void __launch_bounds__((D + 31) / 32 * 128) kda_kernel(const __grid_constant__ StepKdaArgs a) {
  constexpr int64_t kHeadFloats = head_floats(D);
  constexpr int kPanels = (D + 31) / 32, kWarps = kPanels * 4, kRows = D / 4, V = kPanels * kPanel, kEach = D < 32 ? 1 : D / 32, kGateRows = D / kWarps;
  __shared__ float key[kChunk][D], forget[kChunk][D];
  __shared__ float x[3][D], decay[D], gate[D], part[2][4][V], o[D];
  const int h = blockIdx.x, row = blockIdx.y, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, panel = warp >> 2, quarter = warp & 3;
  const int column = panel * kPanel + lane, first = quarter * kRows;
  const int slot = a.step.slots[row];
  let_next_kernel_begin();
  if (slot < 0) return;

  // 1
  const int64_t tokens = a.step.tokens[row];
  const int open = a.step.open[row], wide = a.heads * D, at = open == kChunk ? 0 : open;
  float* head = a.memory + slot * a.slot_floats + h * kHeadFloats;
  float *keys = head + D * V, *decays = keys + kChunk * D, *writes = decays + kChunk * D;
  float* mine = head + panel * D * kPanel + first * kPanel + lane;
  float S[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) S[r] = tokens > open ? mine[r * kPanel] : 0.f;
  for (int i = threadIdx.x; i < open * D; i += kWarps * 32) key[i / D][i % D] = keys[i], forget[i / D][i % D] = decays[i];
  const int which = int(threadIdx.x) / D, c = int(threadIdx.x) % D;  // the convolution of this thread
  const bool convolves = which < 3;
  const StepConv& conv = which == 0 ? a.q : which == 1 ? a.k : a.v;
  float* ring = conv.ring + int64_t(slot) * a.history * wide + h * D + c;
  float sum = 0.f, last = 0.f;
  if (convolves) {
    const float* w = conv.w + (h * D + c) * a.width;
    for (int j = 0; j + 1 < a.width; ++j)
      if (const int64_t p = tokens - (a.width - 1) + j; p >= 0) sum = fmaf(w[j], ring[p % a.history * wide], sum);
    last = w[a.width - 1];
  }
  nv_bf16 fw[kGateRows][kEach], gw[kGateRows][kEach];
#pragma unroll
  for (int r = 0; r < kGateRows; ++r)
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int64_t i = int64_t(h * D + warp * kGateRows + r) * D + lane * kEach + e;
      fw[r][e] = a.f_b && lane * kEach < D ? static_cast<const nv_bf16*>(a.f_b)[i] : nv_bf16(0.f);
      gw[r][e] = a.g_b && lane * kEach < D ? static_cast<const nv_bf16*>(a.g_b)[i] : nv_bf16(0.f);
    }
  const float rate = expf(fminf(a.A_log[h], 60.f));
  __syncthreads();
  for (int t = 0; t < open; ++t) {
    const float u = writes[t * V + column];
#pragma unroll
    for (int r = 0; r < kRows; ++r) S[r] = fmaf(key[t][first + r], u, forget[t][first + r] * S[r]);
  }
  if (open == kChunk)
#pragma unroll
    for (int r = 0; r < kRows; ++r) mine[r * kPanel] = S[r];
  wait_for_kernel_in_front();

  // 2
  if (convolves) {
    const float now = conv.x[int64_t(row) * wide + h * D + c];
    ring[tokens % a.history * wide] = now;
    sum = fmaf(last, now, sum);
    x[which][c] = sum * exact_sigmoid(sum);
  }
  auto low_rank = [&](const float* from, const nv_bf16 (&w)[kGateRows][kEach], float* to) {
    float all[kGateRows] = {};
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      // rounded as every product's operand is
      const float v = lane * kEach < D ? to_f32(from_f32<nv_bf16>(from[int64_t(row) * D + lane * kEach + e])) : 0.f;
#pragma unroll
      for (int r = 0; r < kGateRows; ++r) all[r] = fmaf(to_f32(w[r][e]), v, all[r]);
    }
    const float total = warp_sums_complete(all);
    if (lane < kGateRows) to[warp * kGateRows + lane] = total;
  };
  if (a.f_b) low_rank(a.f, fw, decay);
  else if (threadIdx.x < D) decay[threadIdx.x] = a.f[int64_t(row) * wide + h * D + threadIdx.x];
  if (a.g_b) low_rank(a.g, gw, gate);
  else if (threadIdx.x < D) gate[threadIdx.x] = a.g[int64_t(row) * wide + h * D + threadIdx.x];
  const float beta = exact_sigmoid(a.beta[int64_t(row) * a.heads + h]);
  __syncthreads();
  if (threadIdx.x < D) {
    const float z = decay[threadIdx.x] + a.dt_bias[h * D + threadIdx.x];
    const float log = a.bounded ? a.bound * exact_sigmoid(rate * z) : fmaxf(-rate * softplus(z), -1e30f);
    decay[threadIdx.x] = expf(log);
  }
  float qq = 0.f, kk = 0.f, qk = 0.f;
#pragma unroll
  for (int e = 0; e < kEach; ++e)
    if (const int i = lane + 32 * e; i < D) qq = fmaf(x[0][i], x[0][i], qq), kk = fmaf(x[1][i], x[1][i], kk), qk = fmaf(x[0][i], x[1][i], qk);
  const float rq = 1.f / sqrtf(warp_sum(qq) + 1e-6f), rk = 1.f / sqrtf(warp_sum(kk) + 1e-6f);
  qk = warp_sum(qk) * rq * rk;
  __syncthreads();

  // 3
  float m = 0.f, p = 0.f;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float A = decay[first + r] * S[r];
    m = fmaf(x[1][first + r] * rk, A, m), p = fmaf(x[0][first + r] * rq, A, p);
  }
  part[0][quarter][column] = m, part[1][quarter][column] = p;
  __syncthreads();

  // 4
  if (threadIdx.x < V) {
    const int j = threadIdx.x;
    m = part[0][0][j] + part[0][1][j] + part[0][2][j] + part[0][3][j], p = part[1][0][j] + part[1][1][j] + part[1][2][j] + part[1][3][j];
    const float u = j < D ? beta * (x[2][j < D ? j : 0] - m) : 0.f;
    writes[at * V + j] = u;
    if (j < D) o[j] = a.scale * fmaf(qk, u, p), keys[at * D + j] = x[1][j] * rk, decays[at * D + j] = decay[j];
  }
  __syncthreads();

  // 5
  float square = 0.f;
#pragma unroll
  for (int e = 0; e < kEach; ++e)
    if (const int i = lane + 32 * e; i < D) square = fmaf(o[i], o[i], square);
  const float r = 1.f / sqrtf(warp_sum(square) / float(D) + a.eps);
  if (threadIdx.x < D) a.y[int64_t(row) * wide + h * D + threadIdx.x] = o[threadIdx.x] * r * a.norm[threadIdx.x] * exact_sigmoid(gate[threadIdx.x]);
}

}  // namespace

const char* step_kda(const StepKdaArgs& a, void* stream) {
  if (a.rows == 0) return nullptr;
  if (a.width > kWidth) return "[step] convolutions are of width 1 to 8";
  const dim3 grid(unsigned(a.heads), unsigned(a.rows));
  switch (a.dim) {
    case 16: return launch_step(kda_kernel<16>, grid, 128, 0, stream, a);
    case 32: return launch_step(kda_kernel<32>, grid, 128, 0, stream, a);
    case 64: return launch_step(kda_kernel<64>, grid, 256, 0, stream, a);
    case 128: return launch_step(kda_kernel<128>, grid, 512, 0, stream, a);
  }
  return "[step] KDA heads are of 16, 32, 64 or 128 channels";
}

}  // namespace k3::cuda
