#include "k3/core/block.cuh"
#include "k3/core/tile.cuh"
#include "k3/ops/delta_rule/delta_layer_cuda.h"
#include "k3/ops/delta_rule/delta_rule_kernels.h"

namespace k3::cuda {
namespace {

constexpr int kPanel = cpu::kDeltaPanel, kChunk = cpu::kDeltaChunk, kRows = 32;

// A block is kRows key channels of one head of one slot, a thread a column.
__global__ void __launch_bounds__(128) close_kernel(const DeltaClose a) {
  __shared__ float ks[kChunk][kRows], ds[kChunk][kRows];
  const int slot = a.slots[blockIdx.y], open = a.open[blockIdx.y], k0 = int(blockIdx.z) * kRows;
  const bool closed = a.closed[blockIdx.y] != 0;
  if (slot < 0 || (open == 0 && closed)) return;
  const int64_t K = a.keys, V = a.values;
  float* head = a.memory + slot * a.slot_floats + blockIdx.x * a.head_floats;
  const float *k = head + K * V, *d = k + kChunk * K, *u = d + kChunk * K;
  const int rows = int(min(int64_t(kRows), K - k0));
  for (int e = threadIdx.x; e < open * rows; e += 128) ks[e / rows][e % rows] = k[e / rows * K + k0 + e % rows], ds[e / rows][e % rows] = d[e / rows * K + k0 + e % rows];
  __syncthreads();
  for (int64_t v = threadIdx.x; v < V; v += 128) {
    float us[kChunk];
#pragma unroll
    for (int t = 0; t < kChunk; ++t) us[t] = t < open ? u[t * V + v] : 0.f;
    float* column = head + v / kPanel * kPanel * K + v % kPanel;
    for (int r = 0; r < rows; ++r) {
      float S = closed ? column[(k0 + r) * kPanel] : 0.f;
#pragma unroll
      for (int t = 0; t < kChunk; ++t)
        if (t < open) S = __fmaf_rn(ks[t][r], us[t], __fmul_rn(ds[t][r], S));
      column[(k0 + r) * kPanel] = S;
    }
  }
}

// Eight elements a thread; tensor blockIdx.y.
__global__ void __launch_bounds__(256) narrow_kernel(const __grid_constant__ DeltaNarrow a) {
  const int64_t i = (int64_t(blockIdx.x) * 256 + threadIdx.x) * 8, n = a.size[blockIdx.y];
  const float* from = a.from[blockIdx.y];
  if (!from || i >= n) return;
  nv_bf16* to = static_cast<nv_bf16*>(a.to[blockIdx.y]);
  if (i + 8 <= n) {
    float x[8];
    load8(from + i, x);
    store8(to + i, x);
  } else {
    for (int64_t j = i; j < n; ++j) to[j] = __float2bfloat16_rn(from[j]);
  }
}

__global__ void __launch_bounds__(256) widen_kernel(const __grid_constant__ DeltaWiden a) {
  const int64_t i = (int64_t(blockIdx.x) * 256 + threadIdx.x) * 8, n = a.size[blockIdx.y];
  const nv_bf16* from = static_cast<const nv_bf16*>(a.from[blockIdx.y]);
  if (!from || i >= n) return;
  float* to = a.to[blockIdx.y];
  const bool add = a.add[blockIdx.y];
  if (i + 8 <= n) {
    float x[8], y[8] = {};
    load8(from + i, x);
    if (add) load8(to + i, y);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] += y[j];
    store8(to + i, x);
  } else {
    for (int64_t j = i; j < n; ++j) to[j] = to_f32(from[j]) + (add ? to[j] : 0.f);
  }
}

template <class Args>
int64_t longest(const Args& a) {
  int64_t n = 0;
  for (int i = 0; i < kDeltaTensors; ++i)
    if (a.from[i] && a.size[i] > n) n = a.size[i];
  return n;
}

}  // namespace

const char* delta_close(const DeltaClose& a, void* stream) {
  if (a.sequences == 0) return nullptr;
  const unsigned parts = blocks_for(a.keys, kRows);
  close_kernel<<<dim3(unsigned(a.heads), unsigned(a.sequences), parts), 128, 0, stream_of(stream)>>>(a);
  return launched();
}

const char* delta_narrow(const DeltaNarrow& a, void* stream) {
  if (const int64_t n = longest(a)) narrow_kernel<<<dim3(blocks_for(n, 2048), kDeltaTensors), 256, 0, stream_of(stream)>>>(a);
  return launched();
}

const char* delta_widen(const DeltaWiden& a, void* stream) {
  if (const int64_t n = longest(a)) widen_kernel<<<dim3(blocks_for(n, 2048), kDeltaTensors), 256, 0, stream_of(stream)>>>(a);
  return launched();
}

}  // namespace k3::cuda
