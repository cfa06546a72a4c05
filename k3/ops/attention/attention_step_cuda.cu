#include "k3/core/block.cuh"
#include "k3/ops/attention/attention_step_cuda.h"

namespace k3::cuda {
namespace {

__global__ void __launch_bounds__(128) lists_kernel(const AttentionStepLists a) {
  const int64_t i = int64_t(blockIdx.x) * 128 + threadIdx.x;
  if (i >= a.rows) return;
  const int slot = a.step.slots[i];
  a.list[i] = int(i);
  a.sequences[i] = {i, slot >= 0, a.step.tokens[i], int64_t(slot < 0 ? 0 : slot) * a.table_blocks};
  for (int64_t t = 0; t < a.tiles; ++t) a.query_tiles[i * a.tiles + t] = {i, t * cpu::kQueryTile};
}

}  // namespace

const char* attention_step_lists(const AttentionStepLists& a, void* stream) {
  if (a.rows == 0) return nullptr;
  lists_kernel<<<blocks_for(a.rows, 128), 128, 0, stream_of(stream)>>>(a);
  return launched();
}

}  // namespace k3::cuda
