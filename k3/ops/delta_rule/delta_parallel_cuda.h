#pragma once
// The gated delta rule for training on the tensor units: every chunk of 32 tokens at once, but for one small product a chunk that hands the memory
// on. For what the chunk kernels (delta_rule_cuda.h: KDA with heads of 128) do not serve: other heads, Gated DeltaNet, DeltaNet, padding.
//
// Float32 in and out; operands of products tf32 (relative error of results about 5e-4), or with `exact` each as the sum of two (about 1e-6). Heads of
// up to 128 keys and values, every gate of DeltaArgs (a log gate under -20 a token counts as -20, which forgets as well), packed sequences, rows that
// do not exist. Sequences begin with empty memories: slots, initial, d_final, d_initial, kept and errors of DeltaArgs are not read. Fixed order: two
// runs give the same bits, and a row depends on its own sequence's rows up to the end of its chunk.
#include <cstdint>

#include "k3/ops/delta_rule/delta_rule_kernels.h"

namespace k3::cuda {

constexpr int64_t kParallelChunk = 32;
constexpr int64_t delta_parallel_size(int64_t K, int64_t V) { return K <= 32 && V <= 32 ? 32 : K <= 64 && V <= 64 ? 64 : 128; }  // padded head
constexpr bool delta_parallel_serves(int64_t K, int64_t V) { return K <= 128 && V <= 128; }
constexpr int64_t delta_parallel_memory(int64_t size) { return size * size; }  // floats a chunk and head
constexpr int64_t delta_parallel_work(int64_t size) { return 2 * size * size + (kParallelChunk + 1) * size; }

struct DeltaParallel {
  cpu::DeltaArgs a;            // all pointers on the device
  const int32_t* chunk_first;  // (S+1) sum of the chunks of the sequences before
  int64_t chunks;              // chunk_first[S]
  float* memories;             // (chunks, H, memory): written by the forward, read by the backward: the memory entering each chunk, [v][k]
  float* d_memories;           // the same, workspace of the backward
  float* work;                 // (chunks, H, work), workspace of either
  bool exact;
};
const char* delta_parallel_forward(const DeltaParallel&, void* stream);   // writes out
const char* delta_parallel_backward(const DeltaParallel&, void* stream);  // adds to dq, dk, dv, dg, dbeta

}  // namespace k3::cuda
