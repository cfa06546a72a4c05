#pragma once
#include <cstdint>

#include "k3/core/isa.h"

namespace k3::cpu {

constexpr int64_t kDeltaChunk = 16;   // tokens: why 16 is in README.md
constexpr int64_t kDeltaKept = 4;     // the training forward keeps the memory at every 4th chunk; the backward forms those between again
constexpr int64_t kDeltaPanel = 32;   // columns of S that lie together: K x 32 floats fit the first-level cache at K = 128
constexpr int64_t kDeltaTasks = 128;  // pieces that (sequence, head) pairs are cut into, at most; each has its scratch

constexpr int64_t delta_k(int64_t key_dim) { return (key_dim + 15) / 16 * 16; }  // padded widths: the rest is zero and stays zero
constexpr int64_t delta_v(int64_t value_dim) { return (value_dim + kDeltaPanel - 1) / kDeltaPanel * kDeltaPanel; }

// One head of one sequence, in floats:
//   memory (V/32, K, 32)  S after the last closed chunk; holds nothing before the first is closed
//   k      (16, K)        keys of the open chunk
//   decay  (16, K)        exp g
//   u      (16, V)        what each token wrote: beta (v - S^T k)
constexpr int64_t delta_memory_floats(int64_t K, int64_t V) { return delta_k(K) * delta_v(V); }
constexpr int64_t delta_head_floats(int64_t K, int64_t V) { return delta_memory_floats(K, V) + kDeltaChunk * (2 * delta_k(K) + delta_v(V)); }
// A full chunk is closed when the next token comes, so that up to 16 tokens can be taken back.

// Memories that the training forward keeps of a sequence of n tokens.
constexpr int64_t delta_kept(int64_t n) { return n == 0 ? 0 : (n - 1) / (kDeltaChunk * kDeltaKept); }

constexpr int64_t delta_tasks(int64_t pairs) { return pairs < kDeltaTasks ? pairs : kDeltaTasks; }
constexpr int64_t delta_forward_scratch(int64_t K, int64_t V) {  // floats a task
  int64_t k = delta_k(K), v = delta_v(V);
  return delta_head_floats(K, V) + 49 * k + 33 * v + 512;
}
constexpr int64_t delta_backward_scratch(int64_t K, int64_t V) {
  int64_t k = delta_k(K), v = delta_v(V);
  return kDeltaKept * delta_head_floats(K, V) + k * v + (32 + 16 + 2 + 16 + 32 + 16 + 32 + 16 + 48) * k + (32 + 32 + 16 + 16 + 16) * v + 1024;
}

struct DeltaArgs {
  int64_t heads, key_dim, value_dim;  // H, K, V
  float scale;
  int64_t gate_columns;  // 0, 1 or K a head
  const float *q, *k;    // (N, H*K)
  const float* v;        // (N, H*V)
  const float* g;        // (N, H*gate_columns)
  const float* beta;     // (N, H)
  int64_t sequences;
  const int32_t* first;  // (S+1) where each sequence begins among the rows that exist
  const int32_t* rows;   // (first[S]) their tokens; null: all exist
  float* scratch;        // (tasks, scratch floats)
  float* out;            // (N, H*V)

  float* const* slots;         // (S) each sequence's heads, or null: every sequence begins empty
  const int64_t *read, *open;  // (S) tokens they have read; how many of them are in the open chunk

  // training
  const int32_t* kept_first;         // (S+1) sum of delta_kept over the sequences before
  float* kept;                       // (kept_first[S], H, memory)
  float* errors;                     // (N, H*V) v - S^T k; null in inference
  const float* d_out;                // (N, H*V)
  float *dq, *dk, *dv, *dg, *dbeta;  // added to
  const float* initial;              // (S, H, memory) the memory each sequence begins with; null: empty
  const float* d_final;              // (S, H, memory) gradient of the last memory; null: zero
  float* d_initial;                  // (S, H, memory) gradient of the first; null: not wanted
};

struct DeltaKernels {
  void (*forward)(const DeltaArgs&);
  void (*backward)(const DeltaArgs&);
  // The memory of a head after its `open` rows, into (memory) floats; closed: whether any chunk was closed before.
  void (*memory_now)(const float* head, int64_t key_dim, int64_t value_dim, int64_t open, bool closed, float* memory, float* scratch);
};
K3_KERNEL_TABLE(DeltaKernels, delta)

}  // namespace k3::cpu
