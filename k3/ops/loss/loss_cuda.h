#pragma once
// Cross entropy of rows of logits on the GPU, which then hold their own gradient. Null, or a sentence about the argument that cannot be served.
#include <cstdint>

namespace k3::cuda {

struct CrossEntropyArgs {
  void* logits;        // (rows, vocabulary) bf16; becomes (softmax - onehot) * scale, zeros for ignored rows
  const int* targets;  // (rows); negative: ignored
  int64_t rows;
  int vocabulary;  // a multiple of 8
  float scale;     // 1 / number of counted rows, say
  float* loss;     // (rows): log-sum-exp - logit of the target; 0 for ignored rows
};
const char* cross_entropy(const CrossEntropyArgs&, void* stream);

}  // namespace k3::cuda
