#include "k3/tape/tape.h"

namespace k3 {

Var::Var(Context& c, Tensor value) : node_(std::make_shared<Node>(Node{value, {}, nullptr})), context_(&c) {}

Tensor Var::grad() const {
  if (node_->base) {
    Node& b = *node_->base;
    if (b.grad.empty()) b.grad = context_->arena->lend_zeroed(DType::f32, b.value.shape());
    return b.grad.reshape(node_->value.shape());
  }
  if (node_->grad.empty()) node_->grad = context_->arena->lend_zeroed(DType::f32, node_->value.shape());
  return node_->grad;
}

Var Var::reshape(Shape s) const {
  Var v(*context_, value().reshape(s));
  v.node_->base = node_->base ? node_->base : node_;
  return v;
}

}  // namespace k3
