#pragma once
// Where a step of training or evaluation computes.
#include <cstring>
#include <memory>
#include <vector>

#include "k3/core/arena.h"
#include "k3/tape/var.h"

namespace k3 {

// Ids for an operator: lent from the arena; on a GPU the vector itself, since operators check ids on the CPU before they copy them there.
inline Tensor lend_ids(Context& c, const std::vector<int32_t>& ids, int64_t n) {
  if (c.device == Device::cuda) return Tensor(const_cast<int32_t*>(ids.data()), DType::i32, {n});
  Tensor t = c.arena->lend(DType::i32, {n});
  if (t.has_data() && n) std::memcpy(t.data(), ids.data(), t.bytes());
  return t;
}

// An arena of at least `bytes`. Pages are resident only once written, so a larger one costs nothing until a step needs it; on a GPU, where
// kernels need other scratch than the forecast's, it is far larger: of these addresses only what is used becomes memory.
inline void make_room(std::unique_ptr<Arena>& arena, size_t bytes, Device device) {
  if (device == Device::cuda) bytes = 4 * bytes + (size_t(16) << 30);
  if (arena && arena->capacity() >= bytes) return;
  arena.reset();
  arena = std::make_unique<Arena>(bytes, device);
}

}  // namespace k3
