// Decode is bound by memory: the cache (rank + rope floats a token) is read once for all heads, W_kvb once for all tokens. Prefill in this form
// is bound by multiply-adds, 2*rank + rope a key, query and head.
// Steps: 1 q_L = W_UK^T q_nope; 2 for each piece of the context: scores over rank + rope, online softmax, sum of latents; 3 the pieces are
// joined in order; 4 o = W_UV o_L.
#include "k3/ops/attention/absorbed_kernels.h"

#include <cmath>

#include "k3/core/threads.h"
#include "k3/ops/attention/attention_kernels.h"
#include "k3/ops/attention/tile_kernels.h"

namespace k3::cpu::K3_ISA {

constexpr int64_t kTokens = 64;  // that one item of steps 1 and 4 takes

template <class W>
static void absorb(const AbsorbedArgs& a, int64_t h, int64_t first, int64_t last) {  // 1
  const int64_t width = a.rank + a.rope, key_dim = a.nope + a.rope;
  alignas(64) float q[kTokens * kMaxHeadDim];
  for (int64_t i = first; i < last; ++i) {
    const float* row = a.q + (int64_t(a.rows[i]) * a.heads + h) * key_dim;
    copy_floats(q + (i - first) * a.nope, row, a.nope);
    copy_floats(a.q_latent + (i * a.heads + h) * width + a.rank, row + a.nope, a.rope);
  }
  const W* w = static_cast<const W*>(a.kv_b) + h * (a.nope + a.value) * a.rank;
  TileProduct<W> p{last - first, a.rank, a.nope, q, a.nope, w, a.rank, a.q_latent + (first * a.heads + h) * width, a.heads * width};
  p.ahead = 8 * a.rank;
  tile_product<false, true>(p);
}

static void attend(const AbsorbedArgs& a, const AbsorbedItem& item) {  // 2
  const AbsorbedSequence& s = a.sequences[item.sequence];
  const int64_t width = a.rank + a.rope, all = s.queries * a.heads;
  const int64_t n = all - item.first_row < kAbsorbedRows ? all - item.first_row : kAbsorbedRows;
  auto limit = [&](int64_t r) { return s.first + (item.first_row + r) / a.heads + 1; };
  const float* q = a.q_latent + (s.tokens_at * a.heads + item.first_row) * width;
  const int64_t at = s.partial_at + item.chunk * all + item.first_row;
  float *o = a.partial + at * a.rank, *m = a.partial_m + at, *l = a.partial_l + at, keep[kAbsorbedRows];
  alignas(64) float p[kAbsorbedRows * kKeyTile];
  for (int64_t r = 0; r < n; ++r) m[r] = -__builtin_inff(), l[r] = 0;
  bool begun = false;
  for (int64_t j = item.t0; j < item.t1; ++j) {
    int64_t visible = limit(n - 1) - j * kKeyTile;
    if (visible <= 0) break;
    if (visible > kKeyTile) visible = kKeyTile;
    int64_t cols = (visible + kLanes - 1) / kLanes * kLanes, blind = 0;
    while (limit(blind) <= j * kKeyTile) ++blind;  // rows that see nothing of this tile
    const float* block = a.blocks[s.blocks_at + j];
    tile_dots(n - blind, visible, width, q + blind * width, width, block, width, p + blind * kKeyTile, kKeyTile);
    for (int64_t r = 0; r < blind; ++r) {
      keep[r] = 1;
      for (int64_t c = 0; c < cols; ++c) p[r * kKeyTile + c] = 0;
    }
    softmax_rows(
        p + blind * kKeyTile, kKeyTile, n - blind, cols, [&](int64_t r) { return limit(blind + r) - j * kKeyTile; }, a.scale, m + blind, l + blind,
        keep + blind);
    TileProduct<float> sum{n, a.rank, visible, p, kKeyTile, block, width, o, a.rank, begun ? Into::scaled : Into::set, keep};
    if (j + 1 < item.t1) sum.ahead = a.blocks[s.blocks_at + j + 1] - block;  // the next tile comes in while this one is summed
    tile_product<false, true>(sum);
    begun = true;
  }
  if (!begun)
    for (int64_t i = 0; i < n * a.rank; ++i) o[i] = 0;
}

static void join(const AbsorbedArgs& a, const AbsorbedItem& item) {  // 3
  const AbsorbedSequence& s = a.sequences[item.sequence];
  const int64_t width = a.rank + a.rope, all = s.queries * a.heads;
  for (int64_t row = item.first_row; row < all && row < item.first_row + kAbsorbedRows; ++row) {
    float top = -__builtin_inff(), total = 0;
    for (int64_t c = 0; c < s.chunks; ++c) top = a.partial_m[s.partial_at + c * all + row] > top ? a.partial_m[s.partial_at + c * all + row] : top;
    float* out = a.q_latent + (s.tokens_at * a.heads + row) * width;
    for (int64_t i = 0; i < a.rank; ++i) out[i] = 0;
    for (int64_t c = 0; c < s.chunks; ++c) {
      int64_t at = s.partial_at + c * all + row;
      float w = exp(splat(a.partial_m[at] - top))[0];  // of a piece that the row does not see: exactly 0
      total += w * a.partial_l[at];
      for (int64_t i = 0; i < a.rank; ++i) out[i] += w * a.partial[at * a.rank + i];
    }
    for (int64_t i = 0; i < a.rank; ++i) out[i] *= 1.0f / total;
    a.m[int64_t(a.rows[s.tokens_at + row / a.heads]) * a.heads + row % a.heads] = top;
  }
}

template <class W>
static void expand(const AbsorbedArgs& a, int64_t h, int64_t first, int64_t last) {  // 4
  const int64_t width = a.rank + a.rope;
  alignas(64) float o[kTokens * kMaxHeadDim];
  const W* w = static_cast<const W*>(a.kv_b) + (h * (a.nope + a.value) + a.nope) * a.rank;
  tile_dots(last - first, a.value, a.rank, a.q_latent + (first * a.heads + h) * width, a.heads * width, w, a.rank, o, a.value);
  for (int64_t i = first; i < last; ++i) copy_floats(a.y + (int64_t(a.rows[i]) * a.heads + h) * a.value, o + (i - first) * a.value, a.value);
}

static void forward(const AbsorbedArgs& a) {
  const int64_t blocks = (a.token_count + kTokens - 1) / kTokens;
  auto each_head = [&](auto step) {
    parallel_for(blocks * a.heads, [&](int64_t i) {
      int64_t first = i / a.heads * kTokens, last = first + kTokens < a.token_count ? first + kTokens : a.token_count;
      step(i % a.heads, first, last);
    });
  };
  each_head([&](int64_t h, int64_t first, int64_t last) { a.kv_b_is_bf16 ? absorb<uint16_t>(a, h, first, last) : absorb<float>(a, h, first, last); });
  parallel_for(a.item_count, [&](int64_t i) { attend(a, a.items[i]); });
  parallel_for(a.first_chunk_items, [&](int64_t i) { join(a, a.items[i]); });
  each_head([&](int64_t h, int64_t first, int64_t last) { a.kv_b_is_bf16 ? expand<uint16_t>(a, h, first, last) : expand<float>(a, h, first, last); });
}

}  // namespace k3::cpu::K3_ISA

K3_KERNELS(AbsorbedKernels, absorbed, forward)
