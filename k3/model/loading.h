#pragma once
// What load() will make of a model, known from headers alone; and the pages of mapped weights.
#include <functional>
#include <string_view>
#include <vector>

#include "k3/model/checkpoint.h"
#include "k3/ops/moe/moe.h"

namespace k3 {

bool is_routed_expert(std::string_view name);
ExpertWeights* expert_weights(Ffn& ffn);  // null: it has none

// Types and shapes, no values. `mapped`: the values stay in the file.
struct LoadedForm {
  Tensor value, scale;
  bool mapped = false;
};
LoadedForm loaded_form(const Param& p, const StoredParam& at, const LoadOptions& options);

// Reads mapped tensors from the disk into memory, so that their first use finds them there.
void read_in(const std::vector<Tensor>& mapped, const std::function<void(uint64_t done, uint64_t total)>& progress = nullptr);
// Every MXFP4 scale of a loaded model, its experts' too unless a source brings them. Error for a 255, with file and tensor. Each is looked at once.
void check_all_scales(Model& model, const Snapshot& snapshot, const std::vector<StoredParam>& found);
// Unmaps the pages that lie wholly in a mapped tensor: what was read once need not stay resident. Looking again reads again.
void give_back(const Tensor& mapped);

}  // namespace k3
