#pragma once
// The arithmetic of a training step after backward: gradient norm, AdamW, Muon, QK-clip (training.md 1).
//
// Everything works in place on float32 tensors that outlive the step; `c` gives device, scratch memory and the planner's ear. Which
// parameter gets which update is the optimizer's business (train/).
#include <string>
#include <vector>

#include "k3/tape/param.h"
#include "k3/tape/var.h"

namespace k3 {

namespace cuda {
struct StepGate;
}

// AdamW, elementwise:   m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2,
//   w -= lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay w),   g = grad_scale * grad
struct AdamWOptions {
  float lr = 0, beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f, weight_decay = 0.1f;
  int64_t step = 1;      // t, from 1
  float grad_scale = 1;  // clipping, or 1 / micro-batches
};
void adamw_step(Context& c, const Tensor& weight, const Tensor& grad, const Tensor& m, const Tensor& v, const AdamWOptions& o);

// Newton-Schulz, in place on each (rows, cols) block of x (B, rows, cols):
//   X = X / (|X|_F + 1e-7);   5 times  S = X X^T,  X = a X + (b S + c S S) X;   (a, b, c) = (3.4445, -4.7750, 2.0315)
// on X^T when rows > cols. Singular values above 0.002 |X|_F end in [0.68, 1.21], not at 1. A block of zeros stays zero.
void newton_schulz(Context& c, const Tensor& x);

// Muon:   M = mu M + g,   N = mu M + g (Nesterov) or M,   w -= lr (0.2 sqrt(max(rows, cols)) NS(N) + weight_decay w)
// for each of `blocks` equal blocks of rows by itself: its own norm, its own max(rows, cols).
struct MuonOptions {
  float lr = 0, momentum = 0.95f, weight_decay = 0.1f, grad_scale = 1;
  bool nesterov = true;
  const cuda::StepGate* gate = nullptr;  // GPU: takes the place of lr and grad_scale, and may forbid the step (resident.h)
};
struct MuonMatrix {
  Tensor weight, grad, momentum;  // (rows, cols)
  int64_t blocks = 1;             // Role::blocks
};
// A list is faster than one by one: its blocks run side by side. The bits are the same.
void muon_step(Context& c, const std::vector<MuonMatrix>& list, const MuonOptions& o);

// The Euclidean norm of all gradients as one vector, summed in double in a fixed order. `bad` names the first parameter whose gradient
// holds an infinity or NaN (the norm is then not finite); empty when all are finite.
struct GradientNorm {
  double norm = 0;
  std::string bad;
};
GradientNorm gradient_norm(Context& c, const std::vector<Param*>& params);
double sum_of_squares(const Tensor& x);  // CPU; parts of a norm that ranks or groups add up

// QK-clip: head h whose largest logit max_logits[h] exceeded tau is scaled so that it becomes tau. With gamma = tau / max:
// content rows of q and K rows of kv_b by sqrt(gamma), shared rows of q (whose key all heads share) by gamma.
//   q (H * (nope + shared), .): q_b_proj or q_proj;   kv_b (H * (nope + v), .): each head's K rows, then its V rows
// Returns how many heads were clipped.
int64_t qk_clip(Context& c, Param& q, Param& kv_b, const std::vector<float>& max_logits, float tau, int64_t nope, int64_t shared, int64_t v);

}  // namespace k3
