// Bound by multiply-adds: forward 2 products a tile pair (scores, values), backward 5 (scores again, dP, dV, dK, dQ). Work items: forward
// (64 query rows, kv head), backward (sequence, kv head), so every gradient row has one writer and one order. The exponentials cost about one
// sixteenth of the products at 192 / 128 channels.
//
// Forward, per item: 1 gather the query rows; for each key tile: 2 scores = q keys^T; 3 online softmax; 4 o = o * keep + p values;
// at the last tile 5 o / l and l becomes the log-sum-exp.
#include "k3/ops/attention/attention_kernels.h"

#include <cmath>

#include "k3/core/threads.h"
#include "k3/ops/attention/tile_kernels.h"

namespace k3::cpu::K3_ISA {

K3_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// to[c*128 + r] = from[rows[r]*stride + c], sixteen rows at a time so that a line of `to` is written at once
static void transpose_into(float* to, const float* from, int64_t stride, const int32_t* rows, int64_t count, int64_t channels) {
  int64_t r = 0;
  for (; r + kLanes <= count; r += kLanes) {
    const float* x[kLanes];
    for (int i = 0; i < kLanes; ++i) x[i] = from + rows[r + i] * stride;
    for (int64_t c = 0; c < channels; ++c) {
      float* line = to + c * kKeyTile + r;
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) line[i] = x[i][c];
    }
  }
  for (; r < count; ++r)
    for (int64_t c = 0; c < channels; ++c) to[c * kKeyTile + r] = from[rows[r] * stride + c];
}

static void append(const AttentionArgs& a) {
  const KeyTiles& t = a.tiles;
  parallel_for(a.sequence_count * (t.kv_heads + 1), [&](int64_t item) {
    const AttentionSequence& s = a.sequences[item / (t.kv_heads + 1)];
    int64_t g = item % (t.kv_heads + 1) - 1;  // -1: the shared channels
    for (int64_t i = 0; i < s.queries;) {
      int64_t at = s.first + i, column = at % kKeyTile, count = least(kKeyTile - column, s.queries - i);
      float* block = a.blocks[s.blocks_at + at / kKeyTile];
      const int32_t* rows = a.rows + s.rows_at + i;
      if (g < 0) {
        if (t.shared) transpose_into(block + column, a.shared, a.shared_stride, rows, count, t.shared);
      } else {
        transpose_into(block + t.keys_at(g) + column, a.keys + g * a.key_head_stride, a.key_stride, rows, count, t.own);
        float* values = block + t.values_at(g) + column * t.value;
        for (int64_t r = 0; r < count; ++r) copy_floats(values + r * t.value, a.values + rows[r] * a.value_stride + g * a.value_head_stride, t.value);
      }
      i += count;
    }
  });
}

// The query rows of one item: where they lie.
struct Rows {
  const AttentionArgs& a;
  const AttentionSequence& s;
  int64_t g, first, count;
  Rows(const AttentionArgs& args, const AttentionSequence& seq, int64_t head, int64_t first_row)
      : a(args), s(seq), g(head), first(first_row), count(least(kQueryTile, seq.queries * args.group - first_row)) {}
  int64_t token(int64_t r) const { return (first + r) / a.group; }
  // index of (row, query head) in a (tokens, heads) array
  int64_t at(int64_t r) const { return int64_t(a.rows[s.rows_at + token(r)]) * a.tiles.kv_heads * a.group + g * a.group + (first + r) % a.group; }
  int64_t limit(int64_t r) const { return s.first + token(r) + 1; }  // how many keys the row sees
  void gather(float* to, const float* from, int64_t width) const {
    for (int64_t r = 0; r < count; ++r) copy_floats(to + r * width, from + at(r) * width, width);
  }
};

static void attend(const AttentionArgs& a, const QueryTile& tile, int64_t g, int64_t t0, int64_t t1) {
  const KeyTiles& t = a.tiles;
  const AttentionSequence& s = a.sequences[tile.sequence];
  Rows rows(a, s, g, tile.first_row);
  int64_t n = rows.count, last = rows.limit(n - 1), tiles = (last + kKeyTile - 1) / kKeyTile, key_dim = t.own + t.shared;
  if (t0 >= tiles) return;
  alignas(64) float q[kQueryTile * kMaxHeadDim], o[kQueryTile * kMaxHeadDim], p[kQueryTile * kKeyTile];
  float m[kQueryTile], l[kQueryTile], keep[kQueryTile];
  rows.gather(q, a.q, key_dim);  // 1
  if (t0 > 0) rows.gather(o, a.y, t.value);
  for (int64_t r = 0; r < n; ++r) m[r] = t0 ? a.m[rows.at(r)] : -__builtin_inff(), l[r] = t0 ? a.l[rows.at(r)] : 0;
  for (int64_t j = t0; j < least(t1, tiles); ++j) {
    const float* block = a.blocks[s.blocks_at + j];
    // A tile that some row sees in part goes in pieces of sixteen rows, which leaves out most of what nobody sees.
    const int64_t step = rows.limit(0) >= (j + 1) * kKeyTile ? n : kLanes;
    for (int64_t r0 = 0; r0 < n; r0 += step) {
      const int64_t some = least(step, n - r0), visible = least(kKeyTile, rows.limit(r0 + some - 1) - j * kKeyTile);
      if (visible <= 0) continue;
      const int64_t cols = (visible + kLanes - 1) / kLanes * kLanes;
      float *qr = q + r0 * key_dim, *pr = p + r0 * kKeyTile, *o_r = o + r0 * t.value;
      tile_product<false>(TileProduct<float>{some, cols, t.own, qr, key_dim, block + t.keys_at(g), kKeyTile, pr, kKeyTile});  // 2
      if (t.shared) tile_product<false>(TileProduct<float>{some, cols, t.shared, qr + t.own, key_dim, block, kKeyTile, pr, kKeyTile, Into::add});
      softmax_rows(
          pr, kKeyTile, some, cols, [&](int64_t r) { return rows.limit(r0 + r) - j * kKeyTile; }, a.scale, m + r0, l + r0, keep);  // 3
      tile_product<false>(TileProduct<float>{some, t.value, visible, pr, kKeyTile, block + t.values_at(g), t.value, o_r, t.value,
                                             j ? Into::scaled : Into::set, keep});  // 4
    }
  }
  bool done = t1 >= tiles;
  for (int64_t r = 0; r < n; ++r) {
    int64_t at = rows.at(r);
    a.m[at] = m[r];
    a.l[at] = done ? m[r] + std::log(l[r]) : l[r];
    float *y = a.y + at * t.value, *x = o + r * t.value;
    if (done)  // 5; adding 0 turns -0, which a sum of underflowing terms may leave or not, into 0
      for (int64_t i = 0; i < t.value; ++i) y[i] = x[i] * (1.0f / l[r]) + 0.0f;
    else
      copy_floats(y, x, t.value);
  }
}

static void forward(const AttentionArgs& a, int64_t t0, int64_t t1) {
  parallel_for(a.query_tile_count * a.tiles.kv_heads,
               [&](int64_t i) { attend(a, a.query_tiles[i / a.tiles.kv_heads], i % a.tiles.kv_heads, t0, t1); });
}

static void max_logit(const AttentionArgs& a, float* out) {
  int64_t heads = a.tiles.kv_heads * a.group;
  for (int64_t h = 0; h < heads; ++h) out[h] = -__builtin_inff();
  for (int64_t i = 0; i < a.sequence_count; ++i)
    for (int64_t r = 0; r < a.sequences[i].queries; ++r) {
      const float* m = a.m + a.rows[a.sequences[i].rows_at + r] * heads;
      for (int64_t h = 0; h < heads; ++h) out[h] = m[h] > out[h] ? m[h] : out[h];
    }
}

// All key tiles of one sequence and kv head. For key tile j: 1 its keys both ways round and its values transposed; for each query tile that
// sees it: 2 scores, p = exp(scale * score - lse); 3 dp = dy values^T, ds = p (dp - d) scale; 4 dv += p^T dy; 5 dk += ds^T q; 6 dq += ds k.
static void backward_head(const AttentionArgs& a, const AttentionSequence& s, int64_t g) {
  const KeyTiles& t = a.tiles;
  const int64_t key_dim = t.own + t.shared;
  const ivec lane = lane_numbers();
  alignas(64) float k[kKeyTile * kMaxHeadDim], kt[kMaxHeadDim * kKeyTile], vt[kMaxHeadDim * kKeyTile];
  alignas(64) float dk[kKeyTile * kMaxHeadDim], dv[kKeyTile * kMaxHeadDim];
  alignas(64) float q[kQueryTile * kMaxHeadDim], dy[kQueryTile * kMaxHeadDim], dq[kQueryTile * kMaxHeadDim];
  alignas(64) float p[kQueryTile * kKeyTile], ds[kQueryTile * kKeyTile];
  for (int64_t j = 0; j * kKeyTile < s.queries; ++j) {
    const int64_t start = j * kKeyTile, count = least(kKeyTile, s.queries - start);
    const int32_t* key_rows = a.rows + s.rows_at + start;
    const float *own = a.keys + g * a.key_head_stride, *values = a.values + g * a.value_head_stride;
    if (count < kKeyTile) {  // masked columns must be numbers
      for (int64_t i = 0; i < key_dim * kKeyTile; ++i) kt[i] = 0;
      for (int64_t i = 0; i < t.value * kKeyTile; ++i) vt[i] = 0;
    }
    transpose_into(kt, own, a.key_stride, key_rows, count, t.own);  // 1
    if (t.shared) transpose_into(kt + t.own * kKeyTile, a.shared, a.shared_stride, key_rows, count, t.shared);
    transpose_into(vt, values, a.value_stride, key_rows, count, t.value);
    for (int64_t r = 0; r < count; ++r) {
      copy_floats(k + r * key_dim, own + key_rows[r] * a.key_stride, t.own);
      if (t.shared) copy_floats(k + r * key_dim + t.own, a.shared + key_rows[r] * a.shared_stride, t.shared);
    }
    for (int64_t i = 0; i < count * key_dim; ++i) dk[i] = 0;
    for (int64_t i = 0; i < count * t.value; ++i) dv[i] = 0;
    for (int64_t first = start * a.group / kQueryTile * kQueryTile; first < s.queries * a.group; first += kQueryTile) {
      Rows rows(a, s, g, first);
      const int64_t n = rows.count, seen = least(count, rows.limit(n - 1) - start), cols = (seen + kLanes - 1) / kLanes * kLanes;
      rows.gather(q, a.q, key_dim);
      rows.gather(dy, a.dy, t.value);
      tile_product<false>(TileProduct<float>{n, cols, key_dim, q, key_dim, kt, kKeyTile, p, kKeyTile});    // 2
      tile_product<false>(TileProduct<float>{n, cols, t.value, dy, t.value, vt, kKeyTile, ds, kKeyTile});  // 3
      for (int64_t r = 0; r < n; ++r) {
        int64_t visible = rows.limit(r) - start;
        vec lse = splat(a.l[rows.at(r)]), d = splat(a.d[rows.at(r)]);
        for (int64_t c = 0; c < cols; c += kLanes) {
          float *pr = p + r * kKeyTile + c, *dr = ds + r * kKeyTile + c;
          vec w = exp(load(pr) * splat(a.scale) - lse), x = w * (load(dr) - d) * splat(a.scale);
          if (c + kLanes > visible) {
            ivec seen_lane = lane + isplat(int32_t(c)) < isplat(int32_t(visible));
            w = select(seen_lane, w, zero()), x = select(seen_lane, x, zero());
          }
          store(pr, w), store(dr, x);
        }
      }
      tile_product<true>(TileProduct<float>{seen, t.value, n, p, kKeyTile, dy, t.value, dv, t.value, Into::add});  // 4
      tile_product<true>(TileProduct<float>{seen, key_dim, n, ds, kKeyTile, q, key_dim, dk, key_dim, Into::add});  // 5
      tile_product<false>(TileProduct<float>{n, key_dim, seen, ds, kKeyTile, k, key_dim, dq, key_dim});            // 6
      for (int64_t r = 0; r < n; ++r) add_floats(a.dq + rows.at(r) * key_dim, dq + r * key_dim, key_dim);
    }
    for (int64_t r = 0; r < count; ++r) {
      add_floats(a.dkeys + key_rows[r] * a.key_stride + g * a.key_head_stride, dk + r * key_dim, t.own);
      add_floats(a.dvalues + key_rows[r] * a.value_stride + g * a.value_head_stride, dv + r * t.value, t.value);
      if (t.shared) copy_floats(a.dshared + (g * a.tokens + key_rows[r]) * t.shared, dk + r * key_dim + t.own, t.shared);
    }
  }
}

static void backward(const AttentionArgs& a) {
  const KeyTiles& t = a.tiles;
  const int64_t heads = t.kv_heads * a.group;
  parallel_blocks(a.tokens, 64, [&](int64_t first, int64_t last) {
    for (int64_t i = first * heads; i < last * heads; ++i) {
      const float *dy = a.dy + i * t.value, *y = a.y + i * t.value;
      vec acc = zero();
      for (int64_t c = 0; c < t.value; c += kLanes) acc = fma(load_n(dy + c, t.value - c), load_n(y + c, t.value - c), acc);
      a.d[i] = sum(acc);
    }
  });
  parallel_for(a.sequence_count * t.kv_heads, [&](int64_t i) { backward_head(a, a.sequences[i / t.kv_heads], i % t.kv_heads); });
  if (t.shared)
    parallel_blocks(a.tokens, 64, [&](int64_t first, int64_t last) {
      for (int64_t g = 0; g < t.kv_heads; ++g)
        add_floats(a.dshared_sum + first * t.shared, a.dshared + (g * a.tokens + first) * t.shared, (last - first) * t.shared);
    });
}

}  // namespace k3::cpu::K3_ISA

K3_KERNELS(AttentionKernels, attention, append, forward, backward, max_logit)
