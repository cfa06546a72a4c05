#pragma once
// Feed: what the host says anew before each run of a captured step (ids, rates): memory on the device that stays, and how it is filled.
//
//   Feed feed;
//   const int32_t* there = feed.take<int32_t>(n, [&](int32_t* to) { std::copy_n(ids, n, to); });   // while the step is captured
//   feed.send();                                                                                   // before each run of it
//
// A function given to take() must outlive the Feed with all that it reads, and fills all n. send() must not be called while a run is on its way.
#include <functional>
#include <type_traits>
#include <vector>

#include "k3/core/buffer.h"

namespace k3 {

class Feed {
 public:
  Feed() = default;
  Feed(const Feed&) = delete;
  ~Feed();
  template <class T>
  const T* take(int64_t n, std::function<void(T*)> fill) {
    static_assert(std::is_trivially_copyable_v<T>);
    return static_cast<const T*>(take(size_t(n) * sizeof(T), [fill = std::move(fill)](void* p) { fill(static_cast<T*>(p)); }));
  }
  void send();

 private:
  struct Block {
    Buffer there;
    char* here;  // shared with the GPU
    size_t used = 0;
  };
  struct Item {
    char* here;
    std::function<void(void*)> fill;
  };
  const void* take(size_t bytes, std::function<void(void*)> fill);
  std::vector<Block> blocks_;
  std::vector<Item> items_;
};

}  // namespace k3
