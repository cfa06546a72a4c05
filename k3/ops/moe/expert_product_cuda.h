#pragma once
// GPU products of tokens with the experts they were routed to; weights in MXFP4, tokens and results bf16.
//
// Rows are sorted by expert: expert e owns rows begins[e]..begins[e+1]. Row i reads token gather[i] and, in the second product, is scaled by
// weight[i]; a third pass sums each token's rows in slot order.
// Every function returns null, or a sentence that says which argument it cannot serve.
#include <cstdint>

namespace k3::cuda {

// The stored form (codes (R, K/2): low nibble first; scales (R, K/32)) becomes fragments of the tensor units' left operand: for 128 rows and 64
// columns eight tiles of 16 rows, 512 bytes each, a lane's 16 bytes together; scales for four such blocks together. With `up`, rows 8t..8t+7 of both
// matrices share tile t, so a thread holds gate and up of a neuron. R a multiple of 128, K of 256; scale bytes 1..128 (2^-126..2), others are
// counted in `refused`.
struct Mxfp4PackArgs {
  const uint8_t *codes, *scales;
  const uint8_t *up_codes, *up_scales;  // or null
  int64_t experts, rows, columns;       // rows of one matrix
  uint8_t *packed, *packed_scales;      // experts * R * K / 2, experts * R * K / 32 bytes; R counts both matrices
  int* refused;                         // added to
};
const char* mxfp4_pack(const Mxfp4PackArgs&, void* stream);

struct ExpertProductArgs {
  const void* x;      // (tokens, K) bf16
  const int* gather;  // (rows) token of each row; null: row i is token i
  const int* begins;  // (experts + 1)
  const int* active;  // (actives) experts with rows, negative entries are skipped; the streaming kernel only
  const uint8_t *packed, *packed_scales;
  int experts, actives, rows, R, K;  // R = rows of the packed matrix
  bool situ;                         // result (rows, R/2) = situ_glu(gate, up); else (rows, R) = product * weight
  float beta, linear_beta;           // SiTU: beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta)
  const float* weight;               // (rows) or null
  void* y;                           // bf16
};
const char* expert_stream(const ExpertProductArgs&, void* stream);   // up to 8 rows an expert at weight-streaming speed (more: read again)
const char* expert_product(const ExpertProductArgs&, void* stream);  // any number of rows

// y (tokens, d) = sum over slots k of rows[where[t * top + k]]; then, with norm, y rms_norm(y; norm, eps). float32 sums in slot order.
struct ExpertCombineArgs {
  const void* rows;  // (rows, d) bf16, already weighted
  const int* where;  // (tokens, top)
  int64_t tokens;
  int top, d;         // d a multiple of 8, at most 8192
  const float* norm;  // (d) or null
  float eps;
  void* y;  // (tokens, d) bf16
};
const char* expert_combine(const ExpertCombineArgs&, void* stream);

}  // namespace k3::cuda
