#pragma once
// conv_silu for one token of each row of a decode step, straight from and into the ring of ConvState; the order of sums is the other kernels'.
#include <cstdint>

#include "k3/core/device_step.h"

namespace k3::cuda {

struct ConvStepArgs {
  DeviceStep step;
  int64_t rows, channels, width, history;
  const float* x;  // (rows, channels)
  const float* w;  // (channels, width)
  float* state;    // (slots, history, channels): token p in row p % history
  float* y;        // (rows, channels); zeros in filler
};
const char* conv_silu_step(const ConvStepArgs&, void* stream);

}  // namespace k3::cuda
