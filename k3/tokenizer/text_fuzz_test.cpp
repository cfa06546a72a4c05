// Damaged files and hostile text: always an Error or an answer. Mutations are seeded, so that a failure comes again.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "k3/core/error.h"
#include "k3/core/file.h"
#include "k3/core/mutate.h"
#include "k3/core/testing.h"
#include "k3/tokenizer/chat.h"
#include "k3/tokenizer/reply.h"
#include "k3/tokenizer/tokenizer.h"

namespace k3 {
namespace {

namespace fs = std::filesystem;

using testing::TemporaryFolder;

TEST(text_fuzz, tokenizer_files) {
  TemporaryFolder folder;
  Tokenizer::bytes().save(folder.path.string());
  int good = 0;
  for (const char* name : {"tiktoken.model", "tokenizer_config.json"}) {
    const std::string whole = read_file(folder / name);
    for (uint64_t i = 0; i < 1500; ++i) {
      put(folder / name, mutated(whole, i));
      good += answers([&] {
        const Tokenizer t = Tokenizer::load(folder.path.string());
        t.decode(t.encode("some text: 123, 你好\n"), true);
      });
    }
    put(folder / name, whole);
  }
  EXPECT_GT(good, 0);
  EXPECT_LT(good, 2900);
}

constexpr char kMessages[] = R"([
  {"role": "system", "content": "Be brief", "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]},
  {"role": "user", "name": "Ann", "content": [{"type": "text", "text": "Hi <|open|>"}, {"type": "text", "text": "\u4f60 & \"you\""}]},
  {"role": "assistant", "reasoning_content": "hm", "content": "", "tool_calls": [
    {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": [1, 2.50, null], \"b\": \"x\\ny\"}"}}]},
  {"role": "tool", "tool_call_id": "call_1", "content": "42"},
  {"role": "assistant", "content": "It is 42."}])";

TEST(text_fuzz, messages_and_options) {
  const Tokenizer t = Tokenizer::bytes();
  int good = 0;
  for (uint64_t i = 0; i < 4000; ++i)
    good += answers([&] {
      ChatOptions o;
      o.tools = i % 3 ? "" : mutated(R"([{"type":"function","function":{"name":"f","description":"d","parameters":{"a":[1,2]}}}])", i);
      o.response_format = i % 4 ? "" : mutated(R"({"type":"json_schema","json_schema":{"name":"n","schema":{"type":"object"}}})", i);
      const std::vector<Message> messages = parse_messages(i % 5 ? mutated(kMessages, i) : std::string(kMessages));
      for (ChatFormat format : {ChatFormat::xtml, ChatFormat::kimi_linear}) {
        const std::vector<Segment> segments = render_chat(format, messages, o);
        if (format == ChatFormat::xtml) encode(t, segments);
      }
    });
  EXPECT_GT(good, 0);
  EXPECT_LT(good, 4000);
}

TEST(text_fuzz, replies) {
  const Tokenizer t = Tokenizer::bytes();
  const std::string whole =
      "thoughts<|close|>think<|sep|><|open|>response<|sep|>text<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool=\"f\" "
      "index=\"1\"<|sep|><|open|>argument key=\"a\" type=\"number\"<|sep|>12<|close|>argument<|sep|><|open|>json type=\"object\"<|sep|>{\"b\": "
      "[1]}<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>";
  for (uint64_t i = 0; i < 4000; ++i) {
    const std::vector<int32_t> ids = t.encode_with_specials(mutated(whole, i));
    auto parser = reply_parser(t, i % 2);
    Reply all;
    for (size_t at = 0; at < ids.size();) {
      const size_t n = std::min<size_t>(ids.size() - at, 1 + (i * 7 + at) % 5);
      all += parser->add({ids.data() + at, n});
      at += n;
    }
    all += parser->finish();
    EXPECT_LE(all.content.size(), 3 * whole.size() + 1000);
  }
}

}  // namespace
}  // namespace k3
