#include "k3/infer/chat_session.h"

#include <algorithm>

#include "k3/core/error.h"

namespace k3 {

namespace {
struct Stopped {};  // thrown through Session::read by on_read
}  // namespace

ChatSession::ChatSession(Model& model, const Tokenizer& tokenizer, ChatSettings settings)
    : tokenizer_(tokenizer), settings_(std::move(settings)), format_(chat_format(tokenizer)), session_(model, settings_.session) {}

void ChatSession::reset() {
  session_.reset();
  ids_.clear();
  turn_ = prompt_ = 0, has_turn_ = false;
}

ChatTurn ChatSession::ask(const std::string& user, const OnDelta& on_delta, const OnRead& on_read) {
  session_.mark();
  turn_ = ids_.size();
  append(user);
  return answer(on_delta, on_read);
}

ChatTurn ChatSession::regenerate(const OnDelta& on_delta, const OnRead& on_read) {
  K3_CHECK(has_turn_, "[chat] there is no answer to give again; ask first");
  take_back(prompt_);
  ++settings_.generate.sample.seed;
  return answer(on_delta, on_read);
}

ChatTurn ChatSession::edit(const std::string& user, const OnDelta& on_delta, const OnRead& on_read) {
  K3_CHECK(has_turn_, "[chat] there is no question to edit; ask first");
  take_back(turn_);
  append(user);
  return answer(on_delta, on_read);
}

// What the format says before the first message is said once; later turns are their message and the beginning of an answer.
void ChatSession::append(const std::string& user) {
  std::vector<Message> messages;
  ChatOptions options = settings_.chat;
  if (turn_ > 0)
    options.effort.clear(), options.tools.clear();
  else if (!settings_.system.empty())
    messages.push_back({.role = "system", .content = {settings_.system}});
  messages.push_back({.role = "user", .content = {user}});
  const std::vector<int32_t> more = encode(tokenizer_, render_chat(format_, messages, options));
  ids_.insert(ids_.end(), more.begin(), more.end());
  prompt_ = ids_.size();
}

void ChatSession::take_back(size_t to) {
  session_.back();
  ids_.resize(to);
}

ChatTurn ChatSession::answer(const OnDelta& on_delta, const OnRead& on_read) {
  ChatTurn turn{.context = int64_t(ids_.size())};
  auto parser = reply_parser(tokenizer_, settings_.chat.thinking);
  GenerateOptions options = settings_.generate;
  auto tell = [&](const Reply& delta) {
    if (delta.empty()) return;
    turn.reply += delta;
    if (on_delta && !on_delta(delta)) turn.interrupted = true;
  };
  options.on_id = [&](int32_t id) {
    ids_.push_back(id);
    tell(parser->add({&id, 1}));
    return !turn.interrupted;
  };
  if (settings_.context > 0) {
    const int64_t room = settings_.context - int64_t(ids_.size());
    if (room < 1) {
      const size_t tokens = ids_.size();
      has_turn_ = false;
      take_back(turn_);
      fail("[chat] with this question the conversation has {} tokens, and there is room for {}: /reset forgets it, --context makes more room", tokens,
           settings_.context);
    }
    options.max_tokens = std::min(options.max_tokens, room);
  }
  const std::vector<int32_t> unread(ids_.begin() + session_.tokens(), ids_.end());
  has_turn_ = false;
  try {
    turn.generated = generate(session_, tokenizer_, unread, options, nullptr, [&](int64_t done) {
      if (on_read && !on_read(done, int64_t(unread.size()))) throw Stopped();
    });
  } catch (const Stopped&) {
    take_back(turn_);
    turn.interrupted = true;
    return turn;
  } catch (...) {
    take_back(turn_);
    throw;
  }
  has_turn_ = true;
  const bool thinking = parser->thinking();
  tell(parser->finish());
  close(turn.generated, thinking);
  return turn;
}

// Ends the answer in ids_ (the next turn reads it): with the model's own end, or with what was still open.
void ChatSession::close(const Generated& g, bool thinking) {
  auto special = [&](const char* name) { return *tokenizer_.special(name); };
  const bool xtml = format_ == ChatFormat::xtml;
  const int32_t end = special(xtml ? "<|end_of_msg|>" : "<|im_end|>");
  if (g.end != end && xtml) {
    const int32_t sep = special("<|sep|>"), open = special("<|open|>"), closed = special("<|close|>");
    for (size_t i = ids_.size(); i > prompt_ && ids_[i - 1] != sep; --i)
      if (ids_[i - 1] == open || ids_[i - 1] == closed) {  // in the middle of a tag
        ids_.push_back(sep);
        break;
      }
    auto tag = [&](int32_t kind, const char* name) {
      ids_.push_back(kind);
      tokenizer_.encode(name, ids_);
      ids_.push_back(sep);
    };
    if (thinking) tag(closed, "think"), tag(open, "response");
    tag(closed, "response"), tag(closed, "message");
  }
  ids_.push_back(end);
}

}  // namespace k3
