// A block a token. Bound by memory: each source is read for its sums and, from the cache, once more for the mix. du: a block walks
// kDepthMixBlock tokens in order; then the blocks' sums are added in order.
#include <algorithm>

#include "k3/core/enqueue.cuh"
#include "k3/core/four.cuh"
#include "k3/core/tile.cuh"
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
  bool fresh[kDepthMixSources];  // written, not added to
};

// Rows of up to 128 Q channels, a multiple of 4: a warp has a token; what it needs twice comes from the first-level cache the second time.
template <int Q>
struct Row {
  float4 x[Q];
  __device__ __forceinline__ void load(const float* from, int quads) {
#pragma unroll
    for (int j = 0; j < Q; ++j) x[j] = four_of(from, j * 32 + int(threadIdx.x & 31), quads);
  }
  __device__ __forceinline__ float dot(const Row& o) const {
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < Q; ++j) sum = dot4(x[j], o.x[j], sum);
    return warp_sum(sum);
  }
  __device__ __forceinline__ void add(float f, const Row& o) {
#pragma unroll
    for (int j = 0; j < Q; ++j) x[j] = fma4(f, o.x[j], x[j]);
  }
  __device__ __forceinline__ void store(float* to, int quads) const {
#pragma unroll
    for (int j = 0; j < Q; ++j)
      if (j * 32 + int(threadIdx.x & 31) < quads) reinterpret_cast<float4*>(to)[j * 32 + (threadIdx.x & 31)] = x[j];
  }
};
constexpr int kFew = 8;  // sources that these kernels serve
template <int Q>
__device__ __forceinline__ void load_u(Row<Q>& u, const DepthMixArgs& a, int quads) {  // w * query
  Row<Q> q;
  u.load(a.w, quads), q.load(a.query, quads);
#pragma unroll
  for (int j = 0; j < Q; ++j) u.x[j] = times4(u.x[j], q.x[j]);
}

template <int Q>
__global__ void __launch_bounds__(256) rows_forward_kernel(const DepthMixArgs a, const Sources s) {
  follow();
  const int64_t t = int64_t(blockIdx.x) * 8 + (threadIdx.x >> 5);
  if (t >= a.rows) return;
  const int n = int(a.n), quads = int(a.d / 4), lane = threadIdx.x & 31;
  Row<Q> u, v;
  load_u(u, a, quads);
  float score[kFew], r[kFew], top = -INFINITY;
#pragma unroll
  for (int i = 0; i < kFew; ++i) {
    if (i >= n) break;
    v.load(s.v[i] + t * a.d, quads);
    r[i] = 1.f / sqrtf(v.dot(v) / float(a.d) + a.eps), score[i] = r[i] * v.dot(u);
    top = score[i] > top ? score[i] : top;
  }
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < kFew; ++i)
    if (i < n) total += expf(score[i] - top);
#pragma unroll
  for (int j = 0; j < Q; ++j) u.x[j] = zero4();
#pragma unroll
  for (int i = 0; i < kFew; ++i) {
    if (i >= n) break;
    const float weight = expf(score[i] - top) / total;
    if (lane == 0) a.r[t * n + i] = r[i], a.s[t * n + i] = score[i], a.a[t * n + i] = weight;
    v.load(s.v[i] + t * a.d, quads);
    u.add(weight, v);
  }
  u.store(a.h + t * a.d, quads);
}

constexpr int kBackRows = 16;  // tokens of a block, and the grain of du's sum

template <int Q>
__global__ void __launch_bounds__(256, 2) rows_backward_kernel(const DepthMixArgs a, const Sources s, const Gradients g) {
  follow();
  extern __shared__ float4 sums[];  // (8, d / 4)
  const int n = int(a.n), quads = int(a.d / 4), lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int64_t first = int64_t(blockIdx.x) * kBackRows, end = min(a.rows, first + kBackRows);
  Row<Q> du;
#pragma unroll
  for (int j = 0; j < Q; ++j) du.x[j] = zero4();
  for (int64_t t = first + warp; t < end; t += 8) {
    Row<Q> dh, v;
    dh.load(a.dh + t * a.d, quads);
    float dot[kFew], mean = 0.f;
#pragma unroll
    for (int i = 0; i < kFew; ++i) {
      if (i >= n) break;
      v.load(s.v[i] + t * a.d, quads);
      dot[i] = v.dot(dh);
      mean += a.a[t * n + i] * dot[i];
    }
#pragma unroll
    for (int i = 0; i < kFew; ++i) {
      if (i >= n) break;
      const int64_t at = t * n + i;
      const float weight = a.a[at], r = a.r[at], dr = weight * (dot[i] - mean) * r, back = -dr * a.s[at] * r / float(a.d);
      v.load(s.v[i] + t * a.d, quads);
      du.add(dr, v);
#pragma unroll
      for (int j = 0; j < Q; ++j)  // v becomes what is added
        v.x[j] = each4([&](float w, float q, float dh, float v) { return fmaf(weight, dh, fmaf(dr, w * q, back * v)); }, four_of(a.w, j * 32 + lane, quads),
                       four_of(a.query, j * 32 + lane, quads), dh.x[j], v.x[j]);
      float4* dv = reinterpret_cast<float4*>(g.dv[i] + t * a.d);
      constexpr int kTogether = Q < 4 ? Q : 4;  // so many loads are on their way before the first is stored
#pragma unroll
      for (int j0 = 0; j0 < Q; j0 += kTogether) {
        float4 old[kTogether];
#pragma unroll
        for (int j = 0; j < kTogether; ++j) old[j] = g.fresh[i] ? zero4() : four_of(g.dv[i] + t * a.d, (j0 + j) * 32 + lane, quads);
#pragma unroll
        for (int j = 0; j < kTogether; ++j)
          if (const int c = (j0 + j) * 32 + lane; c < quads) dv[c] = plus4(old[j], v.x[j0 + j]);
      }
    }
  }
  if (!a.partial) return;
  du.store(reinterpret_cast<float*>(sums + warp * quads), quads);
  __syncthreads();
  const float* all = reinterpret_cast<const float*>(sums);
  for (int64_t i = threadIdx.x; i < a.d; i += 256) {
    float sum = 0.f;
    for (int w = 0; w < 8; ++w) sum += all[w * a.d + i];
    a.partial[int64_t(blockIdx.x) * a.d + i] = sum;
  }
}
bool by_rows(const DepthMixArgs& a) { return a.d % 4 == 0 && a.d <= 1024 && a.n <= kFew; }

// ---- wide rows: a block a token at a time, all its sources' loads in flight together, one sum over the block for all of them ----------------------
constexpr int kMany = 16, kWideQuads = 8;  // sources; float4 of a row that a thread has
bool wide(const DepthMixArgs& a) { return a.d % 4 == 0 && a.d <= 4 * kWideQuads * kThreads && a.n <= kMany; }

// The sums of x[0..31] over the block, in `all`; call with a barrier between two calls' last reads.
__device__ __forceinline__ void block_sums32(const float (&x)[2 * kMany], float (&warps)[kThreads / 32][2 * kMany], float (&all)[2 * kMany]) {
  const int lane = threadIdx.x & 31;
  warps[threadIdx.x >> 5][lane] = warp_sums(x);
  __syncthreads();
  if (threadIdx.x < 2 * kMany) {
    float sum = warps[0][lane];
#pragma unroll
    for (int w = 1; w < kThreads / 32; ++w) sum += warps[w][lane];
    all[lane] = sum;
  }
  __syncthreads();
}
// A thread's share of a row; zeros behind its end.
struct Share {
  float4 x[kWideQuads];
  __device__ __forceinline__ void load(const float* row, int quads) {
#pragma unroll
    for (int j = 0; j < kWideQuads; ++j) x[j] = four_of(row, j * kThreads + int(threadIdx.x), quads);
  }
};

__global__ void __launch_bounds__(kThreads) wide_forward_kernel(const DepthMixArgs a, const Sources s) {
  follow();
  __shared__ float warps[kThreads / 32][2 * kMany], all[2 * kMany];
  const int n = int(a.n), quads = int(a.d / 4);
  for (int64_t t = blockIdx.x; t < a.rows; t += gridDim.x) {
    float sums[2 * kMany] = {};
    Share v, u;
    u.load(a.w, quads), v.load(a.query, quads);
#pragma unroll
    for (int j = 0; j < kWideQuads; ++j) u.x[j] = times4(u.x[j], v.x[j]);
#pragma unroll
    for (int i = 0; i < kMany; ++i) {
      if (i >= n) break;
      v.load(s.v[i] + t * a.d, quads);
#pragma unroll
      for (int j = 0; j < kWideQuads; ++j) sums[i] = dot4(v.x[j], u.x[j], sums[i]), sums[kMany + i] = dot4(v.x[j], v.x[j], sums[kMany + i]);
    }
    block_sums32(sums, warps, all);
    float top = -INFINITY, total = 0.f, weight[kMany];
#pragma unroll
    for (int i = 0; i < kMany; ++i) {
      if (i >= n) break;
      const float r = 1.f / sqrtf(all[kMany + i] / float(a.d) + a.eps);
      weight[i] = r * all[i];
      if (threadIdx.x == 0) a.r[t * n + i] = r, a.s[t * n + i] = weight[i];
      top = weight[i] > top ? weight[i] : top;
    }
#pragma unroll
    for (int i = 0; i < kMany; ++i)
      if (i < n) total += weight[i] = expf(weight[i] - top);
#pragma unroll
    for (int i = 0; i < kMany; ++i) {
      if (i >= n) break;
      weight[i] /= total;
      if (threadIdx.x == 0) a.a[t * n + i] = weight[i];
    }
#pragma unroll
    for (int j = 0; j < kWideQuads; ++j) u.x[j] = zero4();  // now the mix
#pragma unroll
    for (int i = 0; i < kMany; ++i) {
      if (i >= n) break;
      v.load(s.v[i] + t * a.d, quads);
#pragma unroll
      for (int j = 0; j < kWideQuads; ++j) u.x[j] = fma4(weight[i], v.x[j], u.x[j]);
    }
#pragma unroll
    for (int j = 0; j < kWideQuads; ++j)
      if (const int c = j * kThreads + int(threadIdx.x); c < quads) reinterpret_cast<float4*>(a.h + t * a.d)[c] = u.x[j];
    __syncthreads();  // `all` has been read
  }
}

// A block is kBackRows tokens; a thread keeps its channels' share of du over them.
__global__ void __launch_bounds__(kThreads, 2) wide_backward_kernel(const DepthMixArgs a, const Sources s, const Gradients g) {
  follow();
  __shared__ float warps[kThreads / 32][2 * kMany], all[2 * kMany];
  const int n = int(a.n), quads = int(a.d / 4);
  const int64_t first = int64_t(blockIdx.x) * kBackRows, end = min(a.rows, first + kBackRows);
  float4 du[kWideQuads] = {};
  for (int64_t t = first; t < end; ++t) {
    float sums[2 * kMany] = {};
    Share dh, v;
    dh.load(a.dh + t * a.d, quads);
#pragma unroll
    for (int i = 0; i < kMany; ++i) {
      if (i >= n) break;
      v.load(s.v[i] + t * a.d, quads);
#pragma unroll
      for (int j = 0; j < kWideQuads; ++j) sums[i] = dot4(v.x[j], dh.x[j], sums[i]);
    }
    block_sums32(sums, warps, all);
    float mean = 0.f;
    for (int i = 0; i < n; ++i) mean += a.a[t * n + i] * all[i];
#pragma unroll 1
    for (int i = 0; i < n; ++i) {
      const int64_t at = t * n + i;
      const float weight = a.a[at], r = a.r[at], dr = weight * (all[i] - mean) * r, back = -dr * a.s[at] * r / float(a.d);
      v.load(s.v[i] + t * a.d, quads);
#pragma unroll
      for (int j = 0; j < kWideQuads; ++j) {
        const int c = j * kThreads + int(threadIdx.x);
        if (c >= quads) continue;
        const float4 u = times4(reinterpret_cast<const float4*>(a.w)[c], reinterpret_cast<const float4*>(a.query)[c]);
        float4* to = reinterpret_cast<float4*>(g.dv[i] + t * a.d) + c;
        const float4 old = g.fresh[i] ? zero4() : *to;
        *to = each4([&](float old, float u, float dh, float v) { return old + fmaf(weight, dh, fmaf(dr, u, back * v)); }, old, u, dh.x[j], v.x[j]);
        du[j] = fma4(dr, v.x[j], du[j]);
      }
    }
    __syncthreads();
  }
  if (!a.partial) return;
#pragma unroll
  for (int j = 0; j < kWideQuads; ++j)
    if (const int c = j * kThreads + int(threadIdx.x); c < quads) reinterpret_cast<float4*>(a.partial + int64_t(blockIdx.x) * a.d)[c] = du[j];
}

__global__ void __launch_bounds__(kThreads) forward_kernel(const DepthMixArgs a, const Sources s) {
  follow();
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
  follow();
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
  follow();
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
      float* dv = g.dv[i] + t * a.d + c;
      *dv = (g.fresh[i] ? 0.f : *dv) + fmaf(a.a[at], dh, fmaf(dr, u, -dr * a.s[at] * a.r[at] / float(a.d) * v));
      sum = fmaf(dr, v, sum);
    }
    du += sum;
  }
  if (a.partial) a.partial[int64_t(blockIdx.x) * a.d + c] = du;
}

__global__ void __launch_bounds__(256) join_kernel(const DepthMixArgs a, int64_t blocks) {
  follow();
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
  if (by_rows(a)) {
    if (a.d <= 512) enqueue(rows_forward_kernel<4>, blocks_for(a.rows, 8), 256, 0, stream_of(stream), a, s);
    else enqueue(rows_forward_kernel<8>, blocks_for(a.rows, 8), 256, 0, stream_of(stream), a, s);
    return launched();
  }
  if (wide(a))
    enqueue(wide_forward_kernel, unsigned(std::min<int64_t>(a.rows, 132 * 8)), kThreads, 0, stream_of(stream), a, s);
  else
    enqueue(forward_kernel, unsigned(a.rows), kThreads, 0, stream_of(stream), a, s);
  return launched();
}

const char* depth_mix_backward(const DepthMixArgs& a, const bool* fresh, void* stream) {
  if (const char* e = refuse(a)) return e;
  if (a.rows == 0) return nullptr;
  Sources s{};
  Gradients g{};
  for (int64_t i = 0; i < a.n; ++i) s.v[i] = a.v[i], g.dv[i] = a.dv[i], g.fresh[i] = fresh && fresh[i];
  if (by_rows(a)) {
    const int64_t parts = (a.rows + kBackRows - 1) / kBackRows;
    const size_t bytes = size_t(32 * a.d);
    if (a.d <= 512) enqueue(rows_backward_kernel<4>, unsigned(parts), 256, bytes, stream_of(stream), a, s, g);
    else enqueue(rows_backward_kernel<8>, unsigned(parts), 256, bytes, stream_of(stream), a, s, g);
    if (a.partial) enqueue(join_kernel, blocks_for(a.d, 32), 256, 0, stream_of(stream), a, parts);
    return launched();
  }
  if (wide(a)) {
    const int64_t parts = (a.rows + kBackRows - 1) / kBackRows;
    enqueue(wide_backward_kernel, unsigned(parts), kThreads, 0, stream_of(stream), a, s, g);
    if (a.partial) enqueue(join_kernel, blocks_for(a.d, 32), 256, 0, stream_of(stream), a, parts);
    return launched();
  }
  const int64_t blocks = cpu::depth_mix_row_blocks(a.rows);
  enqueue(score_kernel, unsigned(a.rows), kThreads, 0, stream_of(stream), a, s);
  enqueue(backward_kernel, dim3(unsigned(blocks), blocks_for(a.d, 128)), 128, 0, stream_of(stream), a, s, g);
  if (a.partial) enqueue(join_kernel, blocks_for(a.d, 32), 256, 0, stream_of(stream), a, blocks);
  return launched();
}

}  // namespace k3::cuda
