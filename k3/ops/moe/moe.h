#pragma once
// Mixture of experts: choose k of E experts for each token, run them, add their results by weight.
//
//   route     s = sigmoid(W_gate x)  (or softmax)            (N, E), float32 from the product on
//             I = the k largest of s + bias                  the bias chooses and never weighs; ties go to the lower index
//             p_j = s_j / (sum_I s + 1e-20) * scale          model.md 5.3, K3 report eq. 13
//   experts   u = sum_{j in I} p_j W2_j f(W1_j z, W3_j z)    (N, l), f a gated activation; model.md 5.4, K3 report eq. 11
//
// Backward of the routing (training.md 2.1): only through p; the selection and the bias have none.
// Backward of the experts (training.md 4.1): e = W2^T du, dp = e.h, so nothing of width l is kept per pair.
//
// The router reads the full-width x, the experts may read a latent z. Rows marked in batch.padding reach no expert: experts = -1, weight 0.
// A token's result depends on that token only, whoever shares its experts; sums over rows (dW) run in token order.
//
//   Routing r = route(x, gate, e_score_correction_bias, {.top_k = 16}, batch);
//   Var u = experts(linear(x, routed_expert_down_proj), r, {w1, w3, w2}, activation);
//
// Errors: widths that don't fit, k or groups that don't divide, forced choices outside 0..E-1 or twice the same.
#include <memory>
#include <span>
#include <vector>

#include "k3/core/batch.h"
#include "k3/core/listed.h"
#include "k3/tape/param.h"
#include "k3/tape/var.h"

namespace k3 {

struct Activation;

struct RouteOptions {
  int64_t top_k = 1;
  bool softmax = false;     // scores over all experts in place of a sigmoid each
  bool renormalize = true;  // only when top_k > 1
  float scale = 1;          // routed_scaling_factor
  // Experts in `groups` equal runs; only the best `top_groups` of them, by the sum of each one's two largest, are chosen from.
  int64_t groups = 1, top_groups = 1;
};

struct Routing {
  Var weights;     // (N, k) f32, differentiable
  Tensor experts;  // (N, k) i32, best first; -1 in padding rows
  Tensor scores;   // (N, E) f32, raw: without the bias
  Tensor cutoff;   // (N) f32, the (k+1)-th largest biased score; -infinity when nothing is left over (k = E), and no balancing then
  Tensor margin;   // (N) f32, how far the k-th lies above the cutoff: what it takes to flip the choice
};

// gate (E, d), bias (E). `forced` (N, k) i32 replaces the choice (parity tools); cutoff and margin stay those of the free choice.
Routing route(Var x, Param& gate, Param& bias, const RouteOptions& options, const Batch& batch, const Tensor* forced = nullptr);

// Where experts are when not all of them are in memory. experts() says once which ones a step wants, then runs them as they come. Which of them
// come together changes no bit: each expert's rows are its own, and a token's sum over its experts is made at the end, in slot order.
class ExpertSource {
 public:
  virtual ~ExpertSource() = default;
  virtual void want(std::span<const int32_t> experts) = 0;  // ascending, each once; forgets what is left of an earlier step
  // At least one of them, whose parameters have their values until the next call; empty when all have been handed out.
  virtual std::span<const int32_t> take() = 0;
};

// One matrix an expert: w1 and w3 (m, l), w2 (l, m), float32 or, in inference, as they are stored. With a source, a parameter has a shape and a
// type at all times, and values only when the source says so (inference on the CPU).
struct ExpertWeights {
  std::vector<Param*> gate, up, down;
  ExpertSource* source = nullptr;
  // Where the matrices lie, on the device: values and gradients of w1, w3, w2, and which values are bfloat16.
  struct OnDevice {
    ListedOnce values[3], gradients[3], narrow[3], codes[3], scales[3];
  };
  std::shared_ptr<OnDevice> on_device = std::make_shared<OnDevice>();  // owners: the layer, and the closures on the tape
};

Var experts(Var z, const Routing& routing, const ExpertWeights& weights, const Activation& activation);

}  // namespace k3
