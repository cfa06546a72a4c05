#pragma once
// Arena lends the memory of one step and takes it all back at once.
//
//   Arena arena(1 << 30);
//   Tensor y = arena.lend(DType::f32, {n, d});     // uninitialised
//   { Scratch s(arena);  Tensor t = s.lend(...); } // given back at the end of the block
//   arena.rewind(0);
//
// On the null device nothing is allocated and peak() is what the same code needs on a real one, to the byte.
#include <cstddef>

#include "k3/core/buffer.h"

namespace k3 {

class Arena {
 public:
  static constexpr size_t kAlign = 64;

  explicit Arena(size_t capacity, Device device = Device::cpu) : buffer_(Buffer::growing(capacity, device)), capacity_(capacity) {}

  Tensor lend(DType dtype, Shape shape);  // uninitialised; NaN with poison on
  Tensor lend_zeroed(DType dtype, Shape shape);

  size_t mark() const { return used_; }
  void rewind(size_t mark) { used_ = mark; }
  size_t peak() const { return peak_; }
  void reset_peak() { peak_ = used_; }
  size_t capacity() const { return capacity_; }
  Device device() const { return buffer_.device(); }

  // Fill everything lent with NaN, so that reading what nobody wrote is seen. Tests run with it on.
  void set_poison(bool on) { poison_ = on; }

 private:
  Buffer buffer_;
  size_t capacity_ = 0, used_ = 0, peak_ = 0;
  bool poison_ = false;
};

// What is lent through a Scratch returns when it goes out of scope. Move-only on purpose: a backward closure must not capture it.
class Scratch {
 public:
  explicit Scratch(Arena& arena) : arena_(&arena), mark_(arena.mark()) {}
  ~Scratch() {
    if (arena_) arena_->rewind(mark_);
  }
  Scratch(Scratch&& o) noexcept : arena_(o.arena_), mark_(o.mark_) { o.arena_ = nullptr; }
  Scratch& operator=(Scratch&&) = delete;
  Tensor lend(DType dtype, Shape shape) { return arena_->lend(dtype, shape); }
  Tensor lend_zeroed(DType dtype, Shape shape) { return arena_->lend_zeroed(dtype, shape); }

 private:
  Arena* arena_;
  size_t mark_;
};

}  // namespace k3
