#include "k3/tokenizer/chat.h"

#include <algorithm>
#include <optional>

#include <nlohmann/json.hpp>

#include "k3/core/error.h"
#include "k3/tokenizer/json_text.h"
#include "k3/tokenizer/tokenizer.h"

namespace k3 {
namespace {

using Json = nlohmann::ordered_json;

std::string where(const std::vector<Message>& messages, size_t i) { return fmt::format("message {} ({})", i + 1, messages[i].role); }

void check(const std::vector<Message>& messages, const ChatOptions& options) {
  auto plain = [](std::string_view name) { return std::none_of(name.begin(), name.end(), [](char c) { return uint8_t(c) < 0x20 || c == 0x7F; }); };
  for (size_t i = 0; i < messages.size(); ++i) {
    const Message& m = messages[i];
    const bool known = m.role == "system" || m.role == "user" || m.role == "assistant" || m.role == "tool";
    K3_CHECK(known, "[chat] message {} has role \"{}\"; roles are system, user, assistant, tool", i + 1, m.role);
    K3_CHECK(plain(m.name), "[chat] {}: its name has a control character", where(messages, i));
    K3_CHECK(m.tool_calls.empty() || m.role == "assistant", "[chat] {}: only an assistant calls tools", where(messages, i));
    K3_CHECK(m.tools.empty() || m.role == "system", "[chat] {}: only a system message brings tools", where(messages, i));
    for (const ToolCall& c : m.tool_calls) {
      K3_CHECK(!c.name.empty(), "[chat] {}: a tool call has no function name", where(messages, i));
      K3_CHECK(plain(c.name), "[chat] {}: the function name of a tool call has a control character", where(messages, i));
    }
  }
  K3_CHECK(options.effort.empty() || options.effort == "low" || options.effort == "high" || options.effort == "max",
           "[chat] effort is \"{}\"; the model knows low, high and max", options.effort);
}

bool has_tools(const std::string& tools) {
  if (tools.empty()) return false;
  const Json list = Json::parse(tools, nullptr, false);
  K3_CHECK(list.is_array(), "[chat] tools must be a JSON array");
  return !list.empty();
}

// Results of tools, matched to the calls of the last assistant message before them.
struct Result {
  const Message* message;
  int call = -1;  // index of the call that it answers; -1: its id is no call's
};

// The run of tool messages from `at`. If all answer a call by its id they are put in the order of the calls, or else left as they are.
std::vector<Result> results_from(const std::vector<Message>& messages, size_t at, const Message* caller) {
  std::vector<Result> run;
  bool all = true;
  for (; at < messages.size() && messages[at].role == "tool"; ++at) {
    Result r{&messages[at]};
    for (size_t c = 0; caller && c < caller->tool_calls.size() && r.call < 0; ++c)
      if (!r.message->tool_call_id.empty() && caller->tool_calls[c].id == r.message->tool_call_id) r.call = int(c);
    all = all && r.call >= 0;
    run.push_back(r);
  }
  if (all)
    std::stable_sort(run.begin(), run.end(), [](const Result& a, const Result& b) { return a.call < b.call; });
  else
    for (Result& r : run) r.call = -1;
  return run;
}

// K3's format (model.md 7.4).
class Xtml {
 public:
  std::vector<Segment> segments;

  Xtml(const std::vector<Message>& messages, const ChatOptions& o) : thinking_(o.thinking) {
    if (has_tools(o.tools)) declare("# Tools\nHere are the available tools, described in JSONSchema.\n\n", o.tools);
    if (thinking_ && !o.effort.empty())
      system("thinking-effort",
             "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), supported values include "
             "`low`, `medium`, `high`, and `max`.\nNow the system is invoked with `thinking_effort=" +
                 o.effort + "`.");
    const Message* caller = nullptr;
    int results = 0;  // since the last assistant message
    for (size_t i = 0; i < messages.size(); ++i) {
      const Message& m = messages[i];
      if (m.role == "tool") {
        const std::vector<Result> run = results_from(messages, i, caller);
        for (const Result& r : run) result(r, caller, ++results, where(messages, i));
        i += run.size() - 1;
      } else if (m.role == "assistant") {
        assistant(m);
        caller = &m, results = 0;
      } else if (!m.tools.empty() && has_tools(m.tools)) {
        declare(
            "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\nYou have access to all existing and extended "
            "tools.\nHere are the specs for the extended tools.\n\n",
            m.tools);
      } else {
        begin("message", speaker(m));
        text(m.content);
        end_message();
      }
    }
    if (o.tool_choice == "required")
      system("tool-choice", "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.");
    if (o.tool_choice == "none")
      system("tool-choice", "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.");
    if (!o.response_format.empty()) response_format(o.response_format);
    if (o.generation_prompt) {
      begin("message", {{"role", "assistant"}});
      begin(thinking_ ? "think" : "response");
    }
  }

 private:
  using Attributes = std::vector<std::pair<std::string, std::string>>;

  void control(const char* name) { segments.push_back({name, true}); }
  void text(std::string s) {
    if (!s.empty()) segments.push_back({std::move(s), false});
  }
  void text(const std::vector<std::string>& parts) {
    for (const std::string& s : parts) text(s);
  }
  void begin(const char* tag, const Attributes& attributes = {}) {
    control("<|open|>");
    text(tag);
    for (const auto& [key, value] : attributes) {
      text(" " + key);
      text("=\"");
      std::string escaped;
      for (const char c : value) escaped += c == '&' ? "&amp;" : c == '"' ? "&quot;" : std::string(1, c);
      text(escaped);
      text("\"");
    }
    control("<|sep|>");
  }
  void end(const char* tag) {
    control("<|close|>");
    text(tag);
    control("<|sep|>");
  }
  void end_message() {
    end("message");
    control("<|end_of_msg|>");
  }
  void system(const char* type, const std::string& body) {
    begin("message", {{"role", "system"}, {"type", type}});
    text(body);
    end_message();
  }
  void declare(const char* words, const std::string& tools) {
    system("tool-declare", words + ("```json\n" + print_json(tools, JsonStyle::sorted_compact, "tools") + "\n```"));
  }
  static Attributes speaker(const Message& m) {
    Attributes a = {{"role", m.role}};
    if (!m.name.empty()) a.emplace_back("name", m.name);
    return a;
  }

  void result(const Result& r, const Message* caller, int number, const std::string& at) {
    const auto& calls = caller ? caller->tool_calls : std::vector<ToolCall>();
    const size_t answered = r.call >= 0 ? size_t(r.call) : size_t(number - 1);
    const bool by_call = r.call >= 0 || r.message->name.empty();
    K3_CHECK(!by_call || answered < calls.size(), "[chat] {}: it names no tool and answers no tool call before it; give tool_call_id or name", at);
    begin("message", {{"role", "tool"}, {"tool", by_call ? calls[answered].name : r.message->name}, {"index", std::to_string(number)}});
    text(r.message->content);
    end_message();
  }

  void assistant(const Message& m) {
    begin("message", speaker(m));
    if (thinking_) {
      begin("think");
      text(m.reasoning);
      end("think");
    }
    begin("response");
    text(m.content);
    end("response");
    if (!m.tool_calls.empty()) {
      begin("tools");
      for (size_t i = 0; i < m.tool_calls.size(); ++i) {
        begin("call", {{"tool", m.tool_calls[i].name}, {"index", std::to_string(i + 1)}});
        arguments(m.tool_calls[i].arguments);
        end("call");
      }
      end("tools");
    }
    end_message();
  }

  void arguments(const std::string& json) {
    std::vector<JsonMember> members;
    if (json.empty()) return;
    if (!read_members(json, members)) {
      begin("json", {{"type", "object"}});
      text(json);
      return end("json");
    }
    for (const JsonMember& a : members) {
      begin("argument", {{"key", a.key}, {"type", a.type}});
      text(a.value);
      end("argument");
    }
  }

  void response_format(const std::string& text) {
    const Json format = Json::parse(print_json(text, JsonStyle::in_order_compact, "response_format"));
    const std::string type = format.is_object() && format.contains("type") && format["type"].is_string() ? format["type"] : "";
    const char* raw = "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting.";
    if (type == "json_object") {
      system("response-format", std::string("The system is invoked with `response_format=json_object`.\n") + raw);
    } else if (type == "json_schema") {
      K3_CHECK(format.contains("json_schema") && format["json_schema"].is_object(), "[chat] response_format needs an object json_schema");
      const Json& outer = format["json_schema"];
      const Json& schema = outer.contains("schema") ? outer["schema"] : outer.contains("json_schema") ? outer["json_schema"] : outer;
      system("response-format", std::string("The system is invoked with `response_format=json_schema`.\n") + raw +
                                    "\nThe JSON data must match the following schema:\n```json\n" +
                                    print_json(schema.dump(), JsonStyle::sorted_compact, "the schema") + "\n```");
    } else {
      K3_CHECK(type == "text", "[chat] response_format must be an object with type text, json_object or json_schema");
    }
  }

  bool thinking_;
};

// Kimi-Linear's format, that of the K2 family (model.md 7.6). Between two special tokens there is one segment.
class KimiLinear {
 public:
  std::vector<Segment> segments;

  KimiLinear(const std::vector<Message>& messages, const ChatOptions& o) {
    if (has_tools(o.tools)) turn("<|im_system|>", "tool_declare", print_json(o.tools, JsonStyle::in_order_compact, "tools"));
    const Message* caller = nullptr;
    int first = 0;  // number of the caller's first call in the conversation
    int results = 0, calls = 0;
    for (size_t i = 0; i < messages.size(); ++i) {
      const Message& m = messages[i];
      const std::string& name = m.name.empty() ? m.role : m.name;
      if (m.role == "tool") {
        const std::vector<Result> run = results_from(messages, i, caller);
        for (const Result& r : run) {
          const size_t answered = r.call >= 0 ? size_t(r.call) : size_t(results);
          ++results;
          K3_CHECK(caller && answered < caller->tool_calls.size(), "[chat] {}: it answers no tool call before it; give tool_call_id",
                   where(messages, i));
          turn("<|im_system|>", "tool", "## Return of " + id(*caller, answered, first) + "\n" + joined(r.message->content));
        }
        i += run.size() - 1;
      } else if (m.role == "assistant") {
        open("<|im_assistant|>", name);
        text(joined(m.content));
        caller = &m, first = calls, results = 0;
        if (!m.tool_calls.empty()) {
          control("<|tool_calls_section_begin|>");
          for (size_t c = 0; c < m.tool_calls.size(); ++c, ++calls) {
            control("<|tool_call_begin|>");
            text(id(m, c, first));
            control("<|tool_call_argument_begin|>");
            text(m.tool_calls[c].arguments.empty() ? "{}" : m.tool_calls[c].arguments);
            control("<|tool_call_end|>");
          }
          control("<|tool_calls_section_end|>");
        }
        control("<|im_end|>");
      } else if (!m.tools.empty() && has_tools(m.tools)) {
        turn("<|im_system|>", "tool_declare", print_json(m.tools, JsonStyle::in_order_compact, "tools"));
      } else {
        turn(m.role == "user" ? "<|im_user|>" : "<|im_system|>", name, joined(m.content));
      }
    }
    if (o.generation_prompt) open("<|im_assistant|>", "assistant");
  }

 private:
  void control(const char* name) { segments.push_back({name, true}); }
  void text(std::string s) {
    if (!s.empty()) segments.push_back({std::move(s), false});
  }
  void open(const char* who, const std::string& name) {
    control(who);
    text(name);
    control("<|im_middle|>");
  }
  void turn(const char* who, const std::string& name, std::string content) {
    open(who, name);
    text(std::move(content));
    control("<|im_end|>");
  }
  static std::string joined(const std::vector<std::string>& parts) {
    std::string out;
    for (const std::string& p : parts) out += p;
    return out;
  }
  static std::string id(const Message& caller, size_t call, int first) {
    return fmt::format("functions.{}:{}", caller.tool_calls[call].name, first + int(call));
  }
};

}  // namespace

ChatFormat chat_format(const Tokenizer& t) {
  auto has = [&](std::initializer_list<const char*> names) {
    return std::all_of(names.begin(), names.end(), [&](auto n) { return t.special(n).has_value(); });
  };
  if (has({"<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"})) return ChatFormat::xtml;
  K3_CHECK(
      has({"<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"}),
      "[chat] the tokenizer has the special tokens of no chat format: neither <|open|>, <|close|>, <|sep|>, <|end_of_msg|> nor <|im_user|> and the "
      "like; see added_tokens_decoder in tokenizer_config.json");
  return ChatFormat::kimi_linear;
}

std::vector<Segment> render_chat(ChatFormat format, const std::vector<Message>& messages, const ChatOptions& options) {
  check(messages, options);
  return format == ChatFormat::xtml ? Xtml(messages, options).segments : KimiLinear(messages, options).segments;
}

std::vector<Segment> render_chat(const Tokenizer& t, const std::vector<Message>& messages, const ChatOptions& options) {
  return render_chat(chat_format(t), messages, options);
}

std::vector<int32_t> encode(const Tokenizer& t, const std::vector<Segment>& segments) {
  std::vector<int32_t> ids;
  for (const Segment& s : segments) {
    if (!s.control) {
      t.encode(s.text, ids);
      continue;
    }
    const auto id = t.special(s.text);
    K3_CHECK(id, "[chat] the tokenizer has no special token {}; see added_tokens_decoder in tokenizer_config.json", s.text);
    ids.push_back(*id);
  }
  return ids;
}

}  // namespace k3
