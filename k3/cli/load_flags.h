#pragma once
// --dense, and where to compute, for every command that loads a model to run it.
#include <CLI/CLI.hpp>

#include "k3/cli/commands.h"
#include "k3/model/checkpoint.h"

namespace k3 {

inline void add_device(CLI::App* command, LoadOptions& options) { add_device(command, options.device, options.bf16_products); }

// How many tokens of a prompt are read at once. A few leave a GPU idle: there the default is larger.
inline void add_prefill_chunk(CLI::App& command, int64_t& chunk, const LoadOptions& options) {
  const auto* given = command.add_option("--prefill-chunk", chunk, "prompt tokens read at once; bounds memory (on a GPU 2048 where it is left out)")
                          ->check(CLI::PositiveNumber)
                          ->capture_default_str();
  command.parse_complete_callback([given, &chunk, &options] {
    if (given->count() == 0 && options.device == Device::cuda) chunk = 2048;
  });
}

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
