#include "k3/model/param_set.h"

#include <cstring>

#include "k3/core/error.h"
#include "k3/core/gpu.h"
#include "k3/ops/linear/linear.h"
#include "k3/ops/linear/weight_product.h"
#include "k3/ops/update/resident_cuda.h"

namespace k3 {

static size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64; }

Param& ParamSet::add(const std::string& name, Shape shape, Role role) {
  K3_CHECK(!by_name_.count(name), "[model] parameter {} is declared twice", name);
  Param& p = params_.emplace_back();
  p.name = name, p.shape = shape, p.role = role;
  by_name_[name] = &p;
  return p;
}

Param* ParamSet::find(const std::string& name) {
  auto it = by_name_.find(name);
  return it == by_name_.end() ? nullptr : it->second;
}

int64_t ParamSet::count() const {
  int64_t n = 0;
  for (const Param& p : params_) n += p.shape.size();
  return n;
}

size_t ParamSet::bytes() const {
  size_t n = 0;
  for (const Buffer& b : owned_) n += b.bytes();
  return n;
}

Tensor ParamSet::own(DType dtype, Shape shape) {
  size_t bytes = size_t(shape.size()) * bytes_of(dtype);
  return owned_.emplace_back(std::max<size_t>(bytes, 1), device_).view(dtype, shape);
}

void ParamSet::allocate(Device device) {
  device_ = device;
  size_t bytes = 0;
  for (const Param& p : params_) bytes += padded(size_t(p.shape.size()) * 4);
  Buffer& buffer = owned_.emplace_back(std::max<size_t>(bytes, 1), device);
  size_t at = 0;
  for (Param& p : params_) p.value = buffer.view(DType::f32, p.shape, at), at += padded(p.value.bytes());
}

void ParamSet::move_to(Device device, bool narrow) {
  if (device == device_) return;
  auto stays = [&](const Param& p) {  // codes and scales
    return narrow && !p.scale.empty() && weight_of(p).stored == Stored::mxfp4 && p.name.find(".experts.") != std::string::npos;
  };
  // what the GPU multiplies: float32 or bfloat16, which holds every value of MXFP4; the router is float32 always (moe.cpp)
  auto type = [&](const Param& p) {
    if (!p.scale.empty()) return weight_of(p).stored == Stored::mxfp4 ? DType::bf16 : DType::f32;
    const bool rounds = narrow && p.value.dtype() == DType::f32 && (p.role.kind == Role::Kind::matrix || p.name == "lm_head.weight") &&
                        !p.name.ends_with(".gate.weight") && p.shape[0] % 8 == 0 && p.shape[1] % 8 == 0;
    return rounds ? DType::bf16 : p.value.dtype();
  };
  size_t bytes = 0;
  for (const Param& p : params_)
    bytes += stays(p) ? padded(p.value.bytes()) + padded(p.scale.bytes()) : padded(size_t(p.shape.size()) * bytes_of(type(p)));
  Buffer buffer(std::max<size_t>(bytes, 1), device);
  size_t at = 0;
  for (Param& p : params_) {
    if (stays(p)) {
      check_scales(p);
      for (Tensor* t : {&p.value, &p.scale}) {
        Tensor moved = buffer.view(DType::u8, t->shape(), at);
        at += padded(moved.bytes());
        write(moved, t->data());
        *t = moved;
      }
      continue;
    }
    Tensor moved = buffer.view(type(p), p.shape, at);
    at += padded(moved.bytes());
    if (p.scale.empty() && moved.dtype() != p.value.dtype()) {
      std::vector<bf16> values(static_cast<size_t>(p.value.size()));
      for (size_t i = 0; i < values.size(); ++i) values[i] = to_bf16(p.value.f32()[i]);
      write(moved, values.data());
    } else if (p.scale.empty()) {
      write(moved, p.value.data());
    } else {
      check_scales(p);
      std::vector<float> wide(size_t(p.shape.size()));
      widen(weight_of(p), 0, p.shape[0], wide.data());
      std::vector<bf16> narrow;
      if (moved.dtype() == DType::bf16)
        for (float x : wide) narrow.push_back(to_bf16(x));
      write(moved, narrow.empty() ? static_cast<const void*>(wide.data()) : narrow.data());
    }
    p.value = moved, p.scale = {};
  }
  owned_.clear();
  owned_.push_back(std::move(buffer));
  device_ = device;
}

void ParamSet::allocate_grads() {
  size_t bytes = 0;
  for (const Param& p : params_)
    if (p.role.kind != Role::Kind::fixed) bytes += padded(size_t(p.shape.size()) * 4);
  grads_ = Buffer(std::max<size_t>(bytes, 1), device_);
  size_t at = 0;
  for (Param& p : params_)
    if (p.role.kind != Role::Kind::fixed) p.grad = grads_.view(DType::f32, p.shape, at), at += padded(p.grad.bytes());
}

void ParamSet::keep_narrow() {
  auto multiplied = [](const Param& p) {
    return (p.role.kind == Role::Kind::matrix || p.role.kind == Role::Kind::scalar_row) && !p.name.ends_with("embed_tokens.weight");
  };
  size_t bytes = 0;
  for (const Param& p : params_)
    if (multiplied(p)) bytes += padded(size_t(p.shape.size()) * 2);
  narrow_ = Buffer(std::max<size_t>(bytes, 1), device_);
  size_t at = 0;
  for (Param& p : params_) {
    if (!multiplied(p)) continue;
    p.narrow = narrow_.view(DType::bf16, p.shape, at), at += padded(p.narrow.bytes());
    renew_narrow(p);
  }
}

void ParamSet::know_touched(Param& p) {
  touched_ = Buffer(size_t((p.shape.size() + kGradPart - 1) / kGradPart), device_);
  p.touched = touched_.view(DType::u8, {int64_t(touched_.bytes())});
}

void ParamSet::zero_grads(Param* but) {
  if (!grads_.data()) return;
  if (device_ != Device::cuda) {
    std::memset(grads_.data(), 0, grads_.bytes());
    return;
  }
  char* at = grads_.data();  // what lies between those that are served otherwise is cleared at once; they lie in the order of the list
  auto up_to = [&](const Tensor& t) {
    char* begin = static_cast<char*>(t.data());
    gpu::clear(at, size_t(begin - at));
    at = begin + t.bytes();
  };
  for (Param& p : params_) {
    if (&p == but && !p.grad.empty()) {
      up_to(p.grad);
      p.fresh = true;
    } else if (!p.touched.empty()) {
      up_to(p.grad);
      if constexpr (gpu::kBuilt) gpu::check(cuda::clear_touched(p.grad.f32(), p.grad.size(), p.touched.as<uint8_t>(), gpu::stream()));
    }
  }
  gpu::clear(at, size_t(grads_.data() + grads_.bytes() - at));
}

}  // namespace k3
