#pragma once
// Readback: what a step leaves for the host (losses, counts, norms) comes back with one wait at its end.
//
//   Readback later;
//   later.ask(counts, [&](const void* p) { ... });   // enqueues the copy; the tensor's memory may be lent again at once
//   later.deliver();                                 // waits, then calls all in the order they were asked
//   later.forget();                                  // instead, when the step failed: what was asked for may be gone
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
  void deliver();
  void forget();

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
};

}  // namespace k3
