#pragma once
// Choice among hundreds of experts on the GPU and the order of their rows, of a plain sigmoid router: no groups, no softmax, no forced choices, which
// models have (moe_float_cuda.h) and so take that one. Null, or a sentence about the argument that cannot be served.
#include <cstdint>

namespace k3::cuda {

// score = sigmoid(logit), choice = score + bias; the top_k largest choices, ties to the lowest expert; weights = scores of the chosen / their sum *
// scale. cutoff: the (top_k + 1)-th choice, what quantile balancing compares with.
struct RouteArgs {
  const float* logits;  // (rows, experts)
  const float* bias;    // (experts)
  const int* padding;   // (rows) nonzero: not a token, chosen = -1; or null
  int64_t rows;
  int experts, top_k;  // experts <= 1024, top_k <= 31 and < experts
  bool renormalize;
  float scale;
  int* chosen;     // (rows, top_k), best first
  float* weights;  // (rows, top_k)
  float* cutoff;   // (rows); null: not wanted
};
const char* route(const RouteArgs&, void* stream);

// Rows of the grouped product, by expert and then by token: begins (experts + 1), token and weight of each row, row of each (token, slot) or -1.
struct SortRowsArgs {
  const int* chosen;     // (tokens, top_k)
  const float* weights;  // (tokens, top_k)
  int64_t tokens;
  int experts, top_k;
  int* begins;
  int* gather;        // (tokens * top_k)
  float* row_weight;  // (tokens * top_k)
  int* where;         // (tokens, top_k)
  int* counts;        // workspace: sort_rows_counts() integers
};
constexpr int64_t sort_rows_counts(int64_t tokens, int top_k, int experts) { return (tokens * top_k + 255) / 256 * experts; }
const char* sort_rows(const SortRowsArgs&, void* stream);

}  // namespace k3::cuda
