#include "k3/core/block.cuh"
#include "k3/ops/delta_rule/delta_rule_kernels.h"
#include "k3/ops/delta_rule/delta_step_lists_cuda.h"

namespace k3::cuda {
namespace {

__global__ void __launch_bounds__(32) lists_kernel(const DeltaStepLists a) {  // one warp; the rows that exist are counted 32 at a time
  int before = 0;
  for (int64_t i0 = 0; i0 < a.sequences; i0 += 32) {
    const int64_t i = i0 + threadIdx.x;
    const int slot = i < a.sequences ? a.step.slots[i] : -1;
    const unsigned exist = __ballot_sync(~0u, slot >= 0);
    const int at = before + __popc(exist & ((1u << threadIdx.x) - 1));
    if (i < a.sequences) {
      a.first[i] = at;
      if (slot >= 0) a.rows[at] = int(i);
      a.slots[i] = slot < 0 ? nullptr : a.memory + int64_t(slot) * a.slot_floats;
      a.open[i] = a.step.open[i], a.read[i] = a.open[i] + (a.step.tokens[i] > a.open[i] ? cpu::kDeltaChunk : 0);  // as delta_rule() lists them
    }
    before += __popc(exist);
  }
  if (threadIdx.x == 0) a.first[a.sequences] = before;
}

}  // namespace

const char* delta_step_lists(const DeltaStepLists& a, void* stream) {
  if (a.sequences == 0) return nullptr;
  lists_kernel<<<1, 32, 0, stream_of(stream)>>>(a);
  return launched();
}

}  // namespace k3::cuda
