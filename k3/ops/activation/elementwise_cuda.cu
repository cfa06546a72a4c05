// One thread an element. Bound by memory. The equations are those of activation_cpu.cpp: 1 - sigmoid(x) is sigmoid(-x), NaN stays NaN.
#include "k3/core/block.cuh"
#include "k3/ops/activation/elementwise_cuda.h"

namespace k3::cuda {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ float silu(float x) { return x * exact_sigmoid(x); }
__device__ __forceinline__ float silu_slope(float x) { return exact_sigmoid(x) * (1.f + x * exact_sigmoid(-x)); }
__device__ __forceinline__ float at_most(float x, float limit) { return x > limit ? limit : x; }
__device__ __forceinline__ float at_least(float x, float limit) { return x < limit ? limit : x; }

template <Element kind>
__global__ void __launch_bounds__(kThreads) forward_kernel(const cpu::ElementArgs a) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= a.n) return;
  const float x = a.x[i];
  if constexpr (kind == Element::add) a.y[i] = x + a.g[i];
  if constexpr (kind == Element::silu) a.y[i] = silu(x);
  if constexpr (kind == Element::sigmoid) a.y[i] = exact_sigmoid(x);
  if constexpr (kind == Element::sigmoid_gate) a.y[i] = x * exact_sigmoid(a.g[i]);
}

template <Element kind>
__global__ void __launch_bounds__(kThreads) backward_kernel(const cpu::ElementArgs a) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= a.n) return;
  const float x = a.x[i], dy = a.dy[i];
  if constexpr (kind == Element::add) a.dx[i] += dy, a.dg[i] += dy;
  if constexpr (kind == Element::silu) a.dx[i] += dy * silu_slope(x);
  if constexpr (kind == Element::sigmoid) a.dx[i] += dy * exact_sigmoid(x) * exact_sigmoid(-x);
  if constexpr (kind == Element::sigmoid_gate) {
    const float g = a.g[i], ds = dy * exact_sigmoid(g);
    a.dx[i] += ds;
    a.dg[i] += ds * x * exact_sigmoid(-g);
  }
}

__global__ void __launch_bounds__(kThreads) glu_forward_kernel(const cpu::GluArgs a) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= a.n) return;
  const float g = a.gate[i], u = a.up[i], b = a.activation.beta, bu = a.activation.linear_beta, limit = a.activation.limit;
  switch (a.activation.kind) {
    case Activation::Kind::situ:
      a.y[i] = b * tanhf(g / b) * exact_sigmoid(g) * (bu > 0 ? bu * tanhf(u / bu) : u);
      break;
    case Activation::Kind::clipped:
      a.y[i] = silu(at_most(g, limit)) * at_least(at_most(u, limit), -limit);
      break;
    case Activation::Kind::swiglu:
      a.y[i] = silu(g) * u;
      break;
  }
}

__global__ void __launch_bounds__(kThreads) glu_backward_kernel(const cpu::GluArgs a) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= a.n) return;
  const float g = a.gate[i], u = a.up[i], dy = a.dy[i], b = a.activation.beta, bu = a.activation.linear_beta, limit = a.activation.limit;
  float dg = 0.f, du = 0.f;
  switch (a.activation.kind) {
    case Activation::Kind::situ: {
      const float t = tanhf(g / b), s = exact_sigmoid(g), tu = bu > 0 ? tanhf(u / bu) : 0.f, w = bu > 0 ? bu * tu : u;
      dg = dy * w * s * ((1.f - t * t) + b * t * exact_sigmoid(-g));
      du = dy * b * t * s * (1.f - tu * tu);
      break;
    }
    case Activation::Kind::clipped: {
      const float gc = at_most(g, limit), uc = at_least(at_most(u, limit), -limit);
      dg = g > limit ? 0.f : dy * uc * silu_slope(gc);
      du = fabsf(u) > limit ? 0.f : dy * silu(gc);
      break;
    }
    case Activation::Kind::swiglu:
      dg = dy * u * silu_slope(g);
      du = dy * silu(g);
      break;
  }
  a.dgate[i] += dg, a.dup[i] += du;
}

}  // namespace

const char* element_forward(Element kind, const cpu::ElementArgs& a, void* stream) {
  if (a.n == 0) return nullptr;
  const unsigned blocks = blocks_for(a.n, kThreads);
  switch (kind) {
    case Element::add: forward_kernel<Element::add><<<blocks, kThreads, 0, stream_of(stream)>>>(a); break;
    case Element::silu: forward_kernel<Element::silu><<<blocks, kThreads, 0, stream_of(stream)>>>(a); break;
    case Element::sigmoid: forward_kernel<Element::sigmoid><<<blocks, kThreads, 0, stream_of(stream)>>>(a); break;
    case Element::sigmoid_gate: forward_kernel<Element::sigmoid_gate><<<blocks, kThreads, 0, stream_of(stream)>>>(a); break;
  }
  return launched();
}
const char* element_backward(Element kind, const cpu::ElementArgs& a, void* stream) {
  if (a.n == 0) return nullptr;
  const unsigned blocks = blocks_for(a.n, kThreads);
  switch (kind) {
    case Element::add: backward_kernel<Element::add><<<blocks, kThreads, 0, stream_of(stream)>>>(a); break;
    case Element::silu: backward_kernel<Element::silu><<<blocks, kThreads, 0, stream_of(stream)>>>(a); break;
    case Element::sigmoid: backward_kernel<Element::sigmoid><<<blocks, kThreads, 0, stream_of(stream)>>>(a); break;
    case Element::sigmoid_gate: backward_kernel<Element::sigmoid_gate><<<blocks, kThreads, 0, stream_of(stream)>>>(a); break;
  }
  return launched();
}
const char* glu_forward(const cpu::GluArgs& a, void* stream) {
  if (a.n) glu_forward_kernel<<<blocks_for(a.n, kThreads), kThreads, 0, stream_of(stream)>>>(a);
  return launched();
}
const char* glu_backward(const cpu::GluArgs& a, void* stream) {
  if (a.n) glu_backward_kernel<<<blocks_for(a.n, kThreads), kThreads, 0, stream_of(stream)>>>(a);
  return launched();
}

}  // namespace k3::cuda
