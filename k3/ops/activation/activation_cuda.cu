// SiTU-GLU:  f = b t s * c w,  t = tanh(g / b), s = sigmoid(g), w = tanh(u / c);  df/dg = ((1 - t^2) s + b t s (1 - s)) c w,  df/du = b t s (1 - w^2)
// Bound: bytes. A thread has 8 values; float32 inside, one rounding.
#include "k3/core/tile.cuh"
#include "k3/ops/activation/activation_cuda.h"

namespace k3::cuda {
namespace {

template <class T, bool kBackward>
__global__ void __launch_bounds__(256) situ_kernel(const SituArgs a) {
  const int64_t i = (int64_t(blockIdx.x) * 256 + threadIdx.x) * 8;
  if (i >= a.n) return;
  float g[8], u[8], d[8], y[8];
  load8(static_cast<const T*>(a.gate) + i, g), load8(static_cast<const T*>(a.up) + i, u);
  if constexpr (kBackward) load8(static_cast<const T*>(a.dy) + i, d);
  const float per_beta = 1.f / a.beta, per_linear = 1.f / a.linear_beta;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    float t = tanhf(g[e] * per_beta), s = 1.f / (1.f + expf(-g[e])), w = tanhf(u[e] * per_linear);
    if constexpr (kBackward) {
      y[e] = d[e] * ((1.f - t * t) * s + a.beta * t * s * (1.f - s)) * a.linear_beta * w;
      d[e] *= a.beta * t * s * (1.f - w * w);
    } else {
      y[e] = a.beta * t * s * a.linear_beta * w;
    }
  }
  if constexpr (kBackward) store8(static_cast<T*>(a.dgate) + i, y), store8(static_cast<T*>(a.dup) + i, d);
  else store8(static_cast<T*>(a.y) + i, y);
}

template <bool kBackward>
const char* launch(const SituArgs& a, cudaStream_t stream) {
  if (a.n % 8) return "[glu] the GPU serves element counts that are multiples of 8";
  if (a.n == 0) return nullptr;
  const unsigned blocks = unsigned((a.n / 8 + 255) / 256);
  if (a.wide) situ_kernel<float, kBackward><<<blocks, 256, 0, stream>>>(a);
  else situ_kernel<nv_bf16, kBackward><<<blocks, 256, 0, stream>>>(a);
  cudaError_t e = cudaGetLastError();
  return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}

}  // namespace

const char* situ_forward(const SituArgs& a, void* stream) { return launch<false>(a, cudaStream_t(stream)); }
const char* situ_backward(const SituArgs& a, void* stream) { return launch<true>(a, cudaStream_t(stream)); }

}  // namespace k3::cuda
