#include "k3/core/readback.h"

#include <algorithm>

#include "k3/core/gpu.h"

namespace k3 {

Readback::~Readback() {
  for (Block& b : blocks_) gpu::release_shared(b.data);
}

void Readback::ask(const Tensor& t, Take take) {
  const size_t bytes = (t.bytes() + 63) / 64 * 64;
  while (block_ < blocks_.size() && used_ + bytes > blocks_[block_].bytes) ++block_, used_ = 0;
  if (block_ == blocks_.size()) {
    const size_t room = std::max(bytes, size_t(1) << 20);
    blocks_.push_back({gpu::allocate_shared(room), room});
    used_ = 0;
  }
  char* at = blocks_[block_].data + used_;
  used_ += bytes;
  gpu::download_later(at, t.data(), t.bytes());
  wanted_.push_back({at, std::move(take)});
}

void Readback::deliver() {
  if (!wanted_.empty()) gpu::synchronize();
  const std::vector<Wanted> all = std::move(wanted_);
  wanted_.clear(), block_ = used_ = 0;
  for (const Wanted& w : all) w.take(w.at);
}

void Readback::forget() {
  if (!wanted_.empty()) gpu::synchronize();  // a copy may still be on its way into memory that is used again
  wanted_.clear(), block_ = used_ = 0;
}

}  // namespace k3
