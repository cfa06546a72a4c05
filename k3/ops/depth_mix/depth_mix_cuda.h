#pragma once
// GPU kernels of attention over depth (AttnRes): softmax over sources of w . rms_norm(v_i), then the mix of the raw sources, which are in bfloat16:
// half of the bytes of the model's float32 ones (depth_mix_float_cuda.h). No model keeps them so; `k3 bench ops` shows what that would give.
// Every function returns null, or a sentence that says which argument it cannot serve.
#include <cstdint>

namespace k3::cuda {

constexpr int kDepthSources = 9;  // resident in registers; d up to 7168
constexpr int kDepthWidth = 7168;

struct DepthMixArgs {
  const void* v[kDepthSources];  // sources (rows, d) bf16, dense
  int sources;
  const float *w, *p;  // (d) weight of the sources' norm, query; the score uses their product
  float eps;
  int64_t rows;
  int d;  // a multiple of 8
  // forward
  const void* addend;  // (rows, d) bf16, or null: first v[sources - 1] += addend, rounded to bf16 and stored in `sum`
  void* sum;           // (rows, d) bf16; may be v[sources - 1]
  void* y;             // (rows, d) bf16: the mix
  const float* norm;   // (d) or null: also n = rms_norm(y; norm, eps)
  void* n;             // (rows, d) bf16
  float* stats;        // (rows, 2, 16) each source's r and s; written by the forward (null: not wanted), read by the backward
  // backward
  const void* dy;           // (rows, d) bf16
  void* dv[kDepthSources];  // (rows, d) bf16, written
  bool add;                 // added to instead
  float *dw, *dp;           // (d) added to
  float* partial;           // depth_mix_partial(d) floats
};
constexpr int64_t depth_mix_partial(int d) { return int64_t(132) * d; }
const char* depth_mix_forward(const DepthMixArgs&, void* stream);
const char* depth_mix_backward(const DepthMixArgs&, void* stream);

}  // namespace k3::cuda
