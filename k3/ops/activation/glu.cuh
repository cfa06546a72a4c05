#pragma once
// The gated units of activation.h, one element: the equations of activation_cpu.cpp, where 1 - sigmoid(x) is sigmoid(-x) and NaN stays NaN.
#include "k3/core/block.cuh"
#include "k3/ops/activation/activation_kernels.h"

namespace k3 {

__device__ __forceinline__ float silu_of(float x) { return x * exact_sigmoid(x); }
__device__ __forceinline__ float silu_slope(float x) { return exact_sigmoid(x) * (1.f + x * exact_sigmoid(-x)); }
__device__ __forceinline__ float at_most(float x, float limit) { return x > limit ? limit : x; }
__device__ __forceinline__ float at_least(float x, float limit) { return x < limit ? limit : x; }

__device__ __forceinline__ float glu_value(const Activation& f, float g, float u) {
  const float b = f.beta, bu = f.linear_beta;
  if (f.kind == Activation::Kind::situ) return b * tanhf(g / b) * exact_sigmoid(g) * (bu > 0 ? bu * tanhf(u / bu) : u);
  if (f.kind == Activation::Kind::clipped) g = at_most(g, f.limit), u = at_least(at_most(u, f.limit), -f.limit);
  return silu_of(g) * u;
}

struct GluSlopes {
  float gate, up;  // times dy
};
__device__ __forceinline__ GluSlopes glu_slopes(const Activation& f, float g, float u, float dy) {
  const float b = f.beta, bu = f.linear_beta, limit = f.limit;
  if (f.kind == Activation::Kind::situ) {
    const float t = tanhf(g / b), s = exact_sigmoid(g), tu = bu > 0 ? tanhf(u / bu) : 0.f, w = bu > 0 ? bu * tu : u;
    return {dy * w * s * ((1.f - t * t) + b * t * exact_sigmoid(-g)), dy * b * t * s * (1.f - tu * tu)};
  }
  if (f.kind == Activation::Kind::clipped) {
    const float gc = at_most(g, limit), uc = at_least(at_most(u, limit), -limit);
    return {g > limit ? 0.f : dy * uc * silu_slope(gc), fabsf(u) > limit ? 0.f : dy * silu_of(gc)};
  }
  return {dy * u * silu_slope(g), dy * silu_of(g)};
}

}  // namespace k3
