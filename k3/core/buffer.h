#pragma once
// Buffer owns memory on one device. Move-only. CPU pages become resident when first written, so a generous capacity costs nothing; on a GPU
// the same is had from a Buffer that grows: of its addresses those are memory that were committed.
#include <cstddef>
#include <utility>

#include "k3/core/tensor.h"

namespace k3 {

class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes, Device device = Device::cpu);  // zero-filled; throws Error naming the size when there is no room
  static Buffer growing(size_t bytes, Device device);          // not zero-filled on a GPU
  ~Buffer();
  Buffer(Buffer&& o) noexcept { *this = std::move(o); }
  Buffer& operator=(Buffer&& o) noexcept;

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  Device device() const { return device_; }
  // Before the first `bytes` of a growing Buffer are used.
  void commit(size_t bytes) {
    if (grows_ && bytes > committed_) grow(bytes);
  }
  Tensor view(DType dtype, Shape shape, size_t offset = 0) const;

 private:
  void grow(size_t bytes);
  char* data_ = nullptr;
  size_t bytes_ = 0, committed_ = 0;
  Device device_ = Device::cpu;
  bool grows_ = false;
};

}  // namespace k3
