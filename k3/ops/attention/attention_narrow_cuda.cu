//   forward    S = scale Q K^T,  P = softmax(S),  O = P V
//   backward   P = exp(S - lse),  dP = dO V^T,  dS = P (dP - d) scale,  d = dO . O;    dV = P^T dO,  dK = dS^T Q,  dQ = dS K
//
// Bound: the tensor units through mma.sync, 4 products of a tile forward and 7 backward (scores and dP twice, so that a gradient has one owner).
// Split: four warps of 16 rows each; forward and dQ: a block is 64 query rows of a kv head and goes through the keys, 64 or 32 at a time; dK, dV: a
// block is 64 keys and goes through the query rows that see them, 32 at a time. The next tile comes in while one is worked on.
// Heads come first in a grid, so that the longest tiles of all heads begin together.
// A warp's weights stay in registers: the accumulators of one product are the left operand of the next.
#include "k3/core/tile.cuh"
#include "k3/ops/attention/attention_float_cuda.h"
#include "k3/ops/attention/attention_narrow_cuda.h"

namespace k3::cuda {
namespace {

using cpu::AttentionArgs;
using cpu::AttentionSequence;

constexpr int kThreads = 128, kRows = 64, kKeys = 64, kFew = 32;  // kFew: rows or keys that come and go in the backward

__host__ __device__ constexpr int ld_of(int width) { return (width + 15) / 16 * 16 + 8; }  // 16-byte rows meet all banks

// A tile of rows in shared memory: `rows` of them, `width` channels, zeros up to the next 16 channels and in rows that don't exist.
// Eight threads share a row. from(r): where row r begins; channels from `own` on lie at other(r) + channel.
template <class From, class Other>
__device__ __forceinline__ void ask_rows(nv_bf16* to, int rows, int there, int width, int own, From from, Other other) {
  const int ld = ld_of(width), padded = (width + 15) / 16 * 16;
#pragma unroll
  for (int r = threadIdx.x >> 3; r < rows; r += kThreads / 8) {
    const int row = r < there ? r : 0;
    const nv_bf16 *first = from(row), *then = other(row);
    for (int c = (threadIdx.x & 7) * 8; c < padded; c += 64) {
      const bool valid = r < there && c < width;
      copy16(shared_address(to + r * ld + c), !valid ? first : c < own ? first + c : then + c, valid);
    }
  }
}

// c (16 rows of a from row a0, 8 N rows of b) += a b^T over `width` channels
template <int N>
__device__ __forceinline__ void dots(float (&c)[N][4], const nv_bf16* a, int a0, const nv_bf16* b, int width) {
  const int lane = threadIdx.x & 31, ld = ld_of(width);
  const uint32_t as = shared_address(a) + 2 * ((a0 + (lane & 15)) * ld + (lane >> 4) * 8);
  const uint32_t bs = shared_address(b) + 2 * (((lane & 7) + (lane >> 4) * 8) * ld + (lane >> 3 & 1) * 8);
#pragma unroll
  for (int k = 0; k < width; k += 16) {
    uint32_t x[4];
    ldmatrix4(x, as + 2 * k);
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      uint32_t y[4];
      ldmatrix4(y, bs + 2 * (n * 8 * ld + k));
      mma(c[n], x, y[0], y[1]);
      mma(c[n + 1], x, y[2], y[3]);
    }
  }
}
// c (16 rows, columns of b) += w b: w (16, 8 N) as accumulators hold it, b (8 N rows, `width` channels), at most 8 J of them
template <int J, int N>
__device__ __forceinline__ void weighted_rows(float (&c)[J][4], const float (&w)[N][4], const nv_bf16* b, int width) {
  const int lane = threadIdx.x & 31, ld = ld_of(width);
  const uint32_t bs = shared_address(b) + 2 * (((lane & 7) + (lane >> 3 & 1) * 8) * ld + (lane >> 4) * 8);
#pragma unroll
  for (int n = 0; n < N; n += 2) {
    const uint32_t x[4] = {pack(w[n][0], w[n][1]), pack(w[n][2], w[n][3]), pack(w[n + 1][0], w[n + 1][1]), pack(w[n + 1][2], w[n + 1][3])};
#pragma unroll
    for (int j = 0; j < J; j += 2) {
      if (j * 8 >= width) continue;
      uint32_t y[4];
      ldmatrix4_transposed(y, bs + 2 * (n * 8 * ld + j * 8));
      mma(c[j], x, y[0], y[1]);
      mma(c[j + 1], x, y[2], y[3]);
    }
  }
}
__device__ __forceinline__ float quad_sum(float x) { x += __shfl_xor_sync(~0u, x, 1); return x + __shfl_xor_sync(~0u, x, 2); }
__device__ __forceinline__ float quad_max(float x) { x = fmaxf(x, __shfl_xor_sync(~0u, x, 1)); return fmaxf(x, __shfl_xor_sync(~0u, x, 2)); }

// One sequence and kv head: where its rows lie. Row r of the sequence is token r / group, query head g * group + r % group.
struct Place {
  const AttentionNarrowArgs& p;
  const AttentionSequence s;
  const int64_t g, heads, all, begin;  // all: query rows; begin: the first token's row
  const int key_dim, value_dim;
  __device__ Place(const AttentionNarrowArgs& args, int64_t sequence, int64_t head)
      : p(args), s(args.a.sequences[sequence]), g(head), heads(args.a.tiles.kv_heads * args.a.group), all(s.queries * args.a.group),
        begin(s.queries ? args.a.rows[s.rows_at] : 0), key_dim(int(args.a.tiles.own + args.a.tiles.shared)), value_dim(int(args.a.tiles.value)) {}
  __device__ int64_t token(int64_t row) const { return p.a.group == 1 ? row : int64_t(uint32_t(row) / uint32_t(p.a.group)); }  // fewer than 2^32 rows
  __device__ int64_t at(int64_t row) const { return key_row(token(row)) * heads + g * p.a.group + row - token(row) * p.a.group; }
  __device__ int64_t key_row(int64_t key) const { return p.dense ? begin + key : p.a.rows[s.rows_at + key]; }

  __device__ void ask_queries(nv_bf16* to, int rows, int64_t first) const {
    auto from = [&](int r) { return static_cast<const nv_bf16*>(p.q) + at(first + r) * key_dim; };
    ask_rows(to, rows, int(min(int64_t(rows), all - first)), key_dim, key_dim, from, from);
  }
  __device__ void ask_dy(nv_bf16* to, int rows, int64_t first) const {
    auto from = [&](int r) { return static_cast<const nv_bf16*>(p.dy) + at(first + r) * value_dim; };
    ask_rows(to, rows, int(min(int64_t(rows), all - first)), value_dim, value_dim, from, from);
  }
  __device__ void ask_keys(nv_bf16* keys, nv_bf16* values, int rows, int64_t first) const {
    const int there = int(min(int64_t(rows), s.queries - first)), own = int(p.a.tiles.own);
    ask_rows(
        keys, rows, there, key_dim, own, [&](int r) { return static_cast<const nv_bf16*>(p.keys) + key_row(first + r) * p.a.key_stride + g * p.a.key_head_stride; },
        [&](int r) { return static_cast<const nv_bf16*>(p.shared) + key_row(first + r) * p.a.shared_stride - own; });
    auto value = [&](int r) { return static_cast<const nv_bf16*>(p.values) + key_row(first + r) * p.a.value_stride + g * p.a.value_head_stride; };
    ask_rows(values, rows, there, value_dim, value_dim, value, value);
  }
};

template <int V>  // most value channels
__global__ void __launch_bounds__(kThreads) forward_kernel(const AttentionNarrowArgs p) {
  extern __shared__ __align__(16) nv_bf16 narrow[];
  const cpu::QueryTile item = p.a.query_tiles[blockIdx.y];
  const Place w(p, item.sequence, blockIdx.x);
  const int lane = threadIdx.x & 31, r0 = (threadIdx.x >> 5) * 16, key_size = kKeys * ld_of(w.key_dim), value_size = kKeys * ld_of(w.value_dim);
  nv_bf16 *q = narrow, *k = q + kRows * ld_of(w.key_dim), *v = k + 2 * key_size;
  const int64_t first = item.first_row, seen = w.token(min(first + kRows, w.all) - 1) + 1;
  int limit[2];  // keys that this thread's two rows see
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t row = first + r0 + lane / 4 + i * 8;
    limit[i] = row < w.all ? int(w.token(row)) + 1 : 0;
  }
  const float scale = p.a.scale * kLog2e;  // weights as powers of two
  float o[V / 8][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {0.f, 0.f};
  w.ask_queries(q, kRows, first);
  w.ask_keys(k, v, kKeys, 0);
  copy_commit();
  for (int64_t start = 0, half = 0; start < seen; start += kKeys, half ^= 1) {
    if (start + kKeys < seen) {
      w.ask_keys(k + (half ^ 1) * key_size, v + (half ^ 1) * value_size, kKeys, start + kKeys);
      copy_commit();
      copy_wait<1>();
    } else {
      copy_wait<0>();
    }
    __syncthreads();
    float s[kKeys / 8][4] = {};
    dots(s, q, r0, k + half * key_size, w.key_dim);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float top = -INFINITY, sum = 0.f;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int e = i * 2; e < i * 2 + 2; ++e) {
          s[n][e] = int(start) + n * 8 + lane % 4 * 2 + e % 2 < limit[i] ? s[n][e] * scale : -INFINITY;
          top = fmaxf(top, s[n][e]);
        }
      const float now = fmaxf(m[i], quad_max(top)), keep = now == -INFINITY ? 1.f : ex2(m[i] - now);
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int e = i * 2; e < i * 2 + 2; ++e) sum += s[n][e] = now == -INFINITY ? 0.f : ex2(s[n][e] - now);
      m[i] = now, l[i] = l[i] * keep + quad_sum(sum);
#pragma unroll
      for (int j = 0; j < V / 8; ++j) o[j][i * 2] *= keep, o[j][i * 2 + 1] *= keep;
    }
    weighted_rows(o, s, v + half * value_size, w.value_dim);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (limit[i] == 0) continue;
    const int64_t at = w.at(first + r0 + lane / 4 + i * 8);
    const float inverse = 1.f / l[i];
    if (lane % 4 == 0) p.a.m[at] = m[i] * kLn2, p.a.l[at] = m[i] * kLn2 + logf(l[i]);
#pragma unroll
    for (int j = 0; j < V / 8; ++j)
      if (const int c = j * 8 + lane % 4 * 2; c < w.value_dim)
        *reinterpret_cast<float2*>(p.a.y + at * w.value_dim + c) = make_float2(o[j][i * 2] * inverse, o[j][i * 2 + 1] * inverse);
  }
}

template <int K, int V>
__global__ void __launch_bounds__(kThreads) keys_kernel(const AttentionNarrowArgs p) {
  extern __shared__ __align__(16) nv_bf16 narrow[];
  const Place w(p, blockIdx.y, blockIdx.x);
  const int64_t start = int64_t(blockIdx.z) * kKeys;
  if (start >= w.s.queries) return;
  const int lane = threadIdx.x & 31, k0 = (threadIdx.x >> 5) * 16, q_size = kFew * ld_of(w.key_dim), dy_size = kFew * ld_of(w.value_dim);
  nv_bf16 *k = narrow, *v = k + kKeys * ld_of(w.key_dim), *q = v + kKeys * ld_of(w.value_dim), *dy = q + 2 * q_size;
  float* stats = reinterpret_cast<float*>(dy + 2 * dy_size);  // (2, 2, kFew): log-sum-exp and d of the rows at hand
  const float scale = p.a.scale * kLog2e;
  float dk[K / 8][4] = {}, dv[V / 8][4] = {};
  int key[2];  // fewer than 2^31 tokens
#pragma unroll
  for (int i = 0; i < 2; ++i) key[i] = int(start) + k0 + lane / 4 + i * 8;

  const int64_t begin = start * p.a.group / kFew * kFew;
  auto ask = [&](int64_t first, int64_t half) {
    w.ask_queries(q + half * q_size, kFew, first);
    w.ask_dy(dy + half * dy_size, kFew, first);
    if (threadIdx.x < 2 * kFew) {
      const int64_t row = first + threadIdx.x % kFew;
      const float* from = threadIdx.x < kFew ? p.a.l : p.a.d;
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(stats + half * 2 * kFew + threadIdx.x)),
                   "l"(from + (row < w.all ? w.at(row) : 0)), "r"(row < w.all ? 4 : 0)
                   : "memory");
    }
    copy_commit();
  };
  w.ask_keys(k, v, kKeys, start);
  ask(begin, 0);
  for (int64_t first = begin, half = 0; first < w.all; first += kFew, half ^= 1) {
    if (first + kFew < w.all) {
      ask(first + kFew, half ^ 1);
      copy_wait<1>();
    } else {
      copy_wait<0>();
    }
    __syncthreads();
    const float *lse = stats + half * 2 * kFew, *d = lse + kFew;
    float s[kFew / 8][4] = {}, dp[kFew / 8][4] = {};  // (keys, rows)
    dots(s, k, k0, q + half * q_size, w.key_dim);
    dots(dp, v, k0, dy + half * dy_size, w.value_dim);
#pragma unroll
    for (int n = 0; n < kFew / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int r = n * 8 + lane % 4 * 2 + e % 2;
        const bool sees = first + r < w.all && key[e / 2] <= int(w.token(first + r));
        const float x = sees ? ex2(s[n][e] * scale - lse[r] * kLog2e) : 0.f;
        dp[n][e] = sees ? x * (dp[n][e] - d[r]) * p.a.scale : 0.f, s[n][e] = x;
      }
    weighted_rows(dv, s, dy + half * dy_size, w.value_dim);
    weighted_rows(dk, dp, q + half * q_size, w.key_dim);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (key[i] >= w.s.queries) continue;
    const int64_t row = w.key_row(key[i]);
#pragma unroll
    for (int j = 0; j < K / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int c = j * 8 + lane % 4 * 2 + e;
        if (c < p.a.tiles.own)
          p.a.dkeys[row * p.a.key_stride + w.g * p.a.key_head_stride + c] += dk[j][i * 2 + e];
        else if (c < w.key_dim)
          p.a.dshared[(w.g * p.a.tokens + row) * p.a.tiles.shared + c - p.a.tiles.own] = dk[j][i * 2 + e];
      }
  }
  __syncthreads();  // keys and values may be one tensor
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (key[i] >= w.s.queries) continue;
    float* to = p.a.dvalues + w.key_row(key[i]) * p.a.value_stride + w.g * p.a.value_head_stride;
#pragma unroll
    for (int j = 0; j < V / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (const int c = j * 8 + lane % 4 * 2 + e; c < w.value_dim) to[c] += dv[j][i * 2 + e];
  }
}

template <int K, int V>
__global__ void __launch_bounds__(kThreads) queries_kernel(const AttentionNarrowArgs p) {
  extern __shared__ __align__(16) nv_bf16 narrow[];
  const cpu::QueryTile item = p.a.query_tiles[blockIdx.y];
  const Place w(p, item.sequence, blockIdx.x);
  const int lane = threadIdx.x & 31, r0 = (threadIdx.x >> 5) * 16, key_size = kFew * ld_of(w.key_dim), value_size = kFew * ld_of(w.value_dim);
  nv_bf16 *q = narrow, *dy = q + kRows * ld_of(w.key_dim), *k = dy + kRows * ld_of(w.value_dim), *v = k + 2 * key_size;
  const int64_t first = item.first_row, seen = w.token(min(first + kRows, w.all) - 1) + 1;
  const float scale = p.a.scale * kLog2e;
  int limit[2];
  float lse[2], d[2], dq[K / 8][4] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t row = first + r0 + lane / 4 + i * 8;
    limit[i] = row < w.all ? int(w.token(row)) + 1 : 0;
    lse[i] = limit[i] ? p.a.l[w.at(row)] * kLog2e : 0.f, d[i] = limit[i] ? p.a.d[w.at(row)] : 0.f;
  }
  w.ask_queries(q, kRows, first);
  w.ask_dy(dy, kRows, first);
  w.ask_keys(k, v, kFew, 0);
  copy_commit();
  for (int64_t start = 0, half = 0; start < seen; start += kFew, half ^= 1) {
    if (start + kFew < seen) {
      w.ask_keys(k + (half ^ 1) * key_size, v + (half ^ 1) * value_size, kFew, start + kFew);
      copy_commit();
      copy_wait<1>();
    } else {
      copy_wait<0>();
    }
    __syncthreads();
    float s[kFew / 8][4] = {}, dp[kFew / 8][4] = {};
    dots(s, q, r0, k + half * key_size, w.key_dim);
    dots(dp, dy, r0, v + half * value_size, w.value_dim);
#pragma unroll
    for (int n = 0; n < kFew / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool sees = int(start) + n * 8 + lane % 4 * 2 + e % 2 < limit[e / 2];
        dp[n][e] = sees ? ex2(s[n][e] * scale - lse[e / 2]) * (dp[n][e] - d[e / 2]) * p.a.scale : 0.f;
      }
    weighted_rows(dq, dp, k + half * key_size, w.key_dim);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (limit[i] == 0) continue;
    float* to = p.a.dq + w.at(first + r0 + lane / 4 + i * 8) * w.key_dim;
#pragma unroll
    for (int j = 0; j < K / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (const int c = j * 8 + lane % 4 * 2 + e; c < w.key_dim) to[c] += dq[j][i * 2 + e];
  }
}

struct Sizes {
  int key_ld, value_ld;
  size_t forward() const { return 2 * size_t(kRows * key_ld + 2 * kKeys * (key_ld + value_ld)); }
  size_t keys() const { return 2 * size_t((kKeys + 2 * kFew) * (key_ld + value_ld)) + 4 * 4 * kFew; }
  size_t queries() const { return 2 * size_t((kRows + 2 * kFew) * (key_ld + value_ld)); }
};
Sizes sizes_of(const AttentionArgs& a) { return {ld_of(int(a.tiles.own + a.tiles.shared)), ld_of(int(a.tiles.value))}; }

template <class Kernel>
cudaError_t launch(Kernel kernel, dim3 grid, size_t bytes, const AttentionNarrowArgs& p, cudaStream_t stream) {
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)); e != cudaSuccess) return e;
  kernel<<<grid, kThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}
template <int V>
cudaError_t forward(const AttentionNarrowArgs& p, cudaStream_t s) {
  return launch(forward_kernel<V>, dim3(unsigned(p.a.tiles.kv_heads), unsigned(p.a.query_tile_count)), sizes_of(p.a).forward(), p, s);
}
template <int K, int V>
cudaError_t backward(const AttentionNarrowArgs& p, cudaStream_t s) {
  const unsigned heads = unsigned(p.a.tiles.kv_heads);
  const dim3 keys{heads, unsigned(p.a.sequence_count), unsigned((p.longest + kKeys - 1) / kKeys)};
  if (cudaError_t e = launch(keys_kernel<K, V>, keys, sizes_of(p.a).keys(), p, s); e != cudaSuccess) return e;
  return launch(queries_kernel<K, V>, dim3(heads, unsigned(p.a.query_tile_count)), sizes_of(p.a).queries(), p, s);
}
// f.template operator()<most key channels, most value channels>()
template <class F>
cudaError_t with_widths(const AttentionArgs& a, F f) {
  const int64_t key = a.tiles.own + a.tiles.shared, value = a.tiles.value;
  if (key <= 64 && value <= 64) return f.template operator()<64, 64>();
  if (key <= 128) return f.template operator()<128, 128>();
  return f.template operator()<192, 128>();
}

}  // namespace

bool attention_narrow_serves(const AttentionArgs& a) {
  const cpu::KeyTiles& t = a.tiles;
  bool eights = true;
  for (int64_t n : {t.own, t.shared, t.value, a.key_stride, a.key_head_stride, a.value_stride, a.value_head_stride, a.shared_stride}) eights &= n % 8 == 0;
  return eights && t.own + t.shared <= 192 && t.value <= 128 && a.sequence_count <= 65535 && t.kv_heads <= 65535;
}

const char* attention_narrow_forward(const AttentionNarrowArgs& p, void* stream) {
  if (!attention_narrow_serves(p.a)) return "[attention] bfloat16 heads have up to 192 key and 128 value channels, in eights";
  if (p.a.query_tile_count > 65535) return "[attention] bfloat16 attention takes up to 4 million tokens a call";
  if (p.a.query_tile_count == 0) return nullptr;
  cudaError_t e = with_widths(p.a, [&]<int K, int V>() { return forward<V>(p, cudaStream_t(stream)); });
  return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}

const char* attention_narrow_backward(const AttentionNarrowArgs& p, void* stream) {
  if (!attention_narrow_serves(p.a)) return "[attention] bfloat16 heads have up to 192 key and 128 value channels, in eights";
  if (p.a.query_tile_count > 65535) return "[attention] bfloat16 attention takes up to 4 million tokens a call";
  if (p.a.query_tile_count == 0) return nullptr;
  if (const char* e = attention_row_products(p.a, stream)) return e;
  cudaError_t e = with_widths(p.a, [&]<int K, int V>() { return backward<K, V>(p, cudaStream_t(stream)); });
  return e == cudaSuccess ? attention_sum_shared(p.a, stream) : cudaGetErrorString(e);
}

}  // namespace k3::cuda
