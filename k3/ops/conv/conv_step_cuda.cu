// A thread a channel of a row: it reads its taps from the ring, oldest first, then puts the new input where the oldest of all lies.
#include "k3/core/block.cuh"
#include "k3/ops/conv/conv_step_cuda.h"

namespace k3::cuda {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) step_kernel(const ConvStepArgs a) {
  const int64_t c = int64_t(blockIdx.y) * kThreads + threadIdx.x, n = blockIdx.x;
  if (c >= a.channels) return;
  const int slot = a.step.slots[n];
  if (slot < 0) {
    a.y[n * a.channels + c] = 0.f;
    return;
  }
  float* ring = a.state + int64_t(slot) * a.history * a.channels + c;
  const int64_t count = a.step.tokens[n];
  float sum = 0.f;
  for (int64_t j = 0; j + 1 < a.width; ++j)
    if (const int64_t p = count - (a.width - 1) + j; p >= 0) sum = fmaf(a.w[c * a.width + j], ring[p % a.history * a.channels], sum);
  const float x = a.x[n * a.channels + c];
  sum = fmaf(a.w[c * a.width + a.width - 1], x, sum);
  ring[count % a.history * a.channels] = x;
  a.y[n * a.channels + c] = sum * exact_sigmoid(sum);
}

}  // namespace

const char* conv_silu_step(const ConvStepArgs& a, void* stream) {
  if (a.rows == 0 || a.channels == 0) return nullptr;
  step_kernel<<<dim3(unsigned(a.rows), blocks_for(a.channels, kThreads)), kThreads, 0, stream_of(stream)>>>(a);
  return launched();
}

}  // namespace k3::cuda
