#pragma once
// The optimizers' passes over lists of tensors on the GPU, float32; sums in double and in a fixed order that depends on a tensor's size alone.
// Lists and pointers are of the device. Null, or a sentence.
#include <cstdint>

#include "k3/ops/update/resident_cuda.h"

namespace k3::cuda {

// sums[i] = sum of squares of x[i], (n) elements; finite exactly when every element is
struct Listed {
  float* x;
  int64_t n;
};
constexpr int64_t kSumParts = 128;
const char* sums_of_squares(const Listed* list, int64_t count, double* partial /* (count, kSumParts) */, double* sums, void* stream);
// x[i] *= 1 / (sqrt(sums[i]) + eps)
const char* divide_by_norms(const Listed* list, int64_t count, const double* sums, double eps, void* stream);

struct MuonPiece {
  float* weight;
  const float* grad;
  float *momentum, *x;  // x: what is orthogonalised
  int64_t n;
  float step;  // 0.2 sqrt(max(rows, cols))
};
// momentum = mu momentum + s grad;  x = mu momentum + s grad with Nesterov, else momentum
// With a gate, its scale takes the place of s, and nothing is done where it is closed.
const char* muon_momentum(const MuonPiece* list, int64_t count, float mu, float s, bool nesterov, const StepGate* gate, void* stream);
// weight -= lr (step x + decay weight); with a gate, its lr
const char* muon_apply(const MuonPiece* list, int64_t count, float lr, float decay, const StepGate* gate, void* stream);

struct SquareMatrix {
  const float* s;  // combine only
  float* z;        // (m, m)
  int64_t m;
};
const char* combine(const SquareMatrix* list, int64_t count, float a, float b, float c, void* stream);  // z = a I + b s + c z
const char* mirror(const SquareMatrix* list, int64_t count, void* stream);                              // right of the diagonal from below it

const char* scale(float* x, float s, int64_t n, void* stream);

}  // namespace k3::cuda
