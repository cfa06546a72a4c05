// m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,  w -= lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay w).  Bound: bytes, 30 a weight.
#include <cmath>

#include "k3/core/tile.cuh"
#include "k3/ops/update/adamw_cuda.h"

namespace k3::cuda {
namespace {

__global__ void __launch_bounds__(256) adamw_kernel(const AdamwArgs a, float correct1, float correct2) {
  for (int64_t i = (int64_t(blockIdx.x) * 256 + threadIdx.x) * 4; i < a.n; i += int64_t(gridDim.x) * 1024) {
    float w[4], m[4], v[4], g[4];
    const int count = int(min(int64_t(4), a.n - i));
    if (count == 4) {
      *reinterpret_cast<float4*>(w) = *reinterpret_cast<const float4*>(a.weight + i), *reinterpret_cast<float4*>(m) = *reinterpret_cast<const float4*>(a.m + i);
      *reinterpret_cast<float4*>(v) = *reinterpret_cast<const float4*>(a.v + i), *reinterpret_cast<float4*>(g) = *reinterpret_cast<const float4*>(a.grad + i);
    } else {
      for (int e = 0; e < 4; ++e) w[e] = e < count ? a.weight[i + e] : 0.f, m[e] = e < count ? a.m[i + e] : 0.f, v[e] = e < count ? a.v[i + e] : 0.f, g[e] = e < count ? a.grad[i + e] : 0.f;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float x = g[e] * a.grad_scale;
      m[e] = a.beta1 * m[e] + (1.f - a.beta1) * x, v[e] = a.beta2 * v[e] + (1.f - a.beta2) * x * x;
      w[e] -= a.lr * (m[e] * correct1 / (sqrtf(v[e] * correct2) + a.eps) + a.weight_decay * w[e]);
    }
    nv_bf16* copy = static_cast<nv_bf16*>(a.copy);
    if (count == 4) {
      *reinterpret_cast<float4*>(a.weight + i) = make_float4(w[0], w[1], w[2], w[3]), *reinterpret_cast<float4*>(a.m + i) = make_float4(m[0], m[1], m[2], m[3]);
      *reinterpret_cast<float4*>(a.v + i) = make_float4(v[0], v[1], v[2], v[3]);
      if (copy) *reinterpret_cast<uint2*>(copy + i) = make_uint2(pack(w[0], w[1]), pack(w[2], w[3]));
    } else {
      for (int e = 0; e < count; ++e) {
        a.weight[i + e] = w[e], a.m[i + e] = m[e], a.v[i + e] = v[e];
        if (copy) copy[i + e] = __float2bfloat16_rn(w[e]);
      }
    }
  }
}

}  // namespace

const char* adamw(const AdamwArgs& a, void* stream) {
  if (a.n == 0) return nullptr;
  const float c1 = float(1 / (1 - std::pow(double(a.beta1), double(a.step)))), c2 = float(1 / (1 - std::pow(double(a.beta2), double(a.step))));
  const int64_t blocks = (a.n + 1023) / 1024;
  adamw_kernel<<<unsigned(blocks < 2112 ? blocks : 2112), 256, 0, cudaStream_t(stream)>>>(a, c1, c2);
  cudaError_t e = cudaGetLastError();
  return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}

}  // namespace k3::cuda
