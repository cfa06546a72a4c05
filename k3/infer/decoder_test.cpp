#include "k3/infer/decoder.h"

#include <gtest/gtest.h>

#include <cctype>
#include <deque>
#include <functional>
#include <optional>

#include "k3/infer/session.h"
#include "k3/model/testing.h"
#include "k3/ops/linear/quantize.h"
#include "k3/ops/linear/weight_product.h"
#include "k3/ops/testing.h"

namespace k3 {
namespace {

using testing::bytes_of;

// A small model on the GPU, and prompts of different lengths in its slots.
struct Small {
  Model model;
  static Config finished(Config c) { return c.finish(), c; }
  enum class Form { f32, bf16, mxfp4, mxfp4_widened };
  Form form;
  std::deque<std::vector<uint8_t>> codes;  // whose elements stay where they are
  explicit Small(const Config& c, Form f = Form::f32, bool fixed_choice = false) : model(finished(c)), form(f) {
    testing::fill(model);
    if (fixed_choice)  // biases more than a score apart: no rounding changes which experts are chosen
      for (int64_t l = 0; l < c.num_hidden_layers; ++l)
        if (Param* p = model.params().find(fmt::format("model.layers.{}.block_sparse_moe.gate.e_score_correction_bias", l)))
          for (int64_t e = 0; e < p->value.size(); ++e) p->value.f32()[e] = 2 * float((e * 7 + l) % p->value.size());
    if (f == Form::mxfp4 || f == Form::mxfp4_widened)
      for (Param& p : model.params().all())
        if (p.name.find(".experts.") != std::string::npos) pack(p);
    model.bf16_products = fused();
    model.params().move_to(Device::cuda, fused());
  }
  bool fused() const { return form != Form::f32; }
  void pack(Param& p) {
    const int64_t out = p.shape[0], in = p.shape[1];
    auto& values = codes.emplace_back(size_t(out * in / 2));
    auto& scales = codes.emplace_back(size_t(out * in / 32));
    quantize(Stored::mxfp4, p.value.f32(), out, in, values.data(), scales.data(), p.name);
    if (form == Form::mxfp4_widened) return widen({Stored::mxfp4, out, in, values.data(), scales.data()}, 0, out, p.value.f32());
    p.value = Tensor(values.data(), DType::u8, {out, in / 2}), p.scale = Tensor(scales.data(), DType::u8, {out, in / 32});
  }
  int32_t id(int64_t slot, int64_t i) const { return int32_t((slot * 31 + i * 17 + i * i) % model.config().vocab_size); }
  int64_t length(int64_t slot) const { return 1 + (slot + 18) * 7 % 23; }  // slot 5 is empty, 0 is not
  // Slots s and slots + s have read length(s) - 1 tokens; the last of the prompt is what the first step reads. The upper half is as good as new every
  // time, for it is copied from the lower one.
  ModelState& state(int64_t slots) {
    if (!state_ || state_->slots() != 2 * slots) {
      state_.emplace(model.new_state(2 * slots, Device::cuda, !fused()));
      Arena arena(size_t(1) << 30, Device::cuda);
      for (int64_t slot = 0; slot < slots; ++slot) {
        Context c;
        c.device = Device::cuda, c.arena = &arena, c.deterministic = !fused();
        arena.rewind(0);
        std::vector<int32_t> ids;
        for (int64_t i = 0; i + 1 < length(slot); ++i) ids.push_back(id(slot, i));
        if (ids.empty()) continue;
        Batch b = Batch::one(int64_t(ids.size()));
        b.slots = {int32_t(slot)};
        model.forward(c, Tensor(ids.data(), DType::i32, {int64_t(ids.size())}), b, &*state_);
      }
    }
    for (int64_t slot = 0; slot < slots; ++slot) state_->copy(slots + slot, slot);
    return *state_;
  }
  std::optional<ModelState> state_;
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
  std::vector<std::string> states;                     // of every slot, at the end; those of the rows first
};
std::string saved(const ModelState& s, int64_t slot) {
  Blob b;
  s.save(slot, b);
  return {b.bytes.begin(), b.bytes.end()};
}
Decoded run(Small& small, std::vector<DecodeRow> rows, int64_t slots, int64_t steps, bool captured) {
  ModelState& state = small.state(slots);
  for (DecodeRow& row : rows)
    if (row.slot >= 0) row.slot += int32_t(slots);
  Decoder d(small.model, state, {.captured = captured, .deterministic = !small.fused()});
  EXPECT_EQ(d.fused(), small.fused());
  d.arena().set_poison(true);
  d.begin(rows);
  const size_t row = size_t(small.model.config().vocab_size) * 4, all = row * size_t(Decoder::rows_of(int64_t(rows.size())));
  Buffer kept(all * size_t(steps), Device::cuda);  // nothing is waited for between the steps
  for (int64_t i = 0; i < steps; ++i) {
    d.step();
    gpu::copy(kept.data() + size_t(i) * all, d.logits().data(), all);
  }
  std::vector<char> logits(kept.bytes());
  gpu::download(logits.data(), kept.data(), logits.size());
  Decoded r;
  r.ids.resize(rows.size()), r.logits.resize(rows.size());
  for (int64_t i = 0; i < steps; ++i)
    for (size_t j = 0; j < rows.size(); ++j) {
      const auto at = logits.begin() + ptrdiff_t(size_t(i) * all + j * row);
      r.logits[j].push_back({at, at + ptrdiff_t(row)});
      r.ids[j].push_back(rows[j].slot < 0 ? -1 : d.result(i, int64_t(j)));
    }
  EXPECT_EQ(d.kernels() > 0, captured);
  for (int64_t s = 0; s < slots; ++s) r.states.push_back(saved(state, slots + s));
  for (int64_t s = 0; s < slots; ++s) r.states.push_back(saved(state, s));  // which no row has
  return r;
}

using Form = Small::Form;
// Widths that the fused step serves; in K3's shape also MXFP4.
Config fusable(Config c) {
  c.vocab_size = 104, c.q_lora_rank = c.q_lora_rank ? 24 : 0, c.moe_intermediate_size = 32;
  if (c.routed_expert_hidden_size == 0) c.hidden_size = 64;
  return c;
}
struct Case {
  std::string name;
  Config config;
  Form form;
  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }
};
std::vector<Case> cases() {
  std::vector<Case> all = {{"K3, float32", testing::tiny_k3(), Form::f32}, {"Kimi Linear, float32", testing::tiny_linear(), Form::f32}};
  auto add = [&](const char* name, Config c, auto change) { change(c), all.push_back({name, c, Form::bf16}); };
  const Config k3 = fusable(testing::tiny_k3()), linear = fusable(testing::tiny_linear());
  add("K3", k3, [](Config&) {});
  add("Kimi Linear", linear, [](Config&) {});
  all.push_back({"K3, MXFP4", k3, Form::mxfp4}), all.push_back({"Kimi Linear, MXFP4", linear, Form::mxfp4});
  add("heads of 32, blocks of one layer: ten sources", k3, [](Config& c) { c.kda_head_dim = 32, c.attn_res_block_size = 1; });
  add("blocks of two layers: six sources", k3, [](Config& c) { c.attn_res_block_size = 2; });
  add("heads of 64, a wider latent", k3, [](Config& c) { c.kda_head_dim = 64, c.kv_lora_rank = 160; });
  add("heads of 128, 48 experts", k3, [](Config& c) { c.kda_head_dim = 128, c.num_experts = 48; });
  add("a row's norm takes the whole block", linear, [](Config& c) { c.hidden_size = 640; });
  return all;
}

struct decoder : ::testing::Test {
  void SetUp() override {
    if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  }
};

struct each_decoder : decoder, ::testing::WithParamInterface<Case> {
  static std::string name(const ::testing::TestParamInfo<Case>& p) {
    std::string s = p.param.name;
    for (char& x : s)
      if (!std::isalnum(static_cast<unsigned char>(x))) x = '_';
    return s;
  }
};
struct filled_decoder : each_decoder {};
struct fused_decoder : each_decoder {};
std::vector<Case> some(const std::function<bool(const Case&)>& wanted) {
  std::vector<Case> all = cases();
  std::erase_if(all, [&](const Case& c) { return !wanted(c); });
  return all;
}
INSTANTIATE_TEST_SUITE_P(, each_decoder, ::testing::ValuesIn(cases()), each_decoder::name);
INSTANTIATE_TEST_SUITE_P(, filled_decoder, ::testing::ValuesIn(some([](const Case& c) {
                           return c.name == "K3, float32" || c.name == "K3" || c.name == "Kimi Linear, MXFP4";
                         })),
                         each_decoder::name);
INSTANTIATE_TEST_SUITE_P(, fused_decoder, ::testing::ValuesIn(some([](const Case& c) { return c.form == Form::bf16; })), each_decoder::name);

TEST_P(each_decoder, captured_equals_eager) {
  Small small(GetParam().config, GetParam().form);
  if (testing::few_shapes()) {  // a greedy row from nine tokens over the first chunk's border
    const std::vector<DecodeRow> row{small.row(3)};
    EXPECT_TRUE(run(small, row, 4, 9, false).logits == run(small, row, 4, 9, true).logits);
    return;
  }
  const int64_t steps = GetParam().form == Form::f32 ? 150 : 36;  // over the border of a block; over two of a chunk
  for (size_t n : {1, 9}) {
    std::vector<DecodeRow> rows;
    for (size_t s = 0; s < n; ++s) rows.push_back(small.row(int64_t(s)));
    const Decoded eager = run(small, rows, 9, steps, false), captured = run(small, rows, 9, steps, true), again = run(small, rows, 9, steps, true);
    EXPECT_EQ(eager.ids, captured.ids);
    EXPECT_TRUE(eager.logits == captured.logits) << n;
    EXPECT_TRUE(eager.states == captured.states) << n;
    EXPECT_TRUE(captured.logits == again.logits) << "two runs differ";
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

TEST_P(filled_decoder, filler_rows_full_of_nan_change_nothing) {
  Small small(GetParam().config, GetParam().form);
  const int64_t vocabulary = small.model.config().vocab_size;
  for (int64_t n : testing::few_shapes() ? std::vector<int64_t>{1, 3} : std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33}) {
    std::vector<DecodeRow> rows, among;  // the same rows, and two fillers before, between and after them; of one row one filler: all in one kernel
    for (int64_t s = 0; s < n; ++s) {
      rows.push_back(small.row(s));
      if (s % 5 == 0) among.insert(among.end(), n == 1 ? 1 : 2, {-1, {}, 3});
      among.push_back(small.row(s));
    }
    if (n > 1) among.push_back({-1, {}, 0});
    const Decoded alone = run(small, rows, 35, 19, true), with = run(small, among, 35, 19, true);
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

TEST_P(each_decoder, a_row_does_not_depend_on_its_neighbours) {
  Small small(GetParam().config, GetParam().form);
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

double distance(const std::vector<char>& a, const std::vector<char>& b) {
  const auto *x = reinterpret_cast<const float*>(a.data()), *y = reinterpret_cast<const float*>(b.data());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size() / 4; ++i) difference += std::pow(double(x[i]) - double(y[i]), 2), norm += double(y[i]) * double(y[i]);
  return std::sqrt(difference / norm);
}

// Both round the operands of the same products, in another order of sums: their errors against float32 are two draws of one size, and as near to each
// other as two such draws at most. A relative L2 of 40 steps' logits averages thousands of roundings, so "one size" is within a half.
TEST_P(fused_decoder, is_the_model_in_bfloat16) {
  const Config& c = GetParam().config;
  Small small(c, Form::bf16, true), exact(c, Form::f32, true);
  const std::vector<DecodeRow> rows{{3, {}, 7}};
  const Decoded fused = run(small, rows, 4, 40, true);
  double to_model = 0, to_exact = 0, model_to_exact = 0;  // sums of squares over the steps
  Session model(small.model, {.captured = false, .deterministic = false}), f32(exact.model, {.captured = false});
  std::vector<int32_t> ids;
  for (int64_t i = 0; i + 1 < small.length(3); ++i) ids.push_back(small.id(3, i));
  model.read(ids), f32.read(ids);
  int32_t id = 7;
  const size_t bytes = size_t(small.model.config().vocab_size) * 4;
  for (size_t i = 0; i < 40; ++i) {
    model.read({&id, 1}), f32.read({&id, 1});
    auto of = [&](const Session& s) {
      return std::vector<char>(reinterpret_cast<const char*>(s.logits()), reinterpret_cast<const char*>(s.logits()) + bytes);
    };
    auto add = [](double& sum, double x) { sum += x * x / 40; };
    add(to_model, distance(fused.logits[0][i], of(model))), add(to_exact, distance(fused.logits[0][i], of(f32)));
    add(model_to_exact, distance(of(model), of(f32)));
    id = fused.ids[0][i];
  }
  const double bound = 1.5 * std::sqrt(model_to_exact);
  const std::string all = fmt::format("to the model {:.5f}, to float32 {:.5f}, the model's to float32 {:.5f}", std::sqrt(to_model),
                                      std::sqrt(to_exact), std::sqrt(model_to_exact));
  RecordProperty("distances", all);
  EXPECT_LT(std::sqrt(to_exact), bound) << all;
  EXPECT_LT(std::sqrt(to_model), bound) << all;
  EXPECT_GT(model_to_exact, 0) << "the model is not in bfloat16";
}

TEST_F(decoder, mxfp4_experts_stay_codes_on_the_gpu) {
  Config c = fusable(testing::tiny_k3());
  c.moe_intermediate_size = 64;  // scales fill the 64 bytes that parameters are padded to
  Small codes(c, Form::mxfp4), wide(c, Form::mxfp4_widened);
  size_t code_bytes = 0, wide_bytes = 0;
  for (const Param& p : codes.model.params().all())
    if (p.name.find(".experts.") != std::string::npos) {
      EXPECT_EQ(p.value.device(), Device::cuda);
      code_bytes += p.value.bytes() + p.scale.bytes(), wide_bytes += wide.model.params().find(p.name)->value.bytes();
    }
  EXPECT_EQ(code_bytes * 64, wide_bytes * 17);  // 17 bytes of 32 weights against 64
  EXPECT_EQ(wide.model.params().bytes() - codes.model.params().bytes(), wide_bytes - code_bytes);
  // the same values: equal but for the order of sums
  const std::vector<DecodeRow> rows{{3, {}, 7}};
  const Decoded a = run(codes, rows, 4, 30, true), b = run(wide, rows, 4, 30, true);
  EXPECT_LT(distance(a.logits[0][0], b.logits[0][0]), 0.02);
}

TEST_F(decoder, what_cannot_be_decoded_is_said) {
  Small small(testing::tiny_k3());
  ModelState& state = small.state(3);
  Decoder d(small.model, state, {});
  EXPECT_THAT([&] { d.begin({}); }, testing::throws_error("no rows"));
  const std::vector<DecodeRow> twice{small.row(1), small.row(1)}, beyond{{6, {}, 1}}, unknown{{0, {}, 97}};
  EXPECT_THAT([&] { d.begin(twice); }, testing::throws_error("two rows have slot 1"));
  EXPECT_THAT([&] { d.begin(beyond); }, testing::throws_error("slot 6 of 6"));
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
