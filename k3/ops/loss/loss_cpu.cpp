// A row of logits is read for its maximum, again for the sum of exponentials, and once more to become its gradient. Bound by the
// exponentials while the piece stays in the cache. Rows over the threads. The sum is float32 in parts of kPart columns, so that 163,840
// terms lose no more digits than a few thousand. -log p is (max - l) + log(sum e^{l - max}): exact zeros and small losses keep their digits.
#include "k3/ops/loss/loss_kernels.h"

#include <cmath>

#include "k3/core/simd.h"
#include "k3/core/threads.h"

namespace k3::cpu::K3_ISA {

using namespace k3::simd;

constexpr int64_t kPart = 4096;

// Lanes beyond n are minus infinity: no maximum, and an exponential of 0.
K3_INLINE vec load_logits(const float* p, int64_t n) {
  if (n >= kLanes) return load(p);
  vec v = splat(-__builtin_inff());
  for (int64_t i = 0; i < n; ++i) v[i] = p[i];
  return v;
}

K3_INLINE float maximum(const float* l, int64_t n) {
  vec m = splat(-__builtin_inff());
  for (int64_t i = 0; i < n; i += kLanes) m = max(load_logits(l + i, n - i), m);
  return max_lane(m);
}

// sum e^{l - max}; with `keep`, the terms replace the logits
template <bool keep>
K3_INLINE float sum_of_exp(const float* l, float* kept, float max, int64_t n) {
  float total = 0;
  for (int64_t part = 0; part < n; part += kPart) {
    int64_t end = part + kPart < n ? part + kPart : n;
    vec s = zero();
    for (int64_t i = part; i < end; i += kLanes) {
      vec e = exp(load_logits(l + i, end - i) - splat(max));
      if (keep) store_n(kept + i, e, end - i);
      s = s + e;
    }
    total += sum(s);
  }
  return total;
}

static void cross_entropy(const CrossEntropyArgs& a) {
  parallel_for(a.rows, [&](int64_t n) {
    float* l = a.logits + n * a.vocabulary;
    int32_t target = a.targets[n];
    float max = maximum(l, a.vocabulary), gap = max - l[target];
    float sum = a.gradient ? sum_of_exp<true>(l, l, max, a.vocabulary) : sum_of_exp<false>(l, nullptr, max, a.vocabulary);
    a.loss[n] = gap + std::log(sum);
    if (!a.gradient) return;
    float scale = a.weight / sum;
    for (int64_t i = 0; i < a.vocabulary; i += kLanes) {
      int64_t m = a.vocabulary - i;
      store_n(l + i, load_n(l + i, m) * splat(scale), m);
    }
    l[target] -= a.weight;
  });
}

static void log_softmax(const LogSoftmaxArgs& a) {
  parallel_for(a.rows, [&](int64_t n) {
    const float* l = a.logits + n * a.vocabulary;
    float* out = a.out + n * a.vocabulary;
    float max = maximum(l, a.vocabulary), log_sum = std::log(sum_of_exp<false>(l, nullptr, max, a.vocabulary));
    for (int64_t i = 0; i < a.vocabulary; i += kLanes) {
      int64_t m = a.vocabulary - i;
      store_n(out + i, -((splat(max) - load_n(l + i, m)) + splat(log_sum)), m);
    }
  });
}

}  // namespace k3::cpu::K3_ISA

K3_KERNELS(LossKernels, loss, cross_entropy, log_softmax)
