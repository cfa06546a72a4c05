// The backward of attention in float32:  p = exp(scale q k - lse),  dp = dy v,  ds = p (dp - d) scale,  d = dy . y
//   dv = p^T dy     dk = ds^T q     dq = ds k
//
// Bound: multiply-adds outside the tensor units, seven products a pair of tiles: scores and dp are made twice so that every gradient has one owner.
// Split: 1 d: a warp a row; 2 dk, dv: a block is 32 keys of one kv head, and goes through the query rows that see them, 64 at a time; 3 dq: a block is
// 64 query rows of one kv head, and goes through their keys, 32 at a time; 4 the shared channels' gradient: kv heads in order.
// 256 threads as 16 x 16: thread (tx, ty) has rows ty + 16 i and keys tx, tx + 16 of scores, columns 4 tx + 64 j of gradients.
#include <algorithm>

#include "k3/core/enqueue.cuh"
#include "k3/core/tile.cuh"
#include "k3/ops/attention/attention_float_cuda.h"

namespace k3::cuda {
namespace {

using cpu::AttentionArgs;
using cpu::AttentionSequence;

constexpr int kThreads = 256, kRows = 64, kKeys = 32;

const char* result(cudaError_t e) { return e == cudaSuccess ? nullptr : cudaGetErrorString(e); }

__host__ __device__ constexpr int padded(int d) { return (d + 3) / 4 * 4 + 4; }
constexpr size_t shared_bytes(int key_dim, int value_dim) {
  return 4 * size_t((kRows + kKeys) * (padded(key_dim) + padded(value_dim)) + 2 * kRows * (kKeys + 4) + kKeys * 4);
}

__global__ void __launch_bounds__(256) row_products_kernel(const float* dy, const float* y, float* d, int64_t rows, int width) {  // 1
  follow();
  const int64_t row = int64_t(blockIdx.x) * 8 + (threadIdx.x >> 5);
  if (row >= rows) return;
  float sum = 0.f;
  for (int c = threadIdx.x & 31; c < width; c += 32) sum = __fmaf_rn(dy[row * width + c], y[row * width + c], sum);
  sum = warp_sum(sum);
  if ((threadIdx.x & 31) == 0) d[row] = sum;
}

// What both kernels hold in shared memory, and the scores of one pair of tiles.
struct Pair {
  const AttentionArgs& a;
  const AttentionSequence s;
  const int64_t g, heads;
  const int key_dim, value_dim, key_ld, value_ld;
  float *k, *v, *q, *dy, *p, *ds;

  __device__ Pair(const AttentionArgs& args, int64_t sequence, int64_t head, float* shared)
      : a(args), s(args.sequences[sequence]), g(head), heads(args.tiles.kv_heads * args.group), key_dim(int(args.tiles.own + args.tiles.shared)),
        value_dim(int(args.tiles.value)), key_ld(padded(key_dim)), value_ld(padded(value_dim)) {
    k = shared, v = k + kKeys * key_ld, q = v + kKeys * value_ld, dy = q + kRows * key_ld, p = dy + kRows * value_ld, ds = p + kRows * (kKeys + 4);
  }
  __device__ int64_t token(int64_t row) const { return a.group == 1 ? row : int64_t(uint32_t(row) / uint32_t(a.group)); }  // fewer than 2^32 rows
  __device__ int64_t at(int64_t row) const { return int64_t(a.rows[s.rows_at + token(row)]) * heads + g * a.group + row - token(row) * a.group; }

  // a warp takes a row at a time
  __device__ void load_keys(int64_t start, int count) const {
    const int own = int(a.tiles.own);
    for (int i = threadIdx.x >> 5; i < kKeys; i += kThreads / 32) {
      const int64_t row = i < count ? a.rows[s.rows_at + start + i] : 0;
      const float *from = a.keys + row * a.key_stride + g * a.key_head_stride, *common = a.shared + row * a.shared_stride - own;
      for (int c = threadIdx.x & 31; c < key_ld; c += 32) k[i * key_ld + c] = i >= count || c >= key_dim ? 0.f : c < own ? from[c] : common[c];
      const float* value = a.values + row * a.value_stride + g * a.value_head_stride;
      for (int c = threadIdx.x & 31; c < value_ld; c += 32) v[i * value_ld + c] = i < count && c < value_dim ? value[c] : 0.f;
    }
  }
  __device__ void load_rows(int64_t first, int count) const {
    for (int r = threadIdx.x >> 5; r < kRows; r += kThreads / 32) {
      const int64_t row = r < count ? at(first + r) : 0;
      for (int c = threadIdx.x & 31; c < key_ld; c += 32) q[r * key_ld + c] = r < count && c < key_dim ? a.q[row * key_dim + c] : 0.f;
      for (int c = threadIdx.x & 31; c < value_ld; c += 32) dy[r * value_ld + c] = r < count && c < value_dim ? a.dy[row * value_dim + c] : 0.f;
    }
  }
  static __device__ void dots(const float* x, int x_ld, const float* y, int y_ld, int width, float (&sum)[4][2]) {
    const int tx = threadIdx.x & 15, ty = threadIdx.x >> 4;
    for (int c = 0; c < width; c += 4) {
      float4 l[4], r[2];
#pragma unroll
      for (int i = 0; i < 4; ++i) l[i] = *reinterpret_cast<const float4*>(x + (ty + 16 * i) * x_ld + c);
#pragma unroll
      for (int j = 0; j < 2; ++j) r[j] = *reinterpret_cast<const float4*>(y + (tx + 16 * j) * y_ld + c);
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          sum[i][j] = __fmaf_rn(l[i].w, r[j].w, __fmaf_rn(l[i].z, r[j].z, __fmaf_rn(l[i].y, r[j].y, __fmaf_rn(l[i].x, r[j].x, sum[i][j]))));
    }
  }
  // f(r, i, p, ds) for each row r and key i of the pair; both 0 where the row does not see the key
  template <class F>
  __device__ void weights(int64_t first, int rows, int64_t start, int keys, F f) const {
    const int tx = threadIdx.x & 15, ty = threadIdx.x >> 4;
    float s_[4][2] = {}, dp[4][2] = {};
    dots(q, key_ld, k, key_ld, key_dim, s_);
    dots(dy, value_ld, v, value_ld, value_dim, dp);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = ty + 16 * i;
      const float lse = r < rows ? a.l[at(first + r)] : 0.f, d = r < rows ? a.d[at(first + r)] : 0.f;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int n = tx + 16 * j;
        const bool sees = r < rows && n < keys && start + n <= s.first + token(first + r);
        const float w = sees ? expf(s_[i][j] * a.scale - lse) : 0.f;
        f(r, n, w, sees ? w * (dp[i][j] - d) * a.scale : 0.f);
      }
    }
  }
};

template <int J>
__global__ void __launch_bounds__(kThreads) keys_kernel(const AttentionArgs a) {  // 2
  follow();
  extern __shared__ __align__(16) float shared[];
  Pair w(a, blockIdx.y, blockIdx.z, shared);
  const int64_t start = int64_t(blockIdx.x) * kKeys, all = w.s.queries * a.group;
  const int count = int(min(int64_t(kKeys), w.s.queries - start)), tx = threadIdx.x & 15, ty = threadIdx.x >> 4;
  if (count <= 0) return;
  w.load_keys(start, count);
  float dk[2][J][4] = {}, dv[2][J][4] = {};
  constexpr int ld = kKeys + 4;
  for (int64_t first = start * a.group / kRows * kRows; first < all; first += kRows) {
    const int rows = int(min(int64_t(kRows), all - first));
    __syncthreads();
    w.load_rows(first, rows);
    __syncthreads();
    w.weights(first, rows, start, count, [&](int r, int n, float p, float ds) { w.p[r * ld + n] = p, w.ds[r * ld + n] = ds; });
    __syncthreads();
    for (int r = 0; r < rows; ++r) {
      const float2 p = *reinterpret_cast<const float2*>(w.p + r * ld + ty * 2), ds = *reinterpret_cast<const float2*>(w.ds + r * ld + ty * 2);
      const float pi[2] = {p.x, p.y}, di[2] = {ds.x, ds.y};
#pragma unroll
      for (int j = 0; j < J; ++j) {
        const int c = tx * 4 + 64 * j;
        if (c < w.value_dim) {
          const float4 x = *reinterpret_cast<const float4*>(w.dy + r * w.value_ld + c);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            dv[i][j][0] = __fmaf_rn(pi[i], x.x, dv[i][j][0]), dv[i][j][1] = __fmaf_rn(pi[i], x.y, dv[i][j][1]);
            dv[i][j][2] = __fmaf_rn(pi[i], x.z, dv[i][j][2]), dv[i][j][3] = __fmaf_rn(pi[i], x.w, dv[i][j][3]);
          }
        }
        if (c < w.key_dim) {
          const float4 x = *reinterpret_cast<const float4*>(w.q + r * w.key_ld + c);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            dk[i][j][0] = __fmaf_rn(di[i], x.x, dk[i][j][0]), dk[i][j][1] = __fmaf_rn(di[i], x.y, dk[i][j][1]);
            dk[i][j][2] = __fmaf_rn(di[i], x.z, dk[i][j][2]), dk[i][j][3] = __fmaf_rn(di[i], x.w, dk[i][j][3]);
          }
        }
      }
    }
  }
  auto each = [&](int width, auto f) {
    for (int i = 0; i < 2; ++i) {
      const int n = ty * 2 + i;
      if (n >= count) continue;
      const int64_t row = a.rows[w.s.rows_at + start + n];
#pragma unroll
      for (int j = 0; j < J; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (const int c = tx * 4 + 64 * j + e; c < width) f(row, i, j, e, c);
    }
  };
  each(w.key_dim, [&](int64_t row, int i, int j, int e, int c) {
    if (c < a.tiles.own)
      a.dkeys[row * a.key_stride + w.g * a.key_head_stride + c] += dk[i][j][e];
    else
      a.dshared[(w.g * a.tokens + row) * a.tiles.shared + c - a.tiles.own] = dk[i][j][e];
  });
  __syncthreads();  // keys and values may be one tensor
  each(w.value_dim, [&](int64_t row, int i, int j, int e, int c) { a.dvalues[row * a.value_stride + w.g * a.value_head_stride + c] += dv[i][j][e]; });
}

template <int J>
__global__ void __launch_bounds__(kThreads) queries_kernel(const AttentionArgs a) {  // 3
  follow();
  extern __shared__ __align__(16) float shared[];
  const cpu::QueryTile item = a.query_tiles[blockIdx.x];
  Pair w(a, item.sequence, blockIdx.y, shared);
  const int64_t first = item.first_row;
  const int rows = int(min(int64_t(kRows), w.s.queries * a.group - first)), tx = threadIdx.x & 15, ty = threadIdx.x >> 4;
  const int64_t seen = w.token(first + rows - 1) + 1;
  w.load_rows(first, rows);
  float dq[4][J][4] = {};
  constexpr int ld = kRows + 4;
  for (int64_t start = 0; start < seen; start += kKeys) {
    const int count = int(min(int64_t(kKeys), seen - start));
    __syncthreads();
    w.load_keys(start, count);
    __syncthreads();
    w.weights(first, rows, start, count, [&](int r, int n, float, float ds) { w.p[n * ld + r] = ds; });
    __syncthreads();
    for (int n = 0; n < count; ++n) {
      float ds[4];
      *reinterpret_cast<float4*>(ds) = *reinterpret_cast<const float4*>(w.p + n * ld + ty * 4);
#pragma unroll
      for (int j = 0; j < J; ++j) {
        const int c = tx * 4 + 64 * j;
        if (c >= w.key_dim) continue;
        const float4 x = *reinterpret_cast<const float4*>(w.k + n * w.key_ld + c);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          dq[i][j][0] = __fmaf_rn(ds[i], x.x, dq[i][j][0]), dq[i][j][1] = __fmaf_rn(ds[i], x.y, dq[i][j][1]);
          dq[i][j][2] = __fmaf_rn(ds[i], x.z, dq[i][j][2]), dq[i][j][3] = __fmaf_rn(ds[i], x.w, dq[i][j][3]);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = ty * 4 + i;
    if (r >= rows) continue;
#pragma unroll
    for (int j = 0; j < J; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (const int c = tx * 4 + 64 * j + e; c < w.key_dim) a.dq[w.at(first + r) * w.key_dim + c] += dq[i][j][e];
  }
}

__global__ void __launch_bounds__(256) shared_kernel(const AttentionArgs a) {  // 4
  follow();
  const int64_t i = int64_t(blockIdx.x) * 256 + threadIdx.x, n = a.tokens * a.tiles.shared;
  if (i >= n) return;
  float sum = a.dshared_sum[i];
  for (int64_t g = 0; g < a.tiles.kv_heads; ++g) sum += a.dshared[g * n + i];
  a.dshared_sum[i] = sum;
}

template <int J>
cudaError_t backward(const AttentionArgs& a, int64_t longest, cudaStream_t stream) {
  const size_t bytes = shared_bytes(int(a.tiles.own + a.tiles.shared), int(a.tiles.value));
  for (auto kernel : {keys_kernel<J>, queries_kernel<J>})
    if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)); e != cudaSuccess) return e;
  const unsigned heads = unsigned(a.tiles.kv_heads);
  enqueue(keys_kernel<J>, dim3(unsigned((longest + kKeys - 1) / kKeys), unsigned(a.sequence_count), heads), kThreads, bytes, stream, a);
  enqueue(queries_kernel<J>, dim3(unsigned(a.query_tile_count), heads), kThreads, bytes, stream, a);
  return cudaGetLastError();
}

}  // namespace

const char* attention_row_products(const AttentionArgs& a, void* stream) {
  const int64_t rows = a.tokens * a.tiles.kv_heads * a.group;
  if (rows) enqueue(row_products_kernel, unsigned((rows + 7) / 8), 256, 0, cudaStream_t(stream), a.dy, a.y, a.d, rows, int(a.tiles.value));
  return result(cudaGetLastError());
}

const char* attention_sum_shared(const AttentionArgs& a, void* stream) {
  const int64_t n = a.tokens * a.tiles.shared;
  if (n) enqueue(shared_kernel, unsigned((n + 255) / 256), 256, 0, cudaStream_t(stream), a);
  return result(cudaGetLastError());
}

const char* attention_backward(const AttentionArgs& a, int64_t longest, void* stream) {
  const int64_t widest = std::max(a.tiles.own + a.tiles.shared, a.tiles.value);
  if (longest == 0 || a.query_tile_count == 0) return nullptr;
  if (widest > 256) return "[attention] the GPU serves heads of up to 256 channels";
  if (a.sequence_count > 65535 || a.tiles.kv_heads > 65535) return "[attention] the GPU takes up to 65535 sequences and kv heads in a call";
  const cudaStream_t s = cudaStream_t(stream);
  if (const char* e = attention_row_products(a, stream)) return e;
  cudaError_t e = widest <= 64 ? backward<1>(a, longest, s) : widest <= 128 ? backward<2>(a, longest, s) : widest <= 192 ? backward<3>(a, longest, s) : backward<4>(a, longest, s);
  return e == cudaSuccess ? attention_sum_shared(a, stream) : cudaGetErrorString(e);
}

}  // namespace k3::cuda
