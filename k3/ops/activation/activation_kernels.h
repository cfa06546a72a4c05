#pragma once
#include <cstdint>

#include "k3/core/isa.h"

namespace k3 {

// Which gated unit a feed-forward layer has; glu() in activation.h has the equations.
struct Activation {
  enum class Kind : uint8_t { swiglu, situ, clipped } kind = Kind::swiglu;
  float beta = 4;          // situ: bound of the gate branch
  float linear_beta = 25;  // situ: bound of the up branch; 0 or less leaves it unchanged
  float limit = 7;         // clipped
};

namespace cpu {

// y = f(gate, up) over n values. Forward reads gate and up; backward reads dy too and adds to dgate and dup.
struct GluArgs {
  Activation activation;
  int64_t n;
  const float *gate, *up;  // (n)
  float* y;                // (n)
  const float* dy;         // (n)
  float *dgate, *dup;      // (n)
};

// One input, or two with the names of sigmoid_gate: x = o, g = the gate.
struct ElementArgs {
  int64_t n;
  const float *x, *g;  // (n)
  float* y;            // (n)
  const float* dy;     // (n)
  float *dx, *dg;      // (n) added to
};

// All run on the calling thread: expert kernels call them on their own rows, activation.cpp on blocks of elements.
struct ActivationKernels {
  void (*glu_forward)(const GluArgs&);
  void (*glu_backward)(const GluArgs&);
  void (*add_forward)(const ElementArgs&);
  void (*add_backward)(const ElementArgs&);
  void (*silu_forward)(const ElementArgs&);
  void (*silu_backward)(const ElementArgs&);
  void (*sigmoid_forward)(const ElementArgs&);
  void (*sigmoid_backward)(const ElementArgs&);
  void (*sigmoid_gate_forward)(const ElementArgs&);
  void (*sigmoid_gate_backward)(const ElementArgs&);
};
K3_KERNEL_TABLE(ActivationKernels, activation)

}  // namespace cpu
}  // namespace k3
