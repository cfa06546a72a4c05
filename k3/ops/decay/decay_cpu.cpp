// Bound by memory, nearly by the exponentials. Forward splits rows and channels. Backward splits channels alone, so that each bias has one
// owner, who sums its rows in order (sums of kSumRows, then the sum of those); dA_log is summed per channel first, since a head may be one
// channel wide or many.
#include "k3/ops/decay/decay_kernels.h"

#include <cmath>

#include "k3/core/simd.h"
#include "k3/core/threads.h"

namespace k3::cpu::K3_ISA {

using namespace k3::simd;

constexpr int64_t kRows = 16, kForwardChannels = 1024;
constexpr int64_t kBackwardChannels = 64, kSumRows = 64;

// Beyond e^60 every gate is saturated, and infinity times zero is near.
static void fill_rate(const DecayArgs& a) {
  for (int64_t h = 0; h < a.heads; h += kLanes) {
    int64_t m = a.heads - h < kLanes ? a.heads - h : int64_t(kLanes);
    vec A = load_n(a.A_log + h, m);
    float rate[kLanes];
    store(rate, exp(select(A > splat(60.0f), splat(60.0f), A)));
    for (int64_t k = 0; k < m; ++k)
      for (int64_t i = 0; i < a.dim; ++i) a.rate[(h + k) * a.dim + i] = rate[k];
  }
}

K3_INLINE vec at_least(vec x, float low) { return select(x < splat(low), splat(low), x); }  // NaN stays NaN

struct Bounded {
  K3_INLINE vec gate(const DecayArgs& a, vec rate, vec v) { return splat(a.lower_bound) * sigmoid(rate * v); }
  // dz and what a channel adds to dA_log. 1 - sigmoid(x) is sigmoid(-x), which keeps its digits when the gate saturates.
  K3_INLINE void slopes(const DecayArgs& a, vec rate, vec v, vec dg, vec& dz, vec& dA) {
    dz = dg * splat(a.lower_bound) * sigmoid(rate * v) * sigmoid(-(rate * v)) * rate;
    dA = dz * v;
  }
};
struct Softplus {
  K3_INLINE vec gate(const DecayArgs&, vec rate, vec v) { return at_least(-rate * softplus(v), -1e30f); }
  K3_INLINE void slopes(const DecayArgs& a, vec rate, vec v, vec dg, vec& dz, vec& dA) {
    dz = -dg * rate * sigmoid(v);
    dA = dg * gate(a, rate, v);
  }
};

template <class Kind>
static void forward(const DecayArgs& a) {
  fill_rate(a);
  int64_t width = a.heads * a.dim, row_blocks = (a.rows + kRows - 1) / kRows, channel_blocks = (width + kForwardChannels - 1) / kForwardChannels;
  parallel_for(row_blocks * channel_blocks, [&](int64_t block) {
    int64_t first = block % channel_blocks * kForwardChannels, last = first + kForwardChannels < width ? first + kForwardChannels : width;
    int64_t row = block / channel_blocks * kRows, end = row + kRows < a.rows ? row + kRows : a.rows;
    for (; row < end; ++row)
      for (int64_t i = first; i < last; i += kLanes) {
        int64_t m = last - i < kLanes ? last - i : int64_t(kLanes);
        vec v = load_n(a.z + row * width + i, m) + load_n(a.bias + i, m);
        store_n(a.g + row * width + i, Kind::gate(a, load_n(a.rate + i, m), v), m);
      }
  });
}

template <class Kind>
static void backward(const DecayArgs& a) {
  fill_rate(a);
  int64_t width = a.heads * a.dim;
  parallel_blocks(width, kBackwardChannels, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += kLanes) {
      int64_t m = last - i < kLanes ? last - i : int64_t(kLanes);
      vec rate = load_n(a.rate + i, m), bias = load_n(a.bias + i, m), dbias = zero(), dA = zero();
      for (int64_t row = 0; row < a.rows;) {
        vec block_bias = zero(), block_A = zero();
        for (int64_t end = row + kSumRows < a.rows ? row + kSumRows : a.rows; row < end; ++row) {
          vec v = load_n(a.z + row * width + i, m) + bias, dz, dA_row;
          Kind::slopes(a, rate, v, load_n(a.dg + row * width + i, m), dz, dA_row);
          store_n(a.dz + row * width + i, load_n(a.dz + row * width + i, m) + dz, m);
          block_bias = block_bias + dz, block_A = block_A + dA_row;
        }
        dbias = dbias + block_bias, dA = dA + block_A;
      }
      if (a.dbias) store_n(a.dbias + i, load_n(a.dbias + i, m) + dbias, m);
      store_n(a.dA_channel + i, dA, m);
    }
  });
  if (!a.dA_log) return;
  for (int64_t h = 0; h < a.heads; ++h) {
    float sum = 0;
    for (int64_t i = h * a.dim; i < (h + 1) * a.dim; ++i) sum += a.dA_channel[i];
    a.dA_log[h] += sum;
  }
}

}  // namespace k3::cpu::K3_ISA

K3_KERNELS(DecayKernels, decay, forward<Bounded>, backward<Bounded>, forward<Softplus>, backward<Softplus>)
