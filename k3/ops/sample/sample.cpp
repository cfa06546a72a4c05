#include "k3/ops/sample/sample.h"

#include <algorithm>
#include <cmath>

#include "k3/core/error.h"
#include "k3/core/rng.h"
#include "k3/ops/loss/loss_kernels.h"

namespace k3 {

namespace {

constexpr uint64_t kStream = 0x73616d706c65;  // "sample": apart from every other use of the seed

struct Candidate {
  float logit;
  int32_t token;
  double weight = 0;  // probability relative to the most probable token's: nothing can overflow, and a sum is at least 1
};
// The order in which tokens are preferred. Total, so that no result hangs on how a library sorts.
bool before(const Candidate& a, const Candidate& b) { return a.logit != b.logit ? a.logit > b.logit : a.token < b.token; }
bool by_id(const Candidate& a, const Candidate& b) { return a.token < b.token; }

// The token that greedy decoding takes.
int32_t largest(const float* logits, int64_t vocabulary) {
  int64_t best = -1;
  for (int64_t i = 0; i < vocabulary; ++i) {
    K3_CHECK(!(std::isnan(logits[i]) || logits[i] == INFINITY), "[sample] the logit of token {} is {}: the model's numbers broke down", i, logits[i]);
    if (logits[i] != -INFINITY && (best < 0 || logits[i] > logits[best])) best = i;
  }
  K3_CHECK(best >= 0, "[sample] all {} tokens are masked: no token is allowed here", vocabulary);
  return int32_t(best);
}

std::vector<Candidate> unmasked(const float* logits, int64_t vocabulary) {
  std::vector<Candidate> all;
  all.reserve(size_t(vocabulary));
  for (int64_t i = 0; i < vocabulary; ++i)
    if (logits[i] != -INFINITY) all.push_back({logits[i], int32_t(i)});
  return all;
}

double total_weight(const std::vector<Candidate>& all) {
  double sum = 0;
  for (const Candidate& c : all) sum += c.weight;
  return sum;
}

// Sums are made in the order of ids and every filter returns to it, so a filter that drops nothing changes no bit.
void keep_top_k(std::vector<Candidate>& all, int64_t k) {
  if (k >= int64_t(all.size())) return;
  std::nth_element(all.begin(), all.begin() + k, all.end(), before);
  all.resize(size_t(k));
  std::sort(all.begin(), all.end(), by_id);
}

// Halves the range that holds the border until one candidate is left: linear in their number, however many are kept.
void keep_top_p(std::vector<Candidate>& all, double p) {
  double wanted = p * total_weight(all), mass = 0;
  auto first = all.begin(), last = all.end();  // what lies before `first` is kept and weighs `mass`; what lies from `last` on is not
  while (last - first > 1) {
    auto middle = first + (last - first) / 2;
    std::nth_element(first, middle, last, before);
    double half = 0;
    for (auto i = first; i != middle; ++i) half += i->weight;
    if (mass + half >= wanted)
      last = middle;
    else
      mass += half, first = middle;
  }
  all.erase(last, all.end());
  std::sort(all.begin(), all.end(), by_id);
}

}  // namespace

void check(const SampleOptions& o) {
  K3_CHECK(o.temperature >= 0 && std::isfinite(o.temperature), "[sample] temperature must be 0 or more, not {}", o.temperature);
  K3_CHECK(o.top_k >= 0, "[sample] top_k must be 0 (off) or more, not {}", o.top_k);
  K3_CHECK(o.top_p > 0 && o.top_p <= 1, "[sample] top_p must be above 0 and at most 1, not {}", o.top_p);
  K3_CHECK(o.min_p >= 0 && o.min_p <= 1, "[sample] min_p must be from 0 to 1, not {}", o.min_p);
}

int32_t sample(const float* logits, int64_t vocabulary, const SampleOptions& o, uint64_t position) {
  check(o);
  int32_t best = largest(logits, vocabulary);
  if (o.temperature == 0 || o.top_k == 1) return best;

  std::vector<Candidate> kept = unmasked(logits, vocabulary);
  if (o.top_k > 0) keep_top_k(kept, o.top_k);
  for (Candidate& c : kept) c.weight = std::exp((double(c.logit) - double(logits[best])) / double(o.temperature));
  if (o.top_p < 1) keep_top_p(kept, double(o.top_p));
  if (o.min_p > 0) std::erase_if(kept, [&](const Candidate& c) { return c.weight < double(o.min_p); });

  double left = Rng{o.seed, kStream}.uniform(position) * total_weight(kept);
  int32_t drawn = best;
  for (const Candidate& c : kept) {
    if (c.weight == 0) continue;
    drawn = c.token;  // stays at the last one when rounding leaves a rest
    if ((left -= c.weight) < 0) break;
  }
  return drawn;
}

void log_probabilities(const float* logits, int64_t vocabulary, float* out) {
  largest(logits, vocabulary);
  cpu::loss().log_softmax({1, vocabulary, logits, out});
}

std::vector<TokenLogProbability> top_log_probabilities(const float* logits, int64_t vocabulary, int64_t count) {
  K3_CHECK(count >= 0, "[sample] the number of log probabilities must be 0 or more, not {}", count);
  std::vector<float> all(static_cast<size_t>(vocabulary));
  log_probabilities(logits, vocabulary, all.data());
  std::vector<Candidate> c = unmasked(logits, vocabulary);
  auto end = c.begin() + std::min<int64_t>(count, int64_t(c.size()));
  std::partial_sort(c.begin(), end, c.end(), before);
  std::vector<TokenLogProbability> top;
  for (auto i = c.begin(); i != end; ++i) top.push_back({i->token, all[size_t(i->token)]});
  return top;
}

}  // namespace k3
