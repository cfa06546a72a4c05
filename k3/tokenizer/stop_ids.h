#pragma once
// Which ids end a reply, and who says so.
#include <cstdint>
#include <string>
#include <vector>

namespace k3 {

class Tokenizer;

struct StopId {
  int32_t id;
  std::string from;  // "generation_config.json, config.json"
};

// From eos_token_id (a number or a list) of generation_config.json and of config.json (also inside text_config), eos_token of
// tokenizer_config.json, and the end marker of the chat format, if the tokenizer has one. Ascending, each id once. Errors: an id that is no
// number, or beyond the tokenizer's vocabulary.
std::vector<StopId> stop_ids(const std::string& model_folder, const Tokenizer&);

}  // namespace k3
