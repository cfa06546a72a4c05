#pragma once
// Mixture of experts in float32 on the GPU: routing of any size, and the moves between token order and expert order. The structs are the CPU's with
// device pointers. Nothing waits for the host: how many rows an expert has stays on the device. Null, or a sentence.
#include <cstdint>

#include "k3/ops/linear/products_cuda.h"
#include "k3/ops/moe/moe_kernels.h"

namespace k3::cuda {

const char* route_forward(const cpu::RouteArgs&, void* stream);
const char* route_backward(const cpu::RouteArgs&, void* stream);

// Pairs (token, slot) by expert, then in order: offsets (experts + 1), pair_of_row (pairs), row_of_pair (pairs), -1 where chosen < 0. No atomics.
struct DispatchOrderArgs {
  const int32_t* chosen;  // (pairs)
  int64_t pairs, experts;
  int32_t* counts;  // workspace: dispatch_counts() integers
  int64_t* offsets;
  int32_t *pair_of_row, *row_of_pair;
};
constexpr int64_t kDispatchGroup = 256;  // pairs that one warp counts
constexpr int64_t dispatch_counts(int64_t pairs, int64_t experts) { return (pairs + kDispatchGroup - 1) / kDispatchGroup * experts; }
const char* dispatch_order(const DispatchOrderArgs&, void* stream);

// As cpu::MoeKernels: DispatchArgs.pairs is an upper bound, and `rows` (device) says how many rows there are.
const char* gather(const cpu::DispatchArgs&, const int64_t* rows, void* stream);
const char* combine(const cpu::DispatchArgs&, bool add, void* stream);
// PairArgs.last is an upper bound, first is 0. dp += e.h;  e = p e;  h = p h
const char* weigh_pairs(const cpu::PairArgs&, const int64_t* rows, void* stream);

// The grouped products of one matrix kind: expert j owns rows offsets[j] .. offsets[j+1]-1 of x and y.
//   forward            y = x W^T        x (rows, in), W (out, in), y (rows, out)
//   input              y = x W, or +=   x (rows, out), y (rows, in)
//   weight_gradient    W += x^T z       x (rows, out), z (rows, in); `weights` are the gradients, null entries are skipped
enum class Grouped { forward, input, weight_gradient };
struct GroupedArgs {
  Grouped kind;
  const int64_t* offsets;               // (experts + 1), on the device
  void* const* weights;                 // (experts), on the device
  const uint8_t* bf16;                  // (experts), on the device: which are bfloat16; null: none
  int64_t experts, out, in, most_rows;  // most_rows: at least offsets[experts]
  const float *x, *z;
  float* y;
  bool accumulate;      // input only
  bool narrow;          // operands in bfloat16, on the tensor units
  ListedProduct* list;  // workspace (experts)
  int* tile_begins;     // workspace (experts + 1)
};
const char* grouped_products(const GroupedArgs&, void* stream);

// load[j] += rows that chose expert j; counts[j, bin] += tokens whose margin falls there (balance.h). Integers, so any order gives the same.
struct ObserveArgs {
  const float *scores, *cutoff;  // (rows, experts), (rows)
  const uint8_t* padding;        // (rows) or null
  int64_t rows, experts, bins;
  const float* range;  // (2): lowest margin and width of a bin, of the device
  int32_t* counts;     // (experts, bins), zero at first
};
const char* count_choices(const int32_t* chosen, int64_t n, int64_t experts, int32_t* counts, void* stream);  // added to; -1 is none
const char* observe_margins(const ObserveArgs&, void* stream);

}  // namespace k3::cuda
