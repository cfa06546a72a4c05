// Bound: the tensor units through mma.sync. Split: a block is a tile of 128 x 128 of one expert's result, eight warps of 64 x 32; 64 of the summed
// dimension at a time, three stages on their way. An operand lies in shared memory as in global memory, (row, k) or (k, row); ldmatrix turns it.
#include "k3/core/tile.cuh"
#include "k3/ops/activation/glu.cuh"
#include "k3/ops/moe/experts_narrow_cuda.h"

namespace k3::cuda {
namespace {

constexpr int kThreads = 256, T = int(kExpertTile), kDeep = 64, kStages = 3;
constexpr int kAlongK = kDeep + 8, kAlongRow = T + 8, kOperand = T * kAlongK;  // bfloat16s of an operand's stage
static_assert(kDeep * kAlongRow <= kOperand);
constexpr int kSharedBytes = kStages * 2 * kOperand * 2;

// How a thread copies an operand's tiles: its first eight values, and from there to its others; `rows` of the tile exist, a multiple of 8 where they
// are contiguous, as the summed dimension is else.
template <bool kOuter>  // k outermost in memory
struct Copies {
  static constexpr int kEach = T * kDeep / 8 / kThreads, kStep = kThreads / (kOuter ? T / 8 : kDeep / 8);
  const nv_bf16 *from, *safe;
  int64_t jump, further;  // to the thread's next eight; to the same eight kDeep further
  int row, k;
  uint32_t to;  // bytes
  __device__ __forceinline__ Copies(const nv_bf16* matrix, int64_t ld) : safe(matrix) {
    const int c = threadIdx.x;
    k = kOuter ? c / (T / 8) : c % (kDeep / 8) * 8, row = kOuter ? c % (T / 8) * 8 : c / (kDeep / 8);
    from = matrix + (kOuter ? k * ld + row : row * ld + k), jump = kStep * ld, further = kOuter ? kDeep * ld : kDeep;
    to = 2 * (kOuter ? k * kAlongRow + row : row * kAlongK + k);
  }
  __device__ __forceinline__ void ask(uint32_t stage, int rows, int depth) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const bool there = kOuter ? k + i * kStep < depth && row < rows : row + i * kStep < rows && k < depth;
      copy16(stage + to + 2 * i * kStep * (kOuter ? kAlongRow : kAlongK), there ? from + i * jump : safe, there);
    }
    from += further;
  }
};
template <bool kOuter>
__device__ __forceinline__ void left(uint32_t (&x)[4], uint32_t tile, int row, int k) {
  const int lane = threadIdx.x & 31;
  if constexpr (kOuter) ldmatrix4_transposed(x, tile + 2 * ((k + (lane & 7) + (lane >> 4) * 8) * kAlongRow + row + (lane >> 3 & 1) * 8));
  else ldmatrix4(x, tile + 2 * ((row + (lane & 15)) * kAlongK + k + (lane >> 4) * 8));
}
template <bool kOuter>
__device__ __forceinline__ void right(uint32_t (&x)[4], uint32_t tile, int row, int k) {
  const int lane = threadIdx.x & 31;
  if constexpr (kOuter) ldmatrix4_transposed(x, tile + 2 * ((k + (lane & 7) + (lane >> 3 & 1) * 8) * kAlongRow + row + (lane >> 4) * 8));
  else ldmatrix4(x, tile + 2 * ((row + (lane & 7) + (lane >> 4) * 8) * kAlongK + k + (lane >> 3 & 1) * 8));
}

// sum over `depth` of A (m, depth) B (depth, n), of one or two pairs of operands one after the other; f(row, column, two neighbours)
struct Operands {
  const nv_bf16 *a, *b;
};
template <bool kAOuter, bool kBOuter, class F>
__device__ __forceinline__ void multiply(const Operands (&pairs)[2], int count, int64_t lda, int64_t ldb, int rows, int columns, int depth, F f) {
  extern __shared__ __align__(16) nv_bf16 stages[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wm = warp / 4 * 64, wn = warp % 4 * 32, each = (depth + kDeep - 1) / kDeep, all = each * count;
  const uint32_t base = shared_address(stages);
  Copies<kAOuter> a(pairs[0].a, lda);
  Copies<kBOuter> b(pairs[0].b, ldb);
  auto load = [&](int i) {
    if (i < all) {
      if (i == each) a = Copies<kAOuter>(pairs[1].a, lda), b = Copies<kBOuter>(pairs[1].b, ldb);
      const int rest = depth - (i >= each ? i - each : i) * kDeep;
      const uint32_t to = base + i % kStages * 4 * kOperand;
      a.ask(to, rows, rest);
      b.ask(to + 2 * kOperand, columns, rest);
    }
    copy_commit();
  };
  for (int i = 0; i < kStages - 1; ++i) load(i);
  float c[4][4][4] = {};
  for (int i = 0; i < all; ++i) {
    copy_wait<kStages - 2>();
    __syncthreads();
    load(i + kStages - 1);
    const uint32_t as = base + i % kStages * 4 * kOperand, bs = as + 2 * kOperand;
#pragma unroll
    for (int k = 0; k < kDeep; k += 16) {
      uint32_t x[4][4], y[2][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) left<kAOuter>(x[j], as, wm + j * 16, k);
#pragma unroll
      for (int j = 0; j < 2; ++j) right<kBOuter>(y[j], bs, wn + j * 16, k);
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int n = 0; n < 4; ++n) mma(c[j][n], x[j], y[n / 2][n % 2 * 2], y[n / 2][n % 2 * 2 + 1]);
    }
  }
  copy_wait<0>();
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int row = wm + j * 16 + lane / 4 + e * 8, column = wn + n * 8 + lane % 4 * 2;
        if (row < rows && column < columns) f(row, column, c[j][n][e * 2], c[j][n][e * 2 + 1]);
      }
}

struct Three {
  ExpertProduct p[3];
  ExpertSizes s[3];
  int64_t count;
};

// Which expert a tile of rows is of; false past the last tile.
struct RowTile {
  int expert, rows;
  int64_t first;
  __device__ bool find(const ExpertsNarrow& g) {
    const int tile = int(blockIdx.y), n = int(g.experts);
    if (tile >= g.tile_begins[n]) return false;
    int low = 0, high = n;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (g.tile_begins[middle] <= tile) low = middle; else high = middle;
    }
    expert = low, first = g.offsets[low] + int64_t(tile - g.tile_begins[low]) * T;
    rows = int(min(int64_t(T), g.offsets[low + 1] - first));
    return true;
  }
};

__global__ void __launch_bounds__(kThreads, 2) forward_kernel(const ExpertsNarrow g, const __grid_constant__ Three list) {
  RowTile t;
  if (!t.find(g)) return;
  const ExpertProduct& p = list.p[blockIdx.z];
  const int64_t out = list.s[0].out, in = list.s[0].in, n0 = int64_t(blockIdx.x) * T;
  const Operands pairs[2] = {{static_cast<const nv_bf16*>(p.x) + t.first * in, static_cast<const nv_bf16*>(p.weights[t.expert]) + n0 * in}, {}};
  float* y = p.y + t.first * out + n0;
  multiply<false, false>(pairs, 1, in, in, t.rows, int(min(int64_t(T), out - n0)), int(in),
                         [&](int r, int c, float a, float b) { *reinterpret_cast<float2*>(y + r * out + c) = make_float2(a, b); });
}
__global__ void __launch_bounds__(kThreads, 2) input_kernel(const ExpertsNarrow g, const __grid_constant__ Three list) {
  RowTile t;
  if (!t.find(g)) return;
  const int64_t out = list.s[0].out, in = list.s[0].in, n0 = int64_t(blockIdx.x) * T;
  Operands pairs[2];
  for (int i = 0; i < 2; ++i) {
    const ExpertProduct& p = list.p[i < list.count ? i : 0];
    pairs[i] = {static_cast<const nv_bf16*>(p.x) + t.first * out, static_cast<const nv_bf16*>(p.weights[t.expert]) + n0};
  }
  float* y = list.p[0].y + t.first * in + n0;
  multiply<false, true>(pairs, int(list.count), out, in, t.rows, int(min(int64_t(T), in - n0)), int(out),
                        [&](int r, int c, float a, float b) { *reinterpret_cast<float2*>(y + r * in + c) = make_float2(a, b); });
}
__global__ void __launch_bounds__(kThreads, 2) weight_kernel(const ExpertsNarrow g, const __grid_constant__ Three list) {
  const ExpertProduct& p = list.p[blockIdx.z];
  const int64_t out = list.s[blockIdx.z].out, in = list.s[blockIdx.z].in, across = (in + T - 1) / T, first = g.offsets[blockIdx.y];
  const int64_t m0 = int64_t(blockIdx.x) / across * T, n0 = int64_t(blockIdx.x) % across * T;
  const int depth = int(g.offsets[blockIdx.y + 1] - first);
  float* w = static_cast<float*>(const_cast<void*>(p.weights[blockIdx.y]));
  if (m0 >= out || depth == 0 || !w) return;
  const Operands pairs[2] = {{static_cast<const nv_bf16*>(p.x) + first * out + m0, static_cast<const nv_bf16*>(p.z) + first * in + n0}, {}};
  w += m0 * in + n0;
  multiply<true, true>(pairs, 1, out, in, int(min(int64_t(T), out - m0)), int(min(int64_t(T), in - n0)), depth, [&](int r, int c, float a, float b) {
    float2* to = reinterpret_cast<float2*>(w + r * in + c);
    const float2 old = *to;
    *to = make_float2(old.x + a, old.y + b);
  });
}

__global__ void __launch_bounds__(32) tiles_kernel(const ExpertsNarrow g, int32_t* begins) {
  int before = 0;
  if (threadIdx.x == 0) begins[0] = 0;
  for (int64_t e0 = 0; e0 < g.experts; e0 += 32) {
    const int64_t e = e0 + threadIdx.x;
    int x = e < g.experts ? int((g.offsets[e + 1] - g.offsets[e] + T - 1) / T) : 0;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const int y = __shfl_up_sync(~0u, x, d);
      if (int(threadIdx.x) >= d) x += y;
    }
    if (e < g.experts) begins[e + 1] = before + x;
    before += __shfl_sync(~0u, x, 31);
  }
}

__global__ void __launch_bounds__(kThreads) gather_kernel(const NarrowGather a) {  // a warp a row
  const int64_t r = int64_t(blockIdx.x) * 8 + (threadIdx.x >> 5);
  if (r >= *a.rows) return;
  const int64_t token = a.pair_of_row[r] / a.slots;
  nv_bf16* to = static_cast<nv_bf16*>(a.to) + r * a.d;
  for (int64_t c = (threadIdx.x & 31) * 8; c < a.d; c += 256) {
    if (a.from_bf16) {
      *reinterpret_cast<uint4*>(to + c) = *reinterpret_cast<const uint4*>(static_cast<const nv_bf16*>(a.from_bf16) + token * a.d + c);
    } else {
      float x[8];
      load8(a.from + token * a.d + c, x);
      store8(to + c, x);
    }
  }
}

__global__ void __launch_bounds__(kThreads) glu_kernel(const NarrowGlu p) {
  const int64_t i = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * 8;
  if (i >= *p.rows * p.m) return;
  float a[8], b[8];
  load8(p.a + i, a), load8(p.b + i, b);
#pragma unroll
  for (int e = 0; e < 8; ++e) a[e] = glu_value(p.activation, a[e], b[e]);
  store8(static_cast<nv_bf16*>(p.h) + i, a);
}
__global__ void __launch_bounds__(kThreads) glu_backward_kernel(const NarrowGlu p) {  // a warp a row
  const int64_t r = int64_t(blockIdx.x) * 8 + (threadIdx.x >> 5);
  if (r >= *p.rows) return;
  const int pair = p.pair_of_row[r];
  const float weight = p.weights[pair];
  float dot = 0.f;
  for (int64_t c = (threadIdx.x & 31) * 8; c < p.m; c += 256) {
    const int64_t at = r * p.m + c;
    float a[8], b[8], e[8], h[8];
    load8(p.a + at, a), load8(p.b + at, b), load8(p.e + at, e);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float y = glu_value(p.activation, a[i], b[i]);
      dot = __fmaf_rn(e[i], y, dot);
      h[i] = weight * y;
      const GluSlopes s = glu_slopes(p.activation, a[i], b[i], weight * e[i]);
      a[i] = s.gate, b[i] = s.up;
    }
    store8(static_cast<nv_bf16*>(p.h) + at, h), store8(static_cast<nv_bf16*>(p.da) + at, a), store8(static_cast<nv_bf16*>(p.db) + at, b);
  }
  dot = warp_sum(dot);
  if ((threadIdx.x & 31) == 0) p.dweights[pair] += dot;
}

unsigned tiles(int64_t n) { return unsigned((n + T - 1) / T); }
unsigned row_tiles(const ExpertsNarrow& g) { return unsigned(g.most_rows / T + (g.most_rows < g.experts ? g.most_rows : g.experts)); }
Three listed(const ExpertProduct* list, const ExpertSizes* sizes, int64_t count) {
  Three t{};
  for (int64_t i = 0; i < count; ++i) t.p[i] = list[i], t.s[i] = sizes[i];
  t.count = count;
  return t;
}
template <class Kernel>
const char* launch(Kernel kernel, dim3 grid, const ExpertsNarrow& g, const Three& list, void* stream) {
  if (g.most_rows == 0) return nullptr;
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes); e != cudaSuccess) return cudaGetErrorString(e);
  kernel<<<grid, kThreads, kSharedBytes, stream_of(stream)>>>(g, list);
  return launched();
}

}  // namespace

const char* expert_tiles(const ExpertsNarrow& g, int32_t* tile_begins, void* stream) {
  tiles_kernel<<<1, 32, 0, stream_of(stream)>>>(g, tile_begins);
  return launched();
}
const char* expert_forward(const ExpertsNarrow& g, const ExpertProduct* list, int64_t count, int64_t out, int64_t in, void* stream) {
  const ExpertSizes s[2] = {{out, in}, {out, in}};
  return launch(forward_kernel, dim3(tiles(out), row_tiles(g), unsigned(count)), g, listed(list, s, count), stream);
}
const char* expert_input(const ExpertsNarrow& g, const ExpertProduct* list, int64_t count, int64_t out, int64_t in, void* stream) {
  const ExpertSizes s[2] = {{out, in}, {out, in}};
  return launch(input_kernel, dim3(tiles(in), row_tiles(g)), g, listed(list, s, count), stream);
}
const char* expert_weight_gradients(const ExpertsNarrow& g, const ExpertProduct* list, const ExpertSizes* sizes, int64_t count, void* stream) {
  unsigned most = 0;
  for (int64_t i = 0; i < count; ++i) most = max(most, tiles(sizes[i].out) * tiles(sizes[i].in));
  return launch(weight_kernel, dim3(most, unsigned(g.experts), unsigned(count)), g, listed(list, sizes, count), stream);
}
const char* gather_narrow(const NarrowGather& a, void* stream) {
  if (a.most_rows) gather_kernel<<<blocks_for(a.most_rows, 8), kThreads, 0, stream_of(stream)>>>(a);
  return launched();
}
const char* glu_narrow(const NarrowGlu& p, void* stream) {
  if (p.most_rows) glu_kernel<<<blocks_for(p.most_rows * p.m, 8 * kThreads), kThreads, 0, stream_of(stream)>>>(p);
  return launched();
}
const char* glu_narrow_backward(const NarrowGlu& p, void* stream) {
  if (p.most_rows) glu_backward_kernel<<<blocks_for(p.most_rows, 8), kThreads, 0, stream_of(stream)>>>(p);
  return launched();
}

}  // namespace k3::cuda
