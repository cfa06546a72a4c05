#pragma once
// Muon's orthogonalisation on the GPU, one block of 128 rows (a head) at a time, in the Gram form: X_5 = Q X_0 with Q a polynomial of X_0 X_0^T.
// Training (resident.h) takes the library's products, which serve every shape; this is for K3's heads, in `k3 bench ops`.
// Returns null, or a sentence that says which argument it cannot serve.
#include <cstdint>

namespace k3::cuda {

struct NewtonSchulzArgs {
  const void* g;                   // (heads, 128, n) bf16
  int heads, n;                    // n a multiple of 128
  int steps;                       // X <- a X + (b A + c A^2) X, A = X X^T, this many times
  const float (*coefficients)[3];  // (steps, 3) on the host; at most 16 steps
  float safety;                    // g is divided by safety * its Frobenius norm first, 1.01 say
  float* gram;                     // (heads, 128, 128) workspace
  void* q;                         // (heads, 2, 128, 128) bf16 workspace: Q as a sum of two
  void* x;                         // (heads, 128, n) bf16; a zero block gives zeros
};
const char* newton_schulz(const NewtonSchulzArgs&, void* stream);

}  // namespace k3::cuda
