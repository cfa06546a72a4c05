#pragma once
// o = sum_s p_s v_s, p = softmax(scale q . k_s), for a few rows against tiles of 128 keys, in float32 outside the tensor units.
//
// 256 threads as 16 x 16: thread (tx, ty) has rows ty + 16 i, keys 4 tx .. 4 tx + 3 and 64 + the same, value columns 4 tx + 64 j ...
// Steps per tile: 1 scores, 32 channels of the keys in shared memory at a time; 2 online softmax, a row's sixteen threads by shuffles; 3 o = o keep +
// p v, sixteen values at a time. Each sum is one chain (scores over channels, o over keys) or one tree of fixed shape (the row sum), the same
// however many rows a block has.
#include "k3/core/tile.cuh"

namespace k3::cuda {

constexpr int kAttendThreads = 256, kAttendKeys = 128, kAttendChannels = 32, kAttendValues = 16, kAttendLd = kAttendKeys + 4;

__host__ __device__ constexpr int attend_query_ld(int key_dim) { return (key_dim + kAttendChannels - 1) / kAttendChannels * kAttendChannels + 4; }
constexpr size_t attend_shared_bytes(int rows, int key_dim, int value_tiles) {
  size_t stage = kAttendChannels * kAttendLd, values = kAttendValues * 64 * size_t(value_tiles);
  return 4 * (size_t(rows) * (attend_query_ld(key_dim) + kAttendLd) + (stage > values ? stage : values));
}

// Sum and maximum over the sixteen threads of a row.
__device__ __forceinline__ float row_sum16(float x) {
#pragma unroll
  for (int s = 8; s > 0; s >>= 1) x += __shfl_xor_sync(~0u, x, s);
  return x;
}
__device__ __forceinline__ float row_max16(float x) {
#pragma unroll
  for (int s = 8; s > 0; s >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, s));
  return x;
}

// The state of 16 R rows and 64 J value columns.
template <int R, int J>
struct Attend {
  float o[R][J][4], m[R], l[R];
  float *q, *p, *stage;  // shared: (16 R, query ld), (16 R, kAttendLd), keys or values
  int key_dim, value_dim;

  // row(r): where query row r lies
  template <class Row>
  __device__ void begin(float* shared, int rows, int key_dim_, int value_dim_, Row row) {
    key_dim = key_dim_, value_dim = value_dim_;
    const int ld = attend_query_ld(key_dim);
    q = shared, p = q + 16 * R * ld, stage = p + 16 * R * kAttendLd;
    for (int e = threadIdx.x; e < 16 * R * ld; e += kAttendThreads) {
      const int r = e / ld, c = e % ld;
      q[e] = r < rows && c < key_dim ? row(r)[c] : 0.f;
    }
#pragma unroll
    for (int i = 0; i < R; ++i) {
      m[i] = -INFINITY, l[i] = 0.f;
#pragma unroll
      for (int j = 0; j < J; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) o[i][j][e] = 0.f;
    }
  }

  // One tile of which `there` keys exist, the last `seen` of them by some row; sees(r): how many row r sees (0 or less: none).
  // kAlong: key(c) is a line of 128 keys, 16 bytes aligned, of which those beyond `seen` may be anything; else key(c, s) an element, which lie along
  // c. value(s, c): an element.
  template <bool kAlong, class Sees, class Key, class Value>
  __device__ void tile(int seen, float scale, Sees sees, Key key, Value value) {
    const int t = threadIdx.x, tx = t & 15, ty = t >> 4, ld = attend_query_ld(key_dim);
    float s[R][8] = {};
    for (int c0 = 0; c0 < key_dim; c0 += kAttendChannels) {  // 1
      __syncthreads();
      if constexpr (kAlong) {
#pragma unroll
        for (int c = t >> 5; c < kAttendChannels; c += kAttendThreads / 32) {
          const float4 x = c0 + c < key_dim ? *reinterpret_cast<const float4*>(key(c0 + c) + (t & 31) * 4) : make_float4(0, 0, 0, 0);
          *reinterpret_cast<float4*>(stage + c * kAttendLd + (t & 31) * 4) = x;
        }
      } else {
#pragma unroll
        for (int i = 0; i < kAttendChannels * kAttendKeys / kAttendThreads; ++i) {
          const int e = t + i * kAttendThreads, lane = e & 31, rest = e >> 5;  // a warp reads four keys' runs of 32 bytes
          const int c = (lane & 7) + 8 * (rest & 3), n = (lane >> 3) + 4 * (rest >> 2);
          stage[c * kAttendLd + n] = c0 + c < key_dim && n < seen ? key(c0 + c, n) : 0.f;
        }
      }
      __syncthreads();
      for (int c = 0; c < kAttendChannels; c += 4) {
        float x[R][4];
#pragma unroll
        for (int i = 0; i < R; ++i) *reinterpret_cast<float4*>(x[i]) = *reinterpret_cast<const float4*>(q + (ty + 16 * i) * ld + c0 + c);
#pragma unroll
        for (int d = 0; d < 4; ++d) {
          float y[8];
          *reinterpret_cast<float4*>(y) = *reinterpret_cast<const float4*>(stage + (c + d) * kAttendLd + tx * 4);
          *reinterpret_cast<float4*>(y + 4) = *reinterpret_cast<const float4*>(stage + (c + d) * kAttendLd + 64 + tx * 4);
#pragma unroll
          for (int i = 0; i < R; ++i)
#pragma unroll
            for (int k = 0; k < 8; ++k) s[i][k] = __fmaf_rn(x[i][d], y[k], s[i][k]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < R; ++i) {  // 2
      const int visible = sees(ty + 16 * i);
      float top = -INFINITY;
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        s[i][k] = tx * 4 + k / 4 * 64 + k % 4 < visible ? __fmul_rn(s[i][k], scale) : -INFINITY;
        top = fmaxf(top, s[i][k]);  // a NaN is not the maximum, but reaches the sum
      }
      const float before = m[i], now = fmaxf(before, row_max16(top));
      const float keep = now == -INFINITY ? 1.f : expf(before - now);
      float sum = 0.f;
#pragma unroll
      for (int k = 0; k < 8; ++k) sum = __fadd_rn(sum, s[i][k] = now == -INFINITY ? 0.f : expf(s[i][k] - now));
      m[i] = now, l[i] = __fmaf_rn(l[i], keep, row_sum16(sum));
#pragma unroll
      for (int j = 0; j < J; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) o[i][j][e] = __fmul_rn(o[i][j][e], keep);
      float* to = p + (ty + 16 * i) * kAttendLd + tx * 4;
      *reinterpret_cast<float4*>(to) = make_float4(s[i][0], s[i][1], s[i][2], s[i][3]);
      *reinterpret_cast<float4*>(to + 64) = make_float4(s[i][4], s[i][5], s[i][6], s[i][7]);
    }
    for (int n0 = 0; n0 < seen; n0 += kAttendValues) {  // 3
      __syncthreads();
      for (int e = t; e < kAttendValues * 64 * J; e += kAttendThreads) {
        const int n = e / (64 * J), c = e % (64 * J);
        stage[e] = n0 + n < seen && c < value_dim ? value(n0 + n, c) : 0.f;
      }
      __syncthreads();
#pragma unroll
      for (int n = 0; n < kAttendValues; n += 4) {
        float w[R][4];
#pragma unroll
        for (int i = 0; i < R; ++i) *reinterpret_cast<float4*>(w[i]) = *reinterpret_cast<const float4*>(p + (ty + 16 * i) * kAttendLd + n0 + n);
#pragma unroll
        for (int d = 0; d < 4; ++d)
#pragma unroll
          for (int j = 0; j < J; ++j) {
            const float4 v = *reinterpret_cast<const float4*>(stage + (n + d) * 64 * J + 64 * j + tx * 4);
#pragma unroll
            for (int i = 0; i < R; ++i) {
              o[i][j][0] = __fmaf_rn(w[i][d], v.x, o[i][j][0]), o[i][j][1] = __fmaf_rn(w[i][d], v.y, o[i][j][1]);
              o[i][j][2] = __fmaf_rn(w[i][d], v.z, o[i][j][2]), o[i][j][3] = __fmaf_rn(w[i][d], v.w, o[i][j][3]);
            }
          }
      }
    }
  }
};

}  // namespace k3::cuda
