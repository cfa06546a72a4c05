// Launches of latent attention one by one.
#include "k3/ops/step/latent.cuh"

namespace k3::cuda {
namespace {

__global__ void __launch_bounds__(kThreads) query_kernel(const __grid_constant__ StepLatentArgs a) {
  let_next_kernel_begin();
  query_head<false>(a, blockIdx.x, blockIdx.y, {});
}
template <int J>
__global__ void __launch_bounds__(kThreads) attend_kernel(const __grid_constant__ StepLatentArgs a) {
  extern __shared__ __align__(16) float shared[];
  let_next_kernel_begin();
  attend_piece<J, false>(a, blockIdx.x, blockIdx.y, blockIdx.z, {}, shared);
}
__global__ void __launch_bounds__(kThreads) value_kernel(const __grid_constant__ StepLatentArgs a) {
  let_next_kernel_begin();
  values_of_head<false>(a, blockIdx.x, blockIdx.y, blockIdx.z, {});
}

}  // namespace

const char* step_latent(const StepLatentArgs& a, void* stream) {
  if (a.rows == 0) return nullptr;
  if (a.rank > 512 || a.rope > 64 || a.nope > 256 || a.rank % 4 || a.rope % 4)
    return "[step] latents are of rank up to 512 with up to 64 shared and 256 own channels";
  const unsigned heads = unsigned(a.heads), rows = unsigned(a.rows);
  const int width = a.rank + a.rope;
  if (const char* e = launch_step(query_kernel, dim3(heads, rows), kThreads, 0, stream, a)) return e;
  const dim3 pieces(kStepSplits, rows, (heads + kHeads - 1) / kHeads);
  if (const char* e = launch_step(width <= 160 ? attend_kernel<5> : attend_kernel<18>, pieces, kThreads, attend_shared(width), stream, a)) return e;
  return launch_step(value_kernel, dim3(unsigned(a.value + kValues - 1) / kValues, heads, rows), kThreads, 0, stream, a);
}

}  // namespace k3::cuda
