#pragma once
// generate: text from a session, streamed as whole characters, ended by a stop id, a stop string or a limit.
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "k3/infer/session.h"
#include "k3/ops/sample/sample.h"
#include "k3/tokenizer/tokenizer.h"

namespace k3 {

struct GenerateOptions {
  SampleOptions sample;
  int64_t max_tokens = 256;
  std::vector<std::string> stop;  // stop strings; searched in the generated text only
  std::vector<int32_t> stop_ids;  // end tokens: never part of the text
  bool show_specials = false;
  std::function<bool(int32_t)> on_id;  // told each new id before its text; false ends the generation ("stop")
};

struct Generated {
  std::string text;
  std::vector<int32_t> ids;  // without the end token
  std::string finish;        // "stop" or "length"
  int32_t end = -1;          // the end token, if one came
  double prefill_seconds = 0, decode_seconds = 0;
  int64_t prompt_tokens = 0;
};

// Reads `prompt` (after whatever the session has read already) and continues it. on_text gets each new piece: valid UTF-8, never part of a
// stop string; false from it ends the generation ("stop"). `prefill` is told how many prompt tokens are read.
Generated generate(Session& session, const Tokenizer& tokenizer, std::span<const int32_t> prompt, const GenerateOptions& options,
                   const std::function<bool(const std::string&)>& on_text = nullptr, const std::function<void(int64_t)>& prefill = nullptr);

}  // namespace k3
