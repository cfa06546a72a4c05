#pragma once
// The optimizers' passes over lists that stay on the GPU from step to step. The scale that clips is formed there: nothing waits for the host. Sums
// are in double and in an order that depends on sizes alone. Lists and pointers are of the device. Null, or a sentence.
#include <cstdint>

namespace k3::cuda {

// What the host says of a step: learning rates of AdamW and Muon, and what undoes the moments' bias, 1 / (1 - beta^t).
struct StepRates {
  float adamw_lr, muon_lr, correct1, correct2;
};
// What all updates of a step read. Where a gradient is not finite, they change nothing.
struct StepGate {
  double norm;
  float scale;     // of the gradients: clip / norm, at most 1
  int32_t finite;  // 0: the norm is not
  StepRates rates;
};

constexpr int64_t kUpdateBlock = 8192;  // elements a block; Param::touched's grain
constexpr int64_t update_blocks(int64_t n) { return (n + kUpdateBlock - 1) / kUpdateBlock; }

// sums[i] = sum of squares of grad[i]; then the gate from all of them
struct NormArgs {
  const float* const* grads;      // (count)
  const uint8_t* const* touched;  // (count): Param::touched, or null
  const int64_t* sizes;           // (count)
  const int32_t* begins;          // (count + 1) sum of update_blocks() before each
  int64_t count, blocks;
  double *partial, *sums;  // (blocks), (count)
  double clip;             // 0: off
  const StepRates* rates;
  StepGate* gate;
};
const char* gradient_norm(const NormArgs&, void* stream);
const char* clear_touched(float* grad, int64_t n, uint8_t* touched, void* stream);  // what is touched becomes zero, and untouched

struct AdamwTensor {
  float *weight, *m, *v;
  const float* grad;
  void* copy;              // bf16, or null
  const uint8_t* touched;  // (update_blocks(n)), 0: the block's gradient is zero and not read; or null
  int64_t n;
  float decay;
};
struct AdamwListArgs {
  const AdamwTensor* list;
  const int32_t* begins;  // (count + 1)
  int64_t count, blocks;
  float beta1, beta2, eps;
  const StepGate* gate;
};
const char* adamw(const AdamwListArgs&, void* stream);

// AdamW of a table of which a step touches few rows. A row without a gradient needs no gradient to be updated, so it is left behind and brought up to
// date, update after update in registers, when it is read, or once in kLateTurns updates. Its numbers are those of an update a step.
constexpr int32_t kLateTurns = 48, kLateKept = 64;
struct LateState {             // zeros to begin with
  int32_t updates;             // made
  StepRates rates[kLateKept];  // of the last ones, at their number modulo kLateKept
};
struct LateRows {
  float *weight, *m, *v;   // (rows, d), d a multiple of 4
  const float* grad;       // (rows, d)
  const uint8_t* touched;  // as in AdamwTensor; a row with a gradient was brought up to date before
  int64_t rows, d;
  int32_t* done;  // (rows): how many of the updates a row has, zeros to begin with
  LateState* state;
  float decay, beta1, beta2, eps;
  const StepGate* gate;
};
const char* late_update(const LateRows&, void* stream);
const char* late_catch_up(const LateRows&, const int32_t* ids, int64_t count, void* stream);  // rows of these ids; null: the first `count`

// Muon with products in bfloat16: a block of rows becomes a matrix x (m, n) of bfloat16, m <= n (transposed when it is tall), padded with zeros to
// multiples of 8; tiles of kMuonTile x kMuonTile of the block.
constexpr int64_t kMuonTile = 64;
struct MuonBlock {
  float* weight;
  const float* grad;
  float* momentum;
  void* copy;              // bf16, or null
  int64_t x;               // where the matrix begins in x
  int32_t rows, cols, ld;  // ld: n padded, a row of x
  float step;              // 0.2 sqrt(max(rows, cols))
};
struct MuonListArgs {
  const MuonBlock* list;
  const int32_t* tile_begins;      // (count + 1)
  int64_t count, tiles, elements;  // elements of x
  void* x;
  double* partial;          // (tiles)
  float* factors;           // (count): 1 / (|x| + 1e-7)
  const int64_t* x_begins;  // (count + 1)
  float momentum, decay;
  bool nesterov;
  const StepGate* gate;
};
const char* muon_ahead(const MuonListArgs&, void* stream);  // momentum; x = what is orthogonalised, of norm 1; x must be zero where it is padded
const char* muon_apply(const MuonListArgs&, void* stream);  // weight -= lr (step x + decay weight), and the copy

}  // namespace k3::cuda
