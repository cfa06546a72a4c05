#pragma once
// The end of a decode step on the GPU: the next token of each row by the rules of sample.h, and the row's counters. Weights and sums are float64 as
// on the CPU; only the order of a sum differs, so the same logits, options and position give the same token but for a draw within 1e-13 of a border.
#include <cstdint>

namespace k3::cuda {

constexpr int64_t kSampleVocabulary = 8 * 1024 * 24;  // the largest

struct SampleRow {
  float temperature, top_p, min_p;
  int32_t top_k;
  uint64_t seed;
};
// In memory that the host reads while the GPU works: valid once `stamp` is the step's number plus one.
struct SampleResult {
  int32_t id;     // the token; -1: its logits are broken
  int32_t where;  // then: which logit; -1: all are masked
  float value;    // and what it is
  uint32_t stamp;
};

struct SampleStepArgs {
  const float* logits;  // (rows, vocabulary)
  int64_t rows, vocabulary;
  const SampleRow* options;  // (rows)
  const int32_t* slots;      // (rows) negative: filler, nothing is touched
  int32_t* ids;              // (rows) the token goes here, for the next step to read
  int32_t *tokens, *open;    // (rows) counted on when the logits are of a token that this step has read
  uint32_t* steps;           // (rows) how many results the row has given
  bool has_read;
  int32_t chunk;          // of the delta rule
  SampleResult* results;  // (ring, rows), pinned memory of the host
  uint32_t ring;
};
const char* sample_step(const SampleStepArgs&, void* stream);  // null, or what cannot be served

}  // namespace k3::cuda
