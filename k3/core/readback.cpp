#include "k3/core/readback.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "k3/core/error.h"
#include "k3/core/gpu.h"

namespace k3 {

Readback::~Readback() {
  for (Block& b : blocks_) gpu::release_shared(b.data);
  gpu::release_shared(seal_);
}

void Readback::ask(const Tensor& t, Take take) {
  K3_CHECK(!sealed_, "[gpu] {} bytes are asked for behind the last ones", t.bytes());
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

void Readback::seal(const uint64_t* stamp) {
  if (!seal_) seal_ = gpu::allocate_shared(sizeof(uint64_t));
  gpu::download_later(seal_, stamp, sizeof(uint64_t));
  sealed_ = true;
}

void Readback::deliver() {
  if (sealed_) {
    const std::atomic_ref<uint64_t> stamp(*reinterpret_cast<uint64_t*>(seal_));
    for (int64_t i = 1; stamp.load(std::memory_order_acquire) != next_stamp(); ++i)
      if (i % 4096 == 0)
        K3_CHECK(!gpu::idle() || stamp.load(std::memory_order_acquire) == next_stamp(), "[gpu] a step has ended without its results");
  } else if (!wanted_.empty()) {
    gpu::synchronize();
  }
  ++delivered_;
  if (kept_) {
    for (const Wanted& w : wanted_) w.take(w.at);
    return;
  }
  const std::vector<Wanted> all = std::move(wanted_);
  wanted_.clear(), block_ = used_ = 0, sealed_ = false;
  for (const Wanted& w : all) w.take(w.at);
}

void Readback::forget() {
  if (!wanted_.empty() || sealed_) gpu::synchronize();  // a copy may still be on its way into memory that is used again
  if (std::exchange(sealed_, false)) ++delivered_;
  wanted_.clear(), block_ = used_ = 0;
}

}  // namespace k3
