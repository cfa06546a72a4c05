#pragma once
// Param: a named tensor that outlives steps, and the place of its gradient. ParamSet (model/) owns the memory.
#include <cstdint>
#include <string>

#include "k3/core/tensor.h"

namespace k3 {

// What a parameter is to the optimizer (training.md 1.2). `blocks` > 1: Muon treats each of that many equal blocks of rows as a matrix of
// its own (one head's rows). A block's rows may again be split: kv_b_proj has one K and one V block a head.
struct Role {
  enum class Kind : uint8_t {
    matrix,     // Muon
    vector,     // AdamW without decay: gains, A_log, dt_bias, residual queries
    scalar_row, // AdamW with decay: embedding, lm_head, b_proj
    fixed,      // no gradient, no optimizer: e_score_correction_bias
  };
  Kind kind = Kind::matrix;
  int64_t blocks = 1;
};

struct Param {
  std::string name;   // the checkpoint's
  Tensor value;       // f32 in training; bf16 or other storage types in inference
  Tensor grad;        // f32, same shape; empty when not training
  Role role;
};

}  // namespace k3
