#pragma once
// Between a Model and a snapshot in the published layout. Names, shapes and config keys are the published ones, so other engines load what
// we save and we load what they save: legacy and re-saved spellings included (model.md 1.3, 6).
#include <string>

#include "k3/model/model.h"
#include "k3/model/safetensors.h"

namespace k3 {

// The matrices of attention, shared experts, dense layers and the latent projections, made narrow while loading (ops/linear/quantize.h). As
// they are stored stay: routed experts, router, norms, decay gates and beta, residual mixes, embedding and head, and MLA's kv_b_proj, which
// absorbed decode multiplies from both sides. A matrix that is stored narrower than asked, or whose rows don't divide into groups, stays too.
enum class Dense : uint8_t { as_stored, bf16, q8, mxfp4 };

struct LoadOptions {
  bool for_training = false;  // everything becomes owned float32; otherwise matrices stay where and as they are stored
  Dense dense = Dense::as_stored;
  Device device = Device::cpu;  // cuda: all of it is copied there, as ParamSet::move_to says
  bool bf16_products = false;   // of the model, on a GPU
};

// Where a parameter's values lie: one tensor, or MXFP4 codes and their scales.
struct StoredParam {
  const StoredTensor *value = nullptr, *scale = nullptr;
};

// One for each parameter, in the model's order, from names, shapes and types alone: no value is read. Every parameter must be in the snapshot
// with its shape, and every tensor of the snapshot must be a parameter (but for the vision tower, MTP layers and layers beyond
// num_hidden_layers).
std::vector<StoredParam> find_parameters(const Model& model, const Snapshot& snapshot);

// The same, then the values. The snapshot must outlive the model unless for_training or on a GPU. MXFP4 weights that linear and experts multiply are
// not read here; a scale of 255 is an Error at a weight's first use (ops/linear/weight_product.h, check_scales).
void load(Model& model, const Snapshot& snapshot, const LoadOptions& options);

// config.json and tensors; tokenizer files are the tokenizer's to write. Without `with_mtp` the layer of multi-token prediction is dropped.
void save(const Model& model, const std::string& folder, uint64_t shard_bytes = uint64_t(4) << 30, bool with_mtp = true);

// Where a model's files are: the folder itself when it holds config.json, or the step folder that its file LATEST names (what training
// writes: OUT/step-000400/ complete, then OUT/LATEST renamed to point at it).
std::string resolve_snapshot(const std::string& folder);

// The tensor under which a file would hold parameter `p` (its prefix, or an accepted other spelling); null if there is none.
const StoredTensor* find_parameter(const Snapshot& snapshot, const Config& config, const std::string& name);

}  // namespace k3
