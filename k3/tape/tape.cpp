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
  if (!has_grad()) own().grad = std::make_shared<const Tensor>(context_->arena->lend_zeroed(DType::f32, own().value.shape()));
  bool fresh = false;
  return grad(fresh);
}

Tensor Var::grad(bool& fresh) const {
  Node& n = own();
  fresh = n.grad == nullptr;
  if (fresh || n.grad.use_count() > 1) {
    const Tensor mine = context_->arena->lend(DType::f32, n.value.shape());
    if (!fresh) copy_values(mine, *n.grad);
    n.grad = std::make_shared<const Tensor>(mine);
  }
  return n.grad->reshape(node_->value.shape());
}

Tensor Var::read_grad() const { return has_grad() ? own().grad->reshape(node_->value.shape()) : grad(); }

bool Var::share_grad(const Var& y) const {
  if (node_->base || y.node_->base || node_->grad || node_ == y.node_) return false;
  node_->grad = y.node_->grad;
  return true;
}

Var Var::reshape(Shape s) const {
  Var v(*context_, value().reshape(s));
  v.node_->base = node_->base ? node_->base : node_;
  return v;
}

}  // namespace k3
