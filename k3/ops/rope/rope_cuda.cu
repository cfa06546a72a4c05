// A block a token: its cosines and sines once in double precision, then every head's channels, each written by one thread. Bound by memory.
#include "k3/core/block.cuh"
#include "k3/ops/rope/rope_cuda.h"

namespace k3::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) rope_kernel(const RopeArgs a) {
  extern __shared__ float2 turn[];  // cosine and sine of each pair
  const int64_t n = blockIdx.x, pairs = a.width / 2, head = a.plain + a.width, row = a.heads * head;
  for (int64_t i = threadIdx.x; i < pairs; i += kThreads) {
    const double phi = double(a.positions[n]) * pow(a.theta, -2 * double(i) / double(a.width));
    turn[i] = make_float2(float(cos(phi)), a.direction * float(sin(phi)));
  }
  __syncthreads();
  const float* x = a.x + n * row;
  float* y = a.y + n * row;
  for (int64_t i = threadIdx.x; i < row; i += kThreads) {
    const int64_t at = i % head - a.plain;
    float v = x[i];
    if (at >= 0) {
      const float2 t = turn[at / 2];
      v = at % 2 ? t.y * x[i - 1] + t.x * v : t.x * v - t.y * x[i + 1];
    }
    y[i] = a.add ? y[i] + v : v;
  }
}

}  // namespace

const char* rope(const RopeArgs& a, void* stream) {
  const int64_t shared = a.width / 2 * int64_t(sizeof(float2));
  if (shared > 48 << 10) return "rope turns at most 12288 channels of a head on the GPU; use --device cpu";
  if (a.rows) rope_kernel<<<unsigned(a.rows), kThreads, size_t(shared), stream_of(stream)>>>(a);
  return launched();
}

}  // namespace k3::cuda
