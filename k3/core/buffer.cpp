#include "k3/core/buffer.h"

#include <sys/mman.h>

#include "k3/core/error.h"

namespace k3 {

std::string to_string(const Shape& s) {
  std::string out;
  for (int i = 0; i < s.rank; ++i) out += (i ? " x " : "") + std::to_string(s[i]);
  return s.rank ? out : "nothing";
}

Buffer::Buffer(size_t bytes, Device device) : bytes_(bytes), device_(device) {
  if (bytes == 0 || device == Device::null) return;
  K3_CHECK(device == Device::cpu, "[buffer] this build has no GPU support; use --device cpu");
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  K3_CHECK(p != MAP_FAILED, "[buffer] no room for {} MB of memory; use a smaller model, batch or context", bytes >> 20);
  if (bytes >= (size_t(8) << 20)) madvise(p, bytes, MADV_HUGEPAGE);
  data_ = static_cast<char*>(p);
}

Buffer::~Buffer() {
  if (data_) munmap(data_, bytes_);
}

Buffer& Buffer::operator=(Buffer&& o) noexcept {
  std::swap(data_, o.data_);
  std::swap(bytes_, o.bytes_);
  std::swap(device_, o.device_);
  return *this;
}

Tensor Buffer::view(DType dtype, Shape shape, size_t offset) const {
  K3_CHECK(offset + size_t(shape.size()) * bytes_of(dtype) <= bytes_, "[buffer] a view of {} ({}) at byte {} does not fit into {} bytes",
           to_string(shape), name_of(dtype), offset, bytes_);
  return Tensor(data_ ? data_ + offset : nullptr, dtype, shape, device_);
}

}  // namespace k3
