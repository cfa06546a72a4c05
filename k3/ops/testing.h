#pragma once
// What operator tests share: random values, one step with a tape, complex-step derivatives, comparisons that see NaN first, and forcing of
// instruction sets and thread counts.
#include <cmath>
#include <complex>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <vector>

#include "k3/core/gpu.h"
#include "k3/core/isa.h"
#include "k3/core/rng.h"
#include "k3/core/testing.h"
#include "k3/core/threads.h"
#include "k3/tape/param.h"
#include "k3/tape/tape.h"

namespace k3::testing {

// Random normal float32 values, the same for the same seed.
class Values {
 public:
  Values(int64_t n, uint64_t seed, double scale = 1, double shift = 0) : v_(n) {
    for (int64_t i = 0; i < n; ++i) v_[i] = float(Rng{seed, 77}.normal(i) * scale + shift);
  }
  explicit Values(std::vector<float> v) : v_(std::move(v)) {}
  int64_t size() const { return int64_t(v_.size()); }
  float& operator[](int64_t i) { return v_[i]; }
  float operator[](int64_t i) const { return v_[i]; }
  const float* data() const { return v_.data(); }
  float* data() { return v_.data(); }
  std::vector<double> as_double() const { return {v_.begin(), v_.end()}; }
  Values slice(int64_t at, int64_t n) const { return Values(std::vector<float>(v_.begin() + at, v_.begin() + at + n)); }

 private:
  std::vector<float> v_;
};

inline std::vector<double> as_double(const Tensor& t) { return {t.f32(), t.f32() + t.size()}; }

// One step: arena (poisoned), tape, context; inputs and parameters live in it.
class Step {
 public:
  explicit Step(bool with_tape = true, size_t capacity = size_t(1) << 30, Device device = Device::cpu) : arena_(capacity, device) {
    arena_.set_poison(true);
    context.arena = &arena_, context.device = device;
    if (with_tape) context.tape = &tape_;
  }
  Var input(const Values& v, Shape s) {
    Var x(context, DType::f32, s);
    write(Tensor(x.value().data(), DType::f32, {std::min(v.size(), x.size())}, x.value().device()), v.data());  // a shape that is wrong by intent
    return x;
  }
  Param param(std::string name, const Values& v, Shape s, bool grad = true) {
    Param p;
    p.name = std::move(name);
    p.value = arena_.lend(DType::f32, s);
    write(p.value, v.data());
    if (grad) p.grad = arena_.lend_zeroed(DType::f32, s);
    return p;
  }
  Param& keep(Param p) { return kept_.emplace_back(std::move(p)); }
  // y.grad += dy, then all closures
  void backward(const Var& y, const Values& dy) {
    Tensor g = y.grad();
    const HostCopy before(g);
    std::vector<float> sum(size_t(g.size()));
    for (int64_t i = 0; i < g.size(); ++i) sum[size_t(i)] = before.f32()[i] + dy[i];
    write(g, sum.data());
    tape_.run_backward();
  }
  Arena& arena() { return arena_; }
  Context context;

 private:
  Arena arena_;
  Tape tape_;
  std::deque<Param> kept_;
};

// The worst element against the root mean square of the expected values: relative where values are large, absolute where they cancel.
inline double worst_error(const Tensor& got, const std::vector<double>& want) {
  double scale = 0, worst = 0;
  for (double w : want) scale += w * w;
  scale = std::sqrt(scale / double(std::max<size_t>(1, want.size()))) + 1e-30;
  for (int64_t i = 0; i < got.size(); ++i) {
    double g = got.f32()[i];
    if (!std::isfinite(g)) return INFINITY;
    worst = std::max(worst, std::abs(g - want[i]) / std::max(scale, std::abs(want[i])));
  }
  return worst;
}
inline void expect_near(const Tensor& got, const std::vector<double>& want, double tolerance, const std::string& what) {
  ASSERT_EQ(got.size(), int64_t(want.size())) << what;
  for (int64_t i = 0; i < got.size(); ++i) ASSERT_TRUE(std::isfinite(got.f32()[i])) << what << "[" << i << "] is " << got.f32()[i];
  EXPECT_LE(worst_error(got, want), tolerance) << what;
}
inline bool same_bits(const Tensor& a, const Tensor& b) {
  return a.bytes() == b.bytes() && (a.bytes() == 0 || std::memcmp(a.data(), b.data(), a.bytes()) == 0);
}

// The instruction sets that this processor can run.
inline std::vector<cpu::Isa> levels() {
  std::vector<cpu::Isa> all;
  for (auto isa : {cpu::Isa::plain, cpu::Isa::avx2, cpu::Isa::avx512})
    if (isa <= cpu::best_isa()) all.push_back(isa);
  return all;
}
struct ForceIsa {
  cpu::Isa before = cpu::isa();
  explicit ForceIsa(cpu::Isa isa) { cpu::force_isa(isa); }
  ~ForceIsa() { cpu::force_isa(before); }
};

// Runs `f` with 1, 2 and 8 threads in fresh steps; every returned tensor must be the same bits.
inline void expect_same_bits_at_any_thread_count(const std::function<std::vector<Tensor>(Step&)>& f) {
  int before = thread_count();
  std::vector<std::vector<char>> first;
  for (int threads : {1, 2, 8}) {
    set_thread_count(threads);
    Step step;
    auto out = f(step);
    for (size_t i = 0; i < out.size(); ++i) {
      std::vector<char> bytes(static_cast<char*>(out[i].data()), static_cast<char*>(out[i].data()) + out[i].bytes());
      if (threads == 1)
        first.push_back(bytes);
      else
        EXPECT_EQ(bytes, first[i]) << "tensor " << i << " at " << threads << " threads";
    }
  }
  set_thread_count(before);
}

// Proves a hand-written backward: for random inputs, random dy and every input element, imag(f(x + ih))/h equals the gradient to rounding.
//   []<class S>(const std::vector<const S*>& in, S* out)      the forward, S = complex<double>
//   [](auto in, const double* dy, auto grad)                  the backward, adds to grad[i]
template <class Forward, class Backward>
void expect_complex_step(const std::vector<std::vector<int64_t>>& sizes, Forward forward, int64_t out_size, Backward backward,
                         double tolerance = 1e-12, std::function<double(size_t input, int64_t i, double normal)> shape = nullptr) {
  using C = std::complex<double>;
  std::vector<std::vector<double>> x;
  for (size_t i = 0; i < sizes.size(); ++i) {
    x.emplace_back(sizes[i][0]);
    for (int64_t j = 0; j < sizes[i][0]; ++j) {
      double v = Rng{uint64_t(i), 5}.normal(j);
      x[i][j] = shape ? shape(i, j, v) : v;
    }
  }
  std::vector<double> dy(out_size);
  for (int64_t i = 0; i < out_size; ++i) dy[i] = Rng{99, 5}.normal(i);
  std::vector<const double*> in;
  std::vector<std::vector<double>> grads;
  std::vector<double*> grad;
  for (auto& v : x) in.push_back(v.data()), grads.emplace_back(v.size(), 0.0);
  for (auto& g : grads) grad.push_back(g.data());
  backward(in, dy.data(), grad);
  const double h = 1e-30;
  for (size_t i = 0; i < x.size(); ++i) {
    double scale = 0;
    for (double g : grads[i]) scale = std::max(scale, std::abs(g));
    for (size_t j = 0; j < x[i].size(); ++j) {
      std::vector<std::vector<C>> xc;
      for (auto& v : x) xc.emplace_back(v.begin(), v.end());
      xc[i][j] += C(0, h);
      std::vector<const C*> cin;
      for (auto& v : xc) cin.push_back(v.data());
      std::vector<C> out(out_size);
      forward(cin, out.data());
      double want = 0;
      for (int64_t k = 0; k < out_size; ++k) want += dy[k] * out[k].imag() / h;
      ASSERT_LE(std::abs(grads[i][j] - want), tolerance * std::max(1.0, scale)) << "input " << i << " element " << j << " want " << want;
    }
  }
}

inline std::vector<char> bytes_of(const Tensor& t) {
  const HostCopy copy(t);
  const char* p = static_cast<const char*>(copy.tensor().data());
  return {p, p + t.bytes()};
}

// A race checker makes a kernel some thousand times slower: with K3_FEW_SHAPES set, tests of many shapes try some, once on the GPU.
inline bool few_shapes() {
  static const bool set = std::getenv("K3_FEW_SHAPES") != nullptr;
  return set;
}

// Runs `f` in a step on the CPU and twice in one on the GPU. Every float32 tensor that it returns must be near the CPU's, every other equal,
// and the two runs on the GPU the same bits. Skipped where there is no GPU.
inline void expect_cuda_equals_cpu(double tolerance, const std::function<std::vector<Tensor>(Step&)>& f, bool with_tape = true) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  Step cpu(with_tape);
  const std::vector<Tensor> want = f(cpu);
  std::vector<std::vector<char>> first;
  for (int run = 0; run < (few_shapes() ? 1 : 2); ++run) {
    Step step(with_tape, size_t(1) << 30, Device::cuda);
    const std::vector<Tensor> got = f(step);
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i) {
      const std::string what = "tensor " + std::to_string(i);
      ASSERT_EQ(got[i].device(), Device::cuda) << what;
      if (run) {
        EXPECT_EQ(bytes_of(got[i]), first[i]) << what << ": two runs differ";
        continue;
      }
      first.push_back(bytes_of(got[i]));
      const HostCopy copy(got[i]);
      if (got[i].dtype() == DType::f32)
        expect_near(copy.tensor(), as_double(want[i]), tolerance, what);
      else
        EXPECT_EQ(first[i], bytes_of(want[i])) << what;
    }
  }
}

}  // namespace k3::testing
