#include <algorithm>
#include <cstring>

#include "k3/core/error.h"
#include "k3/core/listed.h"
#include "k3/ops/attention/absorbed_kernels.h"
#include "k3/ops/attention/attention.h"
#include "k3/ops/attention/attention_float_cuda.h"
#include "k3/ops/attention/expanded.h"
#include "k3/ops/attention/prefill.h"
#include "k3/ops/linear/blas_cuda.h"
#include "k3/ops/linear/linear.h"
#include "k3/tape/tape.h"

namespace k3 {

namespace {

using cpu::kKeyTile;

constexpr int64_t kExpandTiles = 4;  // key tiles expanded at a time from a cache of latents: scratch does not grow with the context

cpu::KeyTiles tiles_of(const MlaShape& s) { return {s.heads, s.nope, s.rope, s.value}; }

Expanded expanded_form(const MlaShape& s, Var q, Var kv, Var k_pe) {
  return {"mla_attention", tiles_of(s), 1, s.scale, q, kv, kv, k_pe, s.nope + s.value, s.nope + s.value, s.nope};
}

// The call's latents into the blocks of their slots, rows [c | k_pe].
void append_latents(const AttentionPlan& plan, const MlaShape& s, const float* c, const float* k_pe) {
  for (const auto& q : plan.sequences)
    for (int64_t i = 0; i < q.queries; ++i) {
      int64_t at = q.first + i, row = plan.rows[q.rows_at + i];
      float* to = plan.blocks[q.blocks_at + at / kKeyTile] + at % kKeyTile * (s.rank + s.rope);
      std::memcpy(to, c + row * s.rank, size_t(s.rank) * sizeof(float));
      std::memcpy(to + s.rank, k_pe + row * s.rope, size_t(s.rope) * sizeof(float));
    }
}

bool absorbed_is_cheaper(const MlaShape& s, const cpu::AttentionSequence& q) {
  double keys = double(q.first + q.queries), pairs = double(q.queries) * (double(q.first) + double(q.queries + 1) / 2);
  double absorb = double(q.queries * (s.nope + s.value) * s.rank) + pairs * double(2 * s.rank + s.rope);
  double expand = keys * double((s.nope + s.value) * s.rank) + pairs * double(s.nope + s.rope + s.value);
  return absorb < expand;
}

// One sequence against its cached latents in the expanded form: the same products and sums as without a cache.
void expand_sequence(const AttentionPlan& plan, const cpu::AttentionSequence& sequence, const MlaShape& s, cpu::AttentionArgs a, Param& kv_b,
                     Context& c) {
  const int64_t keys = sequence.first + sequence.queries, width = s.rank + s.rope;
  std::vector<cpu::AttentionSequence> one{sequence};
  one[0].blocks_at = 0;
  auto tiles = query_tiles(one, 1);
  std::vector<float*> blocks(size_t((keys + kKeyTile - 1) / kKeyTile));
  Scratch lists(*c.arena);
  float* const* cached = listed(c.device, lists, plan.blocks) + sequence.blocks_at;
  a.sequences = listed(c.device, lists, one), a.sequence_count = 1;
  a.query_tiles = listed(c.device, lists, tiles), a.query_tile_count = int64_t(tiles.size());
  a.rows = listed(c.device, lists, plan.rows);
  for (int64_t t0 = 0; t0 < int64_t(blocks.size()); t0 += kExpandTiles) {
    const int64_t t1 = std::min<int64_t>(t0 + kExpandTiles, int64_t(blocks.size())), n = std::min(keys, t1 * kKeyTile) - t0 * kKeyTile;
    Scratch scratch(*c.arena);
    Var latents(c, DType::f32, {n, s.rank}), shared(c, DType::f32, {n, s.rope});
    Tensor room = scratch.lend(DType::f32, {t1 - t0, a.tiles.floats()});
    for (int64_t t = t0; t < t1 && room.has_data(); ++t) {
      blocks[t] = room.f32() + (t - t0) * a.tiles.floats();
      for (int64_t i = 0; i < std::min(kKeyTile, keys - t * kKeyTile) && c.device == Device::cpu; ++i) {
        const float* from = cached[t] + i * width;
        int64_t row = (t - t0) * kKeyTile + i;
        std::memcpy(latents.f32() + row * s.rank, from, size_t(s.rank) * sizeof(float));
        std::memcpy(shared.f32() + row * s.rope, from + s.rank, size_t(s.rope) * sizeof(float));
      }
    }
    if constexpr (gpu::kBuilt) {
      if (c.device == Device::cuda)
        gpu::check(cuda::latent_gather(cached, t0 * kKeyTile, n, latents.f32(), s.rank, shared.f32(), s.rope, gpu::stream()));
    }
    Var kv = linear(latents, kv_b);
    if (c.device == Device::null) continue;
    std::vector<int32_t> rows(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) rows[i] = int32_t(i);
    std::vector<cpu::AttentionSequence> group{{0, n, t0 * kKeyTile, 0}};
    a.blocks = listed(c.device, scratch, blocks);
    cpu::AttentionArgs b = a;
    b.rows = listed(c.device, scratch, rows), b.sequences = listed(c.device, scratch, group), b.tokens = n;
    b.keys = kv.f32(), b.values = kv.f32() + s.nope, b.key_stride = b.value_stride = kv.cols();
    b.key_head_stride = b.value_head_stride = s.nope + s.value;
    b.shared = shared.f32(), b.shared_stride = s.rope;
    if (c.device == Device::cpu) {
      cpu::attention().append(b);
      cpu::attention().forward(a, t0, t1);
    }
    if constexpr (gpu::kBuilt) {
      if (c.device == Device::cuda) {
        gpu::check(cuda::attention_append(b, n, gpu::stream()));
        gpu::check(cuda::attention_forward(a, sequence.queries, t0, t1, gpu::stream()));
      }
    }
  }
}

// The same on a GPU's warpgroup products: the latents once, their keys and values some heads at a time.
void prefill_from_latents(const AttentionPlan& plan, const cpu::AttentionSequence& sequence, const MlaShape& s, const cpu::AttentionArgs& a,
                          const Param& kv_b, Context& c) {
  const int64_t keys = sequence.first + sequence.queries;
  Scratch scratch(*c.arena);
  float *latents = scratch.lend(DType::f32, {keys, s.rank}).f32(), *shared = scratch.lend(DType::f32, {keys, s.rope}).f32();
  void* narrow = scratch.lend(DType::bf16, {keys, s.rank}).data();
  const bool is_bf16 = kv_b.value.dtype() == DType::bf16;
  bf16* weight = is_bf16 ? kv_b.value.as<bf16>() : scratch.lend(DType::bf16, kv_b.value.shape()).as<bf16>();
  if constexpr (gpu::kBuilt) {
    gpu::check(cuda::latent_gather(a.blocks + sequence.blocks_at, 0, keys, latents, s.rank, shared, s.rope, gpu::stream()));
    gpu::check(cuda::narrow(latents, narrow, keys * s.rank, gpu::stream()));
    if (!is_bf16) gpu::check(cuda::narrow(kv_b.value.f32(), weight, kv_b.value.size(), gpu::stream()));
  }
  const int64_t width = s.nope + s.value;
  prefill_sequence(c, a, sequence, plan.rows[size_t(sequence.rows_at)], [&](int64_t first, int64_t heads, void* kv, void* shared_narrow) {
    if constexpr (gpu::kBuilt) {
      gpu::check(cuda::blas_products(
          {x_wt(nullptr, nullptr, nullptr, keys, heads * width, s.rank), narrow, weight + first * width * s.rank, kv, kv, true}, gpu::stream()));
      if (shared_narrow) gpu::check(cuda::narrow(shared, shared_narrow, keys * s.rope, gpu::stream()));
    }
  });
}

// All sequences that go absorbed, at once.
void absorbed_attention(const AttentionPlan& plan, const std::vector<cpu::AttentionSequence>& list, const MlaShape& s, const Var& q,
                        const Param& kv_b, const Var& y, float* m) {
  Context& c = y.context();
  std::vector<int32_t> rows;
  std::vector<cpu::AbsorbedSequence> sequences;
  std::vector<cpu::AbsorbedItem> items, later;
  int64_t partial_rows = 0;
  for (const auto& from : list) {
    const int64_t tiles = (from.first + from.queries + kKeyTile - 1) / kKeyTile, all = from.queries * s.heads;
    // Pieces of the context are attended to in parallel when the rows alone give too little to do: from this sequence's sizes only.
    const int64_t step = all > 256 ? tiles : std::max<int64_t>(4, (tiles + cpu::kAbsorbedChunks - 1) / cpu::kAbsorbedChunks);
    const int64_t chunks = (tiles + step - 1) / step, index = int64_t(sequences.size());
    sequences.push_back({int64_t(rows.size()), from.queries, from.first, from.blocks_at, chunks, partial_rows});
    rows.insert(rows.end(), plan.rows.begin() + from.rows_at, plan.rows.begin() + from.rows_at + from.queries);
    partial_rows += chunks * all;
    for (int64_t chunk = 0; chunk < chunks; ++chunk)
      for (int64_t row = 0; row < all; row += cpu::kAbsorbedRows)
        (chunk ? later : items).push_back({index, row, chunk, chunk * step, std::min(tiles, (chunk + 1) * step)});
  }
  const int64_t first_chunk_items = int64_t(items.size());
  items.insert(items.end(), later.begin(), later.end());

  Scratch scratch(*c.arena);
  cpu::AbsorbedArgs a{};
  a.heads = s.heads, a.nope = s.nope, a.rope = s.rope, a.value = s.value, a.rank = s.rank, a.scale = s.scale;
  a.rows = listed(c.device, scratch, rows), a.token_count = int64_t(rows.size());
  a.sequences = listed(c.device, scratch, sequences), a.items = listed(c.device, scratch, items);
  a.item_count = int64_t(items.size()), a.first_chunk_items = first_chunk_items;
  a.blocks = listed(c.device, scratch, plan.blocks);
  a.q = q.f32(), a.kv_b = kv_b.value.data(), a.kv_b_is_bf16 = kv_b.value.dtype() == DType::bf16;
  a.q_latent = scratch.lend(DType::f32, {a.token_count, s.heads, s.rank + s.rope}).f32();
  a.partial = scratch.lend(DType::f32, {partial_rows, s.rank}).f32();
  a.partial_m = scratch.lend(DType::f32, {partial_rows}).f32();
  a.partial_l = scratch.lend(DType::f32, {partial_rows}).f32();
  a.m = m, a.y = y.f32();
  if (c.device == Device::cpu) cpu::absorbed().forward(a);
  if constexpr (gpu::kBuilt) {
    if (c.device == Device::cuda) gpu::check(cuda::absorbed_forward(a, gpu::stream()));
  }
}

}  // namespace

Var mla_attention(Var q, Var c, Var k_pe, Param& kv_b, const MlaShape& s, const Batch& batch, LatentCache* cache, Tensor* max_logit) {
  Context& context = q.context();
  check_attention_call("mla_attention", context, q.rows(), s.heads, s.nope + s.rope, s.value, batch, cache, max_logit);
  auto check = [&](const char* name, const Tensor& x, int64_t rows, int64_t cols) {
    K3_CHECK(x.rows() == rows && x.cols() == cols, "[mla_attention] {} is ({}) but must be ({} x {}): {} heads of {}+{} / {}, rank {}", name,
             to_string(x.shape()), rows, cols, s.heads, s.nope, s.rope, s.value, s.rank);
  };
  check("q", q.value(), q.rows(), s.heads * (s.nope + s.rope));
  check("c", c.value(), q.rows(), s.rank);
  check("k_pe", k_pe.value(), q.rows(), s.rope);
  check(kv_b.name.c_str(), kv_b.value, s.heads * (s.nope + s.value), s.rank);
  K3_CHECK(kv_b.value.dtype() == DType::f32 || kv_b.value.dtype() == DType::bf16, "[mla_attention] {} is {}; F32 or BF16 is wanted", kv_b.name,
           name_of(kv_b.value.dtype()));
  if (cache) {
    const std::string want = LatentCache(0, s, cache->keep_expanded(), Device::null).name();
    K3_CHECK(cache->name() == want, "[mla_attention] the cache is a {}, not a {}", cache->name(), want);
  }
  K3_CHECK(!batch.step || (cache && cache->keep_expanded()), "[mla_attention] a decode step on the device needs an expanded cache");
  Var y(context, DType::f32, {q.rows(), s.heads * s.value});
  if (context.tape) {
    expanded_attention(expanded_form(s, q, linear(c, kv_b), k_pe), y, batch, nullptr, max_logit);
    return y;
  }
  Scratch scratch(*context.arena);
  if (!cache || cache->keep_expanded()) {
    expanded_attention(expanded_form(s, q, linear(c, kv_b), k_pe), y, batch, cache, max_logit);
    return y;
  }

  AttentionPlan plan(batch, 1, cache);
  cpu::AttentionArgs a{};
  a.tiles = tiles_of(s), a.tokens = q.rows(), a.group = 1, a.scale = s.scale, a.q = q.f32(), a.y = y.f32();
  a.m = scratch.lend(DType::f32, {q.rows(), s.heads}).f32();
  a.l = scratch.lend(DType::f32, {q.rows(), s.heads}).f32();
  plan.fill(a, context.device, scratch);
  if (context.device == Device::cpu) append_latents(plan, s, c.f32(), k_pe.f32());
  if constexpr (gpu::kBuilt) {
    if (context.device == Device::cuda) gpu::check(cuda::latent_append(a, plan.longest, c.f32(), s.rank, k_pe.f32(), s.rope, gpu::stream()));
  }
  std::vector<cpu::AttentionSequence> absorbed;
  const bool warpgroups = prefill_serves(context, a.tiles, 1, batch) && s.rank % 8 == 0;
  double flops = 0, bytes = 4.0 * double(q.size() + y.size() + c.size() + k_pe.size()), held = 0;
  for (const auto& sequence : plan.sequences) {
    if (sequence.queries == 0) continue;
    const double keys = double(sequence.first + sequence.queries);
    const double pairs = double(sequence.queries) * (double(sequence.first) + double(sequence.queries + 1) / 2);
    held += 4.0 * double(sequence.first) * double(s.rank + s.rope);
    if (!context.deterministic && absorbed_is_cheaper(s, sequence)) {
      absorbed.push_back(sequence);
      flops += 2.0 * double(s.heads) * (pairs * double(2 * s.rank + s.rope) + double(sequence.queries * (s.nope + s.value) * s.rank));
      bytes += 4.0 * keys * double(s.rank + s.rope);
    } else {
      if (warpgroups && sequence.queries >= kPrefillQueries)
        prefill_from_latents(plan, sequence, s, a, kv_b, context);
      else
        expand_sequence(plan, sequence, s, a, kv_b, context);
      flops += 2.0 * double(s.heads) * pairs * double(s.nope + s.rope + s.value);
      bytes += 4.0 * keys * double(s.rank + s.rope + 2 * s.heads * (s.nope + s.value));
    }
  }
  if (!absorbed.empty()) {
    absorbed_attention(plan, absorbed, s, q, kv_b, y, a.m);
    bytes += double(kv_b.value.bytes()), held += double(kv_b.value.bytes());
  }
  if (max_logit && context.device == Device::cpu) cpu::attention().max_logit(a, max_logit->f32());
  if constexpr (gpu::kBuilt) {
    if (max_logit && context.device == Device::cuda)
      gpu::check(cuda::attention_max_logit(a, int64_t(plan.rows.size()), max_logit->f32(), gpu::stream()));
  }
  clear_padding(y.value(), batch);
  context.cost("mla_attention", {.flops = flops, .bytes = bytes, .held = held});
  return y;
}

}  // namespace k3
