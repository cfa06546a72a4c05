// Models with the heads of K3 and Kimi-Linear, 128 and 128 + 64 / 128, on a GPU with products in bfloat16, where kernels of their own serve them:
// against float32 on the CPU. The limit is parity.h's: rounding every matrix to bfloat16 moves a result so far, and four times that may be.
#include <gtest/gtest.h>

#include <cmath>

#include "k3/model/testing.h"
#include "k3/ops/loss/loss.h"

namespace k3 {
namespace {

using testing::some_ids;
using testing::tensor_of;

constexpr double kFactor = 4;

Config with_published_heads(bool k3) {
  Config c = k3 ? testing::tiny_k3() : testing::tiny_linear();
  c.num_hidden_layers = 3, c.kda_layers = {1, 2}, c.full_attn_layers = {3};
  c.hidden_size = 64, c.num_attention_heads = 2, c.qk_nope_head_dim = 128, c.qk_rope_head_dim = 64, c.v_head_dim = 128, c.kv_lora_rank = 32;
  c.kda_num_heads = 2, c.kda_head_dim = 128, c.vocab_size = 104, c.num_experts_per_token = 16;  // all experts: no choice that rounding could turn
  if (k3) c.q_lora_rank = 24;
  c.finish();
  return c;
}

using Values = std::vector<double>;
double distance(const Values& a, const Values& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum);
}
// Of several tensors, each by its own size: small ones, as a gate's bias, count as much as an embedding.
double relative_distance(const std::vector<Values>& a, const std::vector<Values>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i)
    if (const double norm = distance(b[i], Values(b[i].size())); norm > 0) sum += std::pow(distance(a[i], b[i]) / norm, 2);
  return std::sqrt(sum);
}
void append(Values& to, const Tensor& t) {
  const HostCopy here(t);
  to.insert(to.end(), here.f32(), here.f32() + t.size());
}
void round_matrices(Model& m) {
  for (Param& p : m.params().all())
    for (int64_t i = 0; p.shape.rank == 2 && i < p.value.size(); ++i) p.value.f32()[i] = to_float(to_bf16(p.value.f32()[i]));
}

enum class Where { exact, rounded, gpu };
void prepare(Model& m, Where where, testing::Step& step) {
  testing::fill(m);
  for (Param& p : m.params().all())  // else what a mixer adds is small beside the residual, and its mistakes too
    for (int64_t i = 0; p.name.ends_with("o_proj.weight") && i < p.value.size(); ++i) p.value.f32()[i] *= 16;
  if (where == Where::rounded) round_matrices(m);
  if (where == Where::gpu) m.params().move_to(Device::cuda), step.context.bf16_products = true;
}
Device device_of(Where where) { return where == Where::gpu ? Device::cuda : Device::cpu; }

// Hidden rows, and the gradient of each parameter, of documents in one batch.
std::pair<Values, std::vector<Values>> trained(const Config& config, Where where, const std::vector<int64_t>& lengths) {
  const Batch batch = Batch::of_lengths(lengths);
  const auto ids = some_ids(batch.tokens(), config.vocab_size), targets = some_ids(batch.tokens(), config.vocab_size, 4);
  testing::Step step(true, size_t(1) << 30, device_of(where));
  Model m(config);
  prepare(m, where, step);
  m.params().allocate_grads();
  if (where == Where::gpu) m.params().keep_narrow();
  Var h = m.forward(step.context, tensor_of(ids), batch);
  cross_entropy(h, m.lm_head(), tensor_of(targets), 1.0f / float(batch.tokens()));
  step.context.tape->run_backward();
  std::pair<Values, std::vector<Values>> out;
  append(out.first, h.value());
  for (const Param& p : m.params().all())
    if (!p.grad.empty()) append(out.second.emplace_back(), p.grad);
  return out;
}

// Hidden rows of a prompt read in these pieces through a state.
Values read(const Config& config, Where where, const std::vector<int64_t>& pieces, bool deterministic) {
  testing::Step step(false, size_t(1) << 30, device_of(where));
  step.context.deterministic = deterministic;
  Model m(config);
  prepare(m, where, step);
  ModelState state = m.new_state(2, step.context.device, deterministic);
  int64_t all = 0, at = 0;
  for (int64_t n : pieces) all += n;
  const auto ids = some_ids(all, config.vocab_size);
  Values out;
  for (int64_t n : pieces) {
    Batch batch = Batch::one(n);
    batch.slots = {1};
    append(out, m.forward(step.context, Tensor(const_cast<int32_t*>(ids.data() + at), DType::i32, {n}), batch, &state).value());
    at += n;
  }
  return out;
}

class widths : public ::testing::TestWithParam<bool> {};

TEST_P(widths, cuda_in_bfloat16_trains_like_float32) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  const Config config = with_published_heads(GetParam());
  for (const std::vector<int64_t>& lengths : {std::vector<int64_t>{70, 0, 1, 40, 64, 0}, {130}}) {
    const auto exact = trained(config, Where::exact, lengths), rounded = trained(config, Where::rounded, lengths);
    const auto got = trained(config, Where::gpu, lengths), twice = trained(config, Where::gpu, lengths);
    EXPECT_LE(distance(got.first, exact.first), kFactor * distance(rounded.first, exact.first)) << "hidden";
    EXPECT_LE(relative_distance(got.second, exact.second), kFactor * relative_distance(rounded.second, exact.second)) << "gradients";
    EXPECT_EQ(got, twice) << "two runs differ";
  }
}

TEST_P(widths, cuda_in_bfloat16_reads_a_prompt_in_any_pieces) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  const Config config = with_published_heads(GetParam());
  const Values exact = read(config, Where::exact, {140}, true);
  const double limit = kFactor * distance(read(config, Where::rounded, {140}, true), exact);
  for (bool deterministic : {true, false})
    for (const std::vector<int64_t>& pieces : {std::vector<int64_t>{140}, {64, 76}, {33, 1, 1, 1, 104}, {5, 100, 35}, {134, 1, 1, 1, 1, 1, 1}})
      EXPECT_LE(distance(read(config, Where::gpu, pieces, deterministic), exact), limit)
          << pieces.size() << " pieces, the first of " << pieces[0] << (deterministic ? "" : ", absorbed");
}

INSTANTIATE_TEST_SUITE_P(of, widths, ::testing::Bool(), [](const auto& p) { return p.param ? "k3" : "kimi_linear"; });

}  // namespace
}  // namespace k3
