#pragma once
#include <cstdint>

#include "k3/core/isa.h"

namespace k3::cpu {

struct EmbeddingArgs {
  int64_t rows, d;
  const int32_t* ids;          // (rows)
  const float* table;          // (V, d)   one of the two
  const uint16_t* table_bf16;  // (V, d)
  float* y;                    // (rows, d)
  const float* dy;             // (rows, d)
  float* dtable;               // (V, d)   added to
  uint8_t* touched;            // GPU: Param::touched of the table, or null
  int64_t part;                // its grain
};

struct EmbeddingKernels {
  void (*embedding_forward)(const EmbeddingArgs&);
  void (*embedding_backward)(const EmbeddingArgs&);
};
K3_KERNEL_TABLE(EmbeddingKernels, embedding)

}  // namespace k3::cpu
