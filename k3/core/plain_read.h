#pragma once
// PlainRead: how fast this machine's threads read memory when they do nothing else. The limit of what streams weights.
//
//   PlainRead plain(512 << 20);                  // more than the processor caches, or it is their speed
//   double limit = plain.rate();                 // bytes a second of one pass, with thread_count() threads; take it beside what it is compared to
#include <cstdint>

#include "k3/core/buffer.h"

namespace k3 {

class PlainRead {
 public:
  explicit PlainRead(uint64_t bytes);  // at least 1 MiB
  double rate();

 private:
  Buffer memory_;
  uint64_t sum_ = 0;  // of what was read, so that it is
};

}  // namespace k3
