#pragma once
// ParamSet: the parameters of a model in the order they were declared, and the memory they own. Layers declare by name and shape and keep
// references; names are the checkpoint's without the layout's prefix.
#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

#include "k3/core/buffer.h"
#include "k3/tape/param.h"

namespace k3 {

class ParamSet {
 public:
  Param& add(const std::string& name, Shape shape, Role role);
  Param& matrix(const std::string& name, int64_t out, int64_t in, int64_t blocks = 1) { return add(name, {out, in}, {Role::Kind::matrix, blocks}); }
  Param& vector(const std::string& name, Shape shape) { return add(name, shape, {Role::Kind::vector}); }

  Param* find(const std::string& name);
  std::deque<Param>& all() { return params_; }
  const std::deque<Param>& all() const { return params_; }
  int64_t count() const;  // scalars
  size_t bytes() const;   // of the memory that is owned

  void allocate(Device device);  // float32 values, zeroed (null device: shapes only)
  // Every value as it is stored, but MXFP4 as bfloat16 and q8 as float32. `narrow`: for inference with products in bfloat16; matrices that these
  // round anyway become bfloat16 now, and routed experts in MXFP4 stay what they are.
  void move_to(Device device, bool narrow = false);
  Device device() const { return device_; }
  void allocate_grads();                  // float32, zeroed, for every parameter that learns
  void zero_grads(Param* but = nullptr);  // a gradient that will be written, not added to, is left out (Param::fresh)
  void know_touched(Param& p);            // Param::touched, where only some rows of a step have gradients (GPU): the embedding
  void keep_narrow();                     // Param::narrow of every matrix that is multiplied (GPU); from then on whoever changes a value renews it
  Tensor own(DType dtype, Shape shape);   // memory that lives as long as the set

 private:
  std::deque<Param> params_;
  std::unordered_map<std::string, Param*> by_name_;
  std::vector<Buffer> owned_;
  Buffer grads_, narrow_, touched_;
  Device device_ = Device::cpu;
};

}  // namespace k3
