#pragma once
// Cross entropy of rows of float32 logits on the GPU, and the moving of rows between all tokens and those that count; the arguments are those
// of the CPU, with pointers of device memory. Null, or a sentence about what cannot be served.
#include "k3/ops/loss/loss_kernels.h"

namespace k3::cuda {

const char* cross_entropy(const cpu::CrossEntropyArgs&, void* stream);
const char* log_softmax(const cpu::LogSoftmaxArgs&, void* stream);  // the same bits as -loss
// to (n, d) = rows row[i] of from
const char* gather_rows(const float* from, const int32_t* row, float* to, int64_t n, int64_t d, void* stream);
const char* gather_rows_bf16(const float* from, const int32_t* row, void* to, int64_t n, int64_t d, void* stream);  // d a multiple of 8
// rows row[i] of to = or += from (n, d); every row at most once
const char* scatter_rows(const float* from, const int32_t* row, float* to, int64_t n, int64_t d, bool add, void* stream);

}  // namespace k3::cuda
