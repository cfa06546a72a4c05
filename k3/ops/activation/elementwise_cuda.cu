// Bound by memory.
#include "k3/core/enqueue.cuh"
#include "k3/ops/activation/glu.cuh"
#include "k3/ops/activation/elementwise_cuda.h"

namespace k3::cuda {
namespace {

constexpr int kThreads = 256;

// A thread has four neighbours of each input and result. f(x, y): one element's inputs and its results, which are written, or added where `add` says so.
constexpr int kEach = 4;
template <int kIn, int kOut, class F>
__device__ __forceinline__ void each(int64_t n, const float* const (&in)[kIn], float* const (&out)[kOut], const bool (&add)[kOut], F f) {
  const int64_t i = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kEach;
  if (i >= n) return;
  const bool whole = i + kEach <= n;
  float x[kIn][kEach], y[kOut][kEach];
  auto load = [&](const float* from, float (&to)[kEach]) {
    if (whole) {
      *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from + i);
    } else {
#pragma unroll
      for (int e = 0; e < kEach; ++e) to[e] = i + e < n ? from[i + e] : 0.f;
    }
  };
#pragma unroll
  for (int j = 0; j < kIn; ++j) load(in[j], x[j]);
#pragma unroll
  for (int j = 0; j < kOut; ++j)
    if (add[j]) load(out[j], y[j]);
    else y[j][0] = y[j][1] = y[j][2] = y[j][3] = 0.f;
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    float a[kIn], b[kOut];
#pragma unroll
    for (int j = 0; j < kIn; ++j) a[j] = x[j][e];
    f(a, b);
#pragma unroll
    for (int j = 0; j < kOut; ++j) y[j][e] += b[j];
  }
#pragma unroll
  for (int j = 0; j < kOut; ++j) {
    if (whole) {
      *reinterpret_cast<float4*>(out[j] + i) = *reinterpret_cast<float4*>(y[j]);
    } else {
      for (int e = 0; e < kEach && i + e < n; ++e) out[j][i + e] = y[j][e];
    }
  }
}

template <Element kind>
__global__ void __launch_bounds__(kThreads) forward_kernel(const cpu::ElementArgs a) {
  follow();
  constexpr bool kTwo = kind == Element::add || kind == Element::sigmoid_gate;
  const float* in[2] = {a.x, kTwo ? a.g : a.x};
  each<2, 1>(a.n, in, {a.y}, {false}, [](const float (&x)[2], float (&y)[1]) {
    if constexpr (kind == Element::add) y[0] = x[0] + x[1];
    if constexpr (kind == Element::silu) y[0] = silu_of(x[0]);
    if constexpr (kind == Element::sigmoid) y[0] = exact_sigmoid(x[0]);
    if constexpr (kind == Element::sigmoid_gate) y[0] = x[0] * exact_sigmoid(x[1]);
  });
}

template <Element kind>
__global__ void __launch_bounds__(kThreads) backward_kernel(const cpu::ElementArgs a, bool fresh_x, bool fresh_g) {
  follow();
  if constexpr (kind == Element::add) {
    each<1, 2>(a.n, {a.dy}, {a.dx, a.dg}, {!fresh_x, !fresh_g}, [](const float (&x)[1], float (&y)[2]) { y[0] = y[1] = x[0]; });
  } else if constexpr (kind == Element::sigmoid_gate) {
    each<3, 2>(a.n, {a.dy, a.x, a.g}, {a.dx, a.dg}, {!fresh_x, !fresh_g}, [](const float (&x)[3], float (&y)[2]) {
      const float ds = x[0] * exact_sigmoid(x[2]);
      y[0] = ds, y[1] = ds * x[1] * exact_sigmoid(-x[2]);
    });
  } else {
    each<2, 1>(a.n, {a.dy, a.x}, {a.dx}, {!fresh_x}, [](const float (&x)[2], float (&y)[1]) {
      y[0] = x[0] * (kind == Element::silu ? silu_slope(x[1]) : exact_sigmoid(x[1]) * exact_sigmoid(-x[1]));
    });
  }
}

__global__ void __launch_bounds__(kThreads) accumulate_kernel(float* to, const float* from, int64_t n) {
  follow();
  each<1, 1>(n, {from}, {to}, {true}, [](const float (&x)[1], float (&y)[1]) { y[0] = x[0]; });
}
__global__ void __launch_bounds__(kThreads) glu_forward_kernel(const cpu::GluArgs a) {
  follow();
  each<2, 1>(a.n, {a.gate, a.up}, {a.y}, {false}, [&](const float (&x)[2], float (&y)[1]) { y[0] = glu_value(a.activation, x[0], x[1]); });
}
__global__ void __launch_bounds__(kThreads) glu_backward_kernel(const cpu::GluArgs a, bool fresh_gate, bool fresh_up) {
  follow();
  each<3, 2>(a.n, {a.gate, a.up, a.dy}, {a.dgate, a.dup}, {!fresh_gate, !fresh_up}, [&](const float (&x)[3], float (&y)[2]) {
    const GluSlopes s = glu_slopes(a.activation, x[0], x[1], x[2]);
    y[0] = s.gate, y[1] = s.up;
  });
}

}  // namespace

const char* element_forward(Element kind, const cpu::ElementArgs& a, void* stream) {
  if (a.n == 0) return nullptr;
  const unsigned blocks = blocks_for(a.n, kThreads * kEach);
  switch (kind) {
    case Element::add: enqueue(forward_kernel<Element::add>, blocks, kThreads, 0, stream_of(stream), a); break;
    case Element::silu: enqueue(forward_kernel<Element::silu>, blocks, kThreads, 0, stream_of(stream), a); break;
    case Element::sigmoid: enqueue(forward_kernel<Element::sigmoid>, blocks, kThreads, 0, stream_of(stream), a); break;
    case Element::sigmoid_gate: enqueue(forward_kernel<Element::sigmoid_gate>, blocks, kThreads, 0, stream_of(stream), a); break;
  }
  return launched();
}
const char* element_backward(Element kind, const cpu::ElementArgs& a, bool fresh_x, bool fresh_g, void* stream) {
  if (a.n == 0) return nullptr;
  const unsigned blocks = blocks_for(a.n, kThreads * kEach);
  switch (kind) {
    case Element::add: enqueue(backward_kernel<Element::add>, blocks, kThreads, 0, stream_of(stream), a, fresh_x, fresh_g); break;
    case Element::silu: enqueue(backward_kernel<Element::silu>, blocks, kThreads, 0, stream_of(stream), a, fresh_x, fresh_g); break;
    case Element::sigmoid: enqueue(backward_kernel<Element::sigmoid>, blocks, kThreads, 0, stream_of(stream), a, fresh_x, fresh_g); break;
    case Element::sigmoid_gate: enqueue(backward_kernel<Element::sigmoid_gate>, blocks, kThreads, 0, stream_of(stream), a, fresh_x, fresh_g); break;
  }
  return launched();
}
const char* accumulate(float* to, const float* from, int64_t n, void* stream) {
  if (n) enqueue(accumulate_kernel, blocks_for(n, kThreads * kEach), kThreads, 0, stream_of(stream), to, from, n);
  return launched();
}
const char* glu_forward(const cpu::GluArgs& a, void* stream) {
  if (a.n) enqueue(glu_forward_kernel, blocks_for(a.n, kThreads * kEach), kThreads, 0, stream_of(stream), a);
  return launched();
}
const char* glu_backward(const cpu::GluArgs& a, void* stream) { return glu_backward(a, false, false, stream); }
const char* glu_backward(const cpu::GluArgs& a, bool fresh_gate, bool fresh_up, void* stream) {
  if (a.n) enqueue(glu_backward_kernel, blocks_for(a.n, kThreads * kEach), kThreads, 0, stream_of(stream), a, fresh_gate, fresh_up);
  return launched();
}

}  // namespace k3::cuda
