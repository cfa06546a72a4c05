#pragma once
// --dense, and where to compute, for every command that loads a model to run it.
#include <CLI/CLI.hpp>

#include "k3/cli/commands.h"
#include "k3/model/checkpoint.h"

namespace k3 {

inline void add_device(CLI::App* command, LoadOptions& options) { add_device(command, options.device, options.bf16_products); }

inline void add_dense(CLI::App& command, LoadOptions& options) {
  static const std::map<std::string, Dense> names = {{"stored", Dense::as_stored}, {"bf16", Dense::bf16}, {"q8", Dense::q8}, {"mxfp4", Dense::mxfp4}};
  command
      .add_option_function<std::string>(
          "--dense", [&options](const std::string& name) { options.dense = names.at(name); },
          "make the matrices of attention, shared experts and dense layers narrow while loading: bf16, q8 (an error of at most 1/254 of the "
          "largest of 64 weights) or mxfp4 (1/3 of the largest of 32); the rest stays as it is stored")
      ->check(CLI::IsMember({"stored", "bf16", "q8", "mxfp4"}))
      ->default_str("stored");
}

}  // namespace k3
