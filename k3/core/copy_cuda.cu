// Bound: bytes. A thread has kTogether sixteens, all on their way before the first is stored; what does not begin or end at sixteen goes byte by byte.
#include "k3/core/copy_cuda.h"
#include "k3/core/enqueue.cuh"

namespace k3::cuda {
namespace {

constexpr int kThreads = 256, kTogether = 4;

__global__ void __launch_bounds__(kThreads) fill_kernel(char* p, uint32_t four, size_t head, size_t sixteens, size_t tail) {
  follow();
  uint4* body = reinterpret_cast<uint4*>(p + head);
  const size_t first = size_t(blockIdx.x) * (kThreads * kTogether) + threadIdx.x;
#pragma unroll
  for (int j = 0; j < kTogether; ++j)
    if (const size_t i = first + j * kThreads; i < sixteens) body[i] = make_uint4(four, four, four, four);
  if (blockIdx.x) return;
  if (threadIdx.x < head) p[threadIdx.x] = char(four);
  if (threadIdx.x < tail) p[head + 16 * sixteens + threadIdx.x] = char(four);
}

template <bool kToHost>
__global__ void __launch_bounds__(kThreads) copy_kernel(char* to, const char* from, size_t sixteens, size_t bytes) {
  follow();
  const size_t first = size_t(blockIdx.x) * (kThreads * kTogether) + threadIdx.x;
  uint4 x[kTogether];
#pragma unroll
  for (int j = 0; j < kTogether; ++j)
    if (const size_t i = first + j * kThreads; i < sixteens) x[j] = reinterpret_cast<const uint4*>(from)[i];
#pragma unroll
  for (int j = 0; j < kTogether; ++j)
    if (const size_t i = first + j * kThreads; i < sixteens) reinterpret_cast<uint4*>(to)[i] = x[j];
  for (size_t i = 16 * sixteens + size_t(blockIdx.x) * kThreads + threadIdx.x; i < bytes; i += size_t(gridDim.x) * kThreads) to[i] = from[i];
  if (kToHost) __threadfence_system();
}

unsigned blocks(size_t items) { return unsigned((items + kThreads * kTogether - 1) / (kThreads * kTogether)); }

}  // namespace

const char* fill(void* p, int byte, size_t bytes, void* stream) {
  if (bytes == 0) return nullptr;
  size_t head = (16 - reinterpret_cast<uintptr_t>(p) % 16) % 16;
  if (head > bytes) head = bytes;
  const size_t sixteens = (bytes - head) / 16;
  enqueue(fill_kernel, sixteens ? blocks(sixteens) : 1, kThreads, 0, stream_of(stream), static_cast<char*>(p), 0x01010101u * uint8_t(byte), head, sixteens,
         bytes - head - 16 * sixteens);
  return launched();
}

const char* copy(void* to, const void* from, size_t bytes, bool to_host, void* stream) {
  if (bytes == 0) return nullptr;
  const bool aligned = (reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 16 == 0;
  if (!aligned && bytes > 65536) {
    cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_of(stream));
    return launched();
  }
  const size_t sixteens = aligned ? bytes / 16 : 0;
  enqueue(to_host ? copy_kernel<true> : copy_kernel<false>, blocks(aligned ? sixteens + 1 : bytes), kThreads, 0, stream_of(stream), static_cast<char*>(to),
         static_cast<const char*>(from), sixteens, bytes);
  return launched();
}

}  // namespace k3::cuda
