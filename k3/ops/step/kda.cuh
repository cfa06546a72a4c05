#pragma once
// A head of KDA in a decode step, within a kernel. Bound: at one row latency; at many the state, once. Split: a block is a head of a row; four warps
// share the 32 columns of a panel of S, a lane a column, each warp a quarter of the rows, in registers.
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
constexpr int kKdaThreads = (D + 31) / 32 * 128;

// Head h of a row, by the first kKdaThreads<D> threads of a block; the others return.
template <int D, bool kStamped>
__device__ __forceinline__ void kda_head(const StepKdaArgs& a, int h, int row, Stamp stamp) {
  constexpr int64_t kHeadFloats = head_floats(D);
  constexpr int kPanels = (D + 31) / 32, kWarps = kPanels * 4, kRows = D / 4, V = kPanels * kPanel, kEach = D < 32 ? 1 : D / 32,
                kGateRows = D / kWarps;
  __shared__ float key[kChunk][D], forget[kChunk][D];
  __shared__ float x[3][D], decay[D], gate[D], part[2][4][V], o[D];
  if (threadIdx.x >= kKdaThreads<D>) return;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, panel = warp >> 2, quarter = warp & 3;
  const int column = panel * kPanel + lane, first = quarter * kRows;
  const int slot = a.step.slots[row];
  if (slot < 0) {
    if (kStamped && threadIdx.x < D) give<kStamped>(a.y, (int64_t(row) * a.heads + h) * D + threadIdx.x, NAN, stamp);
    return;
  }

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
  const float norm = threadIdx.x < D ? a.norm[threadIdx.x] : 0.f, bias = threadIdx.x < D ? a.dt_bias[h * D + threadIdx.x] : 0.f;
  const float rate = __expf(fminf(a.A_log[h], 60.f));
  named_barrier(1, kKdaThreads<D>);
  for (int t = 0; t < open; ++t) {
    const float u = writes[t * V + column];
#pragma unroll
    for (int r = 0; r < kRows; ++r) S[r] = fmaf(key[t][first + r], u, forget[t][first + r] * S[r]);
  }
  if (open == kChunk)
#pragma unroll
    for (int r = 0; r < kRows; ++r) mine[r * kPanel] = S[r];
  meet<kStamped>();

  // 2
  constexpr int kTaken = 2 + 2 * kEach;  // this thread's of the convolution; beta; of f and g a low-rank gate's input or a channel
  float taken[kTaken];
  take_each<kStamped>(taken, stamp, [&](int j) {
    const Element beta{a.beta, int64_t(row) * a.heads + h}, channel{nullptr, int64_t(row) * wide + h * D};
    if (j == 0 && convolves) return Element{conv.x, channel.i + c};
    if (j < 2) return beta;
    const bool f = j < 2 + kEach;
    const int e = f ? j - 2 : j - 2 - kEach;
    if (f ? a.f_b : a.g_b) return lane * kEach < D ? Element{f ? a.f : a.g, int64_t(row) * D + lane * kEach + e} : beta;
    return threadIdx.x < D ? Element{f ? a.f : a.g, channel.i + threadIdx.x} : beta;
  });
  if (convolves) {
    ring[tokens % a.history * wide] = taken[0];
    sum = fmaf(last, taken[0], sum);
    x[which][c] = sum * sigmoid(sum);
  }
  auto low_rank = [&](const float* from, const nv_bf16(&w)[kGateRows][kEach], float* to) {
    float all[kGateRows] = {};
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const float v = lane * kEach < D ? to_f32(from_f32<nv_bf16>(from[e])) : 0.f;  // rounded as every product's operand is
#pragma unroll
      for (int r = 0; r < kGateRows; ++r) all[r] = fmaf(to_f32(w[r][e]), v, all[r]);
    }
    const float total = warp_sums_complete(all);
    if (lane < kGateRows) to[warp * kGateRows + lane] = total;
  };
  if (a.f_b)
    low_rank(taken + 2, fw, decay);
  else if (threadIdx.x < D)
    decay[threadIdx.x] = taken[2];
  if (a.g_b)
    low_rank(taken + 2 + kEach, gw, gate);
  else if (threadIdx.x < D)
    gate[threadIdx.x] = taken[2 + kEach];
  const float beta = sigmoid(taken[1]);
  named_barrier(1, kKdaThreads<D>);
  if (threadIdx.x < D) {
    const float z = decay[threadIdx.x] + bias;
    const float log = a.bounded ? a.bound * sigmoid(rate * z) : fmaxf(-rate * softplus(z), -1e30f);
    decay[threadIdx.x] = __expf(log);
  }
  float qq = 0.f, kk = 0.f, qk = 0.f;
#pragma unroll
  for (int e = 0; e < kEach; ++e)
    if (const int i = lane + 32 * e; i < D) qq = fmaf(x[0][i], x[0][i], qq), kk = fmaf(x[1][i], x[1][i], kk), qk = fmaf(x[0][i], x[1][i], qk);
  const float rq = rsqrtf(warp_sum(qq) + 1e-6f), rk = rsqrtf(warp_sum(kk) + 1e-6f);
  qk = warp_sum(qk) * rq * rk;
  named_barrier(1, kKdaThreads<D>);

  // 3
  float m = 0.f, p = 0.f;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float A = decay[first + r] * S[r];
    m = fmaf(x[1][first + r] * rk, A, m), p = fmaf(x[0][first + r] * rq, A, p);
  }
  part[0][quarter][column] = m, part[1][quarter][column] = p;
  named_barrier(1, kKdaThreads<D>);

  // 4
  if (threadIdx.x < V) {
    const int j = threadIdx.x;
    m = part[0][0][j] + part[0][1][j] + part[0][2][j] + part[0][3][j], p = part[1][0][j] + part[1][1][j] + part[1][2][j] + part[1][3][j];
    const float u = j < D ? beta * (x[2][j < D ? j : 0] - m) : 0.f;
    writes[at * V + j] = u;
    if (j < D) o[j] = a.scale * fmaf(qk, u, p), keys[at * D + j] = x[1][j] * rk, decays[at * D + j] = decay[j];
  }
  named_barrier(1, kKdaThreads<D>);

  // 5
  float square = 0.f;
#pragma unroll
  for (int e = 0; e < kEach; ++e)
    if (const int i = lane + 32 * e; i < D) square = fmaf(o[i], o[i], square);
  const float r = rsqrtf(warp_sum(square) * (1.f / float(D)) + a.eps);
  if (threadIdx.x < D) give<kStamped>(a.y, int64_t(row) * wide + h * D + threadIdx.x, o[threadIdx.x] * r * norm * sigmoid(gate[threadIdx.x]), stamp);
}

}  // namespace
}  // namespace k3::cuda
