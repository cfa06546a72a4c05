#include "k3/train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "k3/core/error.h"
#include "k3/core/gpu.h"
#include "k3/ops/activation/mean.h"
#include "k3/ops/loss/loss.h"
#include "k3/tape/tape.h"
#include "k3/train/schedule.h"
#include "k3/train/step_memory.h"

namespace k3 {

namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

struct Losses {
  double next = 0, after_next = 0;  // sums
};

// Adds up -log p of the counted tokens, in order (the others have 0).
void add_up(const Context& c, const Loss& loss, double& sum) {
  c.read(loss.per_token, [&sum, n = loss.per_token.size()](const void* p) {
    double all = 0;
    for (int64_t i = 0; i < n; ++i) all += double(static_cast<const float*>(p)[i]);
    sum += all;
  });
}

// Forward, losses and backward of one batch, on whatever device the context names; `losses` are added to, maybe later (Context::read).
void run_micro_batch(Model& model, Context& c, const TokenBatch& b, float weight, const NextTokens* mtp, float mtp_weight, Losses& losses) {
  Tape tape;
  c.tape = &tape;
  const int64_t n = b.batch.tokens();
  Tensor ids = lend_ids(c, b.ids, n), targets = lend_ids(c, b.targets, n);
  Var features;
  Var h = model.forward(c, ids, b.batch, nullptr, mtp ? &features : nullptr);
  add_up(c, cross_entropy(h, model.lm_head(), targets, weight), losses.next);
  if (mtp) {
    Tensor next = lend_ids(c, mtp->ids, n), after_next = lend_ids(c, mtp->targets, n);
    add_up(c, cross_entropy(model.mtp_forward(features, next, mtp->batch), model.lm_head(), after_next, mtp_weight), losses.after_next);
  }
  tape.run_backward();
  c.tape = nullptr;
}

// Averages what the gates of each layer do, from the records of one forward.
class GateWatch {
 public:
  explicit GateWatch(const Context& c) : c_(c) {}
  void operator()(std::string_view name, const Tensor& t) {
    const bool decay = name.starts_with("log_decay."), gate = name.starts_with("output_gate.");
    if (!decay && !gate) return;
    const int64_t layer = std::atoll(std::string(name.substr(name.find('.') + 1)).c_str());
    mean(c_, decay ? Mean::exp : Mean::sigmoid, t, [this, layer, decay](double x) {
      auto it = std::find_if(gates.begin(), gates.end(), [&](const GateHealth& g) { return g.layer == layer; });
      if (it == gates.end()) gates.push_back({layer, NAN, NAN}), it = gates.end() - 1;
      (decay ? it->keep : it->open) = x;
    });
  }
  std::vector<GateHealth> gates;

 private:
  const Context& c_;
};

}  // namespace

struct Trainer::Shadow {
  Model model;
  Optimizer optimizer;
  Shadow(const Model& like, const TrainOptions& options)
      : model(like.config(), like.has_mtp()), optimizer(prepare(model, like), options, Device::null) {}
  static ParamSet& prepare(Model& m, const Model& like) {
    m.recompute = like.recompute;
    m.params().allocate(Device::null);
    m.params().allocate_grads();
    return m.params();
  }
};

Trainer::Trainer(Model& model, const TokenFile& file, std::vector<int64_t> documents, const Tokenizer& tokenizer, const TrainOptions& options)
    : model_(model),
      tokenizer_(tokenizer),
      options_(options),
      sampler_(file, std::move(documents), uint64_t(options.seed), options.sequence_length),
      optimizer_(model.params(), options, model.params().device()),
      balance_(model, options) {
  file.check_tokenizer(tokenizer);
  K3_CHECK(tokenizer.vocabulary() <= model.config().vocab_size, "[train] the tokenizer has {} ids but vocab_size is {}", tokenizer.vocabulary(),
           model.config().vocab_size);
  model_.recompute = options.recompute;
  model_.params().allocate_grads();
  if (model_.bf16_products && model_.params().device() == Device::cuda) model_.params().keep_narrow();
  shadow_ = std::make_unique<Shadow>(model_, options_);
  Arena arena(0, Device::null);
  Context c{.device = Device::null, .arena = &arena};
  c.on_cost = [&](std::string_view, const Cost& cost) { update_.flops += cost.flops; };
  shadow_->optimizer.step(c, 0);
  update_.bytes = arena.peak();
}

Trainer::~Trainer() = default;

Forecast Trainer::forecast(const Batch& batch) {
  Forecast f;
  Arena arena(0, Device::null);
  Context c{.device = Device::null, .arena = &arena, .observe = true};
  c.on_cost = [&](std::string_view, const Cost& cost) { f.flops += cost.flops; };
  TokenBatch b;
  b.batch = batch;
  const NextTokens next(b);
  Losses none;
  run_micro_batch(shadow_->model, c, b, 1, model_.has_mtp() ? &next : nullptr, 1, none);
  f.bytes = arena.peak();
  return f;
}

const Forecast& Trainer::known_forecast(const Batch& batch) {
  auto at = forecasts_.find(batch.cu_seqlens);
  if (at != forecasts_.end()) return at->second;
  if (forecasts_.size() >= 64) forecasts_.clear();
  return forecasts_[batch.cu_seqlens] = forecast(batch);
}

StepReport Trainer::step(bool with_gates) {
  const auto start = Clock::now();
  StepReport r;
  r.step = steps_done_ + 1;
  r.learning_rate = learning_rate(options_, steps_done_);
  std::vector<TokenBatch> batches;
  std::vector<NextTokens> next;  // of each batch, with multi-token prediction
  int64_t counted = 0, mtp_counted = 0;
  for (int64_t at = 0; at < options_.batch_tokens; at += options_.micro_batch_tokens) {
    batches.push_back(sampler_.tokens(steps_done_ * options_.batch_tokens + at, std::min(options_.micro_batch_tokens, options_.batch_tokens - at)));
    counted += batches.back().counted;
    if (model_.has_mtp()) mtp_counted += next.emplace_back(batches.back()).counted;
    r.tokens += batches.back().batch.tokens();
  }
  r.forecast_bytes = update_.bytes, r.flops = update_.flops;
  for (const TokenBatch& b : batches) {
    const Forecast& f = known_forecast(b.batch);
    r.forecast_bytes = std::max(r.forecast_bytes, f.bytes), r.flops += f.flops;
  }
  make_room(arena_, r.forecast_bytes, model_.params().device());
  arena_->rewind(0), arena_->reset_peak();

  Param& head = model_.lm_head();
  const bool written = model_.bf16_products && head.shape[0] % 8 == 0 && head.shape[1] % 8 == 0;  // by cross_entropy in bfloat16
  later_.forget();  // what a step that failed half-way asked for
  model_.params().zero_grads(written ? &head : nullptr);
  balance_.begin_step();
  Context c{.device = arena_->device(), .arena = arena_.get(), .bf16_products = model_.bf16_products, .observe = true, .later = &later_};
  GateWatch gates(c);
  Losses losses;
  int64_t bytes = 0;
  const float weight = counted ? float(1 / double(counted)) : 0.0f,
              mtp_weight = mtp_counted ? float(options_.mtp_loss_weight / double(mtp_counted)) : 0.0f;
  for (size_t i = 0; i < batches.size(); ++i) {
    const TokenBatch& b = batches[i];
    if (on_batch) on_batch(b);
    if (with_gates && i == 0)
      c.on_record = std::ref(gates);
    else
      c.on_record = nullptr;
    run_micro_batch(model_, c, b, weight, model_.has_mtp() ? &next[i] : nullptr, mtp_weight, losses);
    arena_->rewind(0);
    for (int32_t t : b.targets)
      if (t >= 0) bytes += int64_t(tokenizer_.token_bytes(t).size());
    if (on_micro_batch) on_micro_batch(int64_t(i) + 1, int64_t(batches.size()));
  }
  if (head.fresh) gpu::clear(head.grad.data(), head.grad.bytes()), head.fresh = false;  // no token counted
  Optimizer::Result result;
  optimizer_.step(c, r.learning_rate, result);
  later_.deliver();  // the one wait of a step on a GPU
  r.gradient_norm = result.norm, r.bad = result.bad;
  r.load = balance_.load();
  if (r.bad.empty()) {
    r.clipped_heads = balance_.clip(c);
    balance_.update_bias();
  }
  ++steps_done_;
  r.mtp_loss = mtp_counted ? losses.after_next / double(mtp_counted) : 0;
  r.loss = counted ? losses.next / double(counted) : 0;
  r.bits_per_byte = bytes ? losses.next / std::log(2.0) / double(bytes) : 0;
  r.gates = std::move(gates.gates);
  r.peak_bytes = arena_->peak();
  r.seconds = seconds_since(start);
  return r;
}

}  // namespace k3
