#pragma once
// Tape: the only autograd of the project. An operator computes its result and, when there is a tape, leaves a closure that adds to the
// gradients of its inputs. backward() runs the closures in reverse, so every sum has one fixed order.
#include <functional>
#include <vector>

#include "k3/tape/var.h"

namespace k3 {

class Tape {
 public:
  void push(std::function<void()> f) { closures_.push_back(std::move(f)); }
  void run_backward() {
    while (!closures_.empty()) {
      auto f = std::move(closures_.back());
      closures_.pop_back();
      f();
    }
  }
  bool empty() const { return closures_.empty(); }

 private:
  std::vector<std::function<void()>> closures_;
};

// Records `f` if there is a tape. `y` is the operator's result: without a gradient on it there is nothing to do.
template <class F>
void on_backward(const Var& y, F f) {
  if (Tape* t = y.context().tape)
    t->push([y, f = std::move(f)] {
      if (y.has_grad()) f();
    });
}

// Runs `f` with the context's tape replaced.
template <class F>
auto with_tape(Context& c, Tape* t, F f) {
  struct Restore {
    Context& c;
    Tape* old;
    ~Restore() { c.tape = old; }
  } restore{c, c.tape};
  c.tape = t;
  return f();
}

}  // namespace k3
