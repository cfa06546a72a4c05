#include "k3/infer/decoder.h"

#include <gtest/gtest.h>

#include "k3/infer/session.h"
#include "k3/model/testing.h"
#include "k3/ops/testing.h"

namespace k3 {
namespace {

using testing::bytes_of;

// A small model on the GPU, and prompts of different lengths in its slots.
struct Small {
  Model model;
  static Config finished(Config c) { return c.finish(), c; }
  explicit Small(const Config& c) : model(finished(c)) {
    testing::fill(model);
    model.params().move_to(Device::cuda);
  }
  int32_t id(int64_t slot, int64_t i) const { return int32_t((slot * 31 + i * 17 + i * i) % model.config().vocab_size); }
  int64_t length(int64_t slot) const { return 1 + slot * 7 % 23; }
  // Slot s has read length(s) - 1 tokens; the last of its prompt is what the first step reads.
  ModelState state(int64_t slots) {
    ModelState s = model.new_state(slots, Device::cuda, true);
    Arena arena(size_t(1) << 30, Device::cuda);
    for (int64_t slot = 0; slot < slots; ++slot) {
      Context c;
      c.device = Device::cuda, c.arena = &arena;
      arena.rewind(0);
      std::vector<int32_t> ids;
      for (int64_t i = 0; i + 1 < length(slot); ++i) ids.push_back(id(slot, i));
      if (ids.empty()) continue;
      Batch b = Batch::one(int64_t(ids.size()));
      b.slots = {int32_t(slot)};
      model.forward(c, Tensor(ids.data(), DType::i32, {int64_t(ids.size())}), b, &s);
    }
    return s;
  }
  DecodeRow row(int64_t slot) const { return {int32_t(slot), options(slot), id(slot, length(slot) - 1)}; }
  static SampleOptions options(int64_t slot) {
    if (slot % 3 == 0) return {};
    return {.temperature = 0.7f + 0.1f * float(slot % 5), .top_k = slot % 2 ? 0 : 11, .top_p = slot % 3 == 1 ? 0.9f : 1.0f, .seed = uint64_t(slot)};
  }
};

// What a row of a run gave, step by step.
struct Decoded {
  std::vector<std::vector<int32_t>> ids;               // (rows, steps); -1 in filler
  std::vector<std::vector<std::vector<char>>> logits;  // (rows, steps)
  std::vector<std::string> states;                     // of every slot, at the end
};
std::string saved(const ModelState& s, int64_t slot) {
  Blob b;
  s.save(slot, b);
  return {b.bytes.begin(), b.bytes.end()};
}
Decoded run(Small& small, const std::vector<DecodeRow>& rows, int64_t slots, int64_t steps, bool captured) {
  ModelState state = small.state(slots);
  Decoder d(small.model, state, {.captured = captured});
  d.arena().set_poison(true);
  d.begin(rows);
  Decoded r;
  r.ids.resize(rows.size()), r.logits.resize(rows.size());
  for (int64_t i = 0; i < steps; ++i) {
    d.step();
    const std::vector<char> all = bytes_of(d.logits());
    const size_t row = size_t(small.model.config().vocab_size) * 4;
    for (size_t j = 0; j < rows.size(); ++j) {
      r.logits[j].push_back({all.begin() + ptrdiff_t(j * row), all.begin() + ptrdiff_t((j + 1) * row)});
      r.ids[j].push_back(rows[j].slot < 0 ? -1 : d.result(i, int64_t(j)));
    }
  }
  EXPECT_EQ(d.kernels() > 0, captured);
  for (int64_t s = 0; s < slots; ++s) r.states.push_back(saved(state, s));
  return r;
}

struct decoder : ::testing::Test {
  void SetUp() override {
    if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  }
};

TEST_F(decoder, captured_decode_equals_eager) {
  for (const Config& c : {testing::tiny_k3(), testing::tiny_linear()}) {
    Small small(c);
    const int64_t steps = testing::few_shapes() ? 10 : 150;  // over the border of a block
    for (int64_t n : testing::few_shapes() ? std::vector<int64_t>{3} : std::vector<int64_t>{1, 3, 9}) {
      std::vector<DecodeRow> rows;
      for (int64_t s = 0; s < n; ++s) rows.push_back(small.row(s));
      const Decoded eager = run(small, rows, n, steps, false), captured = run(small, rows, n, steps, true), again = run(small, rows, n, steps, true);
      EXPECT_EQ(eager.ids, captured.ids);
      EXPECT_TRUE(eager.logits == captured.logits) << n;
      EXPECT_TRUE(eager.states == captured.states) << n;
      EXPECT_TRUE(captured.logits == again.logits) << "two runs differ";
    }
  }
}

TEST_F(decoder, a_step_gives_the_bits_of_reading_token_by_token_and_all_at_once) {
  for (const Config& c : {testing::tiny_k3(), testing::tiny_linear()}) {
    Small small(c);
    DecodeRow row = small.row(3);
    const Decoded r = run(small, {row}, 4, testing::few_shapes() ? 10 : 140, true);
    Session one(small.model, {.captured = false}), all(small.model, {.captured = false});
    std::vector<int32_t> ids;
    for (int64_t i = 0; i + 1 < small.length(3); ++i) ids.push_back(small.id(3, i));
    one.read(ids);
    ids.push_back(row.id);
    for (size_t i = 0; i < r.ids[0].size(); ++i) {
      one.read({&ids.back(), 1});
      ASSERT_EQ(std::memcmp(one.logits(), r.logits[0][i].data(), r.logits[0][i].size()), 0) << "step " << i;
      ASSERT_EQ(sample(one.logits(), one.vocabulary(), row.sample, uint64_t(one.tokens())), r.ids[0][i]) << "step " << i;
      ids.push_back(r.ids[0][i]);
    }
    ids.pop_back();
    all.read(ids);
    EXPECT_EQ(std::memcmp(all.logits(), r.logits[0].back().data(), r.logits[0].back().size()), 0);
  }
}

TEST_F(decoder, filler_rows_full_of_nan_change_nothing) {
  Small small(testing::tiny_k3());
  const int64_t vocabulary = small.model.config().vocab_size;
  for (int64_t n : testing::few_shapes() ? std::vector<int64_t>{3} : std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33}) {
    std::vector<DecodeRow> rows, among;  // the same rows, and two fillers before, between and after them
    for (int64_t s = 0; s < n; ++s) {
      rows.push_back(small.row(s));
      if (s % 5 == 0) among.insert(among.end(), 2, {-1, {}, 3});
      among.push_back(small.row(s));
    }
    among.push_back({-1, {}, 0});
    const Decoded alone = run(small, rows, n + 2, 19, true), with = run(small, among, n + 2, 19, true);
    EXPECT_TRUE(alone.states == with.states) << n << " rows";
    size_t next = 0;
    for (size_t j = 0; j < among.size(); ++j) {
      if (among[j].slot >= 0) {
        EXPECT_EQ(alone.ids[next], with.ids[j]) << n << " rows";
        EXPECT_TRUE(alone.logits[next] == with.logits[j]) << n << " rows, slot " << among[j].slot;
        ++next;
        continue;
      }
      const auto* logits = reinterpret_cast<const float*>(with.logits[j].back().data());
      EXPECT_EQ(std::count_if(logits, logits + vocabulary, [](float x) { return std::isnan(x); }), vocabulary) << "a filler row is NaN throughout";
    }
  }
}

TEST_F(decoder, a_captured_row_does_not_depend_on_its_neighbours) {
  for (const Config& c : {testing::tiny_k3(), testing::tiny_linear()}) {
    Small small(c);
    std::vector<DecodeRow> rows;
    for (int64_t s = 0; s < 17; ++s) rows.push_back(small.row(16 - s));
    const int64_t steps = testing::few_shapes() ? 6 : 40;
    const Decoded all = run(small, rows, 17, steps, true);
    for (int64_t s : {0, 5, 16}) {
      const Decoded alone = run(small, {small.row(s)}, 17, steps, true);
      EXPECT_EQ(alone.ids[0], all.ids[size_t(16 - s)]);
      EXPECT_TRUE(alone.logits[0] == all.logits[size_t(16 - s)]) << s;
      EXPECT_TRUE(alone.states[size_t(s)] == all.states[size_t(s)]);
    }
  }
}

TEST_F(decoder, a_session_that_runs_ahead_can_be_stopped_read_and_gone_back_at_any_place) {
  Small small(testing::tiny_k3());
  const SampleOptions o{.temperature = 1, .seed = 3};
  Session a(small.model, {}), b(small.model, {.captured = false});
  ASSERT_TRUE(a.captured() && !b.captured());
  std::vector<int32_t> prompt{5, 6, 7, 8, 9};
  for (Session* s : {&a, &b}) s->read(prompt);
  for (int64_t turn = 0; turn < (testing::few_shapes() ? 12 : 40); ++turn) {  // stops fall on every place of a chunk and on the border of a block
    if (turn % 7 == 3)
      for (Session* s : {&a, &b}) s->mark();
    for (int64_t i = 0; i <= turn % 9; ++i) ASSERT_EQ(a.next(o), b.next(o)) << "turn " << turn << " token " << i;
    ASSERT_EQ(a.tokens(), b.tokens());
    for (Session* s : {&a, &b}) {
      if (turn % 11 == 10) s->back();
      s->read({prompt.data(), size_t(1 + turn % 5)});
    }
    ASSERT_EQ(std::memcmp(a.logits(), b.logits(), size_t(a.vocabulary()) * 4), 0) << "turn " << turn;
  }
}

TEST_F(decoder, what_cannot_be_decoded_is_said) {
  Small small(testing::tiny_k3());
  ModelState state = small.state(3);
  Decoder d(small.model, state, {});
  EXPECT_THAT([&] { d.begin({}); }, testing::throws_error("no rows"));
  const std::vector<DecodeRow> twice{small.row(1), small.row(1)}, beyond{{3, {}, 1}}, unknown{{0, {}, 97}};
  EXPECT_THAT([&] { d.begin(twice); }, testing::throws_error("two rows have slot 1"));
  EXPECT_THAT([&] { d.begin(beyond); }, testing::throws_error("slot 3 of 3"));
  EXPECT_THAT([&] { d.begin(unknown); }, testing::throws_error("token 97 of a vocabulary of 97"));
  const std::vector<DecodeRow> good{small.row(1)};
  d.begin(good);
  d.step();
  EXPECT_THAT([&] { d.result(1, 0); }, testing::throws_error("draw 1 of 1"));
  EXPECT_THAT([&] { d.result(0, 1); }, testing::throws_error("row 1 of 1"));
  for (Param& p : small.model.params().all())
    if (p.name == "model.norm.weight") gpu::fill(p.value.data(), 0xff, 4);
  d.step();
  EXPECT_THAT([&] { d.result(1, 0); }, testing::throws_error("[sample] the logit of token 0 is nan"));
}

}  // namespace
}  // namespace k3
