#include "k3/tokenizer/reply.h"

#include <algorithm>
#include <utility>

#include "k3/core/error.h"
#include "k3/tokenizer/chat.h"
#include "k3/tokenizer/json_text.h"
#include "k3/tokenizer/stream.h"
#include "k3/tokenizer/tokenizer.h"

namespace k3 {
namespace {

int32_t special(const Tokenizer& t, const char* name) {
  const auto id = t.special(name);
  K3_CHECK(id, "[reply] the tokenizer has no special token {}", name);
  return *id;
}

// The deltas of calls: where they begin and how their arguments become one JSON object.
class Calls {
 public:
  explicit Calls(std::string prefix) : prefix_(std::move(prefix)) {}

  void begin(Reply& out, std::string id, std::string name) {
    ++index_;
    if (id.empty()) id = prefix_ + std::to_string(index_);
    out.calls.push_back({index_, std::move(id), std::move(name), {}});
  }
  void arguments(Reply& out, std::string_view more) {
    if (more.empty()) return;
    if (out.calls.empty() || out.calls.back().index != index_) out.calls.push_back({index_, {}, {}, {}});
    out.calls.back().arguments += more;
  }

 private:
  std::string prefix_;
  int index_ = -1;
};

// K3's format (model.md 7.5). A stack of open elements says where text belongs.
class XtmlReply : public ReplyParser {
 public:
  XtmlReply(const Tokenizer& t, bool thinking, std::string prefix)
      : tokenizer_(t),
        open_id_(special(t, "<|open|>")),
        close_id_(special(t, "<|close|>")),
        sep_id_(special(t, "<|sep|>")),
        end_id_(special(t, "<|end_of_msg|>")),
        calls_(std::move(prefix)),
        open_{"message", thinking ? "think" : "response"} {}

  Reply add(std::span<const int32_t> ids) override {
    Reply out;
    for (const int32_t id : ids) {
      const std::string_view bytes = tokenizer_.token_bytes(id);
      if (done_) break;
      if (id == open_id_ || id == close_id_ || id == end_id_) {
        apply_tag(out);  // its separator is missing
        text(out, stream_.finish());
        tag_ = id == open_id_ ? Tag::open : id == close_id_ ? Tag::close : Tag::none;
        if (id == end_id_) leave(out, 0), done_ = true;
      } else if (id == sep_id_) {
        apply_tag(out);
      } else if (tag_ != Tag::none) {
        header_ += bytes;
      } else {
        reasoning_tokens_ += thinking() && !bytes.empty();
        text(out, stream_.add(bytes));
      }
    }
    return out;
  }

  Reply finish() override {  // cut off: an unfinished tag is no text, an unfinished value is what there is
    Reply out;
    text(out, stream_.finish());
    calls_.arguments(out, std::exchange(value_, {}));
    tag_ = Tag::none, header_.clear(), open_.clear(), done_ = true;
    return out;
  }

  bool done() const override { return done_; }
  int64_t reasoning_tokens() const override { return reasoning_tokens_; }
  bool thinking() const override { return !open_.empty() && open_.back() == "think"; }

 private:
  static constexpr size_t kDeepest = 32;  // the format has five levels; more are a model gone astray
  enum class Tag { none, open, close };
  enum class Arguments { none, members, raw };

  size_t depth_of(std::string_view tag) const {  // place in the stack, or its size
    size_t i = open_.size();
    while (i > 0 && open_[i - 1] != tag) --i;
    return i > 0 ? i - 1 : open_.size();
  }
  bool inside(std::string_view tag) const { return depth_of(tag) < open_.size(); }

  void apply_tag(Reply& out) {
    const Tag tag = std::exchange(tag_, Tag::none);
    const std::string header = std::exchange(header_, {});
    if (tag == Tag::close && inside(header)) leave(out, depth_of(header));
    if (tag == Tag::open) enter(out, header);
  }

  void enter(Reply& out, const std::string& header) {
    std::vector<std::pair<std::string, std::string>> attributes;
    const std::string tag = header.substr(0, header.find(' '));
    for (size_t at = tag.size(); at < header.size();) {  // key="value"
      const size_t key = at + 1, equal = header.find("=\"", key), end = equal == header.npos ? equal : header.find('"', equal + 2);
      if (end == header.npos) break;
      attributes.emplace_back(header.substr(key, equal - key), unescape(header.substr(equal + 2, end - equal - 2)));
      at = end + 1;
    }
    auto attribute = [&](std::string_view key) {
      const auto it = std::find_if(attributes.begin(), attributes.end(), [&](const auto& a) { return a.first == key; });
      return it == attributes.end() ? std::string() : it->second;
    };
    // what the model left open ends where it must
    if (tag == "message") leave(out, 0);
    const size_t channel = !open_.empty() && open_[0] == "message";  // depth of think, response, tools
    if (tag == "think" || tag == "response" || tag == "tools") leave(out, channel);
    if (tag == "call") {
      if (!inside("tools")) leave(out, channel), open_.push_back("tools");
      leave(out, depth_of("tools") + 1);
      calls_.begin(out, replace_invalid_utf8(attribute("id")), replace_invalid_utf8(attribute("tool")));
      arguments_ = Arguments::none;
    }
    if ((tag == "argument" || tag == "json") && inside("call")) {
      leave(out, depth_of("call") + 1);
      if (tag == "argument" && arguments_ != Arguments::raw) {
        calls_.arguments(out, (arguments_ == Arguments::none ? "{" : ", ") + quote_json(replace_invalid_utf8(attribute("key"))) + ": ");
        arguments_ = Arguments::members;
        const std::string type = attribute("type");
        is_string_ = type.empty() || type == "string";
        if (is_string_) calls_.arguments(out, "\"");
      }
      if (tag == "json" && arguments_ == Arguments::none) arguments_ = Arguments::raw;
    }
    if (open_.size() < kDeepest) open_.push_back(tag);
  }

  void leave(Reply& out, size_t depth) {  // closes all elements from this depth on
    while (open_.size() > depth) {
      if (open_.back() == "argument" && arguments_ == Arguments::members && inside("call")) {
        const std::string value = std::exchange(value_, {});
        calls_.arguments(out, is_string_ ? "\"" : is_json(value) ? value : quote_json(value));
      }
      if (open_.back() == "call" && arguments_ != Arguments::raw) calls_.arguments(out, arguments_ == Arguments::none ? "{}" : "}");
      open_.pop_back();
    }
  }

  void text(Reply& out, const std::string& s) {
    const std::string_view tag = open_.empty() ? std::string_view() : std::string_view(open_.back());
    if (s.empty()) return;
    if (tag == "think")
      out.reasoning += s;
    else if (tag == "argument" && inside("call"))
      arguments_ != Arguments::members ? void() : is_string_ ? calls_.arguments(out, escape_json(s)) : void(value_ += s);
    else if (tag == "json" && inside("call"))
      arguments_ == Arguments::raw ? calls_.arguments(out, s) : void();
    else if (tag != "tools" && tag != "call")
      out.content += s;
  }

  static std::string unescape(std::string s) {
    for (const auto& [from, to] : {std::pair{"&quot;", "\""}, {"&amp;", "&"}})
      for (size_t at = 0; (at = s.find(from, at)) != s.npos; ++at) s.replace(at, std::string_view(from).size(), to);
    return s;
  }

  const Tokenizer& tokenizer_;
  const int32_t open_id_, close_id_, sep_id_, end_id_;
  Calls calls_;
  std::vector<std::string> open_;  // elements, outermost first
  Tag tag_ = Tag::none;            // a tag's header is being read
  std::string header_;
  Utf8Stream stream_;
  Arguments arguments_ = Arguments::none;  // of the call
  bool is_string_ = true;                  // of the argument
  std::string value_;                      // of an argument that is not a string, so far
  bool done_ = false;
  int64_t reasoning_tokens_ = 0;
};

// Kimi-Linear's format (model.md 7.6).
class KimiLinearReply : public ReplyParser {
 public:
  KimiLinearReply(const Tokenizer& t, std::string prefix) : tokenizer_(t), end_id_(special(t, "<|im_end|>")), calls_(std::move(prefix)) {
    for (const auto& [name, part] : kMarkers)
      if (const auto id = t.special(name)) markers_.emplace_back(*id, part);
  }

  Reply add(std::span<const int32_t> ids) override {
    Reply out;
    for (const int32_t id : ids) {
      const std::string_view bytes = tokenizer_.token_bytes(id);
      if (done_) break;
      const auto marker = std::find_if(markers_.begin(), markers_.end(), [&](const auto& m) { return m.first == id; });
      if (marker != markers_.end() || id == end_id_) {
        text(out, stream_.finish());
        begin_call(out);
        if (id == end_id_)
          done_ = true;
        else
          part_ = marker->second;
      } else {
        text(out, stream_.add(bytes));
      }
    }
    return out;
  }
  Reply finish() override {
    Reply out;
    text(out, stream_.finish());
    header_.clear(), done_ = true;
    return out;
  }
  bool done() const override { return done_; }
  int64_t reasoning_tokens() const override { return 0; }
  bool thinking() const override { return false; }

 private:
  enum class Part { content, section, header, arguments };
  static constexpr std::pair<const char*, Part> kMarkers[] = {{"<|tool_calls_section_begin|>", Part::section},
                                                              {"<|tool_call_begin|>", Part::header},
                                                              {"<|tool_call_argument_begin|>", Part::arguments},
                                                              {"<|tool_call_end|>", Part::section},
                                                              {"<|tool_calls_section_end|>", Part::content}};
  void begin_call(Reply& out) {  // functions.NAME:NUMBER is the call's id
    if (part_ != Part::header) return;
    const std::string id = std::exchange(header_, {});
    std::string name = id.substr(0, id.rfind(':'));
    if (name.starts_with("functions.")) name.erase(0, 10);
    calls_.begin(out, id, name);
  }
  void text(Reply& out, const std::string& s) {
    if (part_ == Part::content) out.content += s;
    if (part_ == Part::header) header_ += s;
    if (part_ == Part::arguments) calls_.arguments(out, s);
  }

  const Tokenizer& tokenizer_;
  const int32_t end_id_;
  std::vector<std::pair<int32_t, Part>> markers_;
  Calls calls_;
  Part part_ = Part::content;
  std::string header_;
  Utf8Stream stream_;
  bool done_ = false;
};

}  // namespace

Reply& Reply::operator+=(const Reply& delta) {
  reasoning += delta.reasoning;
  content += delta.content;
  for (const ReplyCall& c : delta.calls) {
    if (calls.empty() || calls.back().index != c.index) calls.push_back({.index = c.index, .id = {}, .name = {}, .arguments = {}});
    calls.back().id += c.id;
    calls.back().name += c.name;
    calls.back().arguments += c.arguments;
  }
  return *this;
}

std::unique_ptr<ReplyParser> reply_parser(const Tokenizer& t, bool thinking, std::string prefix) {
  if (chat_format(t) == ChatFormat::xtml) return std::make_unique<XtmlReply>(t, thinking, std::move(prefix));
  return std::make_unique<KimiLinearReply>(t, std::move(prefix));
}

}  // namespace k3
