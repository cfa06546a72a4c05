#pragma once
// What the kernels of a decode step share: launches that begin while the kernels in front still run, vectors that say themselves whether they are
// there, and the products' innermost loop.
#include "k3/core/enqueue.cuh"
#include "k3/core/four.cuh"
#include "k3/core/tile.cuh"
#include "k3/ops/activation/activation_kernels.h"

namespace k3::cuda {

constexpr int kThreads = 256, kWarps = 8, kTile = 16;  // of a block; rows of a weight that it takes at a time

// Plain vectors: all that a step computes was computed before this; weights and what no kernel of a step writes may be read earlier.
__device__ __forceinline__ void wait_for_kernel_in_front() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_kernel_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Stamped vectors (kStamped): an element is 8 bytes, a float and the stamp of the step that made it, stored and loaded together; who needs it asks for it
// until the stamp is this step's. So what lies between a value and its use is one store and one load, and no block waits for another to end.
struct Stamp {
  uint32_t now = 0;
};
// Between what can be read early and what can't.
template <bool kStamped>
__device__ __forceinline__ void meet() {
  if constexpr (!kStamped) wait_for_kernel_in_front();
}

struct Stamped {
  uint32_t x, stamp, y, second_stamp;  // two elements
  __device__ __forceinline__ bool is(uint32_t s) const { return stamp == s && second_stamp == s; }
};
__device__ __forceinline__ Stamped look2(const float* v, int64_t i) {
  Stamped s;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(s.x), "=r"(s.stamp), "=r"(s.y), "=r"(s.second_stamp) : "l"(v + 2 * i) : "memory");
  return s;
}
struct Element {
  const float* v;
  int64_t i;
};
// N elements, asked for together; at(j) says which.
template <bool kStamped, int N, class At>
__device__ __forceinline__ void take_each(float (&x)[N], Stamp stamp, At at) {
  if constexpr (!kStamped) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const Element e = at(j);
      x[j] = e.v[e.i];
    }
  } else {
    bool all;
    do {
      all = true;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const Element e = at(j);
        uint32_t bits, is;
        asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];" : "=r"(bits), "=r"(is) : "l"(e.v + 2 * e.i) : "memory");
        x[j] = __uint_as_float(bits), all = all && is == stamp.now;
      }
    } while (!all);
  }
}
template <bool kStamped>
__device__ __forceinline__ float take(const float* v, int64_t i, Stamp stamp) {
  float x[1];
  take_each<kStamped>(x, stamp, [&](int) { return Element{v, i}; });
  return x[0];
}
// Elements i to i+3 (i a multiple of 4) of n <= N vectors; at(j) is vector j.
template <bool kStamped, int N, class At>
__device__ __forceinline__ void take4_each(float4 (&x)[N], int n, Stamp stamp, int64_t i, At at) {
  if constexpr (!kStamped) {
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] = j < n ? load4(at(j) + i) : zero4();
  } else {
#pragma unroll
    for (int j0 = 0; j0 < N; j0 += 4) {  // four at once: registers
      bool all;
      do {
        all = true;
#pragma unroll
        for (int j = j0; j < j0 + 4 && j < N; ++j) {
          x[j] = zero4();
          if (j >= n) continue;
          const Stamped a = look2(at(j), i), b = look2(at(j), i + 2);
          x[j] = make_float4(__uint_as_float(a.x), __uint_as_float(a.y), __uint_as_float(b.x), __uint_as_float(b.y));
          all = all && a.is(stamp.now) && b.is(stamp.now);
        }
      } while (!all);
    }
  }
}
template <bool kStamped>
__device__ __forceinline__ float4 take4(const float* v, int64_t i, Stamp stamp) {
  float4 x[1];
  take4_each<kStamped>(x, 1, stamp, i, [&](int) { return v; });
  return x[0];
}
template <bool kStamped>
__device__ __forceinline__ void give(float* v, int64_t i, float x, Stamp stamp) {
  if constexpr (kStamped)
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1,%2};" ::"l"(v + 2 * i), "r"(__float_as_uint(x)), "r"(stamp.now) : "memory");
  else
    v[i] = x;
}

template <class... Parameters, class... Arguments>
const char* launch_step(void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared, void* stream, const Arguments&... a) {
  if (shared > 8 << 10)  // what a kernel has besides counts too
    if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)); e != cudaSuccess)
      return cudaGetErrorString(e);
  enqueue(kernel, grid, dim3(unsigned(threads)), shared, stream_of(stream), a...);
  return launched();
}

// As near as float32 rounds a few times over; results are rounded to bfloat16. (Code of a step is run once a layer: what is small is fast.)
__device__ __forceinline__ float near_tanh(float x) {
  const float y = x * x;
  return fabsf(x) < 0.2f ? x * fmaf(y, fmaf(y, 2.f / 15, -1.f / 3), 1.f) : fmaf(-2.f, rcp(1.f + ex2(2 * kLog2e * x)), 1.f);
}
__device__ __forceinline__ float gated_unit(const Activation& a, float g, float u) {  // as glu_value() of activation/glu.cuh
  float x = g;
  if (a.kind == Activation::Kind::situ) {
    x = a.beta * near_tanh(__fdividef(g, a.beta));
    if (a.linear_beta > 0) u = a.linear_beta * near_tanh(__fdividef(u, a.linear_beta));
  } else if (a.kind == Activation::Kind::clipped) {
    x = g = g > a.limit ? a.limit : g, u = u > a.limit ? a.limit : u, u = u < -a.limit ? -a.limit : u;
  }
  return x * sigmoid(g) * u;
}

// A weight's rows are the left operand of the tensor units, 16 at a time, tokens the right one, 8 at a time. The units sum over 16 values of k in an
// order of their own, and both operands may be given them permuted alike: lane (g, t) = (lane / 4, lane % 4) takes eight neighbouring values of row g
// and of row g + 8, which two products use up.
struct Eight {
  uint4 low, high;  // rows g and g + 8
};
__device__ __forceinline__ Eight no_weights() { return {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)}; }
__device__ __forceinline__ uint4 stream16(const void* p) {  // read once: past the first-level cache
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p));
  return x;
}
__device__ __forceinline__ void multiply(float (&sum)[4], const Eight& w, const uint4& x) {
  const uint32_t first[4] = {w.low.x, w.high.x, w.low.y, w.high.y}, second[4] = {w.low.z, w.high.z, w.low.w, w.high.w};
  mma(sum, first, x.x, x.y);
  mma(sum, second, x.z, x.w);
}

}  // namespace k3::cuda
