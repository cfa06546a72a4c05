// Bound by memory.
#include "k3/ops/activation/glu.cuh"
#include "k3/ops/activation/elementwise_cuda.h"

namespace k3::cuda {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ void put(float* to, float x, bool fresh) { *to = fresh ? x : *to + x; }

// A thread has kEach elements, kThreads apart, so that their loads are on their way together.
constexpr int kEach = 4;
template <class F>
__device__ __forceinline__ void each(int64_t n, F f) {
  const int64_t first = int64_t(blockIdx.x) * (kThreads * kEach) + threadIdx.x;
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    if (first + j * kThreads < n) f(first + j * kThreads);
}

template <Element kind>
__global__ void __launch_bounds__(kThreads) forward_kernel(const cpu::ElementArgs a) {
  each(a.n, [&](int64_t i) {
    const float x = a.x[i];
    if constexpr (kind == Element::add) a.y[i] = x + a.g[i];
    if constexpr (kind == Element::silu) a.y[i] = silu_of(x);
    if constexpr (kind == Element::sigmoid) a.y[i] = exact_sigmoid(x);
    if constexpr (kind == Element::sigmoid_gate) a.y[i] = x * exact_sigmoid(a.g[i]);
  });
}

template <Element kind>
__global__ void __launch_bounds__(kThreads) backward_kernel(const cpu::ElementArgs a, bool fresh_x, bool fresh_g) {
  each(a.n, [&](int64_t i) {
    const float dy = a.dy[i];
    if constexpr (kind == Element::add) put(a.dx + i, dy, fresh_x), put(a.dg + i, dy, fresh_g);
    if constexpr (kind == Element::silu) put(a.dx + i, dy * silu_slope(a.x[i]), fresh_x);
    if constexpr (kind == Element::sigmoid) put(a.dx + i, dy * exact_sigmoid(a.x[i]) * exact_sigmoid(-a.x[i]), fresh_x);
    if constexpr (kind == Element::sigmoid_gate) {
      const float x = a.x[i], g = a.g[i], ds = dy * exact_sigmoid(g);
      put(a.dx + i, ds, fresh_x);
      put(a.dg + i, ds * x * exact_sigmoid(-g), fresh_g);
    }
  });
}

__global__ void __launch_bounds__(kThreads) accumulate_kernel(float* to, const float* from, int64_t n) {
  each(n, [&](int64_t i) { to[i] += from[i]; });
}
__global__ void __launch_bounds__(kThreads) glu_forward_kernel(const cpu::GluArgs a) {
  each(a.n, [&](int64_t i) { a.y[i] = glu_value(a.activation, a.gate[i], a.up[i]); });
}
__global__ void __launch_bounds__(kThreads) glu_backward_kernel(const cpu::GluArgs a, bool fresh_gate, bool fresh_up) {
  each(a.n, [&](int64_t i) {
    const GluSlopes s = glu_slopes(a.activation, a.gate[i], a.up[i], a.dy[i]);
    put(a.dgate + i, s.gate, fresh_gate), put(a.dup + i, s.up, fresh_up);
  });
}

}  // namespace

const char* element_forward(Element kind, const cpu::ElementArgs& a, void* stream) {
  if (a.n == 0) return nullptr;
  const unsigned blocks = blocks_for(a.n, kThreads * kEach);
  switch (kind) {
    case Element::add: forward_kernel<Element::add><<<blocks, kThreads, 0, stream_of(stream)>>>(a); break;
    case Element::silu: forward_kernel<Element::silu><<<blocks, kThreads, 0, stream_of(stream)>>>(a); break;
    case Element::sigmoid: forward_kernel<Element::sigmoid><<<blocks, kThreads, 0, stream_of(stream)>>>(a); break;
    case Element::sigmoid_gate: forward_kernel<Element::sigmoid_gate><<<blocks, kThreads, 0, stream_of(stream)>>>(a); break;
  }
  return launched();
}
const char* element_backward(Element kind, const cpu::ElementArgs& a, bool fresh_x, bool fresh_g, void* stream) {
  if (a.n == 0) return nullptr;
  const unsigned blocks = blocks_for(a.n, kThreads * kEach);
  switch (kind) {
    case Element::add: backward_kernel<Element::add><<<blocks, kThreads, 0, stream_of(stream)>>>(a, fresh_x, fresh_g); break;
    case Element::silu: backward_kernel<Element::silu><<<blocks, kThreads, 0, stream_of(stream)>>>(a, fresh_x, fresh_g); break;
    case Element::sigmoid: backward_kernel<Element::sigmoid><<<blocks, kThreads, 0, stream_of(stream)>>>(a, fresh_x, fresh_g); break;
    case Element::sigmoid_gate: backward_kernel<Element::sigmoid_gate><<<blocks, kThreads, 0, stream_of(stream)>>>(a, fresh_x, fresh_g); break;
  }
  return launched();
}
const char* accumulate(float* to, const float* from, int64_t n, void* stream) {
  if (n) accumulate_kernel<<<blocks_for(n, kThreads * kEach), kThreads, 0, stream_of(stream)>>>(to, from, n);
  return launched();
}
const char* glu_forward(const cpu::GluArgs& a, void* stream) {
  if (a.n) glu_forward_kernel<<<blocks_for(a.n, kThreads * kEach), kThreads, 0, stream_of(stream)>>>(a);
  return launched();
}
const char* glu_backward(const cpu::GluArgs& a, void* stream) { return glu_backward(a, false, false, stream); }
const char* glu_backward(const cpu::GluArgs& a, bool fresh_gate, bool fresh_up, void* stream) {
  if (a.n) glu_backward_kernel<<<blocks_for(a.n, kThreads * kEach), kThreads, 0, stream_of(stream)>>>(a, fresh_gate, fresh_up);
  return launched();
}

}  // namespace k3::cuda
