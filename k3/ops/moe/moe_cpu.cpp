// Routing and the moves between token order and expert order; the products are product.h's.
// Bound by memory (rows moved once) and, in the selection, by one pass over the scores: a candidate is compared with the worst of the best
// k+1 so far, which it beats about k ln(E/k) times. Every row and every token is computed by itself.
#include "k3/ops/moe/moe_kernels.h"

#include <cmath>

#include "k3/core/simd.h"
#include "k3/core/threads.h"

namespace k3::cpu::K3_ISA {

using namespace k3::simd;

constexpr int64_t kBlock = 16;  // rows that one call of parallel_for takes

// f(i, n): the n <= 16 columns from i
template <class F>
K3_INLINE void columns(int64_t d, F f) {
  int64_t i = 0;
  for (; i + kLanes <= d; i += kLanes) f(i, int64_t(kLanes));
  if (i < d) f(i, d - i);
}

// The best `room` of what is offered, best first; of equals, the one offered first.
struct Best {
  float value[kMaxTopK + 1];
  int32_t index[kMaxTopK + 1];
  int64_t count, room;
};
K3_INLINE void offer(Best& b, float v, int32_t i) {
  if (!(v == v)) v = -__builtin_inff();  // a NaN score is never preferred, but the choice stays valid
  if (b.count == b.room && !(v > b.value[b.count - 1])) return;
  int64_t at = b.count < b.room ? b.count++ : b.count - 1;
  for (; at > 0 && v > b.value[at - 1]; --at) b.value[at] = b.value[at - 1], b.index[at] = b.index[at - 1];
  b.value[at] = v, b.index[at] = i;
}

K3_INLINE void scores_of(const RouteArgs& a, const float* logits, float* s) {
  if (!a.softmax) {
    columns(a.experts, [&](int64_t i, int64_t n) { store_n(s + i, sigmoid(load_n(logits + i, n)), n); });
    return;
  }
  float top = -__builtin_inff();
  for (int64_t j = 0; j < a.experts; ++j) top = logits[j] > top ? logits[j] : top;
  vec total = zero();
  columns(a.experts, [&](int64_t i, int64_t n) {
    store_n(s + i, exp(load_n(logits + i, n) - splat(top)), n);
    total = total + load_n(s + i, n);
  });
  vec r = splat(1.0f / sum(total));
  columns(a.experts, [&](int64_t i, int64_t n) { store_n(s + i, load_n(s + i, n) * r, n); });
}

// The best k+1 of the row by score + bias, within the best groups.
K3_INLINE void choose(const RouteArgs& a, const float* s, Best& best) {
  const int64_t size = a.experts / a.groups;
  bool keep[kMaxGroups];
  if (a.top_groups < a.groups) {
    best.count = 0, best.room = a.top_groups;
    for (int64_t g = 0; g < a.groups; ++g) {
      float first = -__builtin_inff(), second = first;
      for (int64_t j = g * size; j < (g + 1) * size; ++j) {
        float v = s[j] + a.bias[j];
        if (v > first)
          second = first, first = v;
        else if (v > second)
          second = v;
      }
      keep[g] = false;
      offer(best, size > 1 ? first + second : first, int32_t(g));
    }
    for (int64_t i = 0; i < best.count; ++i) keep[best.index[i]] = true;
  } else {
    for (int64_t g = 0; g < a.groups; ++g) keep[g] = true;
  }
  best.count = 0, best.room = a.top_k + 1;
  for (int64_t g = 0; g < a.groups; ++g)
    if (keep[g])
      for (int64_t j = g * size; j < (g + 1) * size; ++j) offer(best, s[j] + a.bias[j], int32_t(j));
}

static void route_forward(const RouteArgs& a) {
  parallel_blocks(a.rows, kBlock, [&](int64_t begin, int64_t end) {
    Best best;
    for (int64_t n = begin; n < end; ++n) {
      float *s = a.scores + n * a.experts, *w = a.weights + n * a.top_k;
      int32_t* chosen = a.chosen + n * a.top_k;
      if (a.padding && a.padding[n]) {
        for (int64_t j = 0; j < a.experts; ++j) s[j] = 0;
        for (int64_t i = 0; i < a.top_k; ++i) chosen[i] = -1, w[i] = 0;
        a.cutoff[n] = 0, a.margin[n] = __builtin_inff();
        continue;
      }
      scores_of(a, a.logits + n * a.experts, s);
      choose(a, s, best);
      a.cutoff[n] = best.count > a.top_k ? best.value[a.top_k] : -__builtin_inff();
      a.margin[n] = best.value[a.top_k - 1] - a.cutoff[n];
      float total = 0;
      for (int64_t i = 0; i < a.top_k; ++i) {
        chosen[i] = a.forced ? a.forced[n * a.top_k + i] : best.index[i];
        total += w[i] = s[chosen[i]];
      }
      float r = a.renormalize ? a.scale / (total + 1e-20f) : a.scale;
      for (int64_t i = 0; i < a.top_k; ++i) w[i] *= r;
    }
  });
}

static void route_backward(const RouteArgs& a) {
  parallel_blocks(a.rows, kBlock, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      if (a.padding && a.padding[n]) continue;
      const float *s = a.scores + n * a.experts, *dw = a.dweights + n * a.top_k;
      const int32_t* chosen = a.chosen + n * a.top_k;
      float* dlogits = a.dlogits + n * a.experts;
      float total = 0, inner = 0, r = a.scale;  // ds_j = r (dw_j - inner)
      if (a.renormalize) {
        for (int64_t i = 0; i < a.top_k; ++i) total += s[chosen[i]], inner += dw[i] * s[chosen[i]];
        total += 1e-20f, inner /= total, r = a.scale / total;
      }
      float across = 0;  // softmax: sum of ds s over all experts
      if (a.softmax)
        for (int64_t i = 0; i < a.top_k; ++i) across += r * (dw[i] - inner) * s[chosen[i]];
      for (int64_t i = 0; i < a.top_k; ++i) {
        float v = s[chosen[i]], ds = r * (dw[i] - inner);
        dlogits[chosen[i]] += a.softmax ? ds * v : ds * v * (1 - v);
      }
      if (a.softmax)
        columns(a.experts, [&](int64_t i, int64_t m) { store_n(dlogits + i, load_n(dlogits + i, m) - splat(across) * load_n(s + i, m), m); });
    }
  });
}

static void gather(const DispatchArgs& a) {
  parallel_blocks(a.pairs, kBlock, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* from = a.from + a.pair_of_row[r] / a.slots * a.d;
      float* to = a.to + r * a.d;
      columns(a.d, [&](int64_t i, int64_t n) { store_n(to + i, load_n(from + i, n), n); });
    }
  });
}

template <bool add>
static void combine(const DispatchArgs& a) {
  parallel_blocks(a.tokens, kBlock, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* to = a.to + t * a.d;
      const int32_t* rows = a.row_of_pair + t * a.slots;
      columns(a.d, [&](int64_t i, int64_t n) {
        vec u = zero();
        for (int64_t k = 0; k < a.slots; ++k)
          if (rows[k] >= 0) u = fma(splat(a.weights ? a.weights[t * a.slots + k] : 1.0f), load_n(a.from + rows[k] * a.d + i, n), u);
        store_n(to + i, add ? load_n(to + i, n) + u : u, n);
      });
    }
  });
}

static void weigh_pairs(const PairArgs& a) {
  for (int64_t r = a.first; r < a.last; ++r) {
    float *e = a.e + r * a.m, *h = a.h + r * a.m;
    vec p = splat(a.weights[a.pair_of_row[r]]), dot = zero();
    columns(a.m, [&](int64_t i, int64_t n) {
      vec ev = load_n(e + i, n), hv = load_n(h + i, n);
      dot = fma(ev, hv, dot);
      store_n(e + i, p * ev, n);
      store_n(h + i, p * hv, n);
    });
    a.dweights[a.pair_of_row[r]] += sum(dot);
  }
}

}  // namespace k3::cpu::K3_ISA

K3_KERNELS(MoeKernels, moe, route_forward, route_backward, gather, combine<false>, combine<true>, weigh_pairs)
