#pragma once
// parallel_for(n, f): calls f(0) ... f(n-1), each once, on any thread in any order.
//
// What one call computes depends on its index only, and the caller chooses n from the size of the work, never from the number of
// threads; so results are the same bits at any thread count. A sum over calls is made by the caller afterwards, in index order.
#include <cstdint>

namespace k3 {

int thread_count();
void set_thread_count(int n);

void parallel_for_raw(int64_t n, void (*call)(void*, int64_t), void* body);

template <class F>
inline void parallel_for(int64_t n, F&& f) {
  if (n == 1) {
    f(int64_t(0));
    return;
  }
  parallel_for_raw(
      n, [](void* body, int64_t i) { (*static_cast<F*>(body))(i); }, &f);
}

// Rows 0..n-1 in fixed blocks of `block` rows: f(first, last).
template <class F>
inline void parallel_blocks(int64_t n, int64_t block, F&& f) {
  parallel_for((n + block - 1) / block, [&](int64_t b) {
    int64_t first = b * block;
    f(first, first + block < n ? first + block : n);
  });
}

}  // namespace k3
