// Launches of KDA one by one.
#include "k3/ops/step/kda.cuh"

namespace k3::cuda {
namespace {

template <int D>
__global__ void __launch_bounds__(kKdaThreads<D>) kda_kernel(const __grid_constant__ StepKdaArgs a) {
  let_next_kernel_begin();
  kda_head<D, false>(a, blockIdx.x, blockIdx.y, {});
}

template <int D>
const char* launch(const StepKdaArgs& a, void* stream) {
  return launch_step(kda_kernel<D>, dim3(unsigned(a.heads), unsigned(a.rows)), kKdaThreads<D>, 0, stream, a);
}

}  // namespace

const char* step_kda(const StepKdaArgs& a, void* stream) {
  if (a.rows == 0) return nullptr;
  if (a.width > kWidth) return "[step] convolutions are of width 1 to 8";
  switch (a.dim) {
    case 16:
      return launch<16>(a, stream);
    case 32:
      return launch<32>(a, stream);
    case 64:
      return launch<64>(a, stream);
    case 128:
      return launch<128>(a, stream);
  }
  return "[step] KDA heads are of 16, 32, 64 or 128 channels";
}

}  // namespace k3::cuda
