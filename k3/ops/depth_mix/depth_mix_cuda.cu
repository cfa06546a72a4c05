// Attention over depth, one token after the other on each multiprocessor:
//   r_i = (mean v_i^2 + eps)^-1/2    s_i = r_i v_i.u    u = w p    alpha = softmax(s)    y = sum_i alpha_i v_i
//   c_i = v_i.dy    ds_i = alpha_i (c_i - sum_j alpha_j c_j)    dv_i = alpha_i dy + ds_i r_i u - (ds_i s_i r_i^2 / d) v_i
//   du = sum over tokens and sources of ds_i r_i v_i;    dw = du p,    dp = du w
//
// Bound: bytes; a source row is read once (T 8192, d 7168, 9 sources: forward 273 us, backward 519 us).
// Split: a persistent block a multiprocessor. One thread keeps a ring of rows full by bulk copies; 448 threads take a row into registers (16
// values each, bf16) and free its place at once, so the ring is always ahead. All rows of a token are in registers when the sums are known.
// Precision: statistics, softmax, mix and du float32. du: a block's tokens in order, then the blocks in order.
#include "k3/core/tile.cuh"
#include "k3/ops/depth_mix/depth_mix_cuda.h"

namespace k3::cuda {
namespace {

constexpr int kThreads = 448, kWarps = kThreads / 32, kMax = kDepthSources, kRingBytes = 196608;

struct Ring {
  uint32_t full, empty, rows;
  int slots, slot = 0;
  uint32_t phase = 0, bytes;
  __device__ void next() {
    if (++slot == slots) slot = 0, phase ^= 1;
  }
};

__device__ Ring make_ring(char* memory, int d) {
  uint32_t base = (shared_address(memory) + 127) & ~127u;
  Ring r;
  r.bytes = d * 2, r.slots = min(32, kRingBytes / int(r.bytes)), r.full = base, r.empty = base + 32 * 8, r.rows = base + 64 * 8;
  if (threadIdx.x == 0) {
    for (int i = 0; i < r.slots; ++i) barrier_init(r.full + i * 8, 1), barrier_init(r.empty + i * 8, kWarps * kWarpArrivals);
    barrier_init_done();
  }
  __syncthreads();
  return r;
}
__device__ void feed(Ring& r, const void* rows, int64_t token, int d) {
  wait(r.empty + r.slot * 8, r.phase ^ 1);
  arrive_expect(r.full + r.slot * 8, r.bytes);
  bulk_load(r.rows + r.slot * r.bytes, static_cast<const nv_bf16*>(rows) + token * d, r.bytes, r.full + r.slot * 8);
  r.next();
}
// A thread's 16 values of the next row: two chunks of 8, 448 apart; zeros past the end.
__device__ __forceinline__ void take(Ring& r, uint4 (&x)[2], int chunks) {
  wait(r.full + r.slot * 8, r.phase);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    int c = threadIdx.x + j * kThreads;
    x[j] = make_uint4(0, 0, 0, 0);
    if (c < chunks)
      asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(x[j].x), "=r"(x[j].y), "=r"(x[j].z), "=r"(x[j].w) : "r"(r.rows + r.slot * r.bytes + c * 16));
  }
  __syncwarp();
  arrive_warp(r.empty + r.slot * 8);
  r.next();
}
__device__ __forceinline__ void unpack(const uint4& u, float (&x)[8]) {
  x[0] = low(u.x), x[1] = high(u.x), x[2] = low(u.y), x[3] = high(u.y), x[4] = low(u.z), x[5] = high(u.z), x[6] = low(u.w), x[7] = high(u.w);
}
// Sums of N values over the block: lane l of every warp returns the sum of value l % N.
template <int N>
__device__ __forceinline__ float block_sums(const float (&x)[N], float* scratch) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  scratch[warp * 32 + lane] = warp_sums_complete(x);
  named_barrier(1, kThreads);
  float s = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) s += scratch[w * 32 + lane];
  return s;
}

struct Weights {  // lane i: source i
  float alpha, r, s;
  __device__ void soften(int sources) {
    float x = (threadIdx.x & 31) < sources ? s : -INFINITY, e = ex2(kLog2e * (x - warp_max(x)));
    alpha = e / warp_sum(e);
  }
};
// lane i of `sums` holds the sum of squares of source i, lane 10 + i its product with u
__device__ __forceinline__ Weights softmax(float sums, int sources, int d, float eps) {
  Weights w;
  w.r = rsqrtf(sums / d + eps);
  w.s = w.r * __shfl_sync(~0u, sums, (threadIdx.x + 10) & 31);
  w.soften(sources);
  return w;
}

__global__ void __launch_bounds__(kThreads + 32, 1) depth_mix_forward_kernel(const __grid_constant__ DepthMixArgs a) {
  extern __shared__ char memory[];
  __shared__ float scratch[3][kWarps * 32];
  Ring ring = make_ring(memory, a.d);
  const int chunks = a.d / 8;
  if (threadIdx.x >= kThreads) {
    if (threadIdx.x == kThreads)
      for (int64_t t = blockIdx.x; t < a.rows; t += gridDim.x) {
        if (a.addend) feed(ring, a.addend, t, a.d);
        for (int i = a.sources - 1; i >= 0; --i) feed(ring, a.v[i], t, a.d);
      }
    return;
  }
  float u[16];
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    int c = (threadIdx.x + (j >> 3) * kThreads) * 8 + (j & 7);
    u[j] = c < a.d ? a.w[c] * a.p[c] : 0.f;
  }
  int turn = 0;
  for (int64_t t = blockIdx.x; t < a.rows; t += gridDim.x, turn ^= 1) {
    uint4 v[kMax][2];
    float sums[32] = {};
    uint4 add[2];
    if (a.addend) take(ring, add, chunks);
#pragma unroll
    for (int i = kMax - 1; i >= 0; --i) {
      if (i < a.sources) {
        take(ring, v[i], chunks);
        if (a.addend && i == a.sources - 1) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float x[8], y[8];
            unpack(v[i][j], x), unpack(add[j], y);
#pragma unroll
            for (int e = 0; e < 8; ++e) x[e] += y[e];
            v[i][j] = make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
            int c = threadIdx.x + j * kThreads;
            if (c < chunks) reinterpret_cast<uint4*>(static_cast<nv_bf16*>(a.sum) + t * a.d)[c] = v[i][j];
          }
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float x[8];
          unpack(v[i][j], x);
#pragma unroll
          for (int e = 0; e < 8; ++e) sums[i] += x[e] * x[e], sums[10 + i] += x[e] * u[j * 8 + e];
        }
      }
    }
    Weights w = softmax(block_sums(sums, scratch[turn]), a.sources, a.d, a.eps);
    if (a.stats && threadIdx.x < 16) a.stats[t * 32 + threadIdx.x] = w.r, a.stats[t * 32 + 16 + threadIdx.x] = w.s;
    float y[16] = {};
#pragma unroll
    for (int i = 0; i < kMax; ++i) {
      if (i < a.sources) {
        float alpha = __shfl_sync(~0u, w.alpha, i);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float x[8];
          unpack(v[i][j], x);
#pragma unroll
          for (int e = 0; e < 8; ++e) y[j * 8 + e] += alpha * x[e];
        }
      }
    }
    float square[32] = {};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      int c = threadIdx.x + j * kThreads;
      uint4 o = make_uint4(pack(y[8 * j], y[8 * j + 1]), pack(y[8 * j + 2], y[8 * j + 3]), pack(y[8 * j + 4], y[8 * j + 5]), pack(y[8 * j + 6], y[8 * j + 7]));
      if (c < chunks) reinterpret_cast<uint4*>(static_cast<nv_bf16*>(a.y) + t * a.d)[c] = o;
      float x[8];
      unpack(o, x);  // the norm reads what was stored
#pragma unroll
      for (int e = 0; e < 8; ++e) y[8 * j + e] = x[e], square[0] += x[e] * x[e];
    }
    if (a.norm) {
      float total = warp_sum(square[0]);
      if ((threadIdx.x & 31) == 0) scratch[2][threadIdx.x >> 5] = total;
      named_barrier(1, kThreads);
      total = 0.f;
#pragma unroll
      for (int k = 0; k < kWarps; ++k) total += scratch[2][k];
      float r = rsqrtf(total / a.d + a.eps);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        int c = threadIdx.x + j * kThreads;
        if (c < chunks) {
          float g[8], x[8];
          load8(a.norm + c * 8, g);
#pragma unroll
          for (int e = 0; e < 8; ++e) x[e] = y[8 * j + e] * r * g[e];
          store8(static_cast<nv_bf16*>(a.n) + t * a.d + c * 8, x);
        }
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads + 32, 1) depth_mix_backward_kernel(const __grid_constant__ DepthMixArgs a) {
  extern __shared__ char memory[];
  __shared__ float scratch[2][kWarps * 32];
  Ring ring = make_ring(memory, a.d);
  const int chunks = a.d / 8;
  if (threadIdx.x >= kThreads) {
    if (threadIdx.x == kThreads)
      for (int64_t t = blockIdx.x; t < a.rows; t += gridDim.x) {
        feed(ring, a.dy, t, a.d);
        for (int i = 0; i < a.sources; ++i) feed(ring, a.v[i], t, a.d);
      }
    return;
  }
  float* u = reinterpret_cast<float*>(memory + kRingBytes + 640);  // in shared memory: registers are for the rows
  float du[16] = {};
  for (int c = threadIdx.x; c < 2 * 8 * kThreads; c += kThreads) u[c] = c < a.d ? a.w[c] * a.p[c] : 0.f;
  named_barrier(1, kThreads);
  int turn = 0;
  for (int64_t t = blockIdx.x; t < a.rows; t += gridDim.x, turn ^= 1) {
    uint4 v[kMax][2], dy[2];
    float sums[16] = {};
    take(ring, dy, chunks);
#pragma unroll
    for (int i = 0; i < kMax; ++i) {
      if (i < a.sources) {
        take(ring, v[i], chunks);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float x[8], g[8];
          unpack(v[i][j], x), unpack(dy[j], g);
#pragma unroll
          for (int e = 0; e < 8; ++e) sums[i] += x[e] * g[e];
        }
      }
    }
    const int lane = threadIdx.x & 15;
    Weights w{0.f, a.stats[t * 32 + lane], a.stats[t * 32 + 16 + lane]};
    w.soften(a.sources);
    float c = block_sums(sums, scratch[turn]);
    float ds = w.alpha * (c - warp_sum((threadIdx.x & 31) < a.sources ? w.alpha * c : 0.f));
    float of_u = ds * w.r, of_v = -ds * w.s * w.r * w.r / a.d;
#pragma unroll
    for (int i = 0; i < kMax; ++i) {
      if (i < a.sources) {
        const float alpha = __shfl_sync(~0u, w.alpha, i), fu = __shfl_sync(~0u, of_u, i), fv = __shfl_sync(~0u, of_v, i);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float x[8], g[8], uu[8];
          unpack(v[i][j], x), unpack(dy[j], g), load8(u + (threadIdx.x + j * kThreads) * 8, uu);
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            du[8 * j + e] += fu * x[e];
            x[e] = alpha * g[e] + fu * uu[e] + fv * x[e];
          }
          int chunk = threadIdx.x + j * kThreads;
          if (chunk < chunks) {
            nv_bf16* to = static_cast<nv_bf16*>(a.dv[i]) + t * a.d + chunk * 8;
            if (a.add) {
              float old[8];
              load8(to, old);
#pragma unroll
              for (int e = 0; e < 8; ++e) x[e] += old[e];
            }
            store8(to, x);
          }
        }
      }
    }
  }
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    int c = (threadIdx.x + (j >> 3) * kThreads) * 8 + (j & 7);
    if (c < a.d) a.partial[int64_t(blockIdx.x) * a.d + c] = du[j];
  }
}

__global__ void __launch_bounds__(128) depth_mix_weights_kernel(const DepthMixArgs a, int blocks) {
  const int c = blockIdx.x * 128 + threadIdx.x;
  if (c >= a.d) return;
  float du = 0.f;
#pragma unroll 8
  for (int b = 0; b < blocks; ++b) du += a.partial[int64_t(b) * a.d + c];
  a.dw[c] += du * a.p[c], a.dp[c] += du * a.w[c];
}

const char* refuse(const DepthMixArgs& a) {
  if (a.sources < 1 || a.sources > kMax) return "[depth_mix] the GPU kernel mixes 1 to 9 sources; use larger blocks";
  if (a.d % 8 || a.d > kDepthWidth) return "[depth_mix] the GPU kernel serves widths that are multiples of 8 up to 7168";
  return nullptr;
}
constexpr int kBytes = kRingBytes + 640, kBackwardBytes = kBytes + 2 * 8 * kThreads * 4, kBlocks = 132;

}  // namespace

const char* depth_mix_forward(const DepthMixArgs& a, void* stream) {
  if (const char* e = refuse(a)) return e;
  if (a.rows == 0) return nullptr;
  cudaError_t e = cudaFuncSetAttribute(depth_mix_forward_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (e == cudaSuccess) {
    depth_mix_forward_kernel<<<int(a.rows < kBlocks ? a.rows : kBlocks), kThreads + 32, kBytes, cudaStream_t(stream)>>>(a);
    e = cudaGetLastError();
  }
  return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}

const char* depth_mix_backward(const DepthMixArgs& a, void* stream) {
  if (const char* e = refuse(a)) return e;
  if (!a.stats) return "[depth_mix] the backward needs the forward's stats";
  if (a.rows == 0) return nullptr;
  const int blocks = int(a.rows < kBlocks ? a.rows : kBlocks);
  cudaError_t e = cudaFuncSetAttribute(depth_mix_backward_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBackwardBytes);
  if (e == cudaSuccess) {
    depth_mix_backward_kernel<<<blocks, kThreads + 32, kBackwardBytes, cudaStream_t(stream)>>>(a);
    depth_mix_weights_kernel<<<(a.d + 127) / 128, 128, 0, cudaStream_t(stream)>>>(a, blocks);
    e = cudaGetLastError();
  }
  return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}

}  // namespace k3::cuda
