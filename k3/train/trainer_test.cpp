// The step: how it is cut, on how many threads and with or without recompute changes nothing but rounding, or nothing at all.
#include <cmath>
#include <cstring>
#include <numeric>

#include "k3/core/threads.h"
#include "k3/ops/loss/loss.h"
#include "k3/train/eval.h"
#include "k3/train/testing.h"

namespace k3 {
namespace {

struct Rig : testing::SmallRun {
  using SmallRun::SmallRun;
  std::vector<char> weights() const {
    std::vector<char> all;
    for (const Param& p : model->params().all()) {
      const char* b = static_cast<const char*>(p.value.data());
      all.insert(all.end(), b, b + p.value.bytes());
    }
    return all;
  }
  float* bias() { return model->ffn(1).router()->bias->value.f32(); }
  // The model's forward as the trainer runs it, on a batch of ours.
  Loss forward(const TokenBatch& b, Arena& arena, bool observe = false) {
    Context c{.arena = &arena, .observe = observe};
    Tensor ids = arena.lend(DType::i32, {b.batch.tokens()}), targets = arena.lend(DType::i32, {b.batch.tokens()});
    std::memcpy(ids.data(), b.ids.data(), ids.bytes());
    std::memcpy(targets.data(), b.targets.data(), targets.bytes());
    return cross_entropy(model->forward(c, ids, b.batch), model->lm_head(), targets, 0);
  }
};

TEST(trainer, learns) {
  Rig rig({"steps=30"});
  double first = rig.trainer->step().loss, last = 0;
  EXPECT_NEAR(first, std::log(512.0), 1.0) << "a new model knows nothing";
  for (int i = 1; i < 30; ++i) last = rig.trainer->step().loss;
  EXPECT_LT(last, first - 2);
}

// Each weight's gradient is a sum over 64 tokens, here in one or in four parts, and everything before the sum has the same bits. Float
// sums of n terms in another order differ by at most about n eps of the sum of magnitudes; cancellation makes that 1e-5 of the norm.
TEST(trainer, accumulated_equals_whole_batch) {
  Rig whole({"micro_batch_tokens=64"}), parts({"micro_batch_tokens=16"});
  StepReport a = whole.trainer->step(), b = parts.trainer->step();
  EXPECT_NEAR(a.loss, b.loss, 1e-6 * a.loss);
  EXPECT_NEAR(a.gradient_norm, b.gradient_norm, 1e-5 * a.gradient_norm);
  EXPECT_EQ(a.load, b.load);
  auto q = parts.model->params().all().begin();
  for (const Param& p : whole.model->params().all()) {
    const Param& other = *q++;
    if (p.grad.empty()) continue;
    double difference = 0, norm = 0;
    for (int64_t i = 0; i < p.grad.size(); ++i) {
      difference += std::pow(double(p.grad.f32()[i]) - double(other.grad.f32()[i]), 2);
      norm += std::pow(double(p.grad.f32()[i]), 2);
    }
    EXPECT_LE(std::sqrt(difference), 1e-5 * std::sqrt(norm) + 1e-9) << p.name;
  }
}

TEST(trainer, balance_counts_once_under_accumulation_and_recompute) {
  Rig plain({"micro_batch_tokens=64"}), parts({"micro_batch_tokens=16"}), again({"micro_batch_tokens=64", "recompute=true"});
  for (Rig* r : {&plain, &parts, &again}) {
    r->trainer->step();
    const RouterWatch& w = *r->model->ffn(1).router();
    int64_t chosen = 0;
    for (int64_t n : w.load) chosen += n;
    EXPECT_EQ(chosen, 64 * 2);
    EXPECT_EQ(w.histogram.tokens, 64);
    // counts are integers and margins don't depend on the cut: the same bias to the bit
    EXPECT_EQ(std::memcmp(r->bias(), plain.bias(), 6 * sizeof(float)), 0);
  }
}

TEST(trainer, the_bias_of_a_step_serves_the_next_one) {
  Rig rig({"micro_batch_tokens=16"}), reference;
  Sampler sampler(*reference.file, reference.split.train, 1, 16);
  TokenBatch all = sampler.tokens(0, 64);
  RouterWatch& w = *reference.model->ffn(1).router();
  w.histogram.reset(w.bias->value, 1000);  // of the bias before the step
  Arena arena(size_t(1) << 28);
  reference.forward(all, arena, true);
  std::vector<float> want = quantile_bias(w.histogram, 2);
  rig.trainer->step();
  ASSERT_EQ(want.size(), 6u);
  EXPECT_EQ(std::memcmp(rig.bias(), want.data(), want.size() * sizeof(float)), 0);
  EXPECT_NEAR(std::accumulate(want.begin(), want.end(), 0.0), 0, 1e-6);
}

TEST(trainer, the_exact_quantile_is_the_histograms_limit_and_an_average_moves_part_of_the_way) {
  auto bias_after_one_step = [](const std::vector<std::string>& sets) {
    Rig r(sets);
    r.trainer->step();
    return std::vector<float>(r.bias(), r.bias() + 6);
  };
  auto exact = bias_after_one_step({"balance=quantile_exact"}), fine = bias_after_one_step({"balance=quantile", "balance_bins=100000"});
  auto half = bias_after_one_step({"balance=quantile_exact", "balance_ema=0.5"});
  float largest = 0;
  for (size_t j = 0; j < 6; ++j) {
    EXPECT_NEAR(fine[j], exact[j], 0.05) << j;  // neighbouring order statistics of 64 margins that spread over about 1
    EXPECT_FLOAT_EQ(half[j], 0.5f * exact[j]) << j;
    largest = std::max(largest, std::abs(exact[j]));
  }
  EXPECT_GT(largest, 0.01f);
}

TEST(trainer, evaluation_and_padding_leave_no_trace_in_the_balance) {
  Rig rig;
  RouterWatch& w = *rig.model->ffn(1).router();
  auto watch = [&](const TokenBatch& b, bool observe) {
    w.histogram.reset(w.bias->value, 1000);
    std::fill(w.load.begin(), w.load.end(), 0);
    Arena arena(size_t(1) << 28);
    rig.forward(b, arena, observe);
    return std::pair(w.histogram.counts, w.load);
  };
  Sampler sampler(*rig.file, rig.split.train, 1, 16);
  TokenBatch real = sampler.tokens(0, 32), padded = real;
  auto want = watch(real, true);
  for (int i = 0; i < 75; ++i) padded.ids.push_back(0), padded.targets.push_back(kIgnored);
  padded.batch.cu_seqlens.push_back(107);
  padded.batch.padding.assign(107, 0);
  std::fill(padded.batch.padding.begin() + 32, padded.batch.padding.end(), 1);
  EXPECT_EQ(watch(padded, true), want);
  auto none = watch(real, false);
  for (int64_t n : none.second) EXPECT_EQ(n, 0);
  for (int32_t n : none.first) EXPECT_EQ(n, 0);
  evaluate(*rig.model, *rig.file, rig.split.held_out, rig.tokenizer, {16, 32, 0});
  for (int64_t n : w.load) EXPECT_EQ(n, 0);
}

TEST(trainer, recompute_is_bitwise_equal) {
  Rig plain, again({"recompute=true"});
  for (int i = 0; i < 3; ++i) {
    StepReport a = plain.trainer->step(), b = again.trainer->step();
    EXPECT_EQ(a.loss, b.loss);
    EXPECT_EQ(a.gradient_norm, b.gradient_norm);
    EXPECT_LT(b.peak_bytes, a.peak_bytes);
  }
  EXPECT_EQ(plain.weights(), again.weights());
}

TEST(trainer, one_thread_equals_many) {
  const int before = thread_count();
  std::vector<char> first;
  for (int threads : {1, 2, 7}) {
    set_thread_count(threads);
    Rig rig;
    rig.trainer->step(), rig.trainer->step();
    if (threads == 1) first = rig.weights();
    EXPECT_EQ(rig.weights(), first) << threads << " threads";
  }
  set_thread_count(before);
}

TEST(trainer, documents_do_not_leak) {
  Rig rig;
  const auto d = rig.split.train;
  auto piece = [&](int64_t i) { return TokenBatch::Piece{d[size_t(i)], 0, std::min<int64_t>(20, rig.file->length(d[size_t(i)]))}; };
  TokenBatch packed, alone;
  packed.add(*rig.file, piece(0)), packed.add(*rig.file, piece(1)), packed.add(*rig.file, piece(2));
  alone.add(*rig.file, piece(1));
  Arena one(size_t(1) << 28), two(size_t(1) << 28);
  Tensor with = rig.forward(packed, one).per_token, without = rig.forward(alone, two).per_token;
  const int64_t at = packed.batch.begin(1), n = alone.batch.tokens();
  EXPECT_EQ(std::memcmp(with.f32() + at, without.f32(), size_t(n) * sizeof(float)), 0);
}

TEST(trainer, the_forecast_is_what_a_step_takes) {
  for (const char* recompute : {"recompute=false", "recompute=true"})
    for (const char* mtp : {"num_nextn_predict_layers=0", "num_nextn_predict_layers=1"}) {
      Rig rig({recompute, mtp, "micro_batch_tokens=64"});
      for (int i = 0; i < 3; ++i) {
        StepReport r = rig.trainer->step();
        EXPECT_LE(r.peak_bytes, r.forecast_bytes);
        EXPECT_GE(double(r.peak_bytes), 0.9 * double(r.forecast_bytes));
        EXPECT_GT(r.flops, 0);
      }
    }
}

TEST(trainer, at_weight_zero_multi_token_prediction_teaches_the_others_nothing) {
  Rig plain, with({"num_nextn_predict_layers=1", "mtp_loss_weight=0"}), taught({"num_nextn_predict_layers=1"});
  for (int i = 0; i < 3; ++i) EXPECT_EQ(plain.trainer->step().loss, with.trainer->step().loss), taught.trainer->step();
  bool differs = false;
  for (const Param& p : plain.model->params().all()) {
    EXPECT_TRUE(std::memcmp(p.value.data(), with.model->params().find(p.name)->value.data(), p.value.bytes()) == 0) << p.name;
    differs |= std::memcmp(p.value.data(), taught.model->params().find(p.name)->value.data(), p.value.bytes()) != 0;
  }
  EXPECT_TRUE(differs);
}

TEST(trainer, the_layer_of_multi_token_prediction_learns_and_its_experts_are_balanced) {
  Rig rig({"num_nextn_predict_layers=1", "steps=40"});
  ASSERT_EQ(rig.model->layers(), 3);
  EXPECT_EQ(rig.trainer->moe_layers(), (std::vector<int64_t>{1, 2}));
  const double first = rig.trainer->step().mtp_loss;
  StepReport last;
  for (int i = 0; i < 39; ++i) last = rig.trainer->step();
  EXPECT_LT(last.mtp_loss, first - 1);
  EXPECT_EQ(last.load.size(), 2u);
  const Tensor bias = rig.model->ffn(2).router()->bias->value;
  EXPECT_GT(*std::max_element(bias.f32(), bias.f32() + bias.size()), 0);
}

TEST(trainer, a_gradient_that_is_not_finite_skips_the_step_and_is_named) {
  Rig rig;
  rig.trainer->step();
  const std::vector<char> before = rig.weights();
  Param& p = *rig.model->params().find("model.layers.0.self_attn.o_proj.weight");
  const float kept = p.value.f32()[3];
  p.value.f32()[3] = NAN;
  StepReport r = rig.trainer->step();
  p.value.f32()[3] = kept;
  EXPECT_FALSE(r.bad.empty());
  EXPECT_TRUE(rig.model->params().find(r.bad)) << r.bad;
  EXPECT_EQ(rig.weights(), before) << "weights and router bias";
  EXPECT_EQ(rig.trainer->optimizer().updates, 1);
  EXPECT_EQ(rig.trainer->steps_done(), 2);
  EXPECT_TRUE(rig.trainer->step().bad.empty());
}

// With a rate of 0 only the clip changes weights, so the largest logit of the same batch becomes tau.
TEST(trainer, qk_clip_brings_the_largest_logit_to_tau) {
  Rig rig({"learning_rate=0", "qk_clip_tau=0.001", "micro_batch_tokens=16"});
  StepReport r = rig.trainer->step();
  EXPECT_EQ(r.clipped_heads, 2);
  QkClip& q = *rig.model->mixer(1).qk_clip();
  std::fill(q.max_logits.begin(), q.max_logits.end(), -INFINITY);
  Sampler sampler(*rig.file, rig.split.train, 1, 16);
  Arena arena(size_t(1) << 28);
  rig.forward(sampler.tokens(0, 64), arena, true);
  // up to rounding of the scaled products: a few dozen terms
  for (float m : q.max_logits) EXPECT_NEAR(m, 0.001, 0.001 * 1e-4);
}

TEST(trainer, gates_are_reported_for_each_layer) {
  Rig rig;
  StepReport r = rig.trainer->step(true);
  ASSERT_EQ(r.gates.size(), 2u);
  EXPECT_GT(r.gates[0].keep, std::exp(-5.0));
  EXPECT_LT(r.gates[0].keep, 1);
  EXPECT_TRUE(std::isnan(r.gates[1].keep)) << "attention forgets nothing";
  for (const GateHealth& g : r.gates) EXPECT_NEAR(g.open, 0.5, 0.2);
  EXPECT_TRUE(rig.trainer->step(false).gates.empty());
}

TEST(eval, does_not_depend_on_how_many_tokens_run_at_once) {
  Rig rig;
  rig.trainer->step();
  Evaluation a = evaluate(*rig.model, *rig.file, rig.split.held_out, rig.tokenizer, {16, 16, 0});
  for (int64_t at_once : {33, 64, 4096}) {
    Evaluation b = evaluate(*rig.model, *rig.file, rig.split.held_out, rig.tokenizer, {16, at_once, 0});
    EXPECT_EQ(a.loss, b.loss) << at_once;
    EXPECT_EQ(a.tokens, b.tokens);
  }
}

// Bytes: every target but [EOS] stands for one; bits of [EOS] count.
TEST(eval, bits_per_byte_is_bits_over_the_bytes_of_the_text) {
  Rig rig;
  Evaluation e = evaluate(*rig.model, *rig.file, rig.split.held_out, rig.tokenizer, {1000, 4096, 0});
  int64_t tokens = 0;
  for (int64_t d : rig.split.held_out) tokens += rig.file->length(d);
  const int64_t documents = int64_t(rig.split.held_out.size());
  EXPECT_EQ(e.tokens, tokens - documents) << "all but the first token of each document is predicted";
  EXPECT_EQ(e.bytes, tokens - 2 * documents) << "one of them is [EOS]";
  EXPECT_NEAR(e.bits_per_byte, e.loss * double(e.tokens) / std::log(2.0) / double(e.bytes), 1e-12);
}

}  // namespace
}  // namespace k3
