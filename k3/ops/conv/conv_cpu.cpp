// Bound by memory: x is read once (its neighbours' rows are still in the cache), y written once. A token's output is one chain over its
// taps, oldest first; a tap before the sequence's start is skipped, wherever the call begins, so the bits don't depend on the cut.
// Forward splits rows and channels; backward splits channels alone, so that every dx and dw has one owner, who walks the rows in order.
// Weights lie (channels, width); each block turns its own to (width, channels) first, so that a vector holds sixteen channels of one tap.
#include "k3/ops/conv/conv_kernels.h"

#include <cmath>

#include "k3/core/simd.h"
#include "k3/core/threads.h"

namespace k3::cpu::K3_ISA {

using namespace k3::simd;

constexpr int64_t kRows = 64;              // rows of a forward block
constexpr int64_t kForwardChannels = 512;  // channels of a forward block
constexpr int64_t kBackwardChannels = 64;  // channels of a backward block: a cache line times four, and enough blocks for many threads
constexpr int64_t kSumRows = 64;           // dw is a sum of sums of this many rows

// wt[j][c - first] = w[c, j]
template <int64_t kChannels>
K3_INLINE void transpose(const ConvArgs& a, int64_t first, int64_t n, float (&wt)[kConvMaxWidth][kChannels]) {
  for (int64_t j = 0; j < a.width; ++j)
    for (int64_t c = 0; c < n; ++c) wt[j][c] = a.w[(first + c) * a.width + j];
}

// The rows that the taps of row n read; null for zeros. False when the row is padding.
K3_INLINE bool sources(const ConvArgs& a, int64_t n, const float* (&source)[kConvMaxWidth]) {
  const int32_t* taps = a.taps + n * a.width;
  if (taps[a.width - 1] == kConvPadding) return false;
  for (int64_t j = 0; j < a.width; ++j)
    source[j] = taps[j] >= 0 ? a.x + taps[j] * a.channels : taps[j] == kConvZero ? nullptr : a.state + int64_t(kConvState - taps[j]) * a.channels;
  return true;
}

static void conv_silu_forward(const ConvArgs& a) {
  int64_t row_blocks = (a.rows + kRows - 1) / kRows, channel_blocks = (a.channels + kForwardChannels - 1) / kForwardChannels;
  parallel_for(row_blocks * channel_blocks, [&](int64_t block) {
    int64_t first = block % channel_blocks * kForwardChannels, n = a.channels - first < kForwardChannels ? a.channels - first : kForwardChannels;
    int64_t row = block / channel_blocks * kRows, last = row + kRows < a.rows ? row + kRows : a.rows;
    float wt[kConvMaxWidth][kForwardChannels];
    transpose(a, first, n, wt);
    for (; row < last; ++row) {
      float* y = a.y + row * a.channels + first;
      const float* source[kConvMaxWidth];
      bool real = sources(a, row, source);
      for (int64_t i = 0; i < n; i += kLanes) {
        int64_t m = n - i < kLanes ? n - i : int64_t(kLanes);
        vec sum = zero();
        if (real) {
          for (int64_t j = 0; j < a.width; ++j)
            if (source[j]) sum = fma(load_n(wt[j] + i, m), load_n(source[j] + first + i, m), sum);
          sum = sum * sigmoid(sum);
        }
        store_n(y + i, sum, m);
      }
    }
  });
}

static void conv_silu_backward(const ConvArgs& a) {
  parallel_blocks(a.channels, kBackwardChannels, [&](int64_t first, int64_t end) {
    int64_t n = end - first;
    float wt[kConvMaxWidth][kBackwardChannels], block[kConvMaxWidth][kBackwardChannels], total[kConvMaxWidth][kBackwardChannels] = {};
    transpose(a, first, n, wt);
    for (int64_t row = 0; row < a.rows;) {
      int64_t last = row + kSumRows < a.rows ? row + kSumRows : a.rows;
      for (int64_t j = 0; j < a.width; ++j)
        for (int64_t i = 0; i < kBackwardChannels; ++i) block[j][i] = 0;
      for (; row < last; ++row) {
        const float* source[kConvMaxWidth];
        if (!sources(a, row, source)) continue;
        const int32_t* taps = a.taps + row * a.width;
        for (int64_t i = 0; i < n; i += kLanes) {
          int64_t m = n - i < kLanes ? n - i : int64_t(kLanes);
          vec sum = zero();
          for (int64_t j = 0; j < a.width; ++j)
            if (source[j]) sum = fma(load_n(wt[j] + i, m), load_n(source[j] + first + i, m), sum);
          vec da = load_n(a.dy + row * a.channels + first + i, m) * sigmoid(sum) * (splat(1.0f) + sum * sigmoid(-sum));
          for (int64_t j = 0; j < a.width; ++j) {
            if (!source[j]) continue;
            float* dx = a.dx + taps[j] * a.channels + first + i;
            store_n(dx, fma(load_n(wt[j] + i, m), da, load_n(dx, m)), m);
            store_n(block[j] + i, fma(da, load_n(source[j] + first + i, m), load_n(block[j] + i, m)), m);
          }
        }
      }
      for (int64_t j = 0; j < a.width; ++j)
        for (int64_t i = 0; i < kBackwardChannels; ++i) total[j][i] += block[j][i];
    }
    if (a.dw)
      for (int64_t j = 0; j < a.width; ++j)
        for (int64_t c = 0; c < n; ++c) a.dw[(first + c) * a.width + j] += total[j][c];
  });
}

}  // namespace k3::cpu::K3_ISA

K3_KERNELS(ConvKernels, conv, conv_silu_forward, conv_silu_backward)
