#pragma once
// What the programs here measure with.
#include <algorithm>
#include <ctime>
#include <vector>

#include "k3/core/threads.h"

namespace k3 {

// On one thread the processor's time, which others on the machine don't lengthen; on many the clock's.
inline double now() {
  timespec t;
  clock_gettime(thread_count() == 1 ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}
template <class F>
double timed(F&& f) {
  const double start = now();
  f();
  return now() - start;
}
inline double median(std::vector<double> t) {
  std::sort(t.begin(), t.end());
  return t[t.size() / 2];
}

}  // namespace k3
