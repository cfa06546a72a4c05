#include "k3/infer/chat_session.h"

#include <gtest/gtest.h>

#include "k3/model/testing.h"
#include "k3/ops/testing.h"

namespace k3 {
namespace {

using testing::throws_error;

// A small K3 (or Kimi-Linear shape) that reads bytes: 256 of them and K3's specials.
struct Small {
  Tokenizer tokenizer = Tokenizer::bytes();
  std::unique_ptr<Model> model;
  ChatSettings settings;
  explicit Small(bool k3 = true) {
    Config c = k3 ? testing::tiny_k3() : testing::tiny_linear();
    c.vocab_size = tokenizer.vocabulary();
    c.finish();
    model = std::make_unique<Model>(c);
    testing::fill(*model);
    settings.generate.sample = {.temperature = 1, .seed = 5};
    settings.generate.max_tokens = 24;
    settings.generate.stop_ids = {*tokenizer.special("<|end_of_msg|>")};
    settings.chat.effort = "low";
  }
  // Always some ASCII character: an answer of these has one spelling in ids, and each is shown at once.
  void write_ascii() {
    for (Param& p : model->params().all())
      if (p.name == "lm_head.weight") std::fill(p.value.f32() + 128 * p.shape[1], p.value.f32() + p.shape.size(), 0.0f);
    settings.generate.sample.temperature = 0;
  }
  ChatSession session() { return ChatSession(*model, tokenizer, settings); }
  std::vector<float> logits(const Session& s) const { return {s.logits(), s.logits() + s.vocabulary()}; }
  // Logits and answer of a session that reads `ids` in one go.
  std::pair<std::vector<float>, std::vector<int32_t>> cold(std::span<const int32_t> ids, uint64_t seed = 5) const {
    Session s(*model, {});
    GenerateOptions o = settings.generate;
    o.sample.seed = seed;
    std::vector<float> first;
    Generated g = generate(s, tokenizer, ids, o, nullptr, [&](int64_t done) {
      if (done == int64_t(ids.size())) first = {s.logits(), s.logits() + s.vocabulary()};
    });
    return {first, g.ids};
  }
};

const auto ignore = [](const Reply&) { return true; };

TEST(chat_session, a_turn_reads_only_what_is_new_and_answers_as_a_cold_run) {
  for (bool k3 : {true, false}) {
    Small m(k3);
    ChatSession chat = m.session();
    size_t before = 0;
    for (const char* question : {"Hello there", "And then?", "Why?"}) {
      const ChatTurn t = chat.ask(question, ignore);
      // all that the conversation holds before this answer, but for what was read in earlier turns; the last id written may still be unread
      std::vector<int32_t> ids = chat.ids();
      const std::span<const int32_t> prompt(ids.data(), size_t(t.context));
      EXPECT_EQ(t.generated.ids, m.cold(prompt).second) << question;
      EXPECT_EQ(size_t(t.generated.prompt_tokens), size_t(t.context) - before);
      before = size_t(chat.session().tokens());
    }
  }
}

TEST(chat_session, an_edit_is_a_cold_run_to_the_bit_and_reads_only_its_turn) {
  Small m;
  ChatSession chat = m.session();
  chat.ask("A rather long first question, so that there is something to save", ignore);
  const int64_t kept = chat.session().tokens();
  chat.ask("Second", ignore);
  const ChatTurn edited = chat.edit("Another second question", ignore);
  EXPECT_EQ(edited.generated.prompt_tokens, edited.context - kept);

  ChatSession straight = m.session();
  straight.ask("A rather long first question, so that there is something to save", ignore);
  const ChatTurn t = straight.ask("Another second question", ignore);
  EXPECT_EQ(chat.ids(), straight.ids());
  EXPECT_EQ(edited.generated.ids, t.generated.ids);
  EXPECT_EQ(edited.reply.content + edited.reply.reasoning, t.reply.content + t.reply.reasoning);
  EXPECT_EQ(m.logits(chat.session()), m.logits(straight.session()));
  EXPECT_EQ(edited.generated.ids, m.cold({chat.ids().data(), size_t(edited.context)}).second);
  const ChatTurn next = chat.ask("Third", ignore), other = straight.ask("Third", ignore);
  EXPECT_EQ(next.generated.ids, other.generated.ids);
}

TEST(chat_session, an_answer_given_again_has_the_next_seed) {
  Small m;
  ChatSession chat = m.session();
  chat.ask("First", ignore);
  const ChatTurn a = chat.ask("Second", ignore), b = chat.regenerate(ignore);
  EXPECT_EQ(a.context, b.context);
  EXPECT_EQ(a.generated.prompt_tokens, b.generated.prompt_tokens);
  EXPECT_NE(a.generated.ids, b.generated.ids);
  EXPECT_EQ(b.generated.ids, m.cold({chat.ids().data(), size_t(b.context)}, 6).second);
}

TEST(chat_session, the_history_is_what_the_format_says_of_the_whole_conversation) {
  for (bool thinking : {true, false}) {
    Small m;
    m.write_ascii();
    m.settings.generate.max_tokens = 3;
    m.settings.chat.thinking = thinking;
    m.settings.system = "Be brief";
    ChatSession chat = m.session();
    const ChatTurn first = chat.ask("Hi", ignore), second = chat.ask("More", ignore);
    EXPECT_EQ((thinking ? first.reply.reasoning : first.reply.content).size(), 3u);
    const std::vector<Message> all = {{.role = "system", .content = {"Be brief"}},
                                      {.role = "user", .content = {"Hi"}},
                                      {.role = "assistant", .content = {first.reply.content}, .reasoning = first.reply.reasoning},
                                      {.role = "user", .content = {"More"}}};
    const std::vector<int32_t> whole = encode(m.tokenizer, render_chat(m.tokenizer, all, m.settings.chat));
    EXPECT_EQ(std::vector<int32_t>(chat.ids().begin(), chat.ids().begin() + second.context), whole) << thinking;
  }
}

TEST(chat_session, a_stopped_answer_is_closed_and_a_stopped_question_taken_back) {
  Small m;
  m.write_ascii();
  ChatSession chat = m.session();
  int pieces = 0;
  const ChatTurn t = chat.ask("Hello", [&](const Reply&) { return ++pieces < 3; });
  EXPECT_TRUE(t.interrupted);
  EXPECT_LT(t.generated.ids.size(), 24u);
  EXPECT_EQ(chat.ids().back(), *m.tokenizer.special("<|end_of_msg|>"));
  const std::vector<int32_t> ids = chat.ids();
  const int64_t read = chat.session().tokens();
  EXPECT_TRUE(chat.ask("Never read", ignore, [](int64_t, int64_t) { return false; }).interrupted);
  EXPECT_EQ(chat.ids(), ids);
  EXPECT_EQ(chat.session().tokens(), read);
  EXPECT_THAT([&] { chat.regenerate(ignore); }, throws_error("no answer to give again"));
  const ChatTurn next = chat.ask("Go on", ignore);
  EXPECT_EQ(next.generated.ids, m.cold({chat.ids().data(), size_t(next.context)}).second);
}

TEST(chat_session, before_the_first_question_there_is_nothing_to_change) {
  Small m;
  ChatSession chat = m.session();
  EXPECT_THAT([&] { chat.edit("x", ignore); }, throws_error("no question to edit"));
  chat.ask("Hi", ignore);
  chat.reset();
  EXPECT_EQ(chat.ids().size(), 0u);
  EXPECT_EQ(chat.session().tokens(), 0);
  EXPECT_THAT([&] { chat.regenerate(ignore); }, throws_error("no answer to give again"));
}

TEST(chat_session, the_context_that_was_planned_for_is_not_exceeded) {
  Small m;
  m.write_ascii();
  ChatSession free = m.session();
  const int64_t asked = free.ask("Hello", ignore).context;
  m.settings.context = asked + 5;
  ChatSession chat = m.session();
  const ChatTurn t = chat.ask("Hello", ignore);
  EXPECT_EQ(t.generated.ids.size(), 5u);
  EXPECT_EQ(t.generated.finish, "length");
  const std::vector<int32_t> ids = chat.ids();
  EXPECT_THAT([&] { chat.ask("And more", ignore); }, throws_error(fmt::format("and there is room for {}: /reset forgets it", asked + 5)));
  EXPECT_EQ(chat.ids(), ids);  // the question that was too much is taken back
  chat.reset();
  EXPECT_EQ(chat.ask("Hello", ignore).generated.ids, t.generated.ids);
}

// Whatever a model writes, tag by tag or torn: what was shown piece by piece is the whole answer, and no marker is in it.
TEST(chat_session, the_streamed_answer_is_the_whole_answer_and_shows_no_marker) {
  for (bool k3 : {true, false})
    for (bool thinking : {true, false}) {
      Small m(k3);
      m.settings.chat.thinking = thinking && k3;
      m.settings.generate.max_tokens = 60;
      std::vector<std::string> markers;
      std::vector<int32_t> likely;  // tags and their names come often, so that parts open and close
      for (const char* name :
           {"<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "<|im_end|>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>"})
        if (auto id = m.tokenizer.special(name)) likely.push_back(*id), markers.push_back(name);
      for (Param& p : m.model->params().all())
        if (p.name == "lm_head.weight")
          for (int32_t id : likely)
            for (int64_t i = 0; i < p.shape[1]; ++i) p.value.f32()[id * p.shape[1] + i] *= 3;
      int64_t ended = 0, shown = 0;
      for (uint64_t seed = 0; seed < 40; ++seed) {
        m.settings.generate.sample.seed = seed;
        ChatSession chat = m.session();
        Reply joined;
        const ChatTurn t = chat.ask("Hello", [&](const Reply& delta) { return joined += delta, true; });
        auto parser = reply_parser(m.tokenizer, m.settings.chat.thinking);
        std::vector<int32_t> ids = t.generated.ids;
        if (t.generated.end >= 0) ids.push_back(t.generated.end), ++ended;
        Reply whole = parser->add(ids);
        whole += parser->finish();
        EXPECT_EQ(joined.content, whole.content);
        EXPECT_EQ(joined.reasoning, whole.reasoning);
        ASSERT_EQ(joined.calls.size(), whole.calls.size());
        std::string all = joined.content + joined.reasoning;
        for (size_t i = 0; i < whole.calls.size(); ++i) {
          EXPECT_EQ(joined.calls[i].arguments, whole.calls[i].arguments);
          all += joined.calls[i].name + joined.calls[i].arguments;
        }
        for (const std::string& marker : markers) EXPECT_EQ(all.find(marker), all.npos) << all;
        shown += !all.empty();
        // generate: the text as it comes, the text at the end, and the ids are one
        Session session(*m.model, {});
        std::string text;
        GenerateOptions o = m.settings.generate;
        const Generated g = generate(session, m.tokenizer, std::vector<int32_t>{65, 66}, o, [&](const std::string& s) { return text += s, true; });
        EXPECT_EQ(text, g.text);
        for (const std::string& marker : markers) EXPECT_EQ(text.find(marker), text.npos) << text;
      }
      EXPECT_GT(shown, 10);
      if (k3) { EXPECT_GT(ended, 3); }
    }
}

}  // namespace
}  // namespace k3
