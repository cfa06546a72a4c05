#pragma once
// Buffer owns memory on one device. Move-only. CPU pages become resident when first written, so a generous capacity costs nothing.
#include <cstddef>
#include <utility>

#include "k3/core/tensor.h"

namespace k3 {

class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes, Device device = Device::cpu);  // zero-filled on the CPU; throws Error naming the size when there is no room
  ~Buffer();
  Buffer(Buffer&& o) noexcept { *this = std::move(o); }
  Buffer& operator=(Buffer&& o) noexcept;

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  Device device() const { return device_; }
  Tensor view(DType dtype, Shape shape, size_t offset = 0) const;

 private:
  char* data_ = nullptr;
  size_t bytes_ = 0;
  Device device_ = Device::cpu;
};

}  // namespace k3
