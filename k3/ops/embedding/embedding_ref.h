#pragma once
#include <cstdint>

namespace k3::ref {

template <class S>
void embedding(const int32_t* ids, const S* table, S* y, int64_t rows, int64_t d) {
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t i = 0; i < d; ++i) y[n * d + i] = table[ids[n] * d + i];
}

template <class S>
void embedding_backward(const int32_t* ids, const S* dy, S* dtable, int64_t rows, int64_t d) {
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t i = 0; i < d; ++i) dtable[ids[n] * d + i] += dy[n * d + i];
}

}  // namespace k3::ref
