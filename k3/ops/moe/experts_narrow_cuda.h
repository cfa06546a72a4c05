#pragma once
// Experts in training on the tensor units: every operand of a product is bfloat16 in memory, sums and results are float32. How many rows an expert
// has stays on the device. Fixed order: two runs give the same bits. Null, or a sentence.
#include <cstdint>

#include "k3/ops/activation/activation_kernels.h"
#include "k3/ops/moe/moe_kernels.h"

namespace k3::cuda {

constexpr int64_t kExpertTile = 128;  // rows of a tile

struct ExpertsNarrow {
  const int64_t* offsets;      // (experts + 1) expert e has rows offsets[e] .. offsets[e + 1] - 1
  const int32_t* tile_begins;  // (experts + 1) tiles of kExpertTile rows before each: expert_tiles()
  int64_t experts, most_rows;  // most_rows: at least offsets[experts]
};
const char* expert_tiles(const ExpertsNarrow&, int32_t* tile_begins, void* stream);

// One matrix kind: W_e (out, in) for each expert, bfloat16; all sizes multiples of 8.
struct ExpertProduct {
  const void *x, *z;           // (rows, in or out) bfloat16
  const void* const* weights;  // (experts) on the device; for weight gradients float32 gradients, null entries are skipped
  float* y;
  const void* const* scales = nullptr;  // (experts): weights are MXFP4 codes (out, in / 2), low nibble first, and these their scales (out, in / 32)
};
// y = x W^T, for one or two matrix kinds of one size:  x (rows, in), y (rows, out). MXFP4, of which in is a multiple of 32, is multiplied as it is.
const char* expert_forward(const ExpertsNarrow&, const ExpertProduct* list, int64_t count, int64_t out, int64_t in, void* stream);
// y = sum over one or two kinds of x W:  x (rows, out), y (rows, in) of the first
const char* expert_input(const ExpertsNarrow&, const ExpertProduct* list, int64_t count, int64_t out, int64_t in, void* stream);
// W += x^T z for up to three kinds:  x (rows, out), z (rows, in); out and in of each
struct ExpertSizes {
  int64_t out, in;
};
const char* expert_weight_gradients(const ExpertsNarrow&, const ExpertProduct* list, const ExpertSizes* sizes, int64_t count, void* stream);

// to (rows, d) bfloat16: row r is that of the token whose pair it has; from float32, or bfloat16
struct NarrowGather {
  const int32_t* pair_of_row;
  const int64_t* rows;  // how many there are
  int64_t most_rows, slots, d;
  const float* from;
  const void* from_bf16;  // in place of it, or null
  void* to;
};
const char* gather_narrow(const NarrowGather&, void* stream);

// h = f(a, b) as bfloat16
struct NarrowGlu {
  Activation activation;
  const int32_t* pair_of_row;
  const int64_t* rows;
  int64_t most_rows, m;
  const float *a, *b;  // (rows, m)
  void* h;             // (rows, m) bfloat16
  // backward: e = W2^T du; dp += e . h;  h = p h;  da, db from dh = p e
  const float* e;
  const float* weights;  // p (tokens * slots)
  float* dweights;       // added to
  void *da, *db;         // (rows, m) bfloat16
};
const char* glu_narrow(const NarrowGlu&, void* stream);
const char* glu_narrow_backward(const NarrowGlu&, void* stream);

}  // namespace k3::cuda
