// A block a part; its threads in order of a fixed tree.
#include "k3/core/enqueue.cuh"
#include "k3/ops/activation/mean_cuda.h"

namespace k3::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) sums_kernel(bool of_exp, const float* x, int64_t n, double* parts) {
  follow();
  __shared__ double part[kThreads];
  double sum = 0;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < n; i += kMeanParts * kThreads) sum += of_exp ? expf(x[i]) : exact_sigmoid(x[i]);
  part[threadIdx.x] = sum;
  for (int s = kThreads / 2; s > 0; s >>= 1) {
    __syncthreads();
    if (int(threadIdx.x) < s) part[threadIdx.x] += part[threadIdx.x + s];
  }
  if (threadIdx.x == 0) parts[blockIdx.x] = part[0];
}

}  // namespace

const char* sums(bool of_exp, const float* x, int64_t n, double* parts, void* stream) {
  enqueue(sums_kernel, unsigned(kMeanParts), kThreads, 0, stream_of(stream), of_exp, x, n, parts);
  return launched();
}

}  // namespace k3::cuda
