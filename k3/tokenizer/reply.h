#pragma once
// Reply: what a model's token ids say, while they come: thinking, answer, calls of tools (model.md 7.5, 7.6).
//
//   auto parser = reply_parser(tokenizer, thinking, "call_7_");
//   Reply whole;
//   for (...) { Reply delta = parser->add(ids); send(delta); whole += delta; }
//   whole += parser->finish();
//
// Structure is read from ids alone: a marker spelled by ordinary tokens is text. Joined deltas are the same for every way to cut the ids, and
// every text in a delta is valid UTF-8. Nothing is held back but an unfinished character and the value of an argument that is not a string
// (it must be whole to be known as JSON; a value that is no JSON is passed on as a string). A reply that was cut off ends as it
// stood: its arguments are then no complete JSON.
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace k3 {

class Tokenizer;

struct ReplyCall {
  int index = 0;          // counted here from 0, in order of appearance
  std::string id, name;   // in a delta: set when the call begins
  std::string arguments;  // JSON text; in a delta: what is new
};

struct Reply {
  std::string reasoning, content;
  std::vector<ReplyCall> calls;
  bool empty() const { return reasoning.empty() && content.empty() && calls.empty(); }
  Reply& operator+=(const Reply& delta);
};

class ReplyParser {
 public:
  virtual ~ReplyParser() = default;
  virtual Reply add(std::span<const int32_t> ids) = 0;
  virtual Reply finish() = 0;     // no more ids will come
  virtual bool done() const = 0;  // the end marker has come; later ids are not read
  virtual int64_t reasoning_tokens() const = 0;
  virtual bool thinking() const = 0;  // the next id would be a thought
};

// `thinking` as in the prompt's ChatOptions: which part the prompt has opened. A call without an id of its own gets prefix + index.
std::unique_ptr<ReplyParser> reply_parser(const Tokenizer&, bool thinking, std::string call_id_prefix = "call_");

}  // namespace k3
