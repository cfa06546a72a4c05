// Newton-Schulz in the Gram form. With A = X X^T of the normalised block, Z = aI + bA + cA^2:   Q <- Z Q,   A <- Z A Z   (all commute)
//
// Bound: bytes, the block read twice and written once (96 x 128 x 7168: 123 us); the recursion is 17 products of 128^3 a head (35 us).
// Split: 1 Gram by the vendor library; 2 recursion, one block a head, two warpgroups with 64 rows each; 3 apply, a block takes 128 x (n / 8).
// Precision is the point: the eigenvalues of A spread over the square of the singular values' range, and Q grows to hundreds, so bf16 anywhere in
// the recursion destroys the large directions. Every matrix is a sum hi + lo of two bf16, a product three products; Q is applied as hi + lo too.
// The norm never needs a pass of its own: the trace of the raw Gram matrix is the square of the Frobenius norm.
#include <cublas_v2.h>

#include "k3/core/tile.cuh"
#include "k3/core/wgmma.cuh"
#include "k3/ops/update/newton_schulz_cuda.h"

namespace k3::cuda {
namespace {

constexpr int D = 128, kPanel = D * 128, kMatrix = 2 * kPanel;  // bytes of 128 x 64, 128 x 128 bf16

struct Steps {
  float c[16][3];
};

// D = X Y for this warpgroup's 64 rows, X and Y symmetric, each as hi and lo
__device__ __forceinline__ void multiply(float (&d)[64], uint32_t x, uint32_t y) {
  const uint32_t row = (threadIdx.x >> 7) * 64 * 128;
  warpgroup_fence();
#pragma unroll
  for (int part = 0; part < 3; ++part) {  // lo hi, hi lo, hi hi: small terms first
    const uint32_t a = x + row + (part == 0 ? kMatrix : 0), b = y + (part == 1 ? kMatrix : 0);
#pragma unroll
    for (int k = 0; k < 8; ++k) wgmma<128, 0, 0>(d, describe(a + (k >> 2) * kPanel) + (k & 3) * 2, describe(b + (k >> 2) * kPanel) + (k & 3) * 2, part + k > 0);
  }
  warpgroup_commit();
  warpgroup_wait<0>();
  pin(d);
}
// Calls f(i, row, column) for each of the 64 values that this thread holds.
template <class F>
__device__ __forceinline__ void each(F f) {
  const int row = (threadIdx.x >> 5) * 16 + ((threadIdx.x & 31) >> 2), column = (threadIdx.x & 3) * 2;
#pragma unroll
  for (int i = 0; i < 64; ++i) f(i, row + 8 * (i >> 1 & 1), column + 8 * (i >> 2) + (i & 1));
}
__device__ __forceinline__ uint32_t residue(float x, float y, uint32_t hi) { return pack(x - low(hi), y - high(hi)); }
__device__ __forceinline__ void put(char* shared, uint32_t matrix, const float (&d)[64]) {
  __syncthreads();  // nobody reads the old matrix any more
  each([&](int i, int row, int column) {
    if (i & 1) return;
    uint32_t at = matrix + (column >> 6) * kPanel + swizzle128(row, (column & 63) * 2), hi = pack(d[i], d[i + 1]);
    *reinterpret_cast<uint32_t*>(shared + at) = hi;
    *reinterpret_cast<uint32_t*>(shared + at + kMatrix) = residue(d[i], d[i + 1], hi);
  });
  publish();
  __syncthreads();
}

__global__ void __launch_bounds__(256, 1) recursion_kernel(const __grid_constant__ NewtonSchulzArgs a, const __grid_constant__ Steps steps) {
  extern __shared__ char memory[];
  __shared__ float sums[4];
  char* s = memory + ((1024 - (shared_address(memory) & 1023)) & 1023);
  const uint32_t base = shared_address(s);
  constexpr uint32_t A = 0, Z = 2 * kMatrix, Q = 4 * kMatrix;
  const float* gram = a.gram + int64_t(blockIdx.x) * D * D;
  if (threadIdx.x < D) {
    float x = warp_sum(gram[threadIdx.x * (D + 1)]);
    if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = x;
  }
  __syncthreads();
  const float trace = (sums[0] + sums[1]) + (sums[2] + sums[3]), scale = trace > 0.f ? 1.f / (a.safety * a.safety * trace) : 0.f;
  float own[64], d[64];
  each([&](int i, int row, int column) { own[i] = 0.5f * scale * (gram[row * D + column] + gram[column * D + row]); });
  put(s, A, own);
  for (int step = 0; step < a.steps; ++step) {
    const float ca = steps.c[step][0], cb = steps.c[step][1], cc = steps.c[step][2];
    multiply(d, base + A, base + A);
    each([&](int i, int row, int column) { d[i] = cc * d[i] + cb * own[i] + (row == column ? ca : 0.f); });
    put(s, Z, d);
    if (step == 0) {
      put(s, Q, d);
    } else {
      multiply(d, base + Z, base + Q);
      if (step + 1 < a.steps) put(s, Q, d);
    }
    if (step + 1 < a.steps) {
      multiply(d, base + Z, base + A);
      put(s, A, d);
      multiply(own, base + A, base + Z);
      put(s, A, own);
    }
  }
  const float r = trace > 0.f ? sqrtf(scale) : 0.f;
  nv_bf16* q = static_cast<nv_bf16*>(a.q) + int64_t(blockIdx.x) * 2 * D * D;
  each([&](int i, int row, int column) {
    if (i & 1) return;
    uint32_t hi = pack(r * d[i], r * d[i + 1]);
    *reinterpret_cast<uint32_t*>(q + row * D + column) = hi;
    *reinterpret_cast<uint32_t*>(q + D * D + row * D + column) = residue(r * d[i], r * d[i + 1], hi);
  });
}

constexpr int kParts = 8, kOutRow = D * 2 + 16;

__global__ void __launch_bounds__(256, 1) apply_kernel(const __grid_constant__ NewtonSchulzArgs a) {
  extern __shared__ char memory[];
  char* s = memory + ((1024 - (shared_address(memory) & 1023)) & 1023);
  constexpr uint32_t X = 2 * kMatrix, out = X + 2 * kMatrix;  // Q hi, lo; two tiles of X; a tile of the result
  const int head = blockIdx.y, tiles = a.n / D, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const uint32_t base = shared_address(s);
  const nv_bf16* q = static_cast<const nv_bf16*>(a.q) + int64_t(head) * 2 * D * D;
  const nv_bf16* g = static_cast<const nv_bf16*>(a.g) + int64_t(head) * D * a.n;
  nv_bf16* x = static_cast<nv_bf16*>(a.x) + int64_t(head) * D * a.n;
  for (int i = threadIdx.x; i < 2 * D * 16; i += 256) {
    int row = i >> 4, c = i & 15;
    copy16(base + (row >> 7) * kMatrix + (c >> 3) * kPanel + swizzle128(row & 127, (c & 7) * 16), q + i * 8);
  }
  auto load = [&](int tile, int buffer) {
    if (tile < tiles)
#pragma unroll
      for (int i = threadIdx.x; i < D * 16; i += 256)
        copy16(base + X + buffer * kMatrix + ((i & 15) >> 3) * kPanel + swizzle128(i >> 4, (i & 7) * 16), g + int64_t(i >> 4) * a.n + tile * D + (i & 15) * 8);
    copy_commit();
  };
  int buffer = 0;
  load(blockIdx.x, 0);
  for (int tile = blockIdx.x; tile < tiles; tile += kParts, buffer ^= 1) {
    load(tile + kParts, buffer ^ 1);
    copy_wait<1>();
    publish();
    __syncthreads();
    float d[64];
    warpgroup_fence();
#pragma unroll
    for (int part = 1; part >= 0; --part)
#pragma unroll
      for (int k = 0; k < 8; ++k)
        wgmma<128, 0, 1>(d, describe(base + part * kMatrix + (k >> 2) * kPanel + (threadIdx.x >> 7) * 64 * 128) + (k & 3) * 2,
                         describe(base + X + buffer * kMatrix, 1024, kPanel) + k * 2048 / 16, part == 0 || k > 0);
    warpgroup_commit();
    warpgroup_wait<0>();
    pin(d);
    each([&](int i, int row, int column) {
      if (!(i & 1)) *reinterpret_cast<uint32_t*>(s + out + row * kOutRow + column * 2) = pack(d[i], d[i + 1]);
    });
    __syncwarp();  // a warp writes and reads its own 16 rows
#pragma unroll
    for (int i = lane; i < 16 * 16; i += 32)
      *reinterpret_cast<uint4*>(x + int64_t(warp * 16 + (i >> 4)) * a.n + tile * D + (i & 15) * 8) = *reinterpret_cast<const uint4*>(s + out + (warp * 16 + (i >> 4)) * kOutRow + (i & 15) * 16);
    __syncthreads();
  }
  copy_wait<0>();
}

}  // namespace

const char* newton_schulz(const NewtonSchulzArgs& a, void* stream) {
  if (a.n % D || a.n < D) return "[update] the GPU's Newton-Schulz takes blocks of 128 rows and a multiple of 128 columns";
  if (a.steps < 1 || a.steps > 16) return "[update] Newton-Schulz takes 1 to 16 steps";
  if (a.heads == 0) return nullptr;
  static cublasHandle_t handle = [] {
    cublasHandle_t h;
    return cublasCreate(&h) == CUBLAS_STATUS_SUCCESS ? h : nullptr;
  }();
  if (!handle) return "[update] cublasCreate failed";
  const float one = 1.f, zero = 0.f;
  cublasSetStream(handle, cudaStream_t(stream));
  if (cublasGemmStridedBatchedEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, D, D, a.n, &one, a.g, CUDA_R_16BF, a.n, int64_t(D) * a.n, a.g, CUDA_R_16BF, a.n, int64_t(D) * a.n, &zero, a.gram, CUDA_R_32F, D,
                                 D * D, a.heads, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT) != CUBLAS_STATUS_SUCCESS)
    return "[update] the Gram product was refused by cublas";
  Steps steps{};
  for (int i = 0; i < a.steps; ++i)
    for (int j = 0; j < 3; ++j) steps.c[i][j] = a.coefficients[i][j];
  constexpr int bytes = 6 * kMatrix + 1024, apply_bytes = 4 * kMatrix + D * kOutRow + 1024;
  cudaError_t e = cudaFuncSetAttribute(recursion_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e == cudaSuccess) e = cudaFuncSetAttribute(apply_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, apply_bytes);
  if (e != cudaSuccess) return cudaGetErrorString(e);
  recursion_kernel<<<a.heads, 256, bytes, cudaStream_t(stream)>>>(a, steps);
  apply_kernel<<<dim3(kParts, a.heads), 256, apply_bytes, cudaStream_t(stream)>>>(a);
  e = cudaGetLastError();
  return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}

}  // namespace k3::cuda
