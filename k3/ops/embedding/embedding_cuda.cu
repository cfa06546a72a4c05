// Bound by memory. Backward: the block of an id's first token adds up all tokens of that id in order; the others of that id end at once.
#include "k3/core/enqueue.cuh"
#include "k3/ops/embedding/embedding_cuda.h"

namespace k3::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) forward_kernel(const cpu::EmbeddingArgs a) {
  follow();
  const int64_t n = blockIdx.x, from = a.ids[n] * a.d;
  for (int64_t i = threadIdx.x; i < a.d; i += kThreads)
    a.y[n * a.d + i] = from < 0 ? NAN : a.table ? a.table[from + i] : __uint_as_float(uint32_t(a.table_bf16[from + i]) << 16);
}

__global__ void __launch_bounds__(kThreads) backward_kernel(const cpu::EmbeddingArgs a) {
  follow();
  const int64_t n = blockIdx.x;
  const int32_t id = a.ids[n];
  int before = 0;
  for (int64_t m = threadIdx.x; m < n; m += kThreads) before |= a.ids[m] == id;
  if (__syncthreads_or(before)) return;
  if (a.touched)
    for (int64_t p = id * a.d / a.part + threadIdx.x; p <= (id * a.d + a.d - 1) / a.part; p += kThreads) a.touched[p] = 1;
  // the tokens of this id, found kThreads at a time
  __shared__ int32_t found[kThreads];
  __shared__ int count;
  for (int64_t at = n; at < a.rows; at += kThreads) {
    const int64_t m = at + threadIdx.x;
    const bool same = m < a.rows && a.ids[m] == id;
    if (threadIdx.x == 0) count = 0;
    if (!__syncthreads_or(same)) continue;
    for (int w = 0; w < kThreads / 32; ++w) {  // in order of the tokens
      if (int(threadIdx.x >> 5) == w) {
        const unsigned mask = __ballot_sync(~0u, same);
        if (same) found[count + __popc(mask & ((1u << (threadIdx.x & 31)) - 1))] = int32_t(m - at);
        __syncwarp();
        if ((threadIdx.x & 31) == 0) count += __popc(mask);
      }
      __syncthreads();
    }
    const int all = count;
    for (int64_t i = int64_t(blockIdx.y) * kThreads + threadIdx.x; i < a.d; i += int64_t(gridDim.y) * kThreads) {
      float sum = a.dtable[id * a.d + i];
#pragma unroll 8
      for (int f = 0; f < all; ++f) sum += a.dy[(at + found[f]) * a.d + i];
      a.dtable[id * a.d + i] = sum;
    }
    __syncthreads();
  }
}

}  // namespace

const char* embedding_forward(const cpu::EmbeddingArgs& a, void* stream) {
  if (a.rows) enqueue(forward_kernel, unsigned(a.rows), kThreads, 0, stream_of(stream), a);
  return launched();
}
const char* embedding_backward(const cpu::EmbeddingArgs& a, void* stream) {
  if (a.rows) enqueue(backward_kernel, dim3(unsigned(a.rows), blocks_for(a.d, kThreads)), kThreads, 0, stream_of(stream), a);
  return launched();
}

}  // namespace k3::cuda
