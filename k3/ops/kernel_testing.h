#pragma once
// What tests of one GPU kernel by itself share: memory of the GPU that begins as NaN, inputs that are bfloat16 already, errors against double
// precision. Tests of operators are in testing.h.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "k3/core/buffer.h"
#include "k3/core/dtype.h"
#include "k3/ops/testing.h"

// A launcher of namespace cuda; a build without CUDA has none.
#define K3_LAUNCH(call)                                                  \
  do {                                                                   \
    if constexpr (::k3::gpu::kBuilt) ::k3::gpu::check(::k3::cuda::call); \
  } while (false)

namespace k3::testing {

struct kernel : ::testing::Test {
  void SetUp() override {
    if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  }
};

// n values on the GPU.
template <class T>
class There {
 public:
  explicit There(int64_t n) : size(n), buffer_(std::max<size_t>(1, size_t(n) * sizeof(T)), Device::cuda) {
    data = reinterpret_cast<T*>(buffer_.data());
    poison();
  }
  explicit There(const std::vector<T>& v) : There(int64_t(v.size())) { upload(v); }
  void poison() { gpu::fill(data, 0xff, bytes()); }  // NaN in bfloat16 and in float32
  void zero() { gpu::clear(data, bytes()); }
  void upload(const std::vector<T>& v) { gpu::upload(data, v.data(), v.size() * sizeof(T)); }
  std::vector<T> download() const {
    std::vector<T> v(static_cast<size_t>(size));
    gpu::download(v.data(), data, bytes());
    return v;
  }
  size_t bytes() const { return size_t(size) * sizeof(T); }
  T* data;
  int64_t size;

 private:
  Buffer buffer_;
};

class Random {
 public:
  explicit Random(uint64_t seed) : rng_{seed, 6} {}
  double uniform() { return rng_.uniform(at_++); }
  double normal() { return rng_.normal(at_++); }
  uint64_t next() {
    const Rng::Bits b = rng_.bits(at_++);
    return uint64_t(b[0]) << 32 | b[1];
  }
  std::vector<float> normals(int64_t n, double mean = 0, double deviation = 1) {
    std::vector<float> v(static_cast<size_t>(n));
    for (float& x : v) x = float(mean + deviation * normal());
    return v;
  }

 private:
  Rng rng_;
  uint64_t at_ = 0;
};

inline float rounded(float x) { return to_float(to_bf16(x)); }
inline std::vector<bf16> narrowed(const std::vector<float>& x) {
  std::vector<bf16> y(x.size());
  for (size_t i = 0; i < x.size(); ++i) y[i] = to_bf16(x[i]);
  return y;
}
inline std::vector<double> widened(const std::vector<bf16>& x) {
  std::vector<double> y(x.size());
  for (size_t i = 0; i < x.size(); ++i) y[i] = to_float(x[i]);
  return y;
}
inline std::vector<double> widened(const std::vector<float>& x) { return {x.begin(), x.end()}; }

// |x - right| / |right| over all values; infinite when one is not finite.
inline double error(const std::vector<double>& x, const std::vector<double>& right) {
  double d = 0, n = 0;
  for (size_t i = 0; i < right.size(); ++i) {
    if (!std::isfinite(x[i])) {
      ADD_FAILURE() << "value " << i << " of " << right.size() << " is " << x[i] << " and should be " << right[i];
      return INFINITY;
    }
    d += (x[i] - right[i]) * (x[i] - right[i]), n += right[i] * right[i];
  }
  return n > 0 ? std::sqrt(d / n) : std::sqrt(d);
}
template <class T>
double error(const There<T>& x, const std::vector<double>& right) {
  return error(widened(x.download()), right);
}
inline void expect_error(const std::string& what, double e, double limit) { EXPECT_LE(e, limit) << what; }
template <class T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || !std::memcmp(a.data(), b.data(), a.size() * sizeof(T)));
}

}  // namespace k3::testing
