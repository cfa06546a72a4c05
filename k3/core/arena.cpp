#include "k3/core/arena.h"

#include <algorithm>
#include <cstring>

#include "k3/core/error.h"
#include "k3/core/gpu.h"

namespace k3 {

Tensor Arena::lend(DType dtype, Shape shape) {
  size_t bytes = size_t(shape.size()) * bytes_of(dtype);
  size_t rounded = (bytes + kAlign - 1) / kAlign * kAlign;
  if (device() != Device::null)
    K3_CHECK(used_ + rounded <= capacity_, "[arena] a step needs more than the {} MB planned for it ({} lent, {} wanted)", capacity_ >> 20, used_,
             bytes);
  buffer_.commit(used_ + rounded);
  char* at = buffer_.data() ? buffer_.data() + used_ : nullptr;
  used_ += rounded;
  peak_ = std::max(peak_, used_);
  if (poison_ && device() == Device::cpu) std::memset(at, 0xff, rounded);  // a float of all ones is NaN
  if (poison_ && device() == Device::cuda) gpu::fill(at, 0xff, rounded);
  return Tensor(at, dtype, shape, device());
}

Tensor Arena::lend_zeroed(DType dtype, Shape shape) {
  Tensor t = lend(dtype, shape);
  if (device() == Device::cpu && t.bytes()) std::memset(t.data(), 0, t.bytes());
  if (device() == Device::cuda) gpu::clear(t.data(), t.bytes());
  return t;
}

}  // namespace k3
