// The JSON form of messages, as chat requests have it.
#include <nlohmann/json.hpp>

#include "k3/core/error.h"
#include "k3/tokenizer/chat.h"
#include "k3/tokenizer/json_text.h"

namespace k3 {
namespace {

using Json = nlohmann::ordered_json;

// The first of the fields that is a string; absent and null are the empty string, anything else is an Error.
std::string text_field(const Json& object, std::initializer_list<const char*> names, const std::string& where) {
  for (const char* name : names) {
    const auto field = object.find(name);
    if (field == object.end() || field->is_null()) continue;
    K3_CHECK(field->is_string(), "[chat] {}: {} must be a string, it is {}", where, name, field->type_name());
    return *field;
  }
  return {};
}

std::vector<std::string> content_of(const Json& message, const std::string& where) {
  const auto content = message.find("content");
  if (content == message.end() || content->is_null()) return {};
  if (content->is_string()) return {content->get<std::string>()};
  K3_CHECK(content->is_array(), "[chat] {}: content must be a string or a list of parts, it is {}", where, content->type_name());
  std::vector<std::string> parts;
  for (const Json& part : *content) {
    const std::string type = part.is_object() ? text_field(part, {"type"}, where) : "";
    K3_CHECK(part.is_string() || (type == "text" && part.contains("text") && part["text"].is_string()),
             "[chat] {}: a part of the content is {}; this model reads text parts only", where, type.empty() ? part.type_name() : type);
    parts.push_back(part.is_string() ? part.get<std::string>() : part["text"].get<std::string>());
  }
  return parts;
}

ToolCall call_of(const Json& call, const std::string& where) {
  K3_CHECK(call.is_object() && call.contains("function") && call["function"].is_object(), "[chat] {}: a tool call must be an object with a function",
           where);
  const Json& function = call["function"];
  ToolCall out{.id = text_field(call, {"id"}, where), .name = text_field(function, {"name"}, where), .arguments = {}};
  K3_CHECK(!out.name.empty(), "[chat] {}: a tool call has no function name", where);
  const auto arguments = function.find("arguments");
  if (arguments == function.end() || arguments->is_null()) return out;
  K3_CHECK(arguments->is_string() || arguments->is_object(), "[chat] {}: arguments of {} must be a JSON text or an object", where, out.name);
  out.arguments = arguments->is_string() ? arguments->get<std::string>() : print_json(arguments->dump(), JsonStyle::in_order_spaced, "arguments");
  return out;
}

}  // namespace

std::vector<Message> parse_messages(std::string_view json) {
  const auto not_too_deep = [](int depth, Json::parse_event_t, Json&) {  // printing goes into itself
    K3_CHECK(depth < 200, "[chat] messages nest deeper than 200 levels");
    return true;
  };
  const Json list = Json::parse(json, not_too_deep, false);
  K3_CHECK(list.is_array(), "[chat] messages must be a JSON array");
  std::vector<Message> messages;
  for (const Json& m : list) {
    std::string where = fmt::format("message {}", messages.size() + 1);
    K3_CHECK(m.is_object(), "[chat] {} must be an object, it is {}", where, m.type_name());
    Message out{.role = text_field(m, {"role"}, where)};
    where += " (" + out.role + ")";
    out.name = out.role == "tool" ? text_field(m, {"tool", "name"}, where) : text_field(m, {"name"}, where);
    out.content = content_of(m, where);
    out.reasoning = text_field(m, {"reasoning_content", "reasoning"}, where);
    if (out.role == "tool") out.tool_call_id = text_field(m, {"tool_call_id", "id"}, where);
    if (const auto calls = m.find("tool_calls"); calls != m.end() && !calls->is_null()) {
      K3_CHECK(calls->is_array(), "[chat] {}: tool_calls must be a list", where);
      for (const Json& call : *calls) out.tool_calls.push_back(call_of(call, where));
    }
    if (const auto tools = m.find("tools"); tools != m.end() && !tools->is_null() && !tools->empty()) out.tools = tools->dump();
    const bool may_be_empty = out.role == "assistant" || !out.tools.empty();
    K3_CHECK(may_be_empty || (m.contains("content") && !m["content"].is_null()), "[chat] {} has no content", where);
    messages.push_back(std::move(out));
  }
  return messages;
}

}  // namespace k3
