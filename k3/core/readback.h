#pragma once
// Readback: what a step leaves for the host (losses, counts, norms) comes back with one wait at its end.
//
//   Readback later;
//   later.ask(counts, [&](const void* p) { ... });   // enqueues the copy; the tensor's memory may be lent again at once
//   later.deliver();                                 // waits, then calls all in the order they were asked
//   later.forget();                                  // instead, when the step failed: what was asked for may be gone
#include <cstdint>
#include <functional>
#include <vector>

#include "k3/core/tensor.h"

namespace k3 {

class Readback {
 public:
  using Take = std::function<void(const void*)>;

  Readback() = default;
  Readback(const Readback&) = delete;
  ~Readback();
  void ask(const Tensor& t, Take take);  // t lies on the GPU
  // Nothing more is asked before deliver(), which then waits for what was enqueued so far and not for what comes behind: `stamp`, on the GPU, is
  // next_stamp() of the run.
  void seal(const uint64_t* stamp);
  uint64_t next_stamp() const { return delivered_ + 1; }
  void deliver();
  void forget();
  void keep() { kept_ = true; }  // deliver() forgets nothing: the copies belong to a captured step, and come again with each run of it

 private:
  struct Block {
    char* data;
    size_t bytes;
  };
  struct Wanted {
    const char* at;
    Take take;
  };
  std::vector<Block> blocks_;  // shared with the GPU; kept from step to step
  size_t block_ = 0, used_ = 0;
  std::vector<Wanted> wanted_;
  bool kept_ = false, sealed_ = false;
  char* seal_ = nullptr;  // where the stamp comes back
  uint64_t delivered_ = 0;
};

}  // namespace k3
