// Bound: bytes. Split: a block has kUpdateBlock elements of one tensor, or a tile of one matrix, found by bisection.
#include "k3/core/enqueue.cuh"
#include "k3/core/tile.cuh"
#include "k3/ops/update/resident_cuda.h"

namespace k3::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
__device__ __forceinline__ int find(const T* begins, int count, T at) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (begins[middle] <= at) low = middle; else high = middle;
  }
  return low;
}

// The threads' values in order of a fixed tree, for thread 0.
__device__ double block_sum(double x) {
  __shared__ double part[kThreads / 32];
#pragma unroll
  for (int s = 16; s > 0; s >>= 1) x += __shfl_xor_sync(~0u, x, s);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = x;
  __syncthreads();
  x = part[0];
  for (int w = 1; w < kThreads / 32; ++w) x += part[w];
  return x;
}

__global__ void __launch_bounds__(kThreads) squares_kernel(const NormArgs a) {
  follow();
  const int i = find(a.begins, int(a.count), int32_t(blockIdx.x));
  const float* x = a.grads[i];
  const int64_t first = (int64_t(blockIdx.x) - a.begins[i]) * kUpdateBlock, n = min(kUpdateBlock, a.sizes[i] - first);
  double sum = 0;
  if (a.touched[i] && !a.touched[i][blockIdx.x - a.begins[i]]) {
    if (threadIdx.x == 0) a.partial[blockIdx.x] = 0;
    return;
  }
  if (n == kUpdateBlock) {
    float4 v[kUpdateBlock / 4 / kThreads];
#pragma unroll
    for (int j = 0; j < int(kUpdateBlock / 4 / kThreads); ++j) v[j] = __ldcs(reinterpret_cast<const float4*>(x + first) + j * kThreads + threadIdx.x);
#pragma unroll
    for (int j = 0; j < int(kUpdateBlock / 4 / kThreads); ++j)
      sum += (double(v[j].x) * v[j].x + double(v[j].y) * v[j].y) + (double(v[j].z) * v[j].z + double(v[j].w) * v[j].w);
  } else {
    for (int64_t e = threadIdx.x; e < n; e += kThreads) sum += double(x[first + e]) * x[first + e];
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) a.partial[blockIdx.x] = sum;
}
__global__ void __launch_bounds__(kThreads) totals_kernel(const NormArgs a) {
  follow();
  double sum = 0;
  for (int32_t b = a.begins[blockIdx.x] + int32_t(threadIdx.x); b < a.begins[blockIdx.x + 1]; b += kThreads) sum += a.partial[b];
  sum = block_sum(sum);
  if (threadIdx.x == 0) a.sums[blockIdx.x] = sum;
}
__global__ void __launch_bounds__(kThreads) gate_kernel(const NormArgs a) {
  follow();
  double sum = 0;
  for (int64_t i = threadIdx.x; i < a.count; i += kThreads) sum += a.sums[i];
  sum = block_sum(sum);
  if (threadIdx.x) return;
  const double norm = sqrt(sum);
  *a.gate = {norm, a.clip > 0 && norm > a.clip ? float(a.clip / norm) : 1.f, isfinite(norm), *a.rates};
}

// Which products are rounded before they are added is said here, not left to the compiler: a row that is updated late has the same bits.
template <class Args>
__device__ __forceinline__ void adamw_element(const Args& a, const StepRates& s, float decay, float g, float& w, float& m, float& v) {
  m = __fmaf_rn(a.beta1, m, __fmul_rn(1.f - a.beta1, g)), v = __fmaf_rn(__fmul_rn(1.f - a.beta2, g), g, __fmul_rn(a.beta2, v));
  const float step = __fdiv_rn(__fmul_rn(m, s.correct1), __fadd_rn(__fsqrt_rn(__fmul_rn(v, s.correct2)), a.eps));
  w = __fmaf_rn(-s.adamw_lr, __fmaf_rn(decay, w, step), w);
}

__global__ void __launch_bounds__(kThreads) adamw_kernel(const AdamwListArgs a) {
  follow();
  const StepGate gate = *a.gate;
  if (!gate.finite) return;
  const int32_t part = int32_t(blockIdx.x);
  const int i = find(a.begins, int(a.count), part);
  const AdamwTensor t = a.list[i];
  const int64_t first = (int64_t(part) - a.begins[i]) * kUpdateBlock, n = min(kUpdateBlock, t.n - first);
  nv_bf16* copy = static_cast<nv_bf16*>(t.copy);
  const bool zero = t.touched && !t.touched[part - a.begins[i]];
  if (n == kUpdateBlock) {
    constexpr int kTogether = 2;  // loads of so many fours are on their way before the first is stored
    for (int j = 0; j < int(kUpdateBlock / 4 / kThreads); j += kTogether) {
      float w[kTogether][4], m[kTogether][4], v[kTogether][4], g[kTogether][4];
      auto load = [](float (&to)[4], const float* from) { *reinterpret_cast<float4*>(to) = __ldcs(reinterpret_cast<const float4*>(from)); };
      auto store = [](float* to, const float (&from)[4]) { __stcs(reinterpret_cast<float4*>(to), *reinterpret_cast<const float4*>(from)); };
      const int64_t at = first + (j * kThreads + threadIdx.x) * 4;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int64_t x = at + i * kThreads * 4;
        load(w[i], t.weight + x), load(m[i], t.m + x), load(v[i], t.v + x);
        if (zero)
          g[i][0] = g[i][1] = g[i][2] = g[i][3] = 0.f;
        else
          load(g[i], t.grad + x);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int64_t x = at + i * kThreads * 4;
#pragma unroll
        for (int e = 0; e < 4; ++e) adamw_element(a, gate.rates, t.decay, g[i][e] * gate.scale, w[i][e], m[i][e], v[i][e]);
        store(t.weight + x, w[i]), store(t.m + x, m[i]), store(t.v + x, v[i]);
        if (copy) *reinterpret_cast<uint2*>(copy + x) = make_uint2(pack(w[i][0], w[i][1]), pack(w[i][2], w[i][3]));
      }
    }
    return;
  }
  for (int64_t at = first + threadIdx.x; at < first + n; at += kThreads) {
    float w = t.weight[at], m = t.m[at], v = t.v[at];
    adamw_element(a, gate.rates, t.decay, zero ? 0.f : t.grad[at] * gate.scale, w, m, v);
    t.weight[at] = w, t.m[at] = m, t.v[at] = v;
    if (copy) copy[at] = __float2bfloat16_rn(w);
  }
}

// Updates [from, to) of a row without a gradient, all threads of the block.
__device__ void replay(const LateRows& a, int64_t row, int32_t from, int32_t to) {
  __shared__ StepRates rates[kLateKept];
  for (int32_t u = from + int32_t(threadIdx.x); u < to; u += kThreads) rates[u % kLateKept] = a.state->rates[u % kLateKept];
  __syncthreads();
  for (int64_t c = threadIdx.x * 4; c < a.d; c += kThreads * 4) {
    float w[4], m[4], v[4];
    const int64_t at = row * a.d + c;
    *reinterpret_cast<float4*>(w) = *reinterpret_cast<const float4*>(a.weight + at), *reinterpret_cast<float4*>(m) = *reinterpret_cast<const float4*>(a.m + at);
    *reinterpret_cast<float4*>(v) = *reinterpret_cast<const float4*>(a.v + at);
    bool rests = true;  // never had a gradient
#pragma unroll
    for (int e = 0; e < 4; ++e) rests &= m[e] == 0.f && v[e] == 0.f;
    if (rests) {
      for (int32_t u = from; u < to; ++u)
#pragma unroll
        for (int e = 0; e < 4; ++e) w[e] = __fmaf_rn(-rates[u % kLateKept].adamw_lr, __fmul_rn(a.decay, w[e]), w[e]);
    } else {
      for (int32_t u = from; u < to; ++u)
#pragma unroll
        for (int e = 0; e < 4; ++e) adamw_element(a, rates[u % kLateKept], a.decay, 0.f, w[e], m[e], v[e]);
      *reinterpret_cast<float4*>(a.m + at) = *reinterpret_cast<const float4*>(m), *reinterpret_cast<float4*>(a.v + at) = *reinterpret_cast<const float4*>(v);
    }
    *reinterpret_cast<float4*>(a.weight + at) = *reinterpret_cast<const float4*>(w);
  }
}
__device__ void bring_up_to_date(const LateRows& a, int64_t row) {
  __shared__ int32_t from;
  const int32_t to = a.state->updates;
  if (threadIdx.x == 0) from = atomicExch(a.done + row, to);  // the first block of a row does it
  __syncthreads();
  if (from < to) replay(a, row, from, to);
}
__global__ void __launch_bounds__(kThreads) catch_up_kernel(const LateRows a, const int32_t* ids) {
  follow();
  const int64_t row = ids ? ids[blockIdx.x] : int64_t(blockIdx.x);
  if (row >= 0) bring_up_to_date(a, row);
}
__global__ void __launch_bounds__(kThreads) turn_kernel(const LateRows a) {
  follow();
  const int64_t row = int64_t(blockIdx.x) * kLateTurns + a.state->updates % kLateTurns;
  if (row < a.rows) bring_up_to_date(a, row);
}
__global__ void __launch_bounds__(kThreads) late_kernel(const LateRows a) {  // a warp a row
  follow();
  const int64_t row = int64_t(blockIdx.x) * (kThreads / 32) + (threadIdx.x >> 5);
  if (row >= a.rows || !a.touched[row * a.d / kUpdateBlock]) return;
  const StepGate gate = *a.gate;
  const int32_t now = a.state->updates;
  if (!gate.finite || a.done[row] != now) return;
  for (int64_t c = (threadIdx.x & 31) * 4; c < a.d; c += 128) {
    float w[4], m[4], v[4], g[4];
    const int64_t at = row * a.d + c;
    *reinterpret_cast<float4*>(w) = *reinterpret_cast<const float4*>(a.weight + at), *reinterpret_cast<float4*>(m) = *reinterpret_cast<const float4*>(a.m + at);
    *reinterpret_cast<float4*>(v) = *reinterpret_cast<const float4*>(a.v + at), *reinterpret_cast<float4*>(g) = *reinterpret_cast<const float4*>(a.grad + at);
#pragma unroll
    for (int e = 0; e < 4; ++e) adamw_element(a, gate.rates, a.decay, g[e] * gate.scale, w[e], m[e], v[e]);
    *reinterpret_cast<float4*>(a.weight + at) = *reinterpret_cast<const float4*>(w), *reinterpret_cast<float4*>(a.m + at) = *reinterpret_cast<const float4*>(m);
    *reinterpret_cast<float4*>(a.v + at) = *reinterpret_cast<const float4*>(v);
  }
  __syncwarp();
  if ((threadIdx.x & 31) == 0) a.done[row] = now + 1;
}
__global__ void __launch_bounds__(32) count_kernel(const LateRows a) {
  follow();
  if (threadIdx.x || !a.gate->finite) return;
  a.state->rates[a.state->updates % kLateKept] = a.gate->rates;
  ++a.state->updates;
}

__global__ void __launch_bounds__(kThreads) clear_kernel(float* grad, int64_t n, uint8_t* touched) {
  follow();
  const bool some = touched[blockIdx.x];
  __syncthreads();
  if (!some) return;
  for (int64_t i = blockIdx.x * kUpdateBlock + threadIdx.x, end = min(n, (blockIdx.x + 1) * kUpdateBlock); i < end; i += kThreads) grad[i] = 0.f;
  if (threadIdx.x == 0) touched[blockIdx.x] = 0;
}

constexpr int T = int(kMuonTile), kRows = kThreads / 32;  // a warp has a row of a tile, two columns a lane

struct Tile {
  MuonBlock b;
  int matrix, r0, c0;
  bool tall;
  __device__ explicit Tile(const MuonListArgs& a) : matrix(find(a.tile_begins, int(a.count), int32_t(blockIdx.x))) {
    b = a.list[matrix];
    const int tile = int(blockIdx.x) - a.tile_begins[matrix], across = (b.cols + T - 1) / T;
    r0 = tile / across * T, c0 = tile % across * T, tall = b.rows > b.cols;
  }
};

__global__ void __launch_bounds__(kThreads) ahead_kernel(const MuonListArgs a) {
  follow();
  __shared__ float turned[T][T + 1];
  const StepGate gate = *a.gate;
  const Tile t(a);
  const MuonBlock& b = t.b;
  nv_bf16* x = static_cast<nv_bf16*>(a.x) + b.x;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  double sum = 0;
  if (gate.finite) {
    float g[T / kRows][2], old[T / kRows][2];
    auto there = [&](int r, int c) { return t.r0 + r < b.rows && t.c0 + c < b.cols; };
    auto at = [&](int r, int c) { return int64_t(t.r0 + r) * b.cols + t.c0 + c; };
#pragma unroll
    for (int i = 0; i < T / kRows; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int r = warp + i * kRows, c = lane + j * 32;
        g[i][j] = there(r, c) ? gate.scale * b.grad[at(r, c)] : 0.f, old[i][j] = there(r, c) ? b.momentum[at(r, c)] : 0.f;
      }
#pragma unroll
    for (int i = 0; i < T / kRows; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int r = warp + i * kRows, c = lane + j * 32;
        const float m = __fmaf_rn(a.momentum, old[i][j], g[i][j]), y = a.nesterov ? __fmaf_rn(a.momentum, m, g[i][j]) : m;
        if (there(r, c)) {
          b.momentum[at(r, c)] = m;
          if (!t.tall) x[int64_t(t.r0 + r) * b.ld + t.c0 + c] = __float2bfloat16_rn(y);
        }
        if (t.tall) turned[r][c] = y;
        sum += double(y) * y;
      }
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) a.partial[blockIdx.x] = sum;
  if (!t.tall || !gate.finite) return;
  __syncthreads();
  for (int c = warp; c < T; c += kRows)
    for (int r = lane; r < T; r += 32)
      if (t.r0 + r < b.rows && t.c0 + c < b.cols) x[int64_t(t.c0 + c) * b.ld + t.r0 + r] = __float2bfloat16_rn(turned[r][c]);
}
__global__ void __launch_bounds__(kThreads) factors_kernel(const MuonListArgs a) {
  follow();
  double sum = 0;
  for (int32_t b = a.tile_begins[blockIdx.x] + int32_t(threadIdx.x); b < a.tile_begins[blockIdx.x + 1]; b += kThreads) sum += a.partial[b];
  sum = block_sum(sum);
  if (threadIdx.x == 0) a.factors[blockIdx.x] = float(1 / (sqrt(sum) + 1e-7));
}
__global__ void __launch_bounds__(kThreads) normalise_kernel(const MuonListArgs a) {  // sizes are multiples of 8
  follow();
  const int64_t at = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * 8;
  if (at >= a.elements) return;
  const float f = a.factors[find(a.x_begins, int(a.count), at)];
  nv_bf16* x = static_cast<nv_bf16*>(a.x) + at;
  float v[8];
  load8(x, v);
#pragma unroll
  for (float& e : v) e *= f;
  store8(x, v);
}

__global__ void __launch_bounds__(kThreads) apply_kernel(const MuonListArgs a) {
  follow();
  __shared__ float turned[T][T + 1];
  if (!a.gate->finite) return;
  const Tile t(a);
  const MuonBlock& b = t.b;
  const nv_bf16* x = static_cast<const nv_bf16*>(a.x) + b.x;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (t.tall) {
    for (int c = warp; c < T; c += kRows)
      for (int r = lane; r < T; r += 32)
        if (t.r0 + r < b.rows && t.c0 + c < b.cols) turned[r][c] = __bfloat162float(x[int64_t(t.c0 + c) * b.ld + t.r0 + r]);
    __syncthreads();
  }
  const float lr = a.gate->rates.muon_lr, step = lr * b.step, decay = lr * a.decay;
  float o[T / kRows][2], w[T / kRows][2];
#pragma unroll
  for (int i = 0; i < T / kRows; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int r = warp + i * kRows, c = lane + j * 32;
      const bool there = t.r0 + r < b.rows && t.c0 + c < b.cols;
      o[i][j] = !there ? 0.f : t.tall ? turned[r][c] : __bfloat162float(x[int64_t(t.r0 + r) * b.ld + t.c0 + c]);
      w[i][j] = there ? b.weight[int64_t(t.r0 + r) * b.cols + t.c0 + c] : 0.f;
    }
#pragma unroll
  for (int i = 0; i < T / kRows; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int r = warp + i * kRows, c = lane + j * 32;
      if (t.r0 + r >= b.rows || t.c0 + c >= b.cols) continue;
      const int64_t at = int64_t(t.r0 + r) * b.cols + t.c0 + c;
      const float y = w[i][j] - __fmaf_rn(step, o[i][j], decay * w[i][j]);
      b.weight[at] = y;
      if (b.copy) static_cast<nv_bf16*>(b.copy)[at] = __float2bfloat16_rn(y);
    }
}

}  // namespace

const char* gradient_norm(const NormArgs& a, void* stream) {
  if (a.blocks) enqueue(squares_kernel, unsigned(a.blocks), kThreads, 0, stream_of(stream), a);
  if (a.count) enqueue(totals_kernel, unsigned(a.count), kThreads, 0, stream_of(stream), a);
  enqueue(gate_kernel, 1, kThreads, 0, stream_of(stream), a);
  return launched();
}
const char* clear_touched(float* grad, int64_t n, uint8_t* touched, void* stream) {
  if (n) enqueue(clear_kernel, unsigned(update_blocks(n)), kThreads, 0, stream_of(stream), grad, n, touched);
  return launched();
}
const char* adamw(const AdamwListArgs& a, void* stream) {
  if (a.blocks) enqueue(adamw_kernel, unsigned(a.blocks), kThreads, 0, stream_of(stream), a);
  return launched();
}
const char* late_update(const LateRows& a, void* stream) {
  if (a.rows == 0) return nullptr;
  enqueue(late_kernel, blocks_for(a.rows, kThreads / 32), kThreads, 0, stream_of(stream), a);
  enqueue(count_kernel, 1, 32, 0, stream_of(stream), a);
  enqueue(turn_kernel, blocks_for(a.rows, kLateTurns), kThreads, 0, stream_of(stream), a);
  return launched();
}
const char* late_catch_up(const LateRows& a, const int32_t* ids, int64_t count, void* stream) {
  if (count) enqueue(catch_up_kernel, unsigned(count), kThreads, 0, stream_of(stream), a, ids);
  return launched();
}
const char* muon_ahead(const MuonListArgs& a, void* stream) {
  if (a.count == 0) return nullptr;
  enqueue(ahead_kernel, unsigned(a.tiles), kThreads, 0, stream_of(stream), a);
  enqueue(factors_kernel, unsigned(a.count), kThreads, 0, stream_of(stream), a);
  enqueue(normalise_kernel, blocks_for(a.elements, 8 * kThreads), kThreads, 0, stream_of(stream), a);
  return launched();
}
const char* muon_apply(const MuonListArgs& a, void* stream) {
  if (a.tiles) enqueue(apply_kernel, unsigned(a.tiles), kThreads, 0, stream_of(stream), a);
  return launched();
}

}  // namespace k3::cuda
