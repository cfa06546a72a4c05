#pragma once
// Var: a tensor in a computation, with the place of its gradient and the Context it is computed in. Copying a Var copies a handle.
#include <functional>
#include <memory>
#include <string_view>

#include "k3/core/arena.h"
#include "k3/core/error.h"
#include "k3/core/feed.h"
#include "k3/core/listed.h"
#include "k3/core/readback.h"
#include "k3/core/tensor.h"

namespace k3 {

class Tape;

// What an operator costs, for the planner: FLOPs, bytes through main memory, bytes through the network. `held`: of the bytes those of weights and
// states that are read, which a token of decode cannot do without.
struct Cost {
  double flops = 0, bytes = 0, network = 0, held = 0;
};

// Context: where operators compute, from which memory, and who listens. One per step; passed along inside each Var.
struct Context {
  Device device = Device::cpu;
  Arena* arena = nullptr;
  Tape* tape = nullptr;                                                 // null: inference
  std::function<void(std::string_view op, const Cost&)> on_cost;        // the planner
  std::function<void(std::string_view name, const Tensor&)> on_record;  // parity tools: "attn_out.3"
  std::function<void(std::string_view part)> on_part;                   // clocks: what computes from here on: "attention"
  bool deterministic = true;   // the same bits however the work is cut; false allows faster forms (absorbed MLA decode)
  bool bf16_products = false;  // GPU: matrix products read bfloat16 and sum in float32; all else stays float32
  bool observe = false;        // collect what the trainer wants to know: expert load, balance histogram, largest logits
  bool recomputing = false;    // inside checkpoint()'s second forward: statistics were already counted, records already given
  Readback* later = nullptr;   // GPU: what read() was asked for is given when this delivers; null: at once
  Feed* feed = nullptr;        // GPU, while a step is captured: where fed() comes from

  void cost(std::string_view op, const Cost& c) const {
    if (on_cost) on_cost(op, c);
  }
  void part(std::string_view name) const {
    if (on_part && !recomputing) on_part(name);
  }
  void record(std::string_view name, const Tensor& t) const {
    if (on_record && !recomputing) on_record(name, t);
  }
  // Gives `take` the tensor's bytes where the CPU can read them.
  void read(const Tensor& t, Readback::Take take) const;
  // GPU: n values that the host makes, and that a captured step gets anew before each run: `fill` must then live as long as the step.
  template <class T, class Lender>
  const T* fed(Lender& lender, int64_t n, std::function<void(T*)> fill) const {
    if (feed) return feed->take<T>(n, std::move(fill));
    K3_CHECK(!gpu::capturing(), "[gpu] a captured step without a feed would see the same values for ever");
    std::vector<T> v(static_cast<size_t>(n));
    fill(v.data());
    return listed(device, lender, v);
  }
};

class Var {
 public:
  Var() = default;
  // A new value from the arena, uninitialised.
  Var(Context& c, DType dtype, Shape shape) : Var(c, c.arena->lend(dtype, shape)) {}
  // A value that already has memory (which must outlive the step).
  Var(Context& c, Tensor value);

  bool empty() const { return node_ == nullptr; }
  Context& context() const { return *context_; }
  const Tensor& value() const { return node_->value; }
  int64_t rows() const { return value().rows(); }
  int64_t cols() const { return value().cols(); }
  int64_t size() const { return value().size(); }
  float* f32() const { return value().f32(); }

  // The gradient, made and zeroed at first touch. Backwards add to it.
  Tensor grad() const;
  // The same for a backward that can also write it: `fresh` when nobody has added anything yet, and then its memory holds nothing.
  Tensor grad(bool& fresh) const;
  // The same to be read alone: several may have one memory, until somebody asks for a gradient to add to while another still has it.
  Tensor read_grad() const;
  // Has the gradient of `y` for its own from here on, if it has none yet and neither is a view.
  bool share_grad(const Var& y) const;
  void drop_grad() const { node_->grad.reset(); }  // nobody reads it or adds to it any more
  bool has_grad() const { return own().grad != nullptr; }
  // The value in bfloat16, for products on a GPU: empty until somebody who reads it makes it, from memory that lives as long as the value's.
  Tensor& narrow() const { return own().narrow; }
  // The same elements seen with another shape; they share the gradient.
  Var reshape(Shape s) const;

 private:
  struct Node {
    Tensor value, narrow;
    std::shared_ptr<const Tensor> grad;  // of as many Nodes as have its memory
    std::shared_ptr<Node> base;          // whose gradient this one's is a view of; null for its own
  };
  Node& own() const { return node_->base ? *node_->base : *node_; }
  // Two owners: the code of the layer, and the closures on the tape that still need the value.
  std::shared_ptr<Node> node_;
  Context* context_ = nullptr;
};

}  // namespace k3
