#pragma once
#include <cstdint>

#include "k3/core/isa.h"

namespace k3::cpu {

struct DecayArgs {
  int64_t rows, heads, dim;
  float lower_bound;   // bounded_decay only
  const float* z;      // (rows, heads * dim)
  const float* A_log;  // (heads) and perhaps more
  const float* bias;   // (heads * dim)
  float* rate;         // (heads * dim) scratch: e^A_log of each channel's head
  float* g;            // (rows, heads * dim)
  const float* dg;     // (rows, heads * dim)
  float* dz;           // (rows, heads * dim) added to
  float* dbias;        // (heads * dim)       added to; may be null
  float* dA_log;       // (heads)             added to; may be null
  float* dA_channel;   // (heads * dim) scratch: dA_log before the channels of a head are summed
};

struct DecayKernels {
  void (*bounded_decay_forward)(const DecayArgs&);
  void (*bounded_decay_backward)(const DecayArgs&);
  void (*softplus_decay_forward)(const DecayArgs&);
  void (*softplus_decay_backward)(const DecayArgs&);
};
K3_KERNEL_TABLE(DecayKernels, decay)

}  // namespace k3::cpu
