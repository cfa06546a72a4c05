// Bound by memory. A thread has 32 codes and their scale.
#include "k3/core/block.cuh"
#include "k3/core/mxfp4.cuh"
#include "k3/ops/moe/widen_cuda.h"

namespace k3::cuda {
namespace {

__global__ void __launch_bounds__(256) widen_kernel(const WidenExpertsArgs a) {
  const int64_t groups = a.out * a.in / 32, i = int64_t(blockIdx.x) * 256 + threadIdx.x, e = blockIdx.y;
  if (i >= groups) return;
  const uint4 c = static_cast<const uint4*>(a.codes[e])[i];
  const uint32_t power = mxfp4_power(static_cast<const uint8_t*>(a.scales[e])[i]);
  uint4* to = static_cast<uint4*>(a.to) + (e * groups + i) * 4;
  to[0] = mxfp4_eight(c.x, power), to[1] = mxfp4_eight(c.y, power), to[2] = mxfp4_eight(c.z, power), to[3] = mxfp4_eight(c.w, power);
}

}  // namespace

const char* widen_experts(const WidenExpertsArgs& a, void* stream) {
  if (a.in % 32) return "[experts] MXFP4 has 32 columns a scale";
  const int64_t groups = a.out * a.in / 32;
  if (groups == 0 || a.experts == 0) return nullptr;
  widen_kernel<<<dim3(blocks_for(groups, 256), unsigned(a.experts)), 256, 0, stream_of(stream)>>>(a);
  return launched();
}

}  // namespace k3::cuda
