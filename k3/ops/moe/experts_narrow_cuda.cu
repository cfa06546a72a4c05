// Bound: the tensor units, and the second-level cache that feeds them: so a block is 128 rows x 256 columns of one expert's result, two warpgroups of 64
// rows. 64 of the summed dimension at a time, two of four stages on their way while one is multiplied and one drains. An operand lies in shared memory
// as in global memory, (row, k) or (k, row); the products read it either way.
#include "k3/core/mxfp4.cuh"
#include "k3/core/enqueue.cuh"
#include "k3/core/tile.cuh"
#include "k3/core/wgmma.cuh"
#include "k3/ops/activation/glu.cuh"
#include "k3/ops/moe/experts_narrow_cuda.h"

namespace k3::cuda {
namespace {

constexpr int kThreads = 256, T = int(kExpertTile), kColumns = 2 * T, kDeep = 64, kStages = 4;
constexpr int kLeft = T * kDeep * 2, kStage = kLeft + kColumns * kDeep * 2, kPanel = kDeep * 128;  // bytes; a panel: (64 k, 64 rows), where k is outermost
constexpr int kSharedBytes = kStages * kStage + 1024;

// How a thread copies an operand's tiles of kSize rows: its first eight values, and from there to its others; `rows` of the tile exist, a multiple of 8
// where they are contiguous, as the summed dimension is else.
template <bool kOuter, int kSize>  // k outermost in memory
struct Copies {
  static constexpr int kEach = kSize * kDeep / 8 / kThreads, kStep = kThreads / (kOuter ? kSize / 8 : kDeep / 8);
  const nv_bf16 *from, *safe;
  int64_t jump, further;  // to the thread's next eight; to the same eight kDeep further
  int row, k;
  uint32_t to;  // bytes; the next eight lie kStep lines of 128 on
  __device__ __forceinline__ Copies(const nv_bf16* matrix, int64_t ld) : safe(matrix) {
    const int c = threadIdx.x;
    k = kOuter ? c / (kSize / 8) : c % (kDeep / 8) * 8, row = kOuter ? c % (kSize / 8) * 8 : c / (kDeep / 8);
    from = matrix + (kOuter ? k * ld + row : row * ld + k), jump = kStep * ld, further = kOuter ? kDeep * ld : kDeep;
    to = kOuter ? row / 64 * kPanel + swizzle128(k, row % 64 * 2) : swizzle128(row, k * 2);
  }
  __device__ __forceinline__ void ask(uint32_t stage, int rows, int depth) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const bool there = kOuter ? k + i * kStep < depth && row < rows : row + i * kStep < rows && k < depth;
      copy16(stage + to + i * kStep * 128, there ? from + i * jump : safe, there);
    }
    from += further;
  }
};

// The right operand out of MXFP4: a thread has two groups of 32 codes of each step, asked for a step before they become bfloat16 in shared memory.
struct Codes {
  static constexpr int kGroups = kColumns * kDeep / 32 / kThreads;
  const uint8_t *codes, *scales;
  int64_t groups;  // of a row
  int columns, row, k;
  uint4 held[kGroups];
  uint32_t scale[kGroups];
  __device__ __forceinline__ Codes(const uint8_t* codes, const uint8_t* scales, int64_t in, int columns, int depth)
      : codes(codes), scales(scales), groups(in / 32), columns(columns), row(threadIdx.x / 2), k(threadIdx.x % 2 * 32) {
    fetch(depth);
  }
  __device__ __forceinline__ void fetch(int depth) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const int n = row + i * kThreads / 2;
      const bool there = n < columns && k % kDeep < depth;
      const int64_t at = n * groups + k / 32;
      held[i] = there ? reinterpret_cast<const uint4*>(codes)[at] : make_uint4(0, 0, 0, 0), scale[i] = there ? scales[at] : 0;
    }
    k += kDeep;
  }
  __device__ __forceinline__ void ask(uint32_t stage, int, int depth) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const uint32_t power = mxfp4_power(scale[i]), part[4] = {held[i].x, held[i].y, held[i].z, held[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint4 x = mxfp4_eight(part[j], power);
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(stage + swizzle128(row + i * kThreads / 2, (threadIdx.x % 2 * 4 + j) * 16)), "r"(x.x),
                     "r"(x.y), "r"(x.z), "r"(x.w)
                     : "memory");
      }
    }
    fetch(depth - kDeep);
  }
};

// sum over `depth` of A (m, depth) B (depth, n), of one or two pairs of operands one after the other: again() turns the copies to the second;
// it becomes `result`, or is added to it
struct Operands {
  const nv_bf16 *a, *b;
};
template <bool kAOuter, bool kBOuter, bool kAdd, class B, class Again>
__device__ __forceinline__ void multiply(Copies<kAOuter, T> a, B b, Again again, int count, int rows, int columns, int depth, float* result, int64_t ld) {
  extern __shared__ char stages[];
  const int lane = threadIdx.x & 31, group = threadIdx.x >> 7, each = (depth + kDeep - 1) / kDeep, all = each * count;
  const uint32_t base = (shared_address(stages) + 1023) & ~1023u;
  auto load = [&](int i) {
    if (i < all) {
      if (i == each) again(a, b);
      const int rest = depth - (i >= each ? i - each : i) * kDeep;
      const uint32_t to = base + i % kStages * kStage;
      a.ask(to, rows, rest);
      b.ask(to + kLeft, columns, rest);
    }
    copy_commit();
  };
  load(0), load(1);
  float c[2][64];
#pragma unroll
  for (int i = 0; i < 64; ++i) c[0][i] = c[1][i] = 0.f;
  for (int i = 0; i < all; ++i) {
    copy_wait<1>();
    publish();
    warpgroup_wait<1>();  // the products before the last have read their stage
    __syncthreads();
    load(i + 2);
    const uint32_t as = base + i % kStages * kStage + group * kPanel, bs = base + i % kStages * kStage + kLeft;  // 64 rows are a panel's size either way
    warpgroup_fence();
#pragma unroll
    for (int k = 0; k < kDeep / 16; ++k)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint64_t left = describe(as) + k * (kAOuter ? 2048 / 16 : 2);
        const uint64_t right = kBOuter ? describe(bs + half * 2 * kPanel, 1024, kPanel) + k * 2048 / 16 : describe(bs + half * T * 128) + k * 2;
        wgmma<T, kAOuter, kBOuter>(c[half], left, right, 1);
      }
    warpgroup_commit();
  }
  copy_wait<0>();
  warpgroup_wait<0>();
  pin(c[0]), pin(c[1]);
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = group * 64 + (threadIdx.x >> 5 & 3) * 16 + lane / 4 + 8 * h;
      float2* to = reinterpret_cast<float2*>(result + row * ld + half * T + lane % 4 * 2);
      auto there = [&](int j) { return row < rows && half * T + j * 8 + lane % 4 * 2 < columns; };
      float2 before[16];  // all on their way before the first is stored
#pragma unroll
      for (int j = 0; j < 16; ++j)
        if (kAdd && there(j)) before[j] = to[j * 4];
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const float x = c[half][4 * j + 2 * h], y = c[half][4 * j + 2 * h + 1];
        if (there(j)) to[j * 4] = kAdd ? make_float2(before[j].x + x, before[j].y + y) : make_float2(x, y);
      }
    }
}

template <bool kAOuter, bool kBOuter, bool kAdd = false>
__device__ __forceinline__ void multiply(const Operands (&pairs)[2], int count, int64_t lda, int64_t ldb, int rows, int columns, int depth, float* result, int64_t ld) {
  using A = Copies<kAOuter, T>;
  using B = Copies<kBOuter, kColumns>;
  multiply<kAOuter, kBOuter, kAdd>(A(pairs[0].a, lda), B(pairs[0].b, ldb), [&](A& a, B& b) { a = A(pairs[1].a, lda), b = B(pairs[1].b, ldb); }, count, rows, columns, depth,
                                   result, ld);
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

__global__ void __launch_bounds__(kThreads, 1) forward_kernel(const ExpertsNarrow g, const __grid_constant__ Three list) {
  follow();
  RowTile t;
  if (!t.find(g)) return;
  const ExpertProduct& p = list.p[blockIdx.z];
  const int64_t out = list.s[0].out, in = list.s[0].in, n0 = int64_t(blockIdx.x) * kColumns;
  const Operands pairs[2] = {{static_cast<const nv_bf16*>(p.x) + t.first * in, static_cast<const nv_bf16*>(p.weights[t.expert]) + n0 * in}, {}};
  float* y = p.y + t.first * out + n0;
  multiply<false, false>(pairs, 1, in, in, t.rows, int(min(int64_t(kColumns), out - n0)), int(in), y, out);
}
__global__ void __launch_bounds__(kThreads, 1) codes_kernel(const ExpertsNarrow g, const __grid_constant__ Three list) {
  follow();
  RowTile t;
  if (!t.find(g)) return;
  const ExpertProduct& p = list.p[blockIdx.z];
  const int64_t out = list.s[0].out, in = list.s[0].in, n0 = int64_t(blockIdx.x) * kColumns;
  const int columns = int(min(int64_t(kColumns), out - n0));
  using A = Copies<false, T>;
  const Codes b(static_cast<const uint8_t*>(p.weights[t.expert]) + n0 * in / 2, static_cast<const uint8_t*>(p.scales[t.expert]) + n0 * in / 32, in, columns, int(in));
  float* y = p.y + t.first * out + n0;
  multiply<false, false, false>(A(static_cast<const nv_bf16*>(p.x) + t.first * in, in), b, [](A&, Codes&) {}, 1, t.rows, columns, int(in), y, out);
}
__global__ void __launch_bounds__(kThreads, 1) input_kernel(const ExpertsNarrow g, const __grid_constant__ Three list) {
  follow();
  RowTile t;
  if (!t.find(g)) return;
  const int64_t out = list.s[0].out, in = list.s[0].in, n0 = int64_t(blockIdx.x) * kColumns;
  Operands pairs[2];
  for (int i = 0; i < 2; ++i) {
    const ExpertProduct& p = list.p[i < list.count ? i : 0];
    pairs[i] = {static_cast<const nv_bf16*>(p.x) + t.first * out, static_cast<const nv_bf16*>(p.weights[t.expert]) + n0};
  }
  float* y = list.p[0].y + t.first * in + n0;
  multiply<false, true>(pairs, int(list.count), out, in, t.rows, int(min(int64_t(kColumns), in - n0)), int(out), y, in);
}
__global__ void __launch_bounds__(kThreads, 1) weight_kernel(const ExpertsNarrow g, const __grid_constant__ Three list) {
  follow();
  const ExpertProduct& p = list.p[blockIdx.z];
  const int64_t out = list.s[blockIdx.z].out, in = list.s[blockIdx.z].in, across = (in + kColumns - 1) / kColumns, first = g.offsets[blockIdx.y];
  const int64_t m0 = int64_t(blockIdx.x) / across * T, n0 = int64_t(blockIdx.x) % across * kColumns;
  const int depth = int(g.offsets[blockIdx.y + 1] - first);
  float* w = static_cast<float*>(const_cast<void*>(p.weights[blockIdx.y]));
  if (m0 >= out || depth == 0 || !w) return;
  const Operands pairs[2] = {{static_cast<const nv_bf16*>(p.x) + first * out + m0, static_cast<const nv_bf16*>(p.z) + first * in + n0}, {}};
  w += m0 * in + n0;
  multiply<true, true, true>(pairs, 1, out, in, int(min(int64_t(T), out - m0)), int(min(int64_t(kColumns), in - n0)), depth, w, in);
}

__global__ void __launch_bounds__(32) tiles_kernel(const ExpertsNarrow g, int32_t* begins) {
  follow();
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
  follow();
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
  follow();
  const int64_t i = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * 8;
  if (i >= *p.rows * p.m) return;
  float a[8], b[8];
  load8(p.a + i, a), load8(p.b + i, b);
#pragma unroll
  for (int e = 0; e < 8; ++e) a[e] = glu_value(p.activation, a[e], b[e]);
  store8(static_cast<nv_bf16*>(p.h) + i, a);
}
__global__ void __launch_bounds__(kThreads) glu_backward_kernel(const NarrowGlu p) {  // a warp a row
  follow();
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

unsigned tiles(int64_t n, int64_t each) { return unsigned((n + each - 1) / each); }
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
  enqueue(kernel, grid, kThreads, kSharedBytes, stream_of(stream), g, list);
  return launched();
}

}  // namespace

const char* expert_tiles(const ExpertsNarrow& g, int32_t* tile_begins, void* stream) {
  enqueue(tiles_kernel, 1, 32, 0, stream_of(stream), g, tile_begins);
  return launched();
}
const char* expert_forward(const ExpertsNarrow& g, const ExpertProduct* list, int64_t count, int64_t out, int64_t in, void* stream) {
  const ExpertSizes s[2] = {{out, in}, {out, in}};
  if (count && list[0].scales && in % 32) return "[experts] MXFP4 has 32 columns a scale";
  return launch(count && list[0].scales ? codes_kernel : forward_kernel, dim3(tiles(out, kColumns), row_tiles(g), unsigned(count)), g, listed(list, s, count), stream);
}
const char* expert_input(const ExpertsNarrow& g, const ExpertProduct* list, int64_t count, int64_t out, int64_t in, void* stream) {
  const ExpertSizes s[2] = {{out, in}, {out, in}};
  return launch(input_kernel, dim3(tiles(in, kColumns), row_tiles(g)), g, listed(list, s, count), stream);
}
const char* expert_weight_gradients(const ExpertsNarrow& g, const ExpertProduct* list, const ExpertSizes* sizes, int64_t count, void* stream) {
  unsigned most = 0;
  for (int64_t i = 0; i < count; ++i) most = max(most, tiles(sizes[i].out, T) * tiles(sizes[i].in, kColumns));
  return launch(weight_kernel, dim3(most, unsigned(g.experts), unsigned(count)), g, listed(list, sizes, count), stream);
}
const char* gather_narrow(const NarrowGather& a, void* stream) {
  if (a.most_rows) enqueue(gather_kernel, blocks_for(a.most_rows, 8), kThreads, 0, stream_of(stream), a);
  return launched();
}
const char* glu_narrow(const NarrowGlu& p, void* stream) {
  if (p.most_rows) enqueue(glu_kernel, blocks_for(p.most_rows * p.m, 8 * kThreads), kThreads, 0, stream_of(stream), p);
  return launched();
}
const char* glu_narrow_backward(const NarrowGlu& p, void* stream) {
  if (p.most_rows) enqueue(glu_backward_kernel, blocks_for(p.most_rows, 8), kThreads, 0, stream_of(stream), p);
  return launched();
}

}  // namespace k3::cuda
