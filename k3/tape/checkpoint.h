#pragma once
// checkpoint: keep what a function reads and what it returns, drop everything between, and compute it again in the backward.
//
//   Var y = checkpoint(c, {x, block_0, block_1}, [&](const std::vector<Var>& in) { return layer(in); });
//
// The result has the shape of in[0]. Every Var the function reads must be among the inputs: a gradient made inside would be lent from
// memory that is given back at the end. The second forward gives the same bits, so routing decisions repeat; Context::recomputing tells
// statistics (load, balance histogram) not to count again.
#include <cstring>
#include <vector>

#include "k3/core/gpu.h"
#include "k3/tape/tape.h"

namespace k3 {

template <class F>
Var checkpoint(Context& c, std::vector<Var> inputs, F f) {
  if (!c.tape) return f(inputs);
  Var y(c, DType::f32, inputs[0].value().shape());
  {
    Scratch scratch(*c.arena);
    Var z = with_tape(c, nullptr, [&] { return f(inputs); });
    copy_values(y.value(), z.value());
  }
  on_backward(y, [&c, inputs, y, f] {
    for (const Var& x : inputs) x.grad();  // made before the mark, so they outlive it
    Tensor dy = y.grad();
    Scratch scratch(*c.arena);
    Tape inner;
    bool outer = c.recomputing;
    c.recomputing = true;
    Var z = with_tape(c, &inner, [&] { return f(inputs); });
    c.recomputing = outer;
    Tensor dz = z.grad();
    copy_values(dz, dy);
    inner.run_backward();
  });
  return y;
}

}  // namespace k3
