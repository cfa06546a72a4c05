#pragma once
// GPU kernels of causal attention: many heads with their own keys (training, prefill), and one wide latent head read by all (decode).
// Every function returns null, or a sentence that says which argument it cannot serve.
#include <cstdint>

namespace k3::cuda {

// ---- decode, absorbed: scores over 576 = latent 512 + shared 64, values = the latent ------------------------------------------------------------
constexpr int kLatent = 512, kLatentRow = 576, kPageTokens = 64;

struct LatentDecodeArgs {
  const void* q;      // (rows, H, 576) bf16
  int64_t q_stride;   // of a row, in elements; heads lie 576 apart
  const void* pages;  // (pages, 64, 576) bf16
  int64_t page_count;
  const int* table;  // (rows, table_stride) pages of each row's sequence, in order; entries past its length are not read
  int table_stride;
  const int* lengths;  // (rows) keys that a row sees
  int rows, heads;     // heads <= 96
  int longest;         // at least the largest length: sizes the grid
  float scale;
  int split_pages;  // pages a block takes; a row's bits depend on it and on the row's own length, on nothing else of the batch
  float* partial;   // latent_decode_workspace() floats; may be null when longest <= 64 * split_pages
  void* out;        // (rows, H, 512) bf16
};
// Splits of one row of `longest` keys; floats of workspace for the whole call; and a split size that fills `multiprocessors` for equal lengths.
constexpr int latent_decode_splits(int longest, int split_pages) { return (longest + kPageTokens * split_pages - 1) / (kPageTokens * split_pages); }
constexpr int64_t latent_decode_workspace(int rows, int heads, int longest, int split_pages) {
  return int64_t(rows) * latent_decode_splits(longest, split_pages) * heads * (kLatent + 2);
}
int latent_decode_split(int rows, int heads, int longest, int multiprocessors);
const char* latent_decode(const LatentDecodeArgs&, void* stream);
const char* latent_decode_pair(const LatentDecodeArgs&, void* stream);  // its part for more than 32 heads

// ---- prefill and training: keys of a head's own channels and some that all heads share, values ---------------------------------------------------
struct PrefillWidths {
  int own, shared, value;
  constexpr int key() const { return own + shared; }
  constexpr bool operator==(const PrefillWidths&) const = default;
};
constexpr PrefillWidths kPrefillWide{128, 64, 128}, kPrefillSmall{64, 32, 64};  // those that there are kernels for: K3 and Kimi-Linear; K3-0.40B
struct PrefillArgs {
  const void* q;                                                            // (Nq, H, key) bf16
  const void *k, *v;                                                        // (Nk, H, own), (Nk, H, value) bf16, slices of one tensor or not
  const void* shared;                                                       // (Nk, shared) bf16: the last key columns of every head
  int64_t q_stride, kv_stride, kv_head_stride, shared_stride, gate_stride;  // elements, multiples of 8
  const int *q_begins, *k_begins;   // (sequences + 1), on the device; query i of n sees the keys up to i + (keys - n)
  int sequences, heads, longest_q;  // longest_q: at least the largest number of queries
  int64_t q_rows, k_rows;
  float scale;
  const void* gate;      // (Nq, H*value) bf16 logits, or null: o is multiplied by their sigmoid
  void* o;               // (Nq, H, value) bf16; null: not wanted
  float *lse, *largest;  // (Nq, H) natural logarithm of the sum of exponentials; the largest scaled logit; null: not wanted
  float* raw;            // (Nq, H, value) o before the gate; null: not wanted
  int row_heads;         // heads of a row of o, lse, largest and raw, of which these are some; 0: just these
  PrefillWidths widths = kPrefillWide;
};
const char* prefill_forward(const PrefillArgs&, void* stream);

// Gradients of the same where each sequence's queries are its keys. Fixed order: two runs give the same bits.
struct PrefillBackwardArgs {
  const void *q, *k, *v, *shared;  // as PrefillArgs says
  const void* dy;                  // (N, H, value) bf16
  int64_t q_stride, kv_stride, kv_head_stride, shared_stride;
  const int* begins;  // (sequences + 1), on the device
  int sequences, heads, longest;
  int64_t rows;
  float scale;
  const float *lse, *d;  // (N, H) of the forward; rowsum(dy * y)
  float* dq;             // (N, H, key) added to
  float *dk, *dv;        // laid out as k and v, added to
  float* dshared;        // (H, N, shared) written
  PrefillWidths widths = kPrefillWide;
};
const char* prefill_backward(const PrefillBackwardArgs&, void* stream);

}  // namespace k3::cuda
