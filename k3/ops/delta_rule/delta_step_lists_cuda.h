#pragma once
// The lists of DeltaArgs for a decode step: one token for each row that is not filler.
#include <cstdint>

#include "k3/core/device_step.h"

namespace k3::cuda {

struct DeltaStepLists {
  DeviceStep step;
  int64_t sequences;  // rows, filler too: a filler row is a sequence without tokens
  float* memory;      // the first slot's
  int64_t slot_floats;
  int32_t *first, *rows;  // (sequences + 1), (sequences)
  float** slots;          // (sequences)
  int64_t *read, *open;   // (sequences)
};
const char* delta_step_lists(const DeltaStepLists&, void* stream);

}  // namespace k3::cuda
