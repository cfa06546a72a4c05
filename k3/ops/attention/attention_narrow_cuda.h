#pragma once
// Causal attention for training on the tensor units, where the kernels of K3's widths (prefill_forward of attention_cuda.h) do not serve: other
// widths, several query heads on one key head, padding. Operands rounded to bfloat16, scores, softmax and sums in float32. No cache. The struct is
// the CPU's (attention_float_cuda.h says how it is read); its tensors are in float32 and here come again as bfloat16 copies with the same strides.
// Fixed order: two runs give the same bits. Null, or a sentence.
#include "k3/ops/attention/attention_kernels.h"

namespace k3::cuda {

struct AttentionNarrowArgs {
  cpu::AttentionArgs a;  // y, m, l, d and the gradients float32
  const void *q, *keys, *values, *shared, *dy;
  int64_t longest;  // at least the largest number of queries of a sequence
  bool dense;       // the rows of a sequence follow each other: no padding
};
// Heads of up to 192 key and 128 value channels, all counts of channels and all strides multiples of 8.
bool attention_narrow_serves(const cpu::AttentionArgs&);
const char* attention_narrow_forward(const AttentionNarrowArgs&, void* stream);
const char* attention_narrow_backward(const AttentionNarrowArgs&, void* stream);

}  // namespace k3::cuda
