#include "k3/ops/moe/balance.h"

#include <algorithm>
#include <cmath>

#include "k3/core/error.h"
#include "k3/core/listed.h"
#include "k3/core/threads.h"
#include "k3/ops/moe/moe_float_cuda.h"

namespace k3 {

namespace {

bool is_padding(const Batch& batch, int64_t i) { return !batch.padding.empty() && batch.padding[i]; }

std::vector<float> centred(const std::vector<double>& b) {
  double mean = 0;
  for (double x : b) mean += x;
  mean /= double(b.size());
  std::vector<float> out(b.size());
  for (size_t j = 0; j < b.size(); ++j) out[j] = float(b[j] - mean);
  return out;
}

// Only the counts come to the host, not the scores.
void observe_on_gpu(MarginHistogram& h, const Routing& r, const Batch& batch) {
  if constexpr (gpu::kBuilt) {
    const Context& c = r.weights.context();
    Scratch scratch(*c.arena);
    Tensor counts = scratch.lend_zeroed(DType::i32, {h.experts, h.bins});
    const uint8_t* padding = batch.padding.empty() ? nullptr : listed(c.device, scratch, batch.padding);
    const float* range = c.fed<float>(scratch, 2, [&h](float* to) { to[0] = h.lo, to[1] = h.width(); });
    gpu::check(
        cuda::observe_margins({r.scores.f32(), r.cutoff.f32(), padding, r.scores.rows(), h.experts, h.bins, range, counts.i32()}, gpu::stream()));
    c.read(counts, [&h](const void* p) {
      const int32_t* made = static_cast<const int32_t*>(p);
      for (size_t i = 0; i < h.counts.size(); ++i) h.counts[i] += made[i];
      for (int64_t b = 0; b < h.bins; ++b) h.tokens += made[b];  // a token that counts is in one bin of every expert
    });
  }
}

}  // namespace

void MarginHistogram::reset(const Tensor& bias, int64_t bin_count) {
  K3_CHECK(bin_count > 0 && bias.size() > 0, "[balance] a histogram needs bins and experts, not {} and {}", bin_count, bias.size());
  experts = bias.size(), bins = bin_count, tokens = 0;
  const HostCopy copy(bias);
  auto [low, high] = std::minmax_element(copy.f32(), copy.f32() + experts);
  lo = *low - 1, hi = *high + 1;
  counts.assign(size_t(experts * bins), 0);
}

void MarginHistogram::add(const MarginHistogram& o) {
  K3_CHECK(experts == o.experts && bins == o.bins && lo == o.lo && hi == o.hi,
           "[balance] histograms of {} x {} over [{}, {}] and {} x {} over [{}, {}] can't be added", experts, bins, lo, hi, o.experts, o.bins, o.lo,
           o.hi);
  for (size_t i = 0; i < counts.size(); ++i) counts[i] += o.counts[i];
  tokens += o.tokens;
}

void count_load(const Routing& r, const Batch& batch, int64_t* load) {
  if (r.experts.device() == Device::null) return;
  if constexpr (gpu::kBuilt) {
    if (r.experts.device() == Device::cuda) {  // padding rows chose none
      const Context& c = r.weights.context();
      const int64_t e = r.scores.cols();
      Scratch scratch(*c.arena);
      Tensor counts = scratch.lend_zeroed(DType::i32, {e});
      gpu::check(cuda::count_choices(r.experts.i32(), r.experts.size(), e, counts.i32(), gpu::stream()));
      c.read(counts, [load, e](const void* p) {
        for (int64_t j = 0; j < e; ++j) load[j] += static_cast<const int32_t*>(p)[j];
      });
      return;
    }
  }
  const HostCopy experts(r.experts);
  int64_t k = r.experts.cols();
  for (int64_t i = 0; i < r.experts.rows(); ++i)
    for (int64_t s = 0; s < k && !is_padding(batch, i); ++s)
      if (int32_t e = experts.i32()[i * k + s]; e >= 0) ++load[e];
}

void observe(MarginHistogram& h, const Routing& r, const Batch& batch) {
  int64_t e = r.scores.cols(), n = r.scores.rows();
  K3_CHECK(h.experts == e, "[balance] the histogram has {} experts but {} were scored", h.experts, e);
  if (r.scores.device() == Device::null) return;
  if (r.scores.device() == Device::cuda) return observe_on_gpu(h, r, batch);
  const float width = h.width();
  auto counted = [&](int64_t i) { return !is_padding(batch, i) && std::isfinite(r.cutoff.f32()[i]); };
  for (int64_t i = 0; i < n; ++i) h.tokens += counted(i);
  parallel_blocks(e, 16, [&](int64_t first, int64_t last) {  // each call owns sixteen experts' counters and walks all tokens
    for (int64_t i = 0; i < n; ++i) {
      if (!counted(i)) continue;
      for (int64_t j = first; j < last; ++j) {
        float at = (r.cutoff.f32()[i] - r.scores.f32()[i * e + j] - h.lo) / width;
        int64_t bin = !(at < float(h.bins)) ? h.bins - 1 : at > 0 ? int64_t(at) : 0;  // a NaN score counts as never chosen
        ++h.counts[size_t(j * h.bins + bin)];
      }
    }
  });
}

std::vector<float> quantile_bias(const MarginHistogram& h, int64_t top_k) {
  K3_CHECK(top_k > 0 && top_k < h.experts, "[balance] top {} of {} experts has no cutoff to balance", top_k, h.experts);
  if (h.tokens == 0) return {};
  const double q = double(h.tokens) * double(top_k) / double(h.experts), width = (double(h.hi) - double(h.lo)) / double(h.bins);
  std::vector<double> b(size_t(h.experts), 0.0);
  for (int64_t j = 0; j < h.experts; ++j) {
    const int32_t* count = h.counts.data() + j * h.bins;
    int64_t below = 0, bin = 0;
    while (bin + 1 < h.bins && double(below + count[bin]) < std::ceil(q)) below += count[bin++];
    double inside = count[bin] ? std::clamp((q - double(below)) / double(count[bin]), 0.0, 1.0) : 0.0;
    b[size_t(j)] = double(h.lo) + (double(bin) + inside) * width;
  }
  return centred(b);
}

std::vector<float> quantile_bias_exact(const std::vector<float>& margins, int64_t experts, int64_t top_k) {
  K3_CHECK(experts > 0 && top_k > 0 && top_k < experts, "[balance] top {} of {} experts has no cutoff to balance", top_k, experts);
  const int64_t tokens = int64_t(margins.size()) / experts;
  if (tokens == 0) return {};
  const double q = double(tokens) * double(top_k) / double(experts);
  const int64_t at = int64_t(q);  // q < tokens, because k < E
  std::vector<double> b(size_t(experts), 0.0);
  parallel_for(experts, [&](int64_t j) {
    std::vector<float> r(size_t(tokens), 0.0f);
    for (int64_t i = 0; i < tokens; ++i) r[size_t(i)] = margins[size_t(i * experts + j)];
    std::nth_element(r.begin(), r.begin() + at, r.end());
    double low = r[size_t(at)], high = low;
    if (at + 1 < tokens) high = *std::min_element(r.begin() + at + 1, r.end());
    b[size_t(j)] = low + (q - double(at)) * (high - low);
  });
  return centred(b);
}

std::vector<float> sign_bias(const std::vector<float>& bias, const std::vector<int64_t>& load, float step) {
  K3_CHECK(bias.size() == load.size(), "[balance] {} biases but {} loads", bias.size(), load.size());
  int64_t total = 0;
  for (int64_t x : load) total += x;
  std::vector<float> out = bias;
  for (size_t j = 0; j < out.size(); ++j) {
    int64_t excess = load[j] * int64_t(load.size()) - total;
    out[j] += excess > 0 ? -step : excess < 0 ? step : 0;
  }
  return out;
}

}  // namespace k3
