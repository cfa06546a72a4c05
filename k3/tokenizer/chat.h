#pragma once
// Chat: messages to token ids. Two published formats (model.md 7.4 and 7.6), told apart by the special tokens that a tokenizer has.
//
//   std::vector<Message> messages = {{.role = "user", .content = {"Hi"}}};
//   std::vector<int32_t> ids = encode(tokenizer, render_chat(tokenizer, messages, {.effort = "high"}));
//
// A conversation is a list of segments, each tokenised by itself (byte pair encoding of joined text would give other ids). A control segment is
// one special token that this file put there. Everything else, from a message or from us, is a text segment and never becomes a special
// token, whatever it says.
//
//   XTML (K3)     <|open|>message role="user"<|sep|>Hi<|close|>message<|sep|><|end_of_msg|>
//                 <|open|>message role="assistant"<|sep|><|open|>think<|sep|>
//   Kimi-Linear   <|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|>
//
// Kimi-Linear's format has no words for thinking, effort, tool_choice and response_format: there the caller sees to them.
// Errors say which message is at fault: unknown role, a tool result that answers no call, names with control characters, an unknown effort.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace k3 {

class Tokenizer;

struct ToolCall {
  std::string id;
  std::string name;
  std::string arguments;  // JSON text, as the model or the client wrote it
};

struct Message {
  std::string role;                       // system, user, assistant, tool
  std::string name = {};                  // of the speaker; for a tool result, of the function
  std::vector<std::string> content = {};  // text parts, each a segment
  std::string reasoning = {};             // assistant: what it thought
  std::vector<ToolCall> tool_calls = {};
  std::string tool_call_id = {};  // tool: the call that it answers
  std::string tools = {};         // system: a JSON array of further tools, in place of the content
};

struct ChatOptions {
  bool thinking = true;              // XTML: the model thinks first
  std::string effort = "max";        // XTML, when thinking: low, high, max; empty: say nothing of it
  std::string tools = {};            // JSON array in the usual form, or empty
  std::string tool_choice = {};      // "required", "none"; anything else leaves the choice to the model
  std::string response_format = {};  // JSON object with a type: text, json_object, json_schema; or empty
  bool generation_prompt = true;     // end with the beginning of the assistant's turn
};

// The usual JSON form of chat requests: an array of objects with role, content (text, or text parts), reasoning_content or reasoning,
// tool_calls, tool_call_id or id, tool or name, tools.
std::vector<Message> parse_messages(std::string_view json);

struct Segment {
  std::string text;
  bool control = false;  // text is the name of one special token
};

enum class ChatFormat { xtml, kimi_linear };
ChatFormat chat_format(const Tokenizer&);  // Error when the tokenizer has the special tokens of neither

std::vector<Segment> render_chat(ChatFormat, const std::vector<Message>&, const ChatOptions&);
std::vector<Segment> render_chat(const Tokenizer&, const std::vector<Message>&, const ChatOptions&);
std::vector<int32_t> encode(const Tokenizer&, const std::vector<Segment>&);

}  // namespace k3
