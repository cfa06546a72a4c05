#pragma once
// Elementwise operators on the GPU, float32; the arguments are those of the CPU, with pointers of device memory. Null, or a sentence about
// what cannot be served.
#include "k3/ops/activation/activation_kernels.h"

namespace k3::cuda {

enum class Element { add, silu, sigmoid, sigmoid_gate };
const char* element_forward(Element, const cpu::ElementArgs&, void* stream);
const char* element_backward(Element, const cpu::ElementArgs&, bool fresh_x, bool fresh_g, void* stream);  // fresh: written, not added to
const char* accumulate(float* to, const float* from, int64_t n, void* stream);                             // to += from
const char* glu_forward(const cpu::GluArgs&, void* stream);
const char* glu_backward(const cpu::GluArgs&, void* stream);
const char* glu_backward(const cpu::GluArgs&, bool fresh_gate, bool fresh_up, void* stream);

}  // namespace k3::cuda
