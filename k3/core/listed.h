#pragma once
// listed: short lists that the host makes (rows, sequences, pointers), where the kernels of a device read them.
//
//   a.rows = listed(c.device, scratch, plan.rows);   // the vector's own memory; on a GPU a copy, lent from scratch
//
// A captured step keeps its lists as they were when it was captured: they may follow from shapes, not from data (that is Context::fed's).
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "k3/core/arena.h"
#include "k3/core/gpu.h"

namespace k3 {

template <class Lender, class T>
const T* listed(Device device, Lender& lender, const std::vector<T>& v) {
  static_assert(std::is_trivially_copyable_v<T>);
  if (device != Device::cuda) return v.data();
  if (gpu::capturing()) return static_cast<const T*>(gpu::kept(v.data(), v.size() * sizeof(T)));
  Tensor t = lender.lend(DType::u8, {int64_t(v.size() * sizeof(T))});
  if (!v.empty()) gpu::upload(t.data(), v.data(), t.bytes());
  return static_cast<const T*>(t.data());
}

// For a list that seldom changes: it stays on the device, and is sent again only when it is another one.
class ListedOnce {
 public:
  template <class T>
  const T* of(Device device, const std::vector<T>& v) {
    static_assert(std::is_trivially_copyable_v<T>);
    if (device != Device::cuda) return v.data();
    const std::string_view bytes(reinterpret_cast<const char*>(v.data()), v.size() * sizeof(T));
    if (bytes != sent_) {
      if (bytes.size() > there_.bytes()) there_ = Buffer(bytes.size(), device);
      gpu::upload(there_.data(), bytes.data(), bytes.size());
      sent_ = bytes;
    }
    return reinterpret_cast<const T*>(there_.data());
  }

 private:
  std::string sent_;
  Buffer there_;
};

}  // namespace k3
