#include "k3/tape/tape.h"

#include "k3/core/gpu.h"

namespace k3 {

void Context::read(const Tensor& t, Readback::Take take) const {
  if (t.device() == Device::null) return;
  if (t.device() == Device::cuda && later) return later->ask(t, std::move(take));
  take(HostCopy(t).tensor().data());
}

Var::Var(Context& c, Tensor value) : node_(std::make_shared<Node>(Node{value, {}, {}, nullptr})), context_(&c) {}

Tensor Var::grad() const {
  if (node_->base) {
    Node& b = *node_->base;
    if (b.grad.empty()) b.grad = context_->arena->lend_zeroed(DType::f32, b.value.shape());
    return b.grad.reshape(node_->value.shape());
  }
  if (node_->grad.empty()) node_->grad = context_->arena->lend_zeroed(DType::f32, node_->value.shape());
  return node_->grad;
}

Tensor Var::grad(bool& fresh) const {
  Node& own = node_->base ? *node_->base : *node_;
  fresh = own.grad.empty();
  if (fresh) own.grad = context_->arena->lend(DType::f32, own.value.shape());
  return own.grad.reshape(node_->value.shape());
}

bool Var::adopt_grad(const Var& y) const {
  if (node_->base || y.node_->base || !node_->grad.empty() || node_ == y.node_) return false;
  node_->grad = y.grad().reshape(value().shape());
  return true;
}

Var Var::reshape(Shape s) const {
  Var v(*context_, value().reshape(s));
  v.node_->base = node_->base ? node_->base : node_;
  return v;
}

}  // namespace k3
