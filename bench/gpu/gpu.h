#pragma once
// What the GPU checks and timings share: buffers that begin as NaN, random inputs, errors, median times.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "k3/core/dtype.h"

namespace k3::gpu {

inline void check(cudaError_t e, const char* what, int line) {
  if (e == cudaSuccess) return;
  std::printf("FAILED %s at line %d: %s\n", what, line, cudaGetErrorString(e));
  std::fflush(stdout);
  std::exit(2);
}
#define GPU(call) ::k3::gpu::check((call), #call, __LINE__)

inline void launched(const char* error) {
  if (error) {
    std::printf("FAILED %s\n", error);
    std::fflush(stdout);
    std::exit(2);
  }
}

template <class T>
struct Buffer {
  T* data = nullptr;
  int64_t size = 0;
  explicit Buffer(int64_t n = 0) : size(n) {
    if (n) GPU(cudaMalloc(&data, n * sizeof(T)));
    poison();
  }
  explicit Buffer(const std::vector<T>& v) : Buffer(int64_t(v.size())) { upload(v); }
  Buffer(Buffer&& o) noexcept : data(std::exchange(o.data, nullptr)), size(o.size) {}
  Buffer(const Buffer&) = delete;
  ~Buffer() { cudaFree(data); }
  void poison() {
    if (size) GPU(cudaMemset(data, 0xff, size * sizeof(T)));  // NaN in bf16 and in float32
  }
  void zero() { GPU(cudaMemset(data, 0, size * sizeof(T))); }
  void upload(const std::vector<T>& v) { GPU(cudaMemcpy(data, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice)); }
  std::vector<T> download() const {
    std::vector<T> v(size);
    GPU(cudaMemcpy(v.data(), data, size * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
  }
};

struct Rng {
  uint64_t s;
  explicit Rng(uint64_t seed = 1) : s(seed * 0x9E3779B97F4A7C15ull + 1) {}
  uint64_t next() {
    s += 0x9E3779B97F4A7C15ull;
    uint64_t z = s;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull, z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  double uniform() { return (next() >> 11) * 0x1.0p-53; }
  double normal() { return std::sqrt(-2 * std::log(1 - uniform())) * std::cos(6.283185307179586 * uniform()); }
};
inline std::vector<float> normals(int64_t n, Rng& rng, double mean = 0, double deviation = 1) {
  std::vector<float> v(n);
  for (float& x : v) x = float(mean + deviation * rng.normal());
  return v;
}
// For large timing inputs: a table of normals, read at random places.
inline std::vector<bf16> many_normals(int64_t n, Rng& rng, double mean = 0, double deviation = 1) {
  std::vector<bf16> table(1 << 16), v(n);
  for (bf16& x : table) x = to_bf16(float(mean + deviation * rng.normal()));
  for (int64_t i = 0; i < n; i += 4) {
    uint64_t r = rng.next();
    for (int64_t j = i; j < std::min(n, i + 4); ++j, r >>= 16) v[j] = table[r & 0xffff];
  }
  return v;
}
inline std::vector<bf16> to_bf16(const std::vector<float>& x) {
  std::vector<bf16> y(x.size());
  for (size_t i = 0; i < x.size(); ++i) y[i] = k3::to_bf16(x[i]);
  return y;
}
inline std::vector<double> widen(const std::vector<bf16>& x) {
  std::vector<double> y(x.size());
  for (size_t i = 0; i < x.size(); ++i) y[i] = to_float(x[i]);
  return y;
}
template <class T>
std::vector<double> widen(const std::vector<T>& x) { return {x.begin(), x.end()}; }

// ||x - right|| / ||right||; infinite when anything is not finite
inline double error(const std::vector<double>& x, const std::vector<double>& right) {
  double d = 0, n = 0;
  for (size_t i = 0; i < right.size(); ++i) {
    if (!std::isfinite(x[i])) return INFINITY;
    d += (x[i] - right[i]) * (x[i] - right[i]), n += right[i] * right[i];
  }
  return n > 0 ? std::sqrt(d / n) : std::sqrt(d);
}
template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) { return a.size() == b.size() && !std::memcmp(a.data(), b.data(), a.size() * sizeof(T)); }

inline int failures = 0;
inline void expect(const std::string& what, double e, double limit) {
  bool ok = e <= limit;
  if (!ok) ++failures;
  std::printf("%s %-72s error %.3g (limit %.3g)\n", ok ? "ok  " : "FAIL", what.c_str(), e, limit);
  std::fflush(stdout);
}
inline void expect_true(const std::string& what, bool ok) {
  if (!ok) ++failures;
  std::printf("%s %s\n", ok ? "ok  " : "FAIL", what.c_str());
  std::fflush(stdout);
}

// Median microseconds of f(i), i = 0, 1, ...: f may rotate over its inputs by i. `inner` calls are captured in one graph for short kernels.
inline double time_us(const std::function<void(int, cudaStream_t)>& f, int inner = 1, int samples = 30) {
  cudaStream_t stream;
  GPU(cudaStreamCreate(&stream));
  f(0, stream);
  GPU(cudaStreamSynchronize(stream));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  GPU(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < inner; ++i) f(i, stream);
  GPU(cudaStreamEndCapture(stream, &graph));
  GPU(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t a, b;
  GPU(cudaEventCreate(&a));
  GPU(cudaEventCreate(&b));
  for (int i = 0; i < 5; ++i) GPU(cudaGraphLaunch(exec, stream));
  std::vector<double> t;
  for (int i = 0; i < samples; ++i) {
    GPU(cudaEventRecord(a, stream));
    GPU(cudaGraphLaunch(exec, stream));
    GPU(cudaEventRecord(b, stream));
    GPU(cudaEventSynchronize(b));
    float ms;
    GPU(cudaEventElapsedTime(&ms, a, b));
    t.push_back(ms * 1e3 / inner);
  }
  GPU(cudaGraphExecDestroy(exec));
  GPU(cudaGraphDestroy(graph));
  GPU(cudaStreamDestroy(stream));
  std::sort(t.begin(), t.end());
  return t[t.size() / 2];
}
inline void report(const std::string& what, double us, double floor_us) {
  std::printf("time %-72s %9.1f us   floor %8.1f   %4.0f %%\n", what.c_str(), us, floor_us, 100 * floor_us / us);
  std::fflush(stdout);
}

inline bool wants(int argc, char** argv, const char* what) {  // program check | time | (nothing: both)
  return argc < 2 || !std::strcmp(argv[1], what) || !std::strcmp(argv[1], "all");
}

}  // namespace k3::gpu
