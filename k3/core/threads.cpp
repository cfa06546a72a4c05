#include "k3/core/threads.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#ifndef K3_STD_THREADS
#include <omp.h>
#endif

namespace k3 {

namespace {

// The first exception of any call, thrown again on the caller's thread.
class FirstError {
 public:
  void keep() {
    std::lock_guard lock(mutex_);
    if (!error_) error_ = std::current_exception();
  }
  void rethrow() {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr error_;
};

}  // namespace

#ifdef K3_STD_THREADS  // the thread sanitizer cannot see through the OpenMP runtime

static std::atomic<int> g_threads{2};
static thread_local bool t_inside = false;
int thread_count() { return t_inside ? 1 : g_threads.load(); }
void set_thread_count(int n) { g_threads = std::max(1, n); }

void parallel_for_raw(int64_t n, void (*call)(void*, int64_t), void* body) {
  int workers = int(std::min<int64_t>(n, thread_count()));
  if (workers <= 1) {
    for (int64_t i = 0; i < n; ++i) call(body, i);
    return;
  }
  std::atomic<int64_t> next{0};
  FirstError error;
  auto work = [&] {
    t_inside = true;
    try {
      for (int64_t i; (i = next++) < n;) call(body, i);
    } catch (...) {
      error.keep();
      next = n;
    }
    t_inside = false;
  };
  std::vector<std::thread> pool;
  for (int w = 1; w < workers; ++w) pool.emplace_back(work);
  work();
  for (auto& t : pool) t.join();
  error.rethrow();
}

#else

int thread_count() { return omp_in_parallel() ? 1 : omp_get_max_threads(); }
void set_thread_count(int n) { omp_set_num_threads(std::max(1, n)); }

void parallel_for_raw(int64_t n, void (*call)(void*, int64_t), void* body) {
  if (n <= 1 || thread_count() == 1) {
    for (int64_t i = 0; i < n; ++i) call(body, i);
    return;
  }
  FirstError error;
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t i = 0; i < n; ++i) {
    try {
      call(body, i);
    } catch (...) { error.keep(); }
  }
  error.rethrow();
}

#endif

}  // namespace k3
