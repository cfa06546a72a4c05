#pragma once
// FusedStep: the decode step of a K3 or Kimi-Linear model in bfloat16 on a GPU, in a few launches a layer: each begins while the one before it ends,
// and what surrounds a product is done by it (ops/step). The model's own forward in bfloat16 is what it is tested against: equal to rounding.
//
//   KDA   mix, norm and all projections | convolutions to gated norm | o_proj and residual                                        3 launches
//   MLA   mix, norm and projections | q_b | absorb, attend, values and gate | o_proj and residual                                 6
//   MoE   mix, norm, router, latent and shared gate and up | choice, first products | second products | up, shared down, residual 4
//   GLU   mix, norm, gate and up | unit, down, residual                                                                           2
//
// One or two rows of a model with small widths: the same as phases of one kernel (ops/step/whole_cuda.h), to the bit; then the head.
//
// States are those of Model::new_state(.., deterministic = false).
#include <memory>
#include <string>

#include "k3/model/model.h"

namespace k3 {

class FusedStep {
 public:
  static std::string why_not(const Model& model);  // what it has no kernel for; empty when it can

  FusedStep(Model& model, ModelState& state);
  ~FusedStep();
  Tensor logits(Context& c, const Tensor& ids, const DeviceStep& step);  // (rows, vocabulary) f32 from the arena

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace k3
