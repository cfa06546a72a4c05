#pragma once
// What the chunk kernels of the delta rule need around them inside a model whose tensors are float32. Null, or a sentence.
#include <cstdint>

namespace k3::cuda {

// Folds the open rows of slots into their memories, as the kernels that close a chunk do, so that a memory is that after the last token.
struct DeltaClose {
  float* memory;                                          // the first slot's; a head of a slot as delta_rule_kernels.h says
  int64_t slot_floats, head_floats, heads, keys, values;  // keys, values: padded widths
  int64_t sequences;
  const int32_t *slots, *open, *closed;  // (sequences) negative slot: nothing; open rows; 0: no chunk was closed, the memory holds nothing yet
};
const char* delta_close(const DeltaClose&, void* stream);

// Up to five tensors in one launch: float32 to bfloat16, and back, written or added.
constexpr int kDeltaTensors = 5;
struct DeltaNarrow {
  const float* from[kDeltaTensors];  // 16-byte aligned; null: left out
  void* to[kDeltaTensors];
  int64_t size[kDeltaTensors];
};
const char* delta_narrow(const DeltaNarrow&, void* stream);
struct DeltaWiden {
  const void* from[kDeltaTensors];
  float* to[kDeltaTensors];
  int64_t size[kDeltaTensors];
  bool add[kDeltaTensors];
};
const char* delta_widen(const DeltaWiden&, void* stream);

}  // namespace k3::cuda
