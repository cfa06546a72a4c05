#pragma once
// Weights made narrow while loading: q8 and MXFP4 from float32, each element to the nearest representable value (ties to the even code).
//
//   q8      s = max|w| / 127 over 64 inputs of a row                    |w - code * s|  <=  max|w| / 254, up to float32 rounding
//   mxfp4   s = the least power of two with max|w| <= 6 s, over 32      |w - code * s|  <=  s  <  max|w| / 3
//
// Source: MXFP4's rule "ceil", which never clips (training.md 9). Values that MXFP4 holds stay as they are.
#include <string>

#include "k3/ops/linear/product.h"

namespace k3 {

// W (out, in) as codes and scales in the layout of product.h, over all threads; in % 32 = 0 for mxfp4. Errors, by `name`: a weight that is not
// finite.
void quantize(Stored to, const float* w, int64_t out, int64_t in, void* codes, void* scales, const std::string& name);

}  // namespace k3
