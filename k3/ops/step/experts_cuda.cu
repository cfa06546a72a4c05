// Launches of the routed experts: first a block for 16 neurons of one (row, slot), then one for 16 outputs of a row, all slots.
#include "k3/ops/step/experts.cuh"

namespace k3::cuda {
namespace {

template <bool kCodes>
__global__ void __launch_bounds__(kThreads) first_kernel(const __grid_constant__ StepExpertsArgs a) {
  extern __shared__ __align__(16) unsigned char shared[];
  let_next_kernel_begin();
  first_products<kCodes, false>(a, blockIdx.x * kTile, blockIdx.y, {}, shared);
}
template <bool kCodes>
__global__ void __launch_bounds__(kThreads) second_kernel(const __grid_constant__ StepExpertsArgs a) {
  extern __shared__ __align__(16) unsigned char shared[];
  let_next_kernel_begin();
  second_products<kCodes, false>(a, blockIdx.x * kTile, blockIdx.y, {}, shared);
}

template <bool kCodes>
const char* both(const StepExpertsArgs& a, void* stream) {
  auto tiles = [](int n) { return unsigned((n + kTile - 1) / kTile); };
  if (const char* e = launch_step(first_kernel<kCodes>, dim3(tiles(a.inner), unsigned(a.rows * a.top_k)), kThreads, first_shared(a), stream, a))
    return e;
  return launch_step(second_kernel<kCodes>, dim3(tiles(a.latent), unsigned(a.rows)), kThreads, second_shared(a), stream, a);
}

}  // namespace

const char* step_experts(const StepExpertsArgs& a, void* stream) {
  if (a.rows == 0) return nullptr;
  const bool codes = a.w1.scales != nullptr;
  if (a.top_k > kMostSlots || a.experts > 12000 || a.rows * a.top_k > 65535) return "[step] up to 64 of 12000 experts for a row, and 65535 pairs";
  if (a.latent % (codes ? 32 : 8) || a.inner % (codes ? 32 : 8)) return "[step] experts' widths must be multiples of 8, of 32 with MXFP4";
  return codes ? both<true>(a, stream) : both<false>(a, stream);
}

}  // namespace k3::cuda
