#pragma once
// fabricate: a snapshot with random weights in exactly the published layout (model.md 6), so that anybody can test loading, speed and tools
// without the weights: names, shapes, types, which shard holds what, the order in it, and the files' bytes but for the values.
//
//   Kimi-K3       shard l+1 holds layer l, then the globals, the projector, the vision tower; experts packed to MXFP4
//   Kimi-Linear   shards of at most 5 GB; bf16 but for A_log and dt_bias
//
// In a shard the tensors are ordered as the releases' writer orders them: by type (F32, BF16, U8), then by name, which puts experts in
// lexicographic order of their numbers (0, 1, 10, 100, ...). Values are a function of (seed, name, index): the same at any thread count.
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "k3/core/tensor.h"
#include "k3/model/config.h"

namespace k3 {

struct LayoutTensor {
  std::string name;
  DType dtype;
  Shape shape;
  uint64_t bytes() const { return uint64_t(shape.size()) * bytes_of(dtype); }
};

struct LayoutShard {
  std::string file;  // model-00001-of-000096.safetensors
  std::vector<LayoutTensor> tensors;
};

// `whole`: with the vision tower and the projector that come with a complete Kimi-K3. Errors: a model whose mixers no release has.
std::vector<LayoutShard> published_layout(const Config& config, bool whole);

struct FabricateOptions {
  int64_t layers = 0, experts = 0;  // 0: as many as the config says
  std::string experts_as;           // bf16 or mxfp4; empty: as the config says
  bool headers_only = false;        // files of the right size that hold headers and a hole (zeros that take no space on the disk)
  uint64_t seed = 1;
};

struct Fabricated {
  int64_t shards = 0, tensors = 0;
  uint64_t bytes = 0;  // of the tensors
};

// The config of what fabricate() would write.
Config fabricated_config(const std::string& config, const FabricateOptions& options);

// Writes shards, index, config.json and generation_config.json to `out`, which must be empty or not be there. `config` is a config.json or a
// folder that holds one. `progress` is told the bytes of tensors written so far.
Fabricated fabricate(const std::string& config, const std::string& out, const FabricateOptions& options,
                     const std::function<void(uint64_t done, uint64_t total)>& progress = nullptr);

}  // namespace k3
