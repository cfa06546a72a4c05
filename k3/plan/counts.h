#pragma once
// Counts: the model's own code, run on the null device: prefill, a decode step, a training step forward and backward, the optimizer's step.
// Every operator reports its FLOPs and bytes and the arena its peak, so planner and engine cannot drift apart. The closed forms are the
// check of it; agreement() puts the two side by side.
//
// Conventions of the operators, where they differ from closed_forms.h:
//   attention   counts a query's own key: T (T + 1) / 2 pairs of a prompt, c + 1 of a decode step. Its backward counts what is executed,
//               3 key + 2 value products for each pair, where closed forms count twice the forward.
//   absorbed    decode's kv_b products are inside mla_attention, not linear; the same number
//   delta_rule  counts the products of its chunks of 16: H (6 d_k d_v + 5 C (d_k + d_v)) a token, in decode too
//   bytes       are this engine's: float32 activations; experts touched counted as min(N, t K), which the planner replaces by U(t)
#include <map>
#include <memory>
#include <string>

#include "k3/model/model.h"
#include "k3/plan/architecture.h"

namespace k3::plan {

struct OperatorCount {
  int64_t calls = 0;
  double flops = 0, bytes = 0;
};

struct Count {
  std::map<std::string, OperatorCount> operators;
  size_t arena_peak = 0;
  double flops() const;
  double bytes() const;
  double of(const std::string& name) const;  // FLOPs; 0 when there is none
  double products() const;                   // FLOPs of matrix products and cores: what closed forms count
};

// One model declared on the null device. Cheap: parameters have shapes and no memory.
class CountedModel {
 public:
  enum class For { inference, training };
  CountedModel(const Architecture& a, For use, DType storage = DType::bf16);

  Count prefill(int64_t tokens, int64_t cached = 0);                 // one sequence; logits of the last token
  Count decode(int64_t batch, int64_t context, int64_t tokens = 1);  // logits of every new token
  Count train(int64_t sequences, int64_t tokens, bool recompute);    // forward, loss, backward
  Count optimizer();                                                 // Muon for each head, AdamW for the rest
  int64_t parameters() const { return model_.params().count(); }
  int64_t state_bytes() const { return model_.new_state(1, Device::null, false).bytes_per_slot(); }
  int64_t cache_bytes_per_token() const { return model_.new_state(1, Device::null, false).bytes_per_token(); }

 private:
  Architecture architecture_;
  Model model_;
};

struct Agreement {
  std::string name, convention;
  double counted = 0, closed = 0;
  double difference() const { return closed == 0 ? counted : counted / closed - 1; }
};
// Each group of operators against its closed form in the operators' convention, then the total against the plain closed forms.
std::vector<Agreement> agreement(const Architecture& a, CountedModel& model, int64_t batch, int64_t context);
std::vector<Agreement> prefill_agreement(const Architecture& a, CountedModel& model, int64_t tokens);
std::vector<Agreement> training_agreement(const Architecture& a, CountedModel& model, int64_t tokens);

}  // namespace k3::plan
