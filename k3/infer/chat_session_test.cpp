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

}  // namespace
}  // namespace k3
