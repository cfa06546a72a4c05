#pragma once
// What the kernels of a decode step share: launches that begin while the kernel in front still runs, and the products' innermost loop.
#include "k3/core/block.cuh"
#include "k3/core/tile.cuh"
#include "k3/ops/activation/glu.cuh"

namespace k3::cuda {

// All that a step computes was computed before this; weights and what no kernel of a step writes may be read earlier.
__device__ __forceinline__ void wait_for_kernel_in_front() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_kernel_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

template <class... Parameters, class... Arguments>
const char* launch_step(void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared, void* stream, const Arguments&... a) {
  if (shared > 8 << 10)  // what a kernel has besides counts too
    if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)); e != cudaSuccess)
      return cudaGetErrorString(e);
  cudaLaunchAttribute chain{cudaLaunchAttributeProgrammaticStreamSerialization, {}, {}};
  chain.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{grid, dim3(unsigned(threads)), shared, stream_of(stream), &chain, 1};
  const cudaError_t e = cudaLaunchKernelEx(&config, kernel, Parameters(a)...);
  return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
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
