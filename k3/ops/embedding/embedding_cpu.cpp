// Bound by memory. Forward splits rows. Backward splits columns, so that every element of the gradient has one owner, who takes the tokens
// in order: a token that comes twice is summed the same way at any number of threads.
#include "k3/ops/embedding/embedding_kernels.h"

#include "k3/core/simd.h"
#include "k3/core/threads.h"

namespace k3::cpu::K3_ISA {

using namespace k3::simd;

constexpr int64_t kRows = 16, kColumns = 128;

static void embedding_forward(const EmbeddingArgs& a) {
  parallel_blocks(a.rows, kRows, [&](int64_t first, int64_t last) {
    for (int64_t n = first; n < last; ++n) {
      int64_t from = a.ids[n] * a.d;
      float* y = a.y + n * a.d;
      if (a.table)
        for (int64_t i = 0; i < a.d; ++i) y[i] = a.table[from + i];
      else  // a bfloat16 is the upper half of a float32
        for (int64_t i = 0; i < a.d; ++i) y[i] = __builtin_bit_cast(float, uint32_t(a.table_bf16[from + i]) << 16);
    }
  });
}

static void embedding_backward(const EmbeddingArgs& a) {
  parallel_blocks(a.d, kColumns, [&](int64_t first, int64_t last) {
    for (int64_t n = 0; n < a.rows; ++n) {
      float* to = a.dtable + a.ids[n] * a.d;
      const float* dy = a.dy + n * a.d;
      for (int64_t i = first; i < last; i += kLanes) {
        int64_t m = last - i < kLanes ? last - i : int64_t(kLanes);
        store_n(to + i, load_n(to + i, m) + load_n(dy + i, m), m);
      }
    }
  });
}

}  // namespace k3::cpu::K3_ISA

K3_KERNELS(EmbeddingKernels, embedding, embedding_forward, embedding_backward)
