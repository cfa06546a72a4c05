#pragma once
// How kernels are timed by themselves: in graphs that are replayed, on random inputs. For builds with CUDA.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "k3/core/arena.h"
#include "k3/core/dtype.h"
#include "k3/core/error.h"
#include "k3/core/gpu.h"
#include "k3/core/rng.h"

namespace k3 {

inline void check_call(cudaError_t e) { K3_CHECK(e == cudaSuccess, "[bench] the GPU says {}", cudaGetErrorString(e)); }

class Events {  // pairs around what is timed
 public:
  Events() { check_call(cudaEventCreate(&a_)), check_call(cudaEventCreate(&b_)); }
  ~Events() { cudaEventDestroy(a_), cudaEventDestroy(b_); }
  Events(const Events&) = delete;
  template <class F>
  double seconds(cudaStream_t s, F f) {
    check_call(cudaEventRecord(a_, s));
    f();
    check_call(cudaEventRecord(b_, s));
    check_call(cudaEventSynchronize(b_));
    float ms = 0;
    check_call(cudaEventElapsedTime(&ms, a_, b_));
    return ms * 1e-3;
  }

 private:
  cudaEvent_t a_, b_;
};

using Launch = std::function<const char*(int i, void* stream)>;  // may rotate over its inputs by i

// Median microseconds of a launch: `inner` of them in a graph, replayed.
inline double median_us(const Launch& f, int inner = 1, int samples = 30) {
  cudaStream_t stream;
  check_call(cudaStreamCreate(&stream));
  gpu::synchronize();
  gpu::check(f(0, stream));
  check_call(cudaStreamSynchronize(stream));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  check_call(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < inner; ++i) gpu::check(f(i, stream));
  check_call(cudaStreamEndCapture(stream, &graph));
  check_call(cudaGraphInstantiate(&exec, graph, 0));
  Events events;
  std::vector<double> t;
  for (int i = -3; i < samples; ++i) {
    const double s = events.seconds(stream, [&] { check_call(cudaGraphLaunch(exec, stream)); });
    if (i >= 0) t.push_back(1e6 * s / inner);
  }
  cudaGraphExecDestroy(exec), cudaGraphDestroy(graph), cudaStreamDestroy(stream);
  std::sort(t.begin(), t.end());
  return t[t.size() / 2];
}

// Device memory of one line, given back when it ends.
class Room {
 public:
  bf16* narrow(int64_t n, double deviation = 1, double mean = 0) {
    return repeat<bf16>(n, DType::bf16, [&](double x) { return to_bf16(float(mean + deviation * x)); });
  }
  float* floats(int64_t n, double deviation = 1, double mean = 0) {
    return repeat<float>(n, DType::f32, [&](double x) { return float(mean + deviation * x); });
  }
  int* integers(const std::vector<int>& v) { return upload(v, DType::i32); }
  template <class T>
  T* blank(int64_t n) {  // zeros
    const Tensor t = arena_.lend_zeroed(DType::u8, {n * int64_t(sizeof(T))});
    return static_cast<T*>(t.data());
  }
  template <class T>
  T* upload(const std::vector<T>& v, DType type) {
    const Tensor t = arena_.lend(type, {int64_t(v.size())});
    write(t, v.data());
    return static_cast<T*>(t.data());
  }
  void end() { arena_.rewind(0); }

 private:
  template <class T, class F>
  T* repeat(int64_t n, DType type, F value) {  // a block of normals, again and again
    const Rng rng{++seed_, 4};
    std::vector<T> some(size_t(std::min<int64_t>(n, 1 << 16)));
    for (size_t i = 0; i < some.size(); ++i) some[i] = value(rng.normal(i));
    T* all = static_cast<T*>(arena_.lend(type, {n}).data());
    gpu::upload(all, some.data(), some.size() * sizeof(T));
    for (int64_t have = int64_t(some.size()); have < n; have *= 2) gpu::copy(all + have, all, size_t(std::min(have, n - have)) * sizeof(T));
    return all;
  }
  Arena arena_{size_t(100) << 30, Device::cuda};
  uint64_t seed_ = 0;
};

}  // namespace k3
