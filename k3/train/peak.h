#pragma once

#include "k3/core/device.h"

namespace k3 {

// Floating point operations a second of a plain float32 matrix product, the best of about `seconds`: what "share of peak" is a share of.
// oneDNN's own on all threads in use; on a GPU the one that linear layers use there, in bfloat16 if they do.
double measured_peak_flops(double seconds = 0.2, Device device = Device::cpu, bool bf16_products = false);

}  // namespace k3
