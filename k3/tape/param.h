#pragma once
// Param: a named tensor that outlives steps, and the place of its gradient. ParamSet (model/) owns the memory.
#include <cstdint>
#include <functional>
#include <string>

#include "k3/core/tensor.h"

namespace k3 {

// What a parameter is to the optimizer. `blocks` > 1: Muon treats each of that many equal blocks of rows as a matrix of its own (one head's
// rows; kv_b_proj has one K and one V block a head).
struct Role {
  enum class Kind : uint8_t {
    matrix,      // Muon
    vector,      // AdamW without decay: gains, A_log, dt_bias, residual queries
    scalar_row,  // AdamW with decay: embedding, lm_head, b_proj
    fixed,       // no gradient, no optimizer: e_score_correction_bias
  };
  Kind kind = Kind::matrix;
  int64_t blocks = 1;
};

constexpr int64_t kGradPart = 8192;  // elements of Param::touched's grain

struct Param {
  std::string name;    // the checkpoint's
  Tensor value;        // f32 in training; in inference as ops/linear/product.h lists it (codes are u8)
  Tensor scale;        // of MXFP4 (u8) and q8 (f32); empty otherwise
  Tensor grad;         // f32, same shape; empty when not training
  bool fresh = false;  // nothing was added to grad in this step, and its memory holds nothing: write it, or clear it first
  Tensor touched;      // u8, GPU: the parts of grad (kGradPart elements each) that something was added to, all others are zeros; empty: look at all
  Tensor narrow;       // value in bfloat16, kept by whoever changes value, where training multiplies in bfloat16; else empty
  // Rows may be behind by updates that no gradient of theirs took part in (GPU): brings those that `ids`, on the device, name up to date, or the
  // first `count` where ids is null. Empty: none is behind. Whoever reads `value` or its moments calls it first.
  std::function<void(const int32_t* ids, int64_t count)> catch_up;
  Role role;
  Shape shape;                  // (out, in) for a matrix, whatever the storage
  bool scales_checked = false;  // none is 255 (check_scales)
};

}  // namespace k3
