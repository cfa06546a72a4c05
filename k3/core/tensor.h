#pragma once
// Tensor looks at memory that somebody else owns: contiguous, row-major, no strides, no broadcasting, no implicit casts.
// Buffer (buffer.h) owns; Arena (arena.h) lends.
#include <cassert>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "k3/core/device.h"
#include "k3/core/dtype.h"

namespace k3 {

struct Shape {
  static constexpr int kMaxRank = 4;
  int64_t dims[kMaxRank] = {};
  int rank = 0;

  Shape() = default;
  Shape(std::initializer_list<int64_t> d) {
    assert(d.size() <= kMaxRank);
    for (int64_t x : d) dims[rank++] = x;
  }
  int64_t operator[](int i) const { return dims[i]; }
  int64_t size() const {
    int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= dims[i];
    return n;
  }
  bool operator==(const Shape& o) const {
    if (rank != o.rank) return false;
    for (int i = 0; i < rank; ++i)
      if (dims[i] != o.dims[i]) return false;
    return true;
  }
};

std::string to_string(const Shape& s);  // "4096 x 2048"

class Tensor {
 public:
  Tensor() = default;
  Tensor(void* data, DType dtype, Shape shape, Device device = Device::cpu) : data_(data), shape_(shape), dtype_(dtype), device_(device) {}

  const Shape& shape() const { return shape_; }
  int64_t dim(int i) const { return shape_[i]; }
  int rank() const { return shape_.rank; }
  int64_t size() const { return shape_.rank ? shape_.size() : 0; }
  size_t bytes() const { return size_t(size()) * bytes_of(dtype_); }
  DType dtype() const { return dtype_; }
  Device device() const { return device_; }
  bool empty() const { return shape_.rank == 0; }  // no tensor at all, as opposed to a tensor of zero rows
  bool has_data() const { return data_ != nullptr; }

  // A tensor of any rank seen as a matrix: rows are the first axis, columns all the others.
  int64_t rows() const { return shape_.rank ? shape_[0] : 0; }
  int64_t cols() const {
    int64_t n = 1;
    for (int i = 1; i < shape_.rank; ++i) n *= shape_[i];
    return n;
  }

  void* data() const { return data_; }
  template <class T>
  T* as() const {
    assert(dtype_of<T>::value == dtype_);
    return static_cast<T*>(data_);
  }
  float* f32() const { return as<float>(); }
  int32_t* i32() const { return as<int32_t>(); }

  // Rows a..b-1 of the first axis: still contiguous.
  Tensor row_range(int64_t a, int64_t b) const {
    assert(0 <= a && a <= b && b <= rows());
    Tensor t = *this;
    t.shape_.dims[0] = b - a;
    if (data_) t.data_ = static_cast<char*>(data_) + size_t(a) * size_t(cols()) * bytes_of(dtype_);
    return t;
  }
  Tensor reshape(Shape s) const {
    assert(s.size() == size());
    Tensor t = *this;
    t.shape_ = s;
    return t;
  }

 private:
  void* data_ = nullptr;
  Shape shape_;
  DType dtype_ = DType::f32;
  Device device_ = Device::cpu;
};

}  // namespace k3
