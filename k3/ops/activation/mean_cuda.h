#pragma once
#include <cstdint>

namespace k3::cuda {

// parts[i], i < kMeanParts: sums of exp(x) or sigmoid(x) over a share of x that depends on n alone. Null, or a sentence.
constexpr int64_t kMeanParts = 128;
const char* sums(bool of_exp, const float* x, int64_t n, double* parts, void* stream);

}  // namespace k3::cuda
