#pragma once
// Products of a decode step: several matrices that read the same rows, in one launch, with what comes before them (mix over depth, norm, gated unit)
// and after them (addition to the residual) folded in.
//
//   y_i = W_i x (+ add + add2)   W_i (out_i, width) bfloat16 or float32; x (rows, width): float32 rows, mixed and normed as asked, or a gated unit of
//                                two; rounded to bfloat16 for bfloat16 weights
//   y = W x + W2 x2 (+ add)      with a second input
//
// A row's bits depend on that row and the shapes alone. Bound: reading W once for up to 64 rows. Null, or what can't be served.
#include <cstdint>

#include "k3/ops/activation/activation_kernels.h"

namespace k3::cuda {

constexpr int kStepSources = 16, kStepParts = 8;

struct StepInput {
  int width = 0;       // a multiple of 8; 0: no input
  int64_t stride = 0;  // from row to row, of all of v
  int sources = 1;     // above 1: x = sum over i of softmax_i(query . mix_gain rms_norm(v_i)) v_i, all (rows, width)
  const float* v[kStepSources] = {};
  const float *mix_gain = nullptr, *query = nullptr;  // (width)
  float mix_eps = 0;
  const float* gain = nullptr;  // (width): then x = rms_norm(x; gain, eps)
  float eps = 0;
  bool gated = false;  // x = f(v[0], v[1])
  Activation activation;
};
struct StepPart {
  const void* w = nullptr;  // (out, width)
  bool bf16 = true;         // else float32
  bool exact = false;       // x as float32 with it; always so with float32 weights
  int out = 0;
  float* y = nullptr;  // (rows, out), `stride` apart
  int64_t stride = 0;
  const float *add = nullptr, *add2 = nullptr;  // (rows, out), `stride` apart; or null
};
struct StepProductArgs {
  int rows = 0, parts = 0;
  StepInput x, x2;           // with x2 there is one part, and no float32 one
  const void* w2 = nullptr;  // (out, x2.width) bfloat16
  StepPart part[kStepParts];
  float* normed = nullptr;  // workspace (rows, width); not needed for 1 or 2 rows
};
const char* step_product(const StepProductArgs&, void* stream);
// How a product is cut: 16 rows of W a tile; of exact parts, 16 rows and four tokens.
struct StepTiles {
  int begin[kStepParts + 1] = {};  // first tile of each part
  int group = 0;                   // rows of x a block takes
  int fours = 1;                   // of them, four tokens at a time
  int row_bytes = 0;               // shared memory for each
  bool wide = false;               // of them float32 rows too
  float* x = nullptr;              // the input is wanted itself
  bool stamps = false;             // stamped
};
// The cut of a product; with `before`, when that has a width, `normed` is to be made of it first, and a.x reads that.
const char* step_tiles(StepProductArgs& a, bool stamped, StepTiles& tiles, StepInput& before);
// A product of no parts, whose input goes to `x`, a row a block.
const char* step_tiles_of_input(const StepInput& in, int rows, float* x, bool stamps, StepProductArgs& a, StepTiles& tiles);
// x itself, (rows, width)
const char* step_input(const StepInput&, int rows, float* x, void* stream);

}  // namespace k3::cuda
