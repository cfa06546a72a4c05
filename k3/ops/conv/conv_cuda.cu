// y_t = silu(sum_j w_j x_{t-3+j}) inside each sequence. Bound: bytes. A thread walks 8 channels over 32 tokens of the flat order, carrying the last
// three inputs, and starts afresh at borders. float32 inside.
#include "k3/core/tile.cuh"
#include "k3/ops/conv/conv_cuda.h"

namespace k3::cuda {
namespace {

constexpr int kWalk = 32;

__global__ void __launch_bounds__(128) conv_silu_kernel(const ConvSiluArgs a) {
  const int c = (blockIdx.x * 128 + threadIdx.x) * 8;
  if (c >= a.channels) return;
  const nv_bf16* x = static_cast<const nv_bf16*>(a.x) + c;
  const nv_bf16* window = static_cast<const nv_bf16*>(a.window) + c;
  float w[4][8], last[3][8];
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    float4 f = *reinterpret_cast<const float4*>(a.w + (c + e) * 4);
    w[0][e] = f.x, w[1][e] = f.y, w[2][e] = f.z, w[3][e] = f.w;
  }
  const int64_t first = int64_t(blockIdx.y) * kWalk, end = min(a.tokens, first + kWalk);
  int s = 0;  // the last sequence that begins at or before `first` and is not empty
  for (int hi = a.sequences - 1; s < hi;) {
    int mid = (s + hi + 1) >> 1;
    if (a.begins[mid] <= first) s = mid; else hi = mid - 1;
  }
  auto before = [&](int64_t t, float (&into)[8]) {  // the input at t, which may lie before the sequence's begin (t >= begin - 3)
    const int slot = a.slots ? a.slots[s] : s, begin = a.begins[s];
    if (t >= begin) load8(x + t * a.channels, into);
    else if (a.window && slot >= 0) load8(window + (int64_t(slot) * 3 + 3 + (t - begin)) * a.channels, into);
    else
#pragma unroll
      for (int e = 0; e < 8; ++e) into[e] = 0.f;
  };
  bool fresh = true;
  for (int64_t t = first; t < end; ++t) {
    while (t >= a.begins[s + 1]) ++s, fresh = true;
    if (fresh) before(t - 3, last[0]), before(t - 2, last[1]), before(t - 1, last[2]), fresh = false;
    float now[8], y[8];
    load8(x + t * a.channels, now);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      float z = w[0][e] * last[0][e] + w[1][e] * last[1][e] + w[2][e] * last[2][e] + w[3][e] * now[e];
      y[e] = z * sigmoid(z);
      last[0][e] = last[1][e], last[1][e] = last[2][e], last[2][e] = now[e];
    }
    store8(static_cast<nv_bf16*>(a.y) + t * a.channels + c, y);
  }
}

__global__ void __launch_bounds__(128) window_kernel(const ConvSiluArgs a) {
  const int c = (blockIdx.x * 128 + threadIdx.x) * 8, s = blockIdx.y, slot = a.slots ? a.slots[s] : s;
  if (c >= a.channels || slot < 0) return;
  float kept[3][8];
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const int64_t t = a.begins[s + 1] - 3 + i;
    if (t >= a.begins[s]) load8(static_cast<const nv_bf16*>(a.x) + t * a.channels + c, kept[i]);
    else if (a.window) load8(static_cast<const nv_bf16*>(a.window) + (int64_t(slot) * 3 + 3 + (t - a.begins[s])) * a.channels + c, kept[i]);
    else
#pragma unroll
      for (int e = 0; e < 8; ++e) kept[i][e] = 0.f;
  }
#pragma unroll
  for (int i = 0; i < 3; ++i) store8(static_cast<nv_bf16*>(a.window_out) + (int64_t(slot) * 3 + i) * a.channels + c, kept[i]);
}

}  // namespace

const char* conv_silu_forward(const ConvSiluArgs& a, void* stream) {
  if (a.channels % 8) return "[conv] the GPU serves channel counts that are multiples of 8";
  if (a.sequences == 0) return nullptr;
  const unsigned columns = unsigned((a.channels / 8 + 127) / 128);
  if (a.tokens) conv_silu_kernel<<<dim3(columns, unsigned((a.tokens + kWalk - 1) / kWalk)), 128, 0, cudaStream_t(stream)>>>(a);
  if (a.window_out) window_kernel<<<dim3(columns, a.sequences), 128, 0, cudaStream_t(stream)>>>(a);
  cudaError_t e = cudaGetLastError();
  return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}

}  // namespace k3::cuda
