#pragma once
#include <cstdint>

#include "k3/core/isa.h"

namespace k3::cpu {

struct CrossEntropyArgs {
  int64_t rows, vocabulary;
  float* logits;           // (rows, vocabulary); with `gradient`, overwritten by the loss's gradient for them
  const int32_t* targets;  // (rows)
  float* loss;             // (rows)
  bool gradient;
  float weight;
};

struct LogSoftmaxArgs {
  int64_t rows, vocabulary;
  const float* logits;  // (rows, vocabulary)
  float* out;           // (rows, vocabulary)
};

struct LossKernels {
  void (*cross_entropy)(const CrossEntropyArgs&);
  void (*log_softmax)(const LogSoftmaxArgs&);  // the same bits as -loss
};
K3_KERNEL_TABLE(LossKernels, loss)

}  // namespace k3::cpu
