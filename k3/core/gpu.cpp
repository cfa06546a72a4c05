#include "k3/core/gpu.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "k3/core/error.h"

#ifdef K3_CUDA
#include <cuda.h>
#include <cuda_runtime_api.h>

#include "k3/core/copy_cuda.h"
#endif

namespace k3 {

void write(const Tensor& to, const void* from) {
  if (to.bytes() == 0) return;
  if (to.device() == Device::cpu) std::memcpy(to.data(), from, to.bytes());
  if (to.device() == Device::cuda) gpu::upload(to.data(), from, to.bytes());
}

void copy_values(const Tensor& to, const Tensor& from) {
  if (to.bytes() == 0) return;
  if (to.device() == Device::cpu) std::memcpy(to.data(), from.data(), to.bytes());
  if (to.device() == Device::cuda) gpu::copy(to.data(), from.data(), to.bytes());
}

namespace gpu {

void require() {
  static const std::string why = why_not();
  K3_CHECK(why.empty(), "[gpu] {}", why);
}

void check(const char* what) { K3_CHECK(!what, "[gpu] {}", what); }

std::string why_not(const Found& found) {
  auto cuda = [](int version) { return fmt::format("CUDA {}.{}", version / 1000, version % 1000 / 10); };
  auto fits = [](const Card& c) { return c.major == 9 && c.minor == 0; };
  if (found.driver == 0)
    return fmt::format("there is no NVIDIA driver here; needs one of {} and an H100 or H200; install it, or use --device cpu", cuda(found.needed));
  if (found.driver / 1000 < found.needed / 1000)
    return fmt::format(
        "the NVIDIA driver here serves {}, but this build needs {}; update the driver, configure with a CUDA toolkit of its age, or use "
        "--device cpu",
        cuda(found.driver), cuda(found.needed));
  if (found.cards.empty())
    return fmt::format("there is no usable NVIDIA GPU here ({}); needs an H100 or H200, or use --device cpu",
                       found.trouble.empty() ? "the driver finds none" : found.trouble);
  const Card& first = found.cards[0];
  if (fits(first)) return "";
  const auto other = std::find_if(found.cards.begin(), found.cards.end(), fits);
  return fmt::format(
      "the GPU here is a {} of compute capability {}.{}, but the kernels need 9.0 (H100, H200); {}use --device cpu", first.name, first.major,
      first.minor,
      other == found.cards.end() ? "" : fmt::format("set CUDA_VISIBLE_DEVICES={} for the {}, or ", other - found.cards.begin(), other->name));
}

std::string no_room(size_t bytes, size_t free, size_t total, const std::string& card) {
  return fmt::format("no room for {} MB more: of the {} MB of {} {} MB are free, so at most that fits; use a smaller model, batch or context",
                     bytes >> 20, total >> 20, card, free >> 20);
}

#ifdef K3_CUDA

namespace {

bool ok(cudaError_t e) {
  if (e != cudaSuccess) cudaGetLastError();  // or the next call would find it again
  return e == cudaSuccess;
}
void check_call(cudaError_t e, const char* doing) { K3_CHECK(ok(e), "[gpu] {} failed: {} ({})", doing, cudaGetErrorString(e), cudaGetErrorName(e)); }

// Calls of the driver, looked up so that the program also starts where there is no driver.
template <class F>
F driver(const char* name) {
  void* f = nullptr;
  cudaDriverEntryPointQueryResult found;
  check_call(cudaGetDriverEntryPointByVersion(name, &f, 12000, cudaEnableDefault, &found), name);
  K3_CHECK(f, "[gpu] the driver has no {}: it is older than CUDA 12; update it", name);
  return reinterpret_cast<F>(f);
}
struct Driver {
  decltype(&cuMemAddressReserve) address_reserve = driver<decltype(&cuMemAddressReserve)>("cuMemAddressReserve");
  decltype(&cuMemAddressFree) address_free = driver<decltype(&cuMemAddressFree)>("cuMemAddressFree");
  decltype(&cuMemCreate) create = driver<decltype(&cuMemCreate)>("cuMemCreate");
  decltype(&cuMemRelease) release = driver<decltype(&cuMemRelease)>("cuMemRelease");
  decltype(&cuMemMap) map = driver<decltype(&cuMemMap)>("cuMemMap");
  decltype(&cuMemUnmap) unmap = driver<decltype(&cuMemUnmap)>("cuMemUnmap");
  decltype(&cuMemSetAccess) set_access = driver<decltype(&cuMemSetAccess)>("cuMemSetAccess");
};
const Driver& driver_calls() {
  static const Driver d;
  return d;
}

// Memory comes a piece at a time, none needlessly small: the memory checker takes a bulk copy across two of them for one out of bounds.
constexpr size_t kPage = size_t(2) << 20, kPiece = size_t(64) << 20;
size_t in_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

[[noreturn]] void fail_for_room(size_t bytes) {
  size_t free = 0, total = 0;
  ok(cudaMemGetInfo(&free, &total));
  cudaDeviceProp p;
  ok(cudaGetDeviceProperties(&p, 0));
  fail("[gpu] {}", no_room(bytes, free, total, p.name));
}

}  // namespace

std::string why_not() {
  Found found{0, CUDART_VERSION, "", {}};
  ok(cudaDriverGetVersion(&found.driver));
  int count = 0;
  if (const cudaError_t e = cudaGetDeviceCount(&count); !ok(e)) found.trouble = cudaGetErrorString(e), count = 0;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp p;
    if (const cudaError_t e = cudaGetDeviceProperties(&p, i); !ok(e))
      found.trouble = cudaGetErrorString(e);
    else
      found.cards.push_back({p.name, p.major, p.minor});
  }
  return why_not(found);
}

namespace {

cudaStream_t new_stream() {
  require();
  cudaStream_t made;
  check_call(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "making a stream");
  return made;
}
cudaEvent_t new_event() {
  cudaEvent_t made;
  check_call(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "making an event");
  return made;
}

cudaStream_t main_stream() {
  static cudaStream_t s = new_stream();
  return s;
}
cudaStream_t branch_now = nullptr;  // inside Branches::run()
Graph* captured_now = nullptr;

// What must be done at once while a graph is captured goes here.
cudaStream_t aside() {
  static cudaStream_t s = new_stream();
  return s;
}

void check_uncaptured(const char* doing) {
  K3_CHECK(!captured_now, "[gpu] {} inside a captured step: its bytes would be those of the capture for ever; keep a list or feed it", doing);
}

}  // namespace

void* stream() { return branch_now ? branch_now : main_stream(); }

static cudaStream_t queue() { return static_cast<cudaStream_t>(stream()); }

char* allocate(size_t bytes) {
  queue();
  void* p = nullptr;
  if (!ok(cudaMalloc(&p, bytes))) fail_for_room(bytes);
  if (captured_now)
    check_call(cudaMemsetAsync(p, 0, bytes, aside()), "filling GPU memory"), check_call(cudaStreamSynchronize(aside()), "filling GPU memory");
  else
    clear(p, bytes);
  return static_cast<char*>(p);
}

void release(char* p) {
  if (p) ok(cudaStreamSynchronize(main_stream())), ok(cudaFree(p));
}

char* reserve(size_t bytes) {
  queue();
  CUdeviceptr p = 0;
  K3_CHECK(driver_calls().address_reserve(&p, in_pages(bytes), 0, 0, 0) == CUDA_SUCCESS, "[gpu] the driver has no {} MB of addresses", bytes >> 20);
  return reinterpret_cast<char*>(p);
}

size_t commit(char* base, size_t committed, size_t wanted, size_t bytes) {
  if (wanted <= committed) return committed;
  const size_t all = in_pages(bytes);
  // a quarter more than now, so that a growing arena asks seldom
  size_t more = in_pages(std::max(wanted, std::min(all, std::max(committed + committed / 4, kPiece)))) - committed;
  CUmemAllocationProp kind{};
  kind.type = CU_MEM_ALLOCATION_TYPE_PINNED, kind.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  CUmemGenericAllocationHandle memory;
  CUresult r = driver_calls().create(&memory, more, &kind, 0);
  if (r != CUDA_SUCCESS) more = in_pages(wanted) - committed, r = driver_calls().create(&memory, more, &kind, 0);
  if (r != CUDA_SUCCESS) fail_for_room(more);
  const auto at = reinterpret_cast<CUdeviceptr>(base) + committed;
  CUmemAccessDesc access{};
  access.location = kind.location, access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  r = driver_calls().map(at, more, 0, memory, 0);
  if (r == CUDA_SUCCESS) r = driver_calls().set_access(at, more, &access, 1);
  driver_calls().release(memory);  // the mapping keeps it
  K3_CHECK(r == CUDA_SUCCESS, "[gpu] mapping {} MB failed with driver error {}", more >> 20, int(r));
  return committed + more;
}

void unreserve(char* base, size_t committed, size_t bytes) {
  if (!base) return;
  ok(cudaStreamSynchronize(main_stream()));
  if (committed) driver_calls().unmap(reinterpret_cast<CUdeviceptr>(base), committed);
  driver_calls().address_free(reinterpret_cast<CUdeviceptr>(base), in_pages(bytes));
}

void upload(void* device, const void* host, size_t bytes) {
  check_uncaptured("a copy to the GPU");
  if (bytes) check_call(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, queue()), "a copy to the GPU");
}
void download(void* host, const void* device, size_t bytes) {
  if (bytes) check_call(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, queue()), "a copy from the GPU");
  synchronize();
}
void download_later(void* shared, const void* device, size_t bytes) { check(cuda::copy(shared, device, bytes, true, queue())); }
void copy(void* to, const void* from, size_t bytes) { check(cuda::copy(to, from, bytes, false, queue())); }
void fill(void* p, int byte, size_t bytes) { check(cuda::fill(p, byte, bytes, queue())); }
void synchronize() {
  check_uncaptured("a wait for the GPU");
  check_call(cudaStreamSynchronize(main_stream()), "a kernel");
}
bool idle() {
  const cudaError_t e = cudaStreamQuery(main_stream());
  if (e == cudaErrorNotReady) return cudaGetLastError(), false;
  return check_call(e, "a kernel"), true;
}

char* allocate_shared(size_t bytes) {
  queue();
  void* p = nullptr;
  check_call(cudaHostAlloc(&p, bytes, cudaHostAllocMapped), "allocating memory for host and GPU");
  std::memset(p, 0, bytes);
  return static_cast<char*>(p);
}
void release_shared(char* p) {
  if (p) ok(cudaStreamSynchronize(main_stream())), ok(cudaFreeHost(p));
}

namespace {
cudaStream_t lane(int i) {
  static std::vector<cudaStream_t> lanes;
  while (lanes.size() < Branches::kMost) lanes.push_back(new_stream());
  return lanes[size_t(i)];
}
std::vector<cudaEvent_t>& free_events() {
  static std::vector<cudaEvent_t> events;
  return events;
}
// Of what `s` has now.
void* mark(cudaStream_t s) {
  if (free_events().empty()) free_events().push_back(new_event());
  cudaEvent_t e = free_events().back();
  check_call(cudaEventRecord(e, s), "a branch");
  free_events().pop_back();
  return e;
}
void wait_for(void* mark, cudaStream_t s) { check_call(cudaStreamWaitEvent(s, static_cast<cudaEvent_t>(mark), 0), "a branch"); }
void give_back(void* mark) { free_events().push_back(static_cast<cudaEvent_t>(mark)); }
}  // namespace

Branches::Branches() {
  K3_CHECK(!branch_now, "[gpu] a branch inside a branch");
  begin_ = mark(main_stream());
}
void Branches::run(int branch, const std::function<void()>& enqueue) {
  const cudaStream_t s = lane(branch);
  if (!done_[branch]) wait_for(begin_, s);
  {
    struct Inside {
      explicit Inside(cudaStream_t s) { branch_now = s; }
      ~Inside() { branch_now = nullptr; }
    } inside(s);
    enqueue();
  }
  if (done_[branch]) give_back(done_[branch]);
  done_[branch] = mark(s);
}
void Branches::join() {
  if (!begin_) return;
  give_back(std::exchange(begin_, nullptr));
  for (void*& d : done_)
    if (d) wait_for(d, main_stream()), give_back(std::exchange(d, nullptr));
}

Graph::Graph(const std::function<void()>& enqueue) {
  cudaGraph_t graph = nullptr;
  aside(), lane(0);                    // made before
  ok(cudaStreamSynchronize(queue()));  // what is timed meanwhile is alone
  // relaxed: arenas may grow and lists may be kept meanwhile
  check_call(cudaStreamBeginCapture(queue(), cudaStreamCaptureModeRelaxed), "beginning to capture");
  captured_now = this;
  try {
    enqueue();
  } catch (...) {
    captured_now = nullptr;
    ok(cudaStreamEndCapture(queue(), &graph));
    if (graph) ok(cudaGraphDestroy(graph));
    for (auto& [p, bytes] : kept_) ok(cudaFree(p));
    throw;
  }
  captured_now = nullptr;
  check_call(cudaStreamEndCapture(queue(), &graph), "capturing");
  size_t count = 0;
  ok(cudaGraphGetNodes(graph, nullptr, &count));
  std::vector<cudaGraphNode_t> nodes(count);
  ok(cudaGraphGetNodes(graph, nodes.data(), &count));
  for (cudaGraphNode_t n : nodes) {
    cudaGraphNodeType type;
    if (ok(cudaGraphNodeGetType(n, &type)) && type == cudaGraphNodeTypeKernel) ++kernels_;
  }
  cudaGraphExec_t made = nullptr;
  const cudaError_t e = cudaGraphInstantiate(&made, graph, 0);
  ok(cudaGraphDestroy(graph));
  check_call(e, "making a graph");
  executable_ = made;
}
Graph::~Graph() {
  if (!executable_) return;
  ok(cudaStreamSynchronize(queue())), ok(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(executable_)));
  for (auto& [p, bytes] : kept_) ok(cudaFree(p));
}
bool capturing() { return captured_now != nullptr; }
const void* kept(const void* host, size_t bytes) {
  K3_CHECK(captured_now, "[gpu] a list is kept for a graph, but none is captured");
  Graph& g = *captured_now;
  constexpr size_t kAlign = 256, kBlock = size_t(1) << 20;
  const size_t room = (std::max<size_t>(bytes, 1) + kAlign - 1) / kAlign * kAlign;
  if (g.kept_.empty() || g.used_ + room > g.kept_.back().second) {
    const size_t block = std::max(room, kBlock);
    g.kept_.emplace_back(allocate(block), block), g.used_ = 0;
  }
  char* at = g.kept_.back().first + g.used_;
  g.used_ += room;
  if (bytes) check_call(cudaMemcpyAsync(at, host, bytes, cudaMemcpyHostToDevice, aside()), "a copy to the GPU");
  check_call(cudaStreamSynchronize(aside()), "a copy to the GPU");  // `host` may be used again
  return at;
}
void Graph::launch() const { check_call(cudaGraphLaunch(static_cast<cudaGraphExec_t>(executable_), queue()), "a graph"); }

#else

std::string why_not() {
  return "this build has no CUDA; configure it with cmake --preset cuda where the CUDA toolkit is installed, or use --device cpu";
}

// Each of these is an Error: there is nothing that it could be called with.
void* stream() { return require(), nullptr; }
char* allocate(size_t) { return require(), nullptr; }
void release(char*) {}
char* reserve(size_t) { return require(), nullptr; }
size_t commit(char*, size_t, size_t, size_t) { return require(), 0; }
void unreserve(char*, size_t, size_t) {}
void upload(void*, const void*, size_t) { require(); }
void download(void*, const void*, size_t) { require(); }
void download_later(void*, const void*, size_t) { require(); }
void copy(void*, const void*, size_t) { require(); }
void fill(void*, int, size_t) { require(); }
void synchronize() { require(); }
bool idle() { return require(), true; }
char* allocate_shared(size_t) { return require(), nullptr; }
void release_shared(char*) {}
Branches::Branches() { require(); }
void Branches::run(int, const std::function<void()>&) { require(); }
void Branches::join() {}
Graph::Graph(const std::function<void()>&) { require(); }
Graph::~Graph() {}
void Graph::launch() const { require(); }
bool capturing() { return false; }
const void* kept(const void*, size_t) { return require(), nullptr; }

#endif

Graph& Graph::operator=(Graph&& o) noexcept {
  std::swap(executable_, o.executable_), std::swap(kernels_, o.kernels_), std::swap(kept_, o.kept_), std::swap(used_, o.used_);
  return *this;
}

}  // namespace gpu
}  // namespace k3
