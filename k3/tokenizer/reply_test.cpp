#include "k3/tokenizer/reply.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <random>

#include <nlohmann/json.hpp>

#include "k3/core/error.h"
#include "k3/core/file.h"
#include "k3/tokenizer/chat.h"
#include "k3/tokenizer/json_text.h"
#include "k3/tokenizer/learn.h"
#include "k3/tokenizer/stop_ids.h"
#include "k3/tokenizer/stream.h"

namespace k3 {
namespace {

using Ids = std::vector<int32_t>;
using Json = nlohmann::json;

const Tokenizer& bytes() {
  static const Tokenizer t = Tokenizer::bytes();
  return t;
}

Tokenizer kimi_linear_tokenizer() {
  const std::string folder = std::filesystem::temp_directory_path() / ("k3_reply_test_" + std::to_string(getpid()));
  bytes().save(folder);
  Json added;
  int id = 256;
  for (const char* name :
       {"[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"})
    added[std::to_string(id++)] = {{"content", name}};
  write_file(folder + "/tokenizer_config.json", Json{{"added_tokens_decoder", added}}.dump());
  Tokenizer t = Tokenizer::load(folder);
  std::filesystem::remove_all(folder);
  return t;
}

std::string show(const Reply& r) {
  std::string out = "think:" + r.reasoning + " say:" + r.content;
  for (const ReplyCall& c : r.calls) out += fmt::format(" call{}:{}:{}({})", c.index, c.id, c.name, c.arguments);
  return out;
}

Reply parse(const Tokenizer& t, const Ids& ids, bool thinking, const std::vector<size_t>& cuts = {}) {
  const auto parser = reply_parser(t, thinking);
  Reply whole;
  size_t at = 0;
  for (size_t i = 0; i <= cuts.size(); ++i) {
    const size_t end = i < cuts.size() ? cuts[i] : ids.size();
    const Reply delta = parser->add(std::span(ids).subspan(at, end - at));
    for (const std::string* s : {&delta.reasoning, &delta.content}) EXPECT_EQ(replace_invalid_utf8(*s), *s) << "every delta is UTF-8";
    for (const ReplyCall& c : delta.calls) EXPECT_EQ(replace_invalid_utf8(c.arguments), c.arguments);
    whole += delta;
    at = end;
  }
  return whole += parser->finish();
}

// A reply as the model writes it; special tokens by their names. Thinking unless it begins in the answer.
Reply parse(const std::string& script, bool thinking = true) { return parse(bytes(), bytes().encode_with_specials(script), thinking); }

constexpr char kTool[] =
    "think about it<|close|>think<|sep|><|open|>response<|sep|>Sure: 中<|close|>response<|sep|><|open|>tools<|sep|>"
    "<|open|>call tool=\"python\" index=\"1\"<|sep|><|open|>argument key=\"code\" type=\"string\"<|sep|>print(\"a\\b\")\n😀<|close|>argument<|sep|>"
    "<|open|>argument key=\"o\" type=\"object\"<|sep|>{\"t\": [1, 2]}<|close|>argument<|sep|><|close|>call<|sep|>"
    "<|open|>call tool=\"x&amp;&quot;\" index=\"9\" id=\"mine\"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>";
const std::string kToolShown =
    "think:think about it say:Sure: 中 call0:call_0:python({\"code\": \"print(\\\"a\\\\b\\\")\\n😀\", \"o\": {\"t\": [1, 2]}}) call1:mine:x&\"({})";

const char* const kScripts[] = {
    kTool,
    "a<|close|>think<|sep|><|open|>response<|sep|>b<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>",
    "cut in the mid",
    "cut in a char \xE4\xB8",
    "a<|close|>thi",
    "look <|op and < and <|close|>think<|sep|><|open|>response<|sep|>this: < |open|> <",
    "\xF0\x9F\x98<|close|>think<|sep|>\x80",
    "t<|open|>tools<|sep|><|open|>call tool=\"f\" index=\"1\"<|sep|><|open|>argument key=\"k\" type=\"string\"<|sep|>half a val\xC3",
    "t<|open|>tools<|sep|><|open|>call tool=\"f\" index=\"1\"<|sep|><|open|>argument key=\"k\" type=\"object\"<|sep|>{\"a\": ",
    "t<|open|>tools<|sep|><|open|>call tool=\"f\" index=\"1\"<|sep|><|open|>json type=\"object\"<|sep|>{\"a\": "
    "1}<|close|>json<|sep|><|close|>call<|sep|>",
};

TEST(reply, a_tool_turn_is_read) { EXPECT_EQ(show(parse(kTool)), kToolShown); }
TEST(reply, every_split_of_the_stream_gives_the_whole_reply) {
  for (const char* script : kScripts) {
    const Ids ids = bytes().encode_with_specials(script);
    const std::string whole = show(parse(bytes(), ids, true));
    EXPECT_EQ(whole.find("<|close|>"), whole.npos) << "no marker in any field";
    for (size_t cut = 0; cut <= ids.size(); ++cut) ASSERT_EQ(show(parse(bytes(), ids, true, {cut})), whole);
    for (size_t step = 1; step <= 5; ++step) {
      std::vector<size_t> cuts;
      for (size_t at = step; at < ids.size(); at += step) cuts.push_back(at);
      ASSERT_EQ(show(parse(bytes(), ids, true, cuts)), whole);
    }
  }
}
TEST(reply, text_is_split_between_thinking_and_answer) {
  EXPECT_EQ(show(parse("a<|close|>think<|sep|><|open|>response<|sep|>b<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>ignored")),
            "think:a say:b");
  EXPECT_EQ(show(parse("only an answer<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>", false)), "think: say:only an answer");
  EXPECT_EQ(show(parse("thinking until the limit")), "think:thinking until the limit say:");
  EXPECT_EQ(show(parse("a<|close|>think<|sep|><|open|>think<|sep|>b<|close|>think<|sep|><|open|>response<|sep|>c")), "think:ab say:c")
      << "two thinking parts";
}
TEST(reply, a_character_ends_with_its_field) { EXPECT_EQ(show(parse("\xF0\x9F\x98<|close|>think<|sep|>\x80")), "think:\uFFFD say:\uFFFD"); }
TEST(reply, markers_spelled_by_ordinary_tokens_are_text) {
  Ids ids = bytes().encode("<|close|>think<|sep|> <|end_of_msg|> <|op");
  EXPECT_EQ(parse(bytes(), ids, true).reasoning, "<|close|>think<|sep|> <|end_of_msg|> <|op");
}
TEST(reply, what_the_model_forgets_to_close_is_closed) {
  EXPECT_EQ(show(parse("a<|open|>response<|sep|>b")), "think:a say:b") << "think";
  EXPECT_EQ(show(parse("a<|open|>response<|sep|>b<|close|>response<|sep|>c")), "think:a say:bc");
  EXPECT_EQ(
      show(parse("a<|open|>tools<|sep|><|open|>call tool=\"f\"<|sep|><|open|>argument key=\"k\" type=\"number\"<|sep|>1<|close|>message<|sep|>")),
      "think:a say: call0:call_0:f({\"k\": 1})")
      << "think, argument, call and tools";
  EXPECT_EQ(show(parse("a<|open|>call tool=\"f\"<|sep|><|open|>call tool=\"g\"<|sep|><|end_of_msg|>")),
            "think:a say: call0:call_0:f({}) call1:call_1:g({})");
  EXPECT_EQ(show(parse("a<|close|>response<|sep|>b<|close|>think<|sep|>c")), "think:ab say:c") << "a close without an open";
  EXPECT_EQ(show(parse("a<|close|>think<|sep|><|open|>response<|sep|>b<|close|>message<|sep|><|end_of_msg|>")), "think:a say:b");
  EXPECT_EQ(show(parse("a<|close|>think<|open|>response<|open|>tools<|sep|> \n <|open|>call tool=\"f\"<|sep|> x <|close|>call<|sep|>")),
            "think:a say: call0:call_0:f({})")
      << "separators are missing; text between calls is dropped";
  EXPECT_EQ(show(parse("<|open|>call tool=\"f\"<|sep|><|open|>argument key=\"a\" type=\"string\"<|sep|>1<|open|>argument key=\"b\" "
                       "type=\"string\"<|sep|>2<|end_of_msg|>")),
            "think: say: call0:call_0:f({\"a\": \"1\", \"b\": \"2\"})");
}
TEST(reply, a_value_that_is_no_json_becomes_a_string) {
  auto value = [](const std::string& type, const std::string& text) {
    return parse("<|open|>call tool=\"f\"<|sep|><|open|>argument key=\"k\"" + type + "<|sep|>" + text + "<|end_of_msg|>").calls[0].arguments;
  };
  EXPECT_EQ(value(" type=\"object\"", "{\"a\": 1"), R"({"k": "{\"a\": 1"})");
  EXPECT_EQ(value(" type=\"number\"", "1.50"), R"({"k": 1.50})");
  EXPECT_EQ(value(" type=\"null\"", "null"), R"({"k": null})");
  EXPECT_EQ(value(" type=\"boolean\"", ""), R"({"k": ""})");
  EXPECT_EQ(value(" type=\"string\"", "1"), R"({"k": "1"})");
  EXPECT_EQ(value("", "1"), R"({"k": "1"})");
}
TEST(reply, a_long_string_argument_flows_and_the_first_delta_has_name_and_id) {
  const auto parser = reply_parser(bytes(), true, "call_7_");
  const Reply first = parser->add(bytes().encode_with_specials("x<|open|>call tool=\"f\"<|sep|>"));
  ASSERT_EQ(first.calls.size(), 1u);
  EXPECT_EQ(first.calls[0].id + first.calls[0].name, "call_7_0f");
  parser->add(bytes().encode_with_specials("<|open|>argument key=\"k\" type=\"string\"<|sep|>"));
  for (const char* text : {"a", "\"", "\n", "z"}) {
    const Reply delta = parser->add(bytes().encode(text));
    ASSERT_EQ(delta.calls.size(), 1u);
    EXPECT_EQ(delta.calls[0].arguments, escape_json(text));
    EXPECT_EQ(delta.calls[0].id + delta.calls[0].name, "");
  }
}
TEST(reply, knows_when_it_thinks_and_counts_thoughts) {
  const auto parser = reply_parser(bytes(), true);
  parser->add(bytes().encode_with_specials("abc"));
  EXPECT_TRUE(parser->thinking());
  parser->add(bytes().encode_with_specials("<|close|>think<|sep|><|open|>response<|sep|>xy"));
  EXPECT_FALSE(parser->thinking());
  EXPECT_EQ(parser->reasoning_tokens(), 3);
  EXPECT_FALSE(parser->done());
  parser->add(bytes().encode_with_specials("<|end_of_msg|>"));
  EXPECT_TRUE(parser->done());
}
TEST(reply, random_ids_never_break_it) {
  std::mt19937 random(4);
  const char* const words[] = {
      "<|open|>", "<|close|>", "<|sep|>", "think",   "response", "tools", "call tool=\"f\"", "argument key=\"k\" type=\"number\"",
      "json",     "1",         "\xE4",    "message", "[EOS]",    "x",     " a=\"",           "<|reserved_token_300|>"};
  for (int i = 0; i < 3000; ++i) {
    Ids ids;
    for (int n = 40; n > 0; --n)
      for (const int32_t id : bytes().encode_with_specials(words[random() % std::size(words)])) ids.push_back(id);
    const std::string whole = show(parse(bytes(), ids, i % 2));
    const size_t cut = random() % ids.size();
    ASSERT_EQ(show(parse(bytes(), ids, i % 2, {cut})), whole);
    ids.push_back(*bytes().special("<|end_of_msg|>"));
    for (const ReplyCall& c : parse(bytes(), ids, i % 2).calls) {
      const bool raw = !c.arguments.starts_with("{");  // a json element is passed on as it is
      EXPECT_TRUE(raw || is_json(c.arguments)) << c.arguments;
    }
  }
  const auto parser = reply_parser(bytes(), true);
  EXPECT_THAT([&] { parser->add(Ids{512}); }, ::testing::ThrowsMessage<Error>(::testing::HasSubstr("there is no token 512")));
}
TEST(reply, what_was_rendered_is_read_back) {
  const Tokenizer learned =
      learn(400, [](const AddText& add) { add("message role assistant think response tools call argument key type string the tool tool"); });
  std::mt19937 random(5);
  auto text = [&] {
    std::string s;
    for (int n = int(random() % 6); n > 0; --n)
      s += std::vector<std::string>{"a", " ", "\n", "\"", "&", "&quot;", "<|open|>", "中", "😀", "{", "\\", "<|end_of_msg|>"}[random() % 12];
    return s;
  };
  for (const Tokenizer* t : {&bytes(), &learned})
    for (int i = 0; i < 300; ++i) {
      Message m = {.role = "assistant", .content = {text()}, .reasoning = text()};
      for (int n = int(random() % 3); n > 0; --n) {
        std::string arguments = "{";
        for (int k = int(random() % 3); k > 0; --k)
          arguments += (arguments.size() > 1 ? ", " : "") + quote_json(text()) + ": " +
                       (random() % 2 ? quote_json(text()) : std::string("{\"n\": [1, 2.50, null, " + quote_json(text()) + "]}"));
        m.tool_calls.push_back({"", "f\"" + std::to_string(n), arguments + "}"});
      }
      const bool thinking = i % 2;
      const auto segments = render_chat(*t, {m}, {.thinking = thinking, .effort = "", .generation_prompt = false});
      const auto prompt = render_chat(*t, {}, {.thinking = thinking, .effort = ""});
      ASSERT_TRUE(std::equal(prompt.begin(), prompt.end(), segments.begin(),
                             [](const Segment& a, const Segment& b) { return a.text == b.text && a.control == b.control; }));
      const Ids ids = encode(*t, {segments.begin() + long(prompt.size()), segments.end()});
      const Reply r = parse(*t, ids, thinking, {random() % (ids.size() + 1)});
      EXPECT_EQ(r.content, m.content[0]);
      EXPECT_EQ(r.reasoning, thinking ? m.reasoning : "");
      ASSERT_EQ(r.calls.size(), m.tool_calls.size());
      for (size_t c = 0; c < r.calls.size(); ++c) {
        EXPECT_EQ(r.calls[c].name, m.tool_calls[c].name);
        EXPECT_EQ(r.calls[c].arguments, m.tool_calls[c].arguments);
        EXPECT_EQ(r.calls[c].index, int(c));
      }
    }
}

TEST(reply, kimi_linear_calls_are_read_at_every_split) {
  const Tokenizer t = kimi_linear_tokenizer();
  const Ids ids = t.encode_with_specials(
      "Let me see 中<|tool_calls_section_begin|> <|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>{\"q\": \"😀\"}<|tool_call_end|>"
      "<|tool_call_begin|>functions.a:b:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|><|im_end|>x");
  for (size_t cut = 0; cut <= ids.size(); ++cut)
    ASSERT_EQ(show(parse(t, ids, false, {cut})), "think: say:Let me see 中 call0:functions.get:0:get({\"q\": \"😀\"}) call1:functions.a:b:1:a:b({})");
  EXPECT_EQ(show(parse(t, t.encode_with_specials("plain <|im_end|>"), false)), "think: say:plain ");
}

TEST(stop_ids, come_from_every_file_and_say_so) {
  const std::string folder = std::filesystem::temp_directory_path() / ("k3_stop_ids_test_" + std::to_string(getpid()));
  std::filesystem::create_directories(folder);
  auto stops = [&](const std::string& generation, const std::string& config) {
    for (const auto& [name, text] : {std::pair{"generation_config.json", generation}, {"config.json", config}}) {
      std::filesystem::remove(folder + "/" + name);
      if (!text.empty()) write_file(folder + "/" + name, text);
    }
    std::string out;
    for (const StopId& s : stop_ids(folder, bytes())) out += fmt::format("{} from {}; ", s.id, s.from);
    return out;
  };
  const std::string always = "257 from tokenizer_config.json; 258 from the chat format; ";
  EXPECT_EQ(stops("", ""), always);
  EXPECT_EQ(stops(R"({"eos_token_id": 258})", R"({"text_config": {"eos_token_id": 258}})"),
            "257 from tokenizer_config.json; 258 from generation_config.json, config.json, the chat format; ");
  EXPECT_EQ(stops(R"({"eos_token_id": [300, 7]})", R"({"eos_token_id": null})"),
            "7 from generation_config.json; " + always + "300 from generation_config.json; ");
  auto refuses = [&](const std::string& config, const std::string& part) {
    EXPECT_THAT([&] { stops(config, ""); }, ::testing::ThrowsMessage<Error>(::testing::HasSubstr(part)));
  };
  refuses(R"({"eos_token_id": 512})", "generation_config.json: eos_token_id has 512, which is no id of the tokenizer (0 to 511)");
  refuses(R"({"eos_token_id": ["x"]})", "eos_token_id has \"x\"");
  refuses("[", "is not a JSON object");
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace k3
