#pragma once
// The equation of rope.h, token by token. `direction` 1 forward, -1 backward; y = x for the plain channels.
#include <cmath>
#include <cstdint>

namespace k3::ref {

template <class S>
void rope(const S* x, const int64_t* positions, S* y, int64_t rows, int64_t heads, int64_t plain, int64_t width, double theta, int direction) {
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t h = 0; h < heads; ++h, x += plain + width, y += plain + width) {
      for (int64_t i = 0; i < plain; ++i) y[i] = x[i];
      for (int64_t i = 0; i < width; i += 2) {
        const double phi = double(positions[n]) * std::pow(theta, -double(i) / double(width)), c = std::cos(phi), s = direction * std::sin(phi);
        const S a = x[plain + i], b = x[plain + i + 1];
        y[plain + i] = c * a - s * b, y[plain + i + 1] = s * a + c * b;
      }
    }
}

}  // namespace k3::ref
