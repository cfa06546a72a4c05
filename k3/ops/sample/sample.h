#pragma once
// sample: the next token, a pure function of (logits, options, position): no generator to carry, so a request gives the same text in any
// batch, after any restart and however its prompt was cut.
//
// In this order: divide by the temperature; keep the top_k largest (ties: lower ids); of these keep the fewest largest whose probability
// reaches top_p; of these drop what is less probable than min_p times the most probable; draw from the rest. A filter that keeps everything
// changes nothing. Logits of minus infinity are masked: never drawn, never listed.
// Errors: NaN or plus infinity among the logits, nothing left unmasked, options out of range.
#include <cstdint>
#include <vector>

namespace k3 {

struct SampleOptions {
  float temperature = 0;  // 0: greedy, the lowest id on ties
  int top_k = 0;          // 0: off
  float top_p = 1;        // 1: off
  float min_p = 0;        // 0: off
  uint64_t seed = 0;
};

void check(const SampleOptions& options);  // Error when one is out of range; sample() does it too
int32_t sample(const float* logits, int64_t vocabulary, const SampleOptions& options, uint64_t position);

// log softmax; a masked token's is minus infinity.
void log_probabilities(const float* logits, int64_t vocabulary, float* out);

struct TokenLogProbability {
  int32_t token;
  float log_probability;
};
// The `count` most probable, most probable first (ties: lower ids); fewer when fewer are unmasked.
std::vector<TokenLogProbability> top_log_probabilities(const float* logits, int64_t vocabulary, int64_t count);

}  // namespace k3
