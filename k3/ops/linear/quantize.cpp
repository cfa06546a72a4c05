#include "k3/ops/linear/quantize.h"

#include <algorithm>
#include <cmath>

#include "k3/core/error.h"
#include "k3/core/threads.h"

namespace k3 {

namespace {

float largest(const float* w, int64_t n) {  // infinite if any is not finite
  float m = 0;
  for (int64_t i = 0; i < n; ++i) m = std::max(m, std::isfinite(w[i]) ? std::fabs(w[i]) : INFINITY);
  return m;
}

// Nearest of {0, 0.5, 1, 1.5, 2, 3, 4, 6} to a in 0..6, ties to the even code.
uint8_t nearest_magnitude(float a) {
  return uint8_t((a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f));
}

// False: a weight is not finite.
bool mxfp4_group(const float* w, uint8_t* codes, uint8_t* scale) {
  const float m = largest(w, kGroupMxfp4);
  if (!std::isfinite(m)) return false;
  int exponent = 0;
  const float fraction = std::frexp(m, &exponent);  // m = fraction * 2^exponent, and 6 s = 0.75 * 2^3 s
  const int e = std::clamp(m == 0 ? 0 : exponent - (fraction <= 0.75f ? 3 : 2), -127, 127);
  const double inverse = std::ldexp(1.0, -e);
  *scale = uint8_t(e + 127);
  auto code = [&](float x) { return nearest_magnitude(float(std::fabs(double(x)) * inverse)) | (std::signbit(x) ? 8 : 0); };
  for (int64_t i = 0; i < kGroupMxfp4 / 2; ++i) codes[i] = uint8_t(code(w[2 * i]) | code(w[2 * i + 1]) << 4);
  return true;
}

bool q8_group(const float* w, int64_t n, int8_t* codes, float* scale) {
  const float s = largest(w, n) / 127;
  if (!std::isfinite(s)) return false;
  *scale = s;
  for (int64_t i = 0; i < n; ++i) codes[i] = s > 0 ? int8_t(std::clamp(std::nearbyint(w[i] / s), -127.0f, 127.0f)) : int8_t(0);
  return true;
}

}  // namespace

void quantize(Stored to, const float* w, int64_t out, int64_t in, void* codes, void* scales, const std::string& name) {
  K3_CHECK(to == Stored::q8 || (to == Stored::mxfp4 && in % kGroupMxfp4 == 0), "[quantize] MXFP4 takes rows of a multiple of 32, not {}", in);
  auto finite = [&](bool good, int64_t r) { K3_CHECK(good, "[quantize] {} holds a weight that is not finite in row {}", name, r); };
  parallel_for(out, [&](int64_t r) {
    if (to == Stored::mxfp4) {
      for (int64_t g = 0; g < in / kGroupMxfp4; ++g) {
        const int64_t at = r * in / kGroupMxfp4 + g;
        finite(mxfp4_group(w + at * kGroupMxfp4, static_cast<uint8_t*>(codes) + at * kGroupMxfp4 / 2, static_cast<uint8_t*>(scales) + at), r);
      }
      return;
    }
    const int64_t groups = (in + kGroupQ8 - 1) / kGroupQ8;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t at = r * in + g * kGroupQ8, n = std::min(kGroupQ8, in - g * kGroupQ8);
      finite(q8_group(w + at, n, static_cast<int8_t*>(codes) + at, static_cast<float*>(scales) + r * groups + g), r);
    }
  });
}

}  // namespace k3
