// A block a token. Bound by memory: each source is read for its sums and, from the cache, once more for the mix. du: a block walks
// kDepthMixBlock tokens in order; then the blocks' sums are added in order.
#include "k3/core/block.cuh"
#include "k3/ops/depth_mix/depth_mix_float_cuda.h"

namespace k3::cuda {
namespace {

using cpu::DepthMixArgs;
constexpr int kThreads = 256;

struct Sources {
  const float* v[kDepthMixSources];
};
struct Gradients {
  float* dv[kDepthMixSources];
};

__global__ void __launch_bounds__(kThreads) forward_kernel(const DepthMixArgs a, const Sources s) {
  __shared__ float part[33], weight[kDepthMixSources];
  const int64_t t = blockIdx.x;
  const int n = int(a.n);
  float top = -INFINITY;
  for (int i = 0; i < n; ++i) {
    const float* v = s.v[i] + t * a.d;
    float dot = 0.f, square = 0.f;
    for (int64_t c = threadIdx.x; c < a.d; c += kThreads) {
      const float x = v[c];
      dot = fmaf(x, a.w[c] * a.query[c], dot), square = fmaf(x, x, square);
    }
    dot = block_sum_f32(dot, part), square = block_sum_f32(square, part);
    const float r = 1.f / sqrtf(square / float(a.d) + a.eps), score = r * dot;
    if (threadIdx.x == 0) a.r[t * n + i] = r, a.s[t * n + i] = score, weight[i] = score;
    top = score > top ? score : top;
  }
  __syncthreads();
  float total = 0.f;
  for (int i = 0; i < n; ++i) total += expf(weight[i] - top);
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += kThreads) a.a[t * n + i] = weight[i] = expf(weight[i] - top) / total;
  __syncthreads();
  for (int64_t c = threadIdx.x; c < a.d; c += kThreads) {
    float h = 0.f;
    for (int i = 0; i < n; ++i) h = fmaf(weight[i], s.v[i][t * a.d + c], h);
    a.h[t * a.d + c] = h;
  }
}

// ds (t, i) = a_i (v_i . dh - sum_j a_j v_j . dh)
__global__ void __launch_bounds__(kThreads) score_kernel(const DepthMixArgs a, const Sources s) {
  __shared__ float part[33], ds[kDepthMixSources];
  const int64_t t = blockIdx.x;
  const int n = int(a.n);
  float mean = 0.f;
  for (int i = 0; i < n; ++i) {
    float dot = 0.f;
    for (int64_t c = threadIdx.x; c < a.d; c += kThreads) dot = fmaf(s.v[i][t * a.d + c], a.dh[t * a.d + c], dot);
    dot = block_sum_f32(dot, part);
    if (threadIdx.x == 0) ds[i] = dot;
    mean += a.a[t * n + i] * dot;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += kThreads) a.ds[t * n + i] = a.a[t * n + i] * (ds[i] - mean);
}

// A thread has one column of kDepthMixBlock tokens.
__global__ void __launch_bounds__(128) backward_kernel(const DepthMixArgs a, const Sources s, const Gradients g) {
  const int64_t c = int64_t(blockIdx.y) * 128 + threadIdx.x, first = int64_t(blockIdx.x) * cpu::kDepthMixBlock;
  if (c >= a.d) return;
  const int64_t end = min(a.rows, first + cpu::kDepthMixBlock);
  const float u = a.w[c] * a.query[c];
  float du = 0.f;
  for (int64_t t = first; t < end; ++t) {
    const float dh = a.dh[t * a.d + c];
    float sum = 0.f;
    for (int i = 0; i < int(a.n); ++i) {
      const int64_t at = t * a.n + i;
      const float v = s.v[i][t * a.d + c], dr = a.ds[at] * a.r[at];
      g.dv[i][t * a.d + c] += fmaf(a.a[at], dh, fmaf(dr, u, -dr * a.s[at] * a.r[at] / float(a.d) * v));
      sum = fmaf(dr, v, sum);
    }
    du += sum;
  }
  if (a.partial) a.partial[int64_t(blockIdx.x) * a.d + c] = du;
}

__global__ void __launch_bounds__(256) join_kernel(const DepthMixArgs a, int64_t blocks) {
  __shared__ float part[8][33];
  const int column = threadIdx.x & 31, lane = threadIdx.x >> 5;
  const int64_t c = int64_t(blockIdx.x) * 32 + column;
  float du = 0.f;
  if (c < a.d)
    for (int64_t b = lane; b < blocks; b += 8) du += a.partial[b * a.d + c];
  part[lane][column] = du;
  __syncthreads();
  if (lane || c >= a.d) return;
  for (int l = 1; l < 8; ++l) du += part[l][column];
  if (a.dw) a.dw[c] += du * a.query[c];
  if (a.dquery) a.dquery[c] += du * a.w[c];
}

const char* refuse(const DepthMixArgs& a) { return a.n > kDepthMixSources ? "[depth_mix] the GPU mixes at most 128 sources" : nullptr; }

}  // namespace

const char* depth_mix_forward(const DepthMixArgs& a, void* stream) {
  if (const char* e = refuse(a)) return e;
  if (a.rows == 0) return nullptr;
  Sources s{};
  for (int64_t i = 0; i < a.n; ++i) s.v[i] = a.v[i];
  forward_kernel<<<unsigned(a.rows), kThreads, 0, stream_of(stream)>>>(a, s);
  return launched();
}

const char* depth_mix_backward(const DepthMixArgs& a, void* stream) {
  if (const char* e = refuse(a)) return e;
  if (a.rows == 0) return nullptr;
  Sources s{};
  Gradients g{};
  for (int64_t i = 0; i < a.n; ++i) s.v[i] = a.v[i], g.dv[i] = a.dv[i];
  const int64_t blocks = cpu::depth_mix_row_blocks(a.rows);
  score_kernel<<<unsigned(a.rows), kThreads, 0, stream_of(stream)>>>(a, s);
  backward_kernel<<<dim3(unsigned(blocks), blocks_for(a.d, 128)), 128, 0, stream_of(stream)>>>(a, s, g);
  if (a.partial) join_kernel<<<blocks_for(a.d, 32), 256, 0, stream_of(stream)>>>(a, blocks);
  return launched();
}

}  // namespace k3::cuda
