#include "k3/core/buffer.h"

#include <sys/mman.h>

#include "k3/core/error.h"
#include "k3/core/gpu.h"

namespace k3 {

std::string to_string(const Shape& s) {
  std::string out;
  for (int i = 0; i < s.rank; ++i) out += (i ? " x " : "") + std::to_string(s[i]);
  return s.rank ? out : "nothing";
}

Buffer::Buffer(size_t bytes, Device device) : bytes_(bytes), device_(device) {
  if (bytes == 0 || device == Device::null) return;
  if (device == Device::cuda) {
    data_ = gpu::allocate(bytes);
    return;
  }
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  K3_CHECK(p != MAP_FAILED, "[buffer] no room for {} MB of memory; use a smaller model, batch or context", bytes >> 20);
  if (bytes >= (size_t(8) << 20)) madvise(p, bytes, MADV_HUGEPAGE);
  data_ = static_cast<char*>(p);
}

Buffer Buffer::growing(size_t bytes, Device device) {
  if (device != Device::cuda) return Buffer(bytes, device);
  Buffer b;
  b.bytes_ = bytes, b.device_ = device, b.grows_ = true;
  if (bytes) b.data_ = gpu::reserve(bytes);
  return b;
}

void Buffer::grow(size_t bytes) { committed_ = gpu::commit(data_, committed_, bytes, bytes_); }

Buffer::~Buffer() {
  if (!data_) return;
  if (device_ == Device::cpu)
    munmap(data_, bytes_);
  else if (grows_)
    gpu::unreserve(data_, committed_, bytes_);
  else
    gpu::release(data_);
}

Buffer& Buffer::operator=(Buffer&& o) noexcept {
  std::swap(data_, o.data_);
  std::swap(bytes_, o.bytes_);
  std::swap(device_, o.device_);
  std::swap(committed_, o.committed_);
  std::swap(grows_, o.grows_);
  return *this;
}

Tensor Buffer::view(DType dtype, Shape shape, size_t offset) const {
  K3_CHECK(offset + size_t(shape.size()) * bytes_of(dtype) <= bytes_, "[buffer] a view of {} ({}) at byte {} does not fit into {} bytes",
           to_string(shape), name_of(dtype), offset, bytes_);
  return Tensor(data_ ? data_ + offset : nullptr, dtype, shape, device_);
}

}  // namespace k3
