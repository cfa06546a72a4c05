#pragma once
// Architecture: a model as the planner sees it: its Config, how its weights are stored, and a name to print.
//
//   Architecture k3 = load_architecture("k3");                          // configs/k3.json
//   Architecture v = load_architecture("k3", {"mixers=mla"});           // a variant; the keys are Config's
//   Architecture s = load_architecture("path/to/snapshot");             // any folder with a config.json
//
// Files of the deepseek_v3 and kimi_k2 types are read too: all layers are MLA, whose rotation changes no count. Beyond what the model code
// runs, the planner knows two mixers by their closed forms: mfa (one key and value head of 256), mla_absorbed (MLA's wide form in prefill too).
// Planner keys besides Config's: experts_format, trunk_format (bf16, fp8, fp8_block, mxfp8, mxfp4, nvfp4, int4, int4_g128, f32).
#include <string>
#include <vector>

#include "k3/model/config.h"

namespace k3::plan {

struct Format {
  std::string name;
  double bytes = 2;  // a weight, its share of the scales included
};
Format format_of(const std::string& name);
std::vector<std::string> format_names();

struct Architecture {
  std::string name;
  Config config;
  Format experts, trunk;
  std::vector<std::string> notes;  // what reading the file changed

  // Layers of the model by mixer, in order of first use.
  std::vector<std::pair<std::string, int64_t>> mixers() const;
  int64_t moe_layers() const;
  int64_t dense_layers() const { return config.num_hidden_layers - moe_layers(); }
  // Whether the model code has all its mixers, so that it can be counted on the null device.
  bool runs() const;
};

Architecture load_architecture(const std::string& what, const std::vector<std::string>& sets = {});
std::vector<std::string> shipped_models();

// The folder that holds configs/: the working directory's, or one above the program. Error when there is none.
std::string configs_folder();

}  // namespace k3::plan
