#pragma once
// GPU kernels of the gated delta rule, with what surrounds it in a KDA layer folded in: the L2 norm of q and k, the decay gate, the sigmoid of
// beta (and, in the decode step, the short convolution before and the gated RMS norm after).
//
// Head size 128. Every function returns null, or a sentence that says which argument it cannot serve.
#include <cstdint>

namespace k3::cuda {

constexpr int kDeltaHead = 128;  // K = V
constexpr int kDeltaChunk = 32;  // tokens that one step of the chunk kernels takes; counted from a sequence's first token

// Log decay from the raw gate x:   bounded   g = bound * sigmoid(exp(A_log) (x + dt_bias))       K3, bound = -5
//                                  softplus  g = -exp(A_log) softplus(x + dt_bias)               Kimi-Linear; clamped at -20 a token
struct DeltaGate {
  bool bounded;
  float bound;           // in [-5, 0); bounded only
  const float* A_log;    // (H)
  const float* dt_bias;  // (H*128)
};

// Any row stride (in elements) that is a multiple of 8, so that q, k, v may be slices of one product's result.
struct DeltaChunkArgs {
  const void *q, *k, *v, *x;  // (N, H, 128) bf16
  const void* b;              // (N, H) bf16, logit of beta
  int64_t q_stride, k_stride, v_stride, x_stride, b_stride, o_stride;
  void* o;  // (N, H, 128) bf16
  DeltaGate gate;
  float scale;        // on the output
  const int* begins;  // (sequences + 1) first row of each sequence, on the device; null: one sequence of `tokens` rows
  int sequences, heads;
  int64_t tokens;
  const float* state_in;             // (slots, H, K, V) float32; null: empty memories
  float* state_out;                  // (slots, H, K, V); may be state_in; null: not wanted
  const int* slots;                  // (sequences) slot of each sequence; null: sequence i has slot i; negative: starts empty, leaves nothing
  int64_t slot_stride, head_stride;  // floats, where memories lie as DeltaState keeps them: (V/32, K, 32) for a head; 0: as above
  void* ahead;      // workspace of delta_ahead_bytes(), with which idle multiprocessors build operands too; null: they stay idle. Moves no bit
  int own, period;  // so many of every period (at most 8) are built by the block that scans them; period 0: as suits
  // for the backward; null: not wanted
  void* snapshots;          // (chunks of all sequences, H, 128 * 128) bf16: the memory entering each chunk, as the gradient kernel multiplies it
  void* u;                  // (N, H, 128) bf16: what was written, times the norm factor of k
  const int* chunk_begins;  // (sequences + 1) first chunk of each sequence, on the device
};
const char* delta_chunk_forward(const DeltaChunkArgs&, void* stream);

constexpr int kDeltaAhead = 104;          // pairs of a head and a sequence; with more of them there are too few idle multiprocessors
constexpr int kDeltaRing = 6;             // chunks ahead for each pair
constexpr int kDeltaOperands = 30 << 10;  // bytes of a chunk's operands
constexpr int64_t delta_ahead_bytes(int heads, int64_t sequences) {
  const int64_t pairs = heads * sequences;
  return pairs > kDeltaAhead ? 0 : pairs * kDeltaRing * kDeltaOperands + ((pairs * kDeltaRing * 8 + 1023) & ~1023);
}

// Gradients of the chunk kernel, for the raw inputs q, k, v, x, b and the gate's parameters. All are written, but dA_log and
// ddt_bias, which are added to. Fixed order: two runs give the same bits.
struct DeltaBackwardArgs {
  DeltaChunkArgs forward;    // as it was called, with snapshots, u and chunk_begins (needed also for one sequence)
  int chunks;                // chunk_begins[sequences]
  const void* d_o;           // (N, H, 128) bf16, dense
  const float* d_state;      // (sequences, H, K, V) gradient of the final memories; null: zero
  void *dq, *dk, *dv, *dx;   // (N, H, 128) bf16, dense
  void* db;                  // (N, H) bf16
  float* d_state_in;         // (sequences, H, K, V); null: not wanted
  float *dA_log, *ddt_bias;  // (H), (H*128)
  void* d_snapshots;         // workspace: (chunks, H, 128 * 128) bf16
  float* partial;            // workspace: delta_backward_partial() floats
};
constexpr int64_t delta_backward_partial(int64_t chunks, int heads) { return chunks * heads * 2 * kDeltaHead; }
const char* delta_chunk_backward(const DeltaBackwardArgs&, void* stream);
const char* delta_gradients(const DeltaBackwardArgs&, void* stream);  // its second part, when dv and d_snapshots are there

// The plain recurrence in float32, any layout of the above with float in place of bf16: the oracle on the device.
const char* delta_plain_forward(const DeltaChunkArgs&, void* stream);

// One token for each of `rows` sequences: convolution, SiLU, norms, gate, delta rule, gated RMS norm; state and windows change in place.
struct DeltaStepArgs {
  const void *q, *k, *v;  // (rows, H*128) bf16, before the convolution
  const void *x, *g;      // (rows, H*128) bf16: raw decay gate, raw output gate
  const void* b;          // (rows, H) bf16, logit of beta
  int64_t q_stride, k_stride, v_stride, x_stride, g_stride, b_stride, y_stride;
  const float *q_conv, *k_conv, *v_conv;  // (H*128, 4); tap 3 multiplies the current token
  void* window;                           // (slots, 3, 3, H*128) bf16: the last three inputs of q, k, v, oldest first
  float* state;                           // (slots, H, K, V) float32
  const int* slots;                       // (rows); negative: a filler row, nothing is touched and y is zero
  DeltaGate gate;
  float scale;
  const float* norm;  // (128) weight of the output norm
  float eps;
  void* y;  // (rows, H*128) bf16
  int rows, heads;
  bool chained;  // start while the kernel in front still runs; these slots, windows and weights must be older than that kernel
};
const char* delta_step(const DeltaStepArgs&, void* stream);

}  // namespace k3::cuda
