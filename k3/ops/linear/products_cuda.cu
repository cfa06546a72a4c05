// C = op(A) op(B) or C += op(A) op(B) for each product of a list.
//
// Bound: multiply-adds outside the tensor units (67 TFLOP/s on an H200). Split: a block is one tile of one C, found by bisection in the running sum of
// tiles, so row counts may come from the device. 256 threads hold 4 x 4 (tile 64) or 8 x 8 (tile 128) sums each.
// Steps: 1 sixteen columns of A and rows of B into registers while the sixteen before are multiplied; 2 into the other half of shared memory, k
// outermost; 3 multiply-adds, k ascending.
#include <cstdint>

#include "k3/core/tile.cuh"
#include "k3/ops/linear/products_cuda.h"

namespace k3::cuda {
namespace {

constexpr int kStep = 16, kThreads = 256;

template <int T>  // sums a thread and side: 4 or 8
__global__ void __launch_bounds__(kThreads) products_kernel(const ListedProduct* __restrict__ list, const int* __restrict__ tile_begins, int count) {
  constexpr int kTile = 16 * T, kLd = kTile + 4, kLoads = kTile * kStep / kThreads;
  __shared__ __align__(16) float as[2][kStep][kLd], bs[2][kStep][kLd];
  const int block = blockIdx.x;
  if (block >= tile_begins[count]) return;
  int low = 0, high = count;  // tile_begins[low] <= block < tile_begins[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (tile_begins[middle] <= block) low = middle; else high = middle;
  }
  const Product p = list[low].p;
  const bool narrow = list[low].b_is_bf16;
  const int tile = block - tile_begins[low], across = int((p.n + kTile - 1) / kTile);
  const int64_t m0 = int64_t(tile / across) * kTile, n0 = int64_t(tile % across) * kTile;
  if (list[low].lower && n0 > m0) return;
  const int t = threadIdx.x, tx = t & 15, ty = t >> 4;

  // A thread's values of an operand: the first at (row, k) of the tile, the next dr rows and dk columns further.
  const int a_row = p.a_transposed ? t % kTile : t / kStep, a_k = p.a_transposed ? t / kTile : t % kStep, a_dr = p.a_transposed ? 0 : kThreads / kStep;
  const int b_col = p.b_transposed ? t / kStep : t % kTile, b_k = p.b_transposed ? t % kStep : t / kTile, b_dc = p.b_transposed ? kThreads / kStep : 0;
  const int a_dk = p.a_transposed ? kThreads / kTile : 0, b_dk = p.b_transposed ? 0 : kThreads / kTile;
  const int64_t a_jump = p.a_transposed ? a_dk * p.lda : a_dr * p.lda, a_step = p.a_transposed ? p.lda : 1;
  const int64_t b_jump = p.b_transposed ? b_dc * p.ldb : b_dk * p.ldb, b_step = p.b_transposed ? 1 : p.ldb;
  int64_t a_at = p.a_transposed ? a_k * p.lda + m0 + a_row : (m0 + a_row) * p.lda + a_k;
  int64_t b_at = p.b_transposed ? (n0 + b_col) * p.ldb + b_k : b_k * p.ldb + n0 + b_col;
  const int m_rest = int(min(int64_t(kTile), p.m - m0)), n_rest = int(min(int64_t(kTile), p.n - n0));
  float ra[kLoads], rb[kLoads];
  auto fetch = [&](int64_t k0) {  // 1
    const int k_rest = int(min(int64_t(kStep), p.k - k0));
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      ra[i] = a_k + i * a_dk < k_rest && a_row + i * a_dr < m_rest ? p.a[a_at + i * a_jump] : 0.f;
      const bool there = b_k + i * b_dk < k_rest && b_col + i * b_dc < n_rest;
      rb[i] = !there ? 0.f : narrow ? __bfloat162float(reinterpret_cast<const nv_bf16*>(p.b)[b_at + i * b_jump]) : p.b[b_at + i * b_jump];
    }
    a_at += kStep * a_step, b_at += kStep * b_step;
  };
  auto put = [&](int half) {  // 2
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int e = t + i * kThreads;
      as[half][p.a_transposed ? e / kTile : e % kStep][p.a_transposed ? e % kTile : e / kStep] = ra[i];
      bs[half][p.b_transposed ? e % kStep : e / kTile][p.b_transposed ? e / kStep : e % kTile] = rb[i];
    }
  };

  float c[T][T] = {};
  fetch(0);
  put(0);
  __syncthreads();
  int half = 0;
  for (int64_t k0 = 0; k0 < p.k; k0 += kStep, half ^= 1) {
    const bool more = k0 + kStep < p.k;
    if (more) fetch(k0 + kStep);
#pragma unroll
    for (int k = 0; k < kStep; ++k) {  // 3
      float x[T], y[T];
#pragma unroll
      for (int i = 0; i < T; i += 4) {
        *reinterpret_cast<float4*>(x + i) = *reinterpret_cast<const float4*>(&as[half][k][ty * 4 + i * 16]);
        *reinterpret_cast<float4*>(y + i) = *reinterpret_cast<const float4*>(&bs[half][k][tx * 4 + i * 16]);
      }
#pragma unroll
      for (int i = 0; i < T; ++i)
#pragma unroll
        for (int j = 0; j < T; ++j) c[i][j] = __fmaf_rn(x[i], y[j], c[i][j]);
    }
    if (more) put(half ^ 1);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < T; ++i) {
    const int64_t m = m0 + ty * 4 + i / 4 * 64 + i % 4;
    if (m >= p.m) continue;
#pragma unroll
    for (int j = 0; j < T; ++j) {
      const int64_t n = n0 + tx * 4 + j / 4 * 64 + j % 4;
      if (n >= p.n) continue;
      float* to = p.c + m * p.ldc + n;
      *to = p.accumulate ? *to + c[i][j] : c[i][j];
    }
  }
}

// The same with operands rounded to bfloat16: eight warps, each 64 x 32 of a tile of 128 x 128; kDeep columns of A and B at a time. An operand lies in
// shared memory as in global memory, (row, k) or (k, row), and is transposed by ldmatrix. Split, it is x = hi + lo, and a b = hi hi + hi lo + lo hi.
template <int kDeep>
struct Operand {
  static constexpr int kAlongK = kDeep + 8, kAlongRow = int(kProductWideTile) + 8, kHalf = int(kProductWideTile) * kAlongK;
  static_assert(kDeep * kAlongRow <= kHalf);
  static constexpr int kQuads = kDeep / 4, kOuter = kThreads / 32, kRows = kThreads / kQuads;  // a thread's next values: columns or rows further
  const void* from;
  bool k_outer, bf16, aligned;  // (k, row) in memory; stored as bfloat16; four neighbours may be read at once
  int64_t at, jump, step;       // a thread's first four values; its next ones; the same kDeep columns further
  int outer, inner, rest;       // where they are in the tile, across and along memory; how many rows there are
  static constexpr int kLoads = int(kProductWideTile) * kDeep / 4 / kThreads;

  __device__ Operand(const void* from_, int64_t ld, int64_t rows, int64_t row0, bool k_outer_, bool bf16_)
      : from(from_), k_outer(k_outer_), bf16(bf16_), aligned(!bf16_ && ld % 4 == 0 && reinterpret_cast<uintptr_t>(from_) % 16 == 0) {
    const int t = threadIdx.x;
    outer = k_outer ? t / 32 : t / kQuads, inner = k_outer ? t % 32 * 4 : t % kQuads * 4;
    jump = (k_outer ? kOuter : kRows) * ld, step = k_outer ? kDeep * ld : kDeep;
    at = k_outer ? outer * ld + row0 + inner : (row0 + outer) * ld + inner;
    rest = int(min(int64_t(kProductWideTile), rows - row0));
  }
  // the next kDeep columns, of which k_rest exist
  __device__ void fetch(float4 (&x)[kLoads], int k_rest) {
    const int outers = k_outer ? k_rest : rest, inners = (k_outer ? rest : k_rest) - inner;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int64_t a = at + i * jump;
      const bool there = outer + i * (k_outer ? kOuter : kRows) < outers;
      if (there && aligned && inners >= 4) {
        x[i] = *reinterpret_cast<const float4*>(static_cast<const float*>(from) + a);
      } else {
        float y[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) y[e] = !there || e >= inners ? 0.f : bf16 ? __bfloat162float(static_cast<const nv_bf16*>(from)[a + e]) : static_cast<const float*>(from)[a + e];
        x[i] = make_float4(y[0], y[1], y[2], y[3]);
      }
    }
    at += step;
  }
  template <bool kSplit>
  __device__ void put(nv_bf16* to, const float4 (&x)[kLoads]) const {  // lo lies kHalf behind hi
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int at_ = (k_outer ? (outer + i * kOuter) * kAlongRow : (outer + i * kRows) * kAlongK) + inner;
      const uint2 hi = make_uint2(pack(x[i].x, x[i].y), pack(x[i].z, x[i].w));
      *reinterpret_cast<uint2*>(to + at_) = hi;
      if constexpr (kSplit)
        *reinterpret_cast<uint2*>(to + kHalf + at_) =
            make_uint2(pack(x[i].x - low(hi.x), x[i].y - high(hi.x)), pack(x[i].z - low(hi.y), x[i].w - high(hi.y)));
    }
  }
  // Fragments of rows row .. row + 15 and columns k .. k + 15, as the left operand or as the right one
  __device__ void left(uint32_t (&x)[4], uint32_t tile, int row, int k) const {
    const int lane = threadIdx.x & 31;
    if (k_outer)
      ldmatrix4_transposed(x, tile + 2 * ((k + (lane & 7) + (lane >> 4) * 8) * kAlongRow + row + (lane >> 3 & 1) * 8));
    else
      ldmatrix4(x, tile + 2 * ((row + (lane & 15)) * kAlongK + k + (lane >> 4) * 8));
  }
  __device__ void right(uint32_t (&x)[4], uint32_t tile, int row, int k) const {
    const int lane = threadIdx.x & 31;
    if (k_outer)
      ldmatrix4_transposed(x, tile + 2 * ((k + (lane & 7) + (lane >> 3 & 1) * 8) * kAlongRow + row + (lane >> 4) * 8));
    else
      ldmatrix4(x, tile + 2 * ((row + (lane & 7) + (lane >> 4) * 8) * kAlongK + k + (lane >> 3 & 1) * 8));
  }
};

template <bool kSplit>
__global__ void __launch_bounds__(kThreads) narrow_products_kernel(const ListedProduct* __restrict__ list, const int* __restrict__ tile_begins, int count) {
  constexpr int kTile = int(kProductWideTile), kDeep = kSplit ? 16 : 32, kParts = kSplit ? 2 : 1;
  using Operand = Operand<kDeep>;
  __shared__ __align__(16) nv_bf16 shared[2][2][kParts * Operand::kHalf];
  const int block = blockIdx.x;
  if (block >= tile_begins[count]) return;
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (tile_begins[middle] <= block) low = middle; else high = middle;
  }
  const Product p = list[low].p;
  const bool b_is_bf16 = list[low].b_is_bf16;
  const int tile = block - tile_begins[low], across = int((p.n + kTile - 1) / kTile);
  const int64_t m0 = int64_t(tile / across) * kTile, n0 = int64_t(tile % across) * kTile;
  if (list[low].lower && n0 > m0) return;
  Operand a(p.a, p.lda, p.m, m0, p.a_transposed, false), b(p.b, p.ldb, p.n, n0, !p.b_transposed, b_is_bf16);
  const int t = threadIdx.x, lane = t & 31, warp = t >> 5, wm = warp / 4 * 64, wn = warp % 4 * 32;

  float4 ra[Operand::kLoads], rb[Operand::kLoads];
  auto fetch = [&](int64_t k0) {
    const int k_rest = int(min(int64_t(kDeep), p.k - k0));
    a.fetch(ra, k_rest), b.fetch(rb, k_rest);
  };
  auto put = [&](int half) { a.template put<kSplit>(shared[half][0], ra), b.template put<kSplit>(shared[half][1], rb); };
  float c[4][4][4] = {};
  fetch(0);
  put(0);
  __syncthreads();
  int half = 0;
  for (int64_t k0 = 0; k0 < p.k; k0 += kDeep, half ^= 1) {
    const bool more = k0 + kDeep < p.k;
    if (more) fetch(k0 + kDeep);
    const uint32_t as = shared_address(shared[half][0]), bs = shared_address(shared[half][1]);
#pragma unroll
    for (int k = 0; k < kDeep; k += 16) {
      uint32_t x[kParts][4][4], y[kParts][2][4];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a.left(x[part][i], as + 2 * part * Operand::kHalf, wm + i * 16, k);
#pragma unroll
        for (int j = 0; j < 2; ++j) b.right(y[part][j], bs + 2 * part * Operand::kHalf, wn + j * 16, k);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if constexpr (kSplit) {  // the small ones first
            mma(c[i][j], x[1][i], y[0][j / 2][j % 2 * 2], y[0][j / 2][j % 2 * 2 + 1]);
            mma(c[i][j], x[0][i], y[1][j / 2][j % 2 * 2], y[1][j / 2][j % 2 * 2 + 1]);
          }
          mma(c[i][j], x[0][i], y[0][j / 2][j % 2 * 2], y[0][j / 2][j % 2 * 2 + 1]);
        }
    }
    if (more) put(half ^ 1);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int64_t m = m0 + wm + i * 16 + lane / 4 + e / 2 * 8, n = n0 + wn + j * 8 + lane % 4 * 2 + e % 2;
        if (m >= p.m || n >= p.n) continue;
        float* to = p.c + m * p.ldc + n;
        *to = p.accumulate ? *to + c[i][j][e] : c[i][j][e];
      }
}

}  // namespace

const char* products(const ProductListArgs& a, void* stream) {
  if (a.count == 0 || a.tiles == 0) return nullptr;
  if (a.tiles > 0x7fffffff) return "[product] the list has more tiles than a launch takes";
  if (a.narrow && !a.wide) return "[product] products in bfloat16 come in wide tiles";
  if (a.narrow && a.split)
    narrow_products_kernel<true><<<unsigned(a.tiles), kThreads, 0, cudaStream_t(stream)>>>(a.list, a.tile_begins, a.count);
  else if (a.narrow)
    narrow_products_kernel<false><<<unsigned(a.tiles), kThreads, 0, cudaStream_t(stream)>>>(a.list, a.tile_begins, a.count);
  else if (a.wide)
    products_kernel<8><<<unsigned(a.tiles), kThreads, 0, cudaStream_t(stream)>>>(a.list, a.tile_begins, a.count);
  else
    products_kernel<4><<<unsigned(a.tiles), kThreads, 0, cudaStream_t(stream)>>>(a.list, a.tile_begins, a.count);
  cudaError_t e = cudaGetLastError();
  return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}

}  // namespace k3::cuda
