#pragma once
// Loss on documents that are not trained on: each document by itself, in pieces of at most `sequence_length` tokens. How many tokens run at
// once doesn't matter to the bits.
#include <functional>
#include <vector>

#include "k3/model/model.h"
#include "k3/tokenizer/tokenizer.h"
#include "k3/train/sampler.h"

namespace k3 {

struct EvalOptions {
  int64_t sequence_length = 512;
  int64_t tokens_at_once = 4096;  // raised to sequence_length where it is less
  int64_t most_tokens = 0;        // of the documents in order; 0: all
};

struct Evaluation {
  double loss = 0;                // mean -log p, nats a token
  double bits_per_byte = 0;       // as StepReport::bits_per_byte
  int64_t tokens = 0, bytes = 0;  // counted targets, and the bytes they stand for
};

Evaluation evaluate(Model& model, const TokenFile& file, const std::vector<int64_t>& documents, const Tokenizer& tokenizer,
                    const EvalOptions& options, const std::function<void(int64_t done, int64_t of)>& progress = {});

}  // namespace k3
