#pragma once
// Keys and values of a sequence out of the tiles of a cache, as rows of bfloat16 for prefill_cuda.cu. Null, or a sentence.
#include "k3/ops/attention/attention_kernels.h"

namespace k3::cuda {

struct TilesGather {
  cpu::KeyTiles tiles;
  float* const* blocks;  // of the sequence, on the device
  int64_t keys;          // the first so many
  int64_t head, heads;   // of these heads
  void* kv;              // (keys, heads, own + value)
  void* shared;          // (keys, shared); null: not wanted
};
const char* gather_tiles(const TilesGather&, void* stream);

}  // namespace k3::cuda
