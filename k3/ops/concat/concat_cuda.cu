// A thread an element forward; backward a thread has the same column of both, so that a may be b. Bound by memory.
#include "k3/core/enqueue.cuh"
#include "k3/ops/concat/concat_cuda.h"

namespace k3::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) forward_kernel(const ConcatArgs c) {
  follow();
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x, width = c.p + c.q;
  if (i >= c.n * width) return;
  const int64_t row = i / width, column = i % width;
  c.y[i] = column < c.p ? c.a[row * c.p + column] : c.b[row * c.q + column - c.p];
}

__global__ void __launch_bounds__(kThreads) backward_kernel(const ConcatArgs c, int64_t wider) {
  follow();
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= c.n * wider) return;
  const int64_t row = i / wider, column = i % wider;
  const float* dy = c.dy + row * (c.p + c.q);
  if (column < c.p) c.da[row * c.p + column] += dy[column];
  if (column < c.q) c.db[row * c.q + column] += dy[c.p + column];
}

}  // namespace

const char* concat_forward(const ConcatArgs& c, void* stream) {
  const int64_t n = c.n * (c.p + c.q);
  if (n) enqueue(forward_kernel, blocks_for(n, kThreads), kThreads, 0, stream_of(stream), c);
  return launched();
}
const char* concat_backward(const ConcatArgs& c, void* stream) {
  const int64_t wider = c.p > c.q ? c.p : c.q;
  if (c.n * wider) enqueue(backward_kernel, blocks_for(c.n * wider, kThreads), kThreads, 0, stream_of(stream), c, wider);
  return launched();
}

}  // namespace k3::cuda
