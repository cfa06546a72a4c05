#pragma once
// The lists of AttentionArgs for a decode step: row i is a sequence of one query, or of none where it is filler; its blocks are its slot's in the
// cache's table.
#include <cstdint>

#include "k3/core/device_step.h"
#include "k3/ops/attention/attention_kernels.h"

namespace k3::cuda {

struct AttentionStepLists {
  DeviceStep step;
  int64_t rows, tiles, table_blocks;  // query tiles a row; entries a slot
  int32_t* list;                      // (rows)
  cpu::AttentionSequence* sequences;  // (rows)
  cpu::QueryTile* query_tiles;        // (rows * tiles)
};
const char* attention_step_lists(const AttentionStepLists&, void* stream);

}  // namespace k3::cuda
