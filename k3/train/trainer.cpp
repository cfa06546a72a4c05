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
  void look(const Context& c, std::string_view name, const Tensor& t) {
    const bool decay = name.starts_with("log_decay."), gate = name.starts_with("output_gate.");
    if (!decay && !gate) return;
    const int64_t layer = std::atoll(std::string(name.substr(name.find('.') + 1)).c_str());
    mean(c, decay ? Mean::exp : Mean::sigmoid, t, [this, layer, decay](double x) {
      auto it = std::find_if(gates.begin(), gates.end(), [&](const GateHealth& g) { return g.layer == layer; });
      if (it == gates.end()) gates.push_back({layer, NAN, NAN}), it = gates.end() - 1;
      (decay ? it->keep : it->open) = x;
    });
  }
  std::vector<GateHealth> gates;
};

constexpr size_t kRuns = 8;

// All that the launches of a step depend on: where sequences begin, and where one ends its document, for such a token has no target.
std::vector<int64_t> shape_of(const std::vector<TokenBatch>& batches, bool with_gates) {
  std::vector<int64_t> shape{with_gates};
  for (const TokenBatch& b : batches) {
    shape.push_back(b.batch.sequences());
    for (int64_t s = 0; s < b.batch.sequences(); ++s) {
      const int64_t n = b.batch.length(s);
      shape.push_back(2 * n + (n && b.targets[size_t(b.batch.begin(s) + n - 1)] == kIgnored));
    }
  }
  return shape;
}

}  // namespace

// Launches that are captured read the batches where they lie, and their results come to the same places: so a Run stays for all steps of its shape.
struct Trainer::Run {
  std::vector<int64_t> shape;
  std::vector<TokenBatch> batches;
  std::vector<NextTokens> next;  // of each batch, with multi-token prediction
  bool with_gates = false;
  int64_t counted = 0, mtp_counted = 0;
  double learning_rate = 0;
  // what comes back
  Losses losses;
  GateWatch gates;
  Optimizer::Result result;
  size_t peak = 0;
  // of one that was captured
  struct Captured {
    Readback later;
    Feed feed;
    gpu::Graph graph;
  };
  std::unique_ptr<Captured> captured;

  void put(std::vector<TokenBatch> now, bool with_mtp) {
    const bool first = batches.empty();
    if (first) batches.resize(now.size());
    counted = mtp_counted = 0;
    for (size_t i = 0; i < now.size(); ++i) {
      TokenBatch& b = batches[i];
      auto in_place = [](std::vector<int32_t>& to, const std::vector<int32_t>& from) { std::copy(from.begin(), from.end(), to.begin()); };
      counted += now[i].counted;
      if (with_mtp) {
        NextTokens n(now[i]);
        mtp_counted += n.counted;
        if (first)
          next.push_back(std::move(n));
        else
          in_place(next[i].ids, n.ids), in_place(next[i].targets, n.targets);
      }
      if (first)
        b = std::move(now[i]);
      else
        in_place(b.ids, now[i].ids), in_place(b.targets, now[i].targets), b.pieces = std::move(now[i].pieces);
    }
  }
};

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
  if (model_.params().device() == Device::cuda) model_.params().know_touched(model_.embed_tokens());
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

// The tokens of a step, and how many bytes their targets stand for.
struct Trainer::Sampled {
  int64_t step = 0, bytes = 0;
  std::vector<TokenBatch> batches;
};

Trainer::Sampled Trainer::sample(int64_t step) {
  Sampled s{step};
  for (int64_t at = 0; at < options_.batch_tokens; at += options_.micro_batch_tokens) {
    s.batches.push_back(sampler_.tokens(step * options_.batch_tokens + at, std::min(options_.micro_batch_tokens, options_.batch_tokens - at)));
    for (int32_t t : s.batches.back().targets)
      if (t >= 0) s.bytes += int64_t(tokenizer_.token_bytes(t).size());
  }
  return s;
}

Trainer::Run& Trainer::run_of(std::vector<TokenBatch> batches, bool with_gates) {
  std::vector<int64_t> shape = shape_of(batches, with_gates);
  auto at = std::find_if(runs_.begin(), runs_.end(), [&](const auto& r) { return r->shape == shape; });
  if (at == runs_.end()) {
    if (runs_.size() == kRuns) runs_.pop_back();
    at = runs_.insert(runs_.end(), std::make_unique<Run>());
    (*at)->shape = std::move(shape), (*at)->with_gates = with_gates;
  }
  std::rotate(runs_.begin(), at, at + 1);
  runs_[0]->put(std::move(batches), model_.has_mtp());
  return *runs_[0];
}

void Trainer::enqueue(Run& run, Readback& later) {
  arena_->rewind(0), arena_->reset_peak();
  Param& head = model_.lm_head();
  const bool written = model_.bf16_products && head.shape[0] % 8 == 0 && head.shape[1] % 8 == 0;  // by cross_entropy in bfloat16
  model_.params().zero_grads(written ? &head : nullptr);
  Context c{.device = arena_->device(),
            .arena = arena_.get(),
            .bf16_products = model_.bf16_products,
            .observe = true,
            .later = &later,
            .feed = run.captured ? &run.captured->feed : nullptr};
  const float weight = run.counted ? float(1 / double(run.counted)) : 0.0f,
              mtp_weight = run.mtp_counted ? float(options_.mtp_loss_weight / double(run.mtp_counted)) : 0.0f;
  const bool shown = !run.captured;  // else the host is far ahead of the GPU
  for (size_t i = 0; i < run.batches.size(); ++i) {
    c.on_record = nullptr;
    if (run.with_gates && i == 0) c.on_record = [&](std::string_view name, const Tensor& t) { run.gates.look(c, name, t); };
    run_micro_batch(model_, c, run.batches[i], weight, model_.has_mtp() ? &run.next[i] : nullptr, mtp_weight, run.losses);
    arena_->rewind(0);
    if (on_micro_batch && shown) on_micro_batch(int64_t(i) + 1, int64_t(run.batches.size()));
  }
  if (head.fresh) gpu::clear(head.grad.data(), head.grad.bytes()), head.fresh = false;  // no token counted
  optimizer_.step(c, run.learning_rate, run.result);
  run.peak = arena_->peak();
}

StepReport Trainer::step(bool with_gates) {
  const auto start = Clock::now();
  StepReport r;
  r.step = steps_done_ + 1;
  r.learning_rate = learning_rate(options_, steps_done_);
  Sampled now = ahead_ && ahead_->step == steps_done_ ? std::move(*ahead_) : sample(steps_done_);
  ahead_.reset();
  const int64_t bytes = now.bytes;
  std::vector<TokenBatch>& batches = now.batches;
  r.forecast_bytes = update_.bytes, r.flops = update_.flops;
  for (const TokenBatch& b : batches) {
    r.tokens += b.batch.tokens();
    if (on_batch) on_batch(b);
    const Forecast& f = known_forecast(b.batch);
    r.forecast_bytes = std::max(r.forecast_bytes, f.bytes), r.flops += f.flops;
  }
  const Arena* before = arena_.get();
  make_room(arena_, r.forecast_bytes, model_.params().device());
  if (arena_.get() != before) runs_.clear();  // they are of memory that is gone

  balance_.begin_step();
  Run& run = run_of(std::move(batches), with_gates);
  const bool again = run.peak > 0;  // this shape was launched one by one before
  run.learning_rate = r.learning_rate, run.losses = {}, run.result = {};
  // exact margins come to the host in the middle of a step
  if (captured && again && !run.captured && arena_->device() == Device::cuda && options_.balance != "quantile_exact") {
    run.captured = std::make_unique<Run::Captured>();
    run.captured->later.keep();
    try {
      run.captured->graph = gpu::Graph([&] { enqueue(run, run.captured->later); });
    } catch (...) {
      run.captured.reset();
      throw;
    }
  }
  Context c{.device = arena_->device(), .arena = arena_.get(), .bf16_products = model_.bf16_products};
  if (captured && run.captured) {
    optimizer_.set(r.learning_rate);
    run.captured->feed.send();
    run.captured->graph.launch();
    if (steps_done_ + 1 < options_.steps) ahead_ = std::make_unique<Sampled>(sample(steps_done_ + 1));  // meanwhile
    run.captured->later.deliver();                                                                      // the one wait of a step on a GPU
    r.launches = run.captured->graph.kernels();
    if (on_micro_batch) on_micro_batch(int64_t(run.batches.size()), int64_t(run.batches.size()));
  } else {
    run.captured.reset();
    later_.forget();  // what a step that failed half-way asked for
    enqueue(run, later_);
    later_.deliver();
  }
  r.gradient_norm = run.result.norm, r.bad = run.result.bad;
  r.load = balance_.load();
  if (r.bad.empty()) {
    arena_->rewind(0);
    r.clipped_heads = balance_.clip(c);
    balance_.update_bias();
  }
  ++steps_done_;
  r.mtp_loss = run.mtp_counted ? run.losses.after_next / double(run.mtp_counted) : 0;
  r.loss = run.counted ? run.losses.next / double(run.counted) : 0;
  r.bits_per_byte = bytes ? run.losses.next / std::log(2.0) / double(bytes) : 0;
  r.gates = run.gates.gates;
  r.peak_bytes = run.peak;
  r.seconds = seconds_since(start);
  return r;
}

}  // namespace k3
