#include "k3/train/balance.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "k3/core/error.h"
#include "k3/core/gpu.h"
#include "k3/ops/update/update.h"

namespace k3 {

Balance::Balance(Model& model, const TrainOptions& options) : options_(options) {
  const Config& c = model.config();
  K3_CHECK(!options.balance.starts_with("quantile") || c.num_experts == 0 || c.num_expert_group == 1 || c.topk_group == c.num_expert_group,
           "[config] balance=quantile needs num_expert_group 1: a quantile over all experts cannot know the limits of {} groups; use balance=sign",
           c.num_expert_group);
  for (int64_t l = 0; l < model.layers(); ++l) {
    if (RouterWatch* r = model.ffn(l).router()) routers_.push_back(r), moe_layers_.push_back(l);
    if (QkClip* q = model.mixer(l).qk_clip()) heads_.push_back(q);
  }
}

Balance::~Balance() { gpu::release_shared(sent_); }

void Balance::begin_step() {
  if (bias_.empty())
    for (const RouterWatch* r : routers_) {
      const HostCopy copy(r->bias->value);
      bias_.emplace_back(copy.f32(), copy.f32() + copy.tensor().size());
    }
  for (size_t i = 0; i < routers_.size(); ++i) {
    RouterWatch* r = routers_[i];
    std::fill(r->load.begin(), r->load.end(), 0);
    if (options_.balance == "quantile") r->histogram.reset(Tensor(bias_[i].data(), DType::f32, {int64_t(bias_[i].size())}), options_.balance_bins);
    r->keep_margins = options_.balance == "quantile_exact";
    r->margins.clear();
  }
  for (QkClip* q : heads_) std::fill(q->max_logits.begin(), q->max_logits.end(), -INFINITY);
}

std::vector<double> Balance::load() const {
  std::vector<double> ratios;
  for (const RouterWatch* r : routers_) {
    int64_t total = 0;
    for (int64_t n : r->load) total += n;
    const double most = double(*std::max_element(r->load.begin(), r->load.end()));
    ratios.push_back(total ? most * double(r->load.size()) / double(total) : 1.0);
  }
  return ratios;
}

void Balance::update_bias() {
  size_t at = 0;
  for (size_t i = 0; i < routers_.size(); ++i) {
    RouterWatch* r = routers_[i];
    std::vector<float>& bias = bias_[i];
    std::vector<float> next;
    if (options_.balance == "quantile") next = quantile_bias(r->histogram, r->top_k);
    if (options_.balance == "quantile_exact") next = quantile_bias_exact(r->margins, int64_t(r->load.size()), r->top_k);
    if (options_.balance.starts_with("quantile"))  // both have mean 0, so has what lies between
      for (size_t j = 0; j < next.size(); ++j) next[j] += float(options_.balance_ema) * (bias[j] - next[j]);
    if (options_.balance == "sign") next = sign_bias(bias, r->load, float(options_.balance_sign_step));
    if (next.empty()) continue;
    const void* from = next.data();
    if (const Tensor& to = r->bias->value; to.device() == Device::cuda) {  // the copy of the step before was made before that step's results came
      if (!sent_) sent_ = gpu::allocate_shared(routers_.size() * to.bytes());
      from = std::memcpy(sent_ + at, next.data(), to.bytes());
      at += to.bytes();
    }
    write(r->bias->value, from);
    bias = std::move(next);
  }
}

int64_t Balance::clip(Context& c) {
  if (options_.qk_clip_tau <= 0) return 0;
  int64_t clipped = 0;
  for (QkClip* q : heads_) clipped += qk_clip(c, *q->q, *q->kv_b, q->max_logits, float(options_.qk_clip_tau), q->nope, q->shared, q->value);
  return clipped;
}

}  // namespace k3
