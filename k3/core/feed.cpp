#include "k3/core/feed.h"

#include <algorithm>

#include "k3/core/gpu.h"

namespace k3 {

Feed::~Feed() {
  for (Block& b : blocks_) gpu::release_shared(b.here);
}

const void* Feed::take(size_t bytes, std::function<void(void*)> fill) {
  const size_t room = (std::max<size_t>(bytes, 1) + 255) / 256 * 256;
  if (blocks_.empty() || blocks_.back().used + room > blocks_.back().there.bytes()) {
    const size_t block = std::max(room, size_t(1) << 20);
    blocks_.push_back({Buffer(block, Device::cuda), gpu::allocate_shared(block)});
  }
  Block& b = blocks_.back();
  const void* there = b.there.data() + b.used;
  items_.push_back({b.here + b.used, std::move(fill)});
  b.used += room;
  return there;
}

void Feed::send() {
  for (const Item& i : items_) i.fill(i.here);
  for (const Block& b : blocks_) gpu::upload(b.there.data(), b.here, b.used);
}

}  // namespace k3
