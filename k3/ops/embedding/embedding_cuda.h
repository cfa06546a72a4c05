#pragma once
// Embedding on the GPU; the arguments are those of the CPU, with pointers of device memory. Null, or a sentence about what cannot be served.
#include "k3/ops/embedding/embedding_kernels.h"

namespace k3::cuda {

const char* embedding_forward(const cpu::EmbeddingArgs&, void* stream);
const char* embedding_backward(const cpu::EmbeddingArgs&, void* stream);

}  // namespace k3::cuda
