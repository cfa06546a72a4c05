#pragma once
// gpu: the one GPU of the process. Memory, copies, and the one stream into which everything is enqueued in order; so memory that is given
// back may be lent again at once, and only download() and synchronize() wait.
//
//   if (c.device == Device::cpu) cpu::norm().rms_norm_forward(a);
//   if constexpr (gpu::kBuilt) {
//     if (c.device == Device::cuda) gpu::check(cuda::rms_norm_forward(a, gpu::stream()));   // a launcher: null, or what it cannot serve
//   }
//
// A build without CUDA has all these functions, and each is an Error that says how to get CUDA; launchers it has none, and `if constexpr`
// keeps their names out of it. Errors: no GPU, one that the kernels were not built for, no room (with what there is).
#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "k3/core/tensor.h"

namespace k3::gpu {

#ifdef K3_CUDA
inline constexpr bool kBuilt = true;
#else
inline constexpr bool kBuilt = false;
#endif

std::string why_not();  // why there is no GPU to compute on, as one sentence; empty when there is one
void require();         // the same as an Error

// What was found on a machine, and the sentences about it: what is there, what is needed, what would do. The kernels need compute capability 9.0.
struct Card {
  std::string name;
  int major, minor;
};
struct Found {
  int driver;           // newest CUDA that the driver serves, as 12040; 0: there is no driver
  int needed;           // CUDA of this build
  std::string trouble;  // what the driver said instead of its cards
  std::vector<Card> cards;
};
std::string why_not(const Found& found);
std::string no_room(size_t bytes, size_t free, size_t total, const std::string& card);

void* stream();                // cudaStream_t: where launches go, the one stream or inside Branches::run() a branch
void check(const char* what);  // a launcher's answer

char* allocate(size_t bytes);  // zeroed
void release(char* p);
// Address space that becomes memory from its beginning on, as far as it is committed: capacity costs nothing, and nothing ever moves.
char* reserve(size_t bytes);
size_t commit(char* base, size_t committed, size_t wanted, size_t bytes);  // the new `committed`, at least `wanted`
void unreserve(char* base, size_t committed, size_t bytes);

void upload(void* device, const void* host, size_t bytes);  // host memory may be used again on return
void download(void* host, const void* device, size_t bytes);
// The same without waiting: `shared`, from allocate_shared(), holds the bytes after the next synchronize().
void download_later(void* shared, const void* device, size_t bytes);
void copy(void* to, const void* from, size_t bytes);
void fill(void* p, int byte, size_t bytes);
inline void clear(void* p, size_t bytes) { fill(p, 0, bytes); }
void synchronize();  // waits; an Error when a kernel failed
bool idle();         // whether all that was enqueued is done; an Error when a kernel failed

// Memory of the host that kernels and copies read and write where it lies, zeroed: results that the host looks at without waiting for the stream.
char* allocate_shared(size_t bytes);
void release_shared(char* p);

// Work that does not depend on each other, side by side: each branch runs after all that was enqueued before the object was made, and what is
// enqueued after join() runs after all branches. Which memory is lent inside must not be lent again before join().
//
//   gpu::Branches side;
//   side.run(0, [&] { ... });  // what it enqueues
//   ...                        // beside it
//   side.join();
class Branches {
 public:
  static constexpr int kMost = 6;
  Branches();
  ~Branches() { join(); }
  Branches(const Branches&) = delete;
  void run(int branch, const std::function<void()>& enqueue);
  void join();

 private:
  void* begin_ = nullptr;
  void* done_[kMost] = {};
};

// What a function enqueues, to be enqueued again as a whole: the same launches with the same arguments. Nothing is computed while it is captured.
// What it uses must have been allocated before, so call the function once by itself first. Lists that are the same for every run are kept (below);
// what changes comes from memory that is filled before launch() (feed.h). upload() and whatever waits is an Error inside.
class Graph {
 public:
  Graph() = default;
  explicit Graph(const std::function<void()>& enqueue);
  ~Graph();
  Graph(Graph&& o) noexcept { *this = std::move(o); }
  Graph& operator=(Graph&& o) noexcept;
  void launch() const;
  int64_t kernels() const { return kernels_; }
  explicit operator bool() const { return executable_ != nullptr; }

 private:
  friend const void* kept(const void* host, size_t bytes);
  void* executable_ = nullptr;
  int64_t kernels_ = 0;
  std::vector<std::pair<char*, size_t>> kept_;  // memory of lists, and its size
  size_t used_ = 0;                             // of the last one
};
bool capturing();
// While a graph is captured: a copy of these bytes on the device that lives as long as the graph.
const void* kept(const void* host, size_t bytes);

}  // namespace k3::gpu

namespace k3 {

// The same bytes where the CPU can read them: the tensor itself, or a copy as long as this object lives.
class HostCopy {
 public:
  explicit HostCopy(const Tensor& t) : tensor_(t) {
    if (t.device() != Device::cuda) return;
    bytes_.resize(t.bytes());
    gpu::download(bytes_.data(), t.data(), t.bytes());
    tensor_ = Tensor(bytes_.data(), t.dtype(), t.shape());
  }
  HostCopy(const HostCopy&) = delete;
  const Tensor& tensor() const { return tensor_; }
  const float* f32() const { return tensor_.f32(); }
  const int32_t* i32() const { return tensor_.i32(); }

 private:
  std::string bytes_;  // aligned as operator new aligns
  Tensor tensor_;
};

// Fills a tensor, wherever it lives, from memory of the CPU; or from another tensor of the same device.
void write(const Tensor& to, const void* from);
void copy_values(const Tensor& to, const Tensor& from);

}  // namespace k3
