#pragma once
// ChatSession: a conversation whose history is the model's state, so that each turn reads only what is new in it.
//
//   ChatSession chat(model, tokenizer, {.generate = {.stop_ids = ids}});
//   ChatTurn t = chat.ask("Hi", [](const Reply& delta) { show(delta); return true; });     // false ends the answer
//   t = chat.regenerate(...);           // the last question again, with the next seed
//   t = chat.edit("Hello", ...);        // another question in its place: only that turn is read anew
//
// The history is token ids: what was rendered, and what the model wrote, id by id. A session that reads ids() from the beginning comes to the
// same bits. An answer that did not end by itself is closed as its format asks before the next turn.
#include <functional>
#include <string>
#include <vector>

#include "k3/infer/generate.h"
#include "k3/tokenizer/chat.h"
#include "k3/tokenizer/reply.h"

namespace k3 {

struct ChatSettings {
  ChatOptions chat;
  std::string system;        // said first, if not empty
  GenerateOptions generate;  // on_id is this session's own
  int64_t context = 0;       // the most tokens of the conversation; 0: no limit. An answer ends there; a question beyond it is an Error
  SessionOptions session;
};

struct ChatTurn {
  Reply reply;
  Generated generated;       // prompt_tokens: those read in this turn, of `context`
  int64_t context = 0;       // tokens of the conversation when the answer began
  bool interrupted = false;  // on_delta or on_read said so
};

class ChatSession {
 public:
  using OnDelta = std::function<bool(const Reply& delta)>;
  using OnRead = std::function<bool(int64_t done, int64_t total)>;  // while the turn's tokens are read; false: the turn is taken back

  ChatSession(Model& model, const Tokenizer& tokenizer, ChatSettings settings);
  ChatTurn ask(const std::string& user, const OnDelta& on_delta, const OnRead& on_read = nullptr);
  ChatTurn regenerate(const OnDelta& on_delta, const OnRead& on_read = nullptr);                     // Error when there is no turn
  ChatTurn edit(const std::string& user, const OnDelta& on_delta, const OnRead& on_read = nullptr);  // the same
  void reset();                                                                                      // forget the conversation

  const std::vector<int32_t>& ids() const { return ids_; }  // of the whole conversation
  Session& session() { return session_; }

 private:
  ChatTurn answer(const OnDelta& on_delta, const OnRead& on_read);
  void append(const std::string& user);
  void take_back(size_t to);
  void close(const Generated& g, bool thinking);

  const Tokenizer& tokenizer_;
  ChatSettings settings_;
  ChatFormat format_;
  Session session_;
  std::vector<int32_t> ids_;
  size_t turn_ = 0, prompt_ = 0;  // where the last turn begins in ids_, and where its answer does
  bool has_turn_ = false;
};

}  // namespace k3
