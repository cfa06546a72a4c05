#pragma once
// Attention with heads of 128 + 64 / 128 channels (K3, Kimi-Linear) or 64 + 32 / 64 (K3-0.40B) on a GPU's warpgroup products (attention_cuda.h),
// under Context::bf16_products: how the operators of attention and mla_attention call it. Results, log-sums and largest logits are float32, as their
// other kernels give them.
#include <functional>

#include "k3/ops/attention/attention_narrow_cuda.h"
#include "k3/ops/attention/expanded.h"

namespace k3 {

// With a cache: whether a sequence that brings so many queries goes this way; one with fewer keeps the float32 kernels, whatever its neighbours
// bring.
constexpr int64_t kPrefillQueries = 32;
inline int64_t prefill_room = int64_t(1) << 30;  // tests make it small
bool prefill_serves(const Context& c, const cpu::KeyTiles& tiles, int64_t group, const Batch& batch);

// All sequences of a batch, their keys its own; and the gradients of that.
void prefill(const cuda::AttentionNarrowArgs& p, const Batch& batch, Scratch& scratch);
void prefill_backward(const cuda::AttentionNarrowArgs& p, const Batch& batch, Scratch& scratch);

// One sequence whose keys lie in a cache. `keys` makes those of heads first .. first+heads-1: kv (keys, heads, own + value), and, when it is not
// null, shared (keys, shared); so many heads at a time that they fit prefill_room bytes. The sequence's rows of the call follow each other from `row`
// on.
using PrefillKeys = std::function<void(int64_t first, int64_t heads, void* kv, void* shared)>;
void prefill_sequence(Context& c, const cpu::AttentionArgs& a, const cpu::AttentionSequence& s, int64_t row, const PrefillKeys& keys);

}  // namespace k3
