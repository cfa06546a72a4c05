#pragma once
// What a gate does on average: the mean of exp(x) or of sigmoid(x) over all elements, in double and in a fixed order. `take` hears it through
// Context::read.
#include <functional>

#include "k3/tape/var.h"

namespace k3 {

enum class Mean : uint8_t { exp, sigmoid };
void mean(const Context& c, Mean of, const Tensor& x, std::function<void(double)> take);

}  // namespace k3
