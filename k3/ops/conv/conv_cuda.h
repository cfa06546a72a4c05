#pragma once
// Causal depthwise convolution of width 4 with SiLU on the GPU, bf16. Null, or a sentence about the argument that cannot be served.
#include <cstdint>

namespace k3::cuda {

struct ConvSiluArgs {
  const void* x;      // (N, channels) bf16
  const float* w;     // (channels, 4), tap 3 multiplies the current token
  const int* begins;  // (sequences + 1), on the device: no tap crosses a border
  int sequences;
  int64_t tokens;
  int channels;        // a multiple of 8
  const void* window;  // (slots, 3, channels) bf16: the three inputs before, oldest first; null: zeros
  void* window_out;    // (slots, 3, channels): the last three of each sequence; null: not wanted
  const int* slots;    // (sequences), negative: zeros before, nothing left; null: sequence i has slot i
  void* y;             // (N, channels) bf16
};
const char* conv_silu_forward(const ConvSiluArgs&, void* stream);

}  // namespace k3::cuda
