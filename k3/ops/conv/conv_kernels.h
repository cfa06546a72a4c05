#pragma once
#include <cstdint>

#include "k3/core/isa.h"

namespace k3::cpu {

constexpr int64_t kConvMaxWidth = 8;
constexpr int32_t kConvZero = -1;     // a tap before the sequence's first token
constexpr int32_t kConvPadding = -2;  // in the current token's place: the row doesn't exist
// A tap in the state: row r of it is written as kConvState - r.
constexpr int32_t kConvState = -3;

// Where each tap reads was worked out once for all channels (conv.cpp), so a kernel knows neither sequences nor slots.
struct ConvArgs {
  int64_t rows, channels, width;
  const float* x;       // (rows, channels)
  const float* w;       // (channels, width)
  const int32_t* taps;  // (rows, width): a row of x, or one of the marks above
  const float* state;   // (state rows, channels); null without a state
  float* y;             // (rows, channels)
  const float* dy;      // (rows, channels)
  float* dx;            // (rows, channels)   added to
  float* dw;            // (channels, width)  added to; may be null
};

struct ConvKernels {
  void (*conv_silu_forward)(const ConvArgs&);
  void (*conv_silu_backward)(const ConvArgs&);
};
K3_KERNEL_TABLE(ConvKernels, conv)

}  // namespace k3::cpu
