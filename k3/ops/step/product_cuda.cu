// Split: a block is 16 rows of W at a time, its eight warps every eighth run of 32 columns; their sums are added in order. Blocks walk over the rows
// of all parts; the next weights are on their way while these are used, the first ones before the kernel in front has ended.
// Inputs that need the whole block for a row (a mix, or a norm of more than kWarpNorm columns) are made by every block for 1 and 2 rows, and by a
// launch of their own for more: the same function, so the same bits.
#include "k3/ops/step/product_cuda.h"
#include "k3/ops/step/step.cuh"

namespace k3::cuda {
namespace {

constexpr int kThreads = 256, kWarps = 8, kTile = 16, kAhead = 4, kWarpNorm = 512;

__host__ __device__ constexpr int padded(int width) { return (width + 31) / 32 * 32; }
// A row of bfloat16 in shared memory: its length is an odd multiple of 16 banks, so that eight lanes' loads of two rows meet all banks.
__host__ __device__ constexpr int row_of(int columns) { return (columns + 63) / 64 * 64 + 32; }
__host__ __device__ inline bool by_block(const StepInput& x) { return x.sources > 1 || (x.gain && x.width > kWarpNorm); }

struct Parts {
  float part[kWarps][32];
};

// The weights of a mix of up to kMost sources: lane i has source i's.
template <int kMost>
__device__ float mix_weights(const StepInput& a, int64_t row, Parts& s) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, n = a.sources;
  float part[2 * kMost] = {};  // dot and square of each source
  for (int c = threadIdx.x * 4; c < a.width; c += kThreads * 4) {
    float4 v[kMost];
#pragma unroll
    for (int i = 0; i < kMost; ++i) v[i] = i < n ? *reinterpret_cast<const float4*>(a.v[i] + row * a.stride + c) : make_float4(0.f, 0.f, 0.f, 0.f);
    const float4 g = *reinterpret_cast<const float4*>(a.mix_gain + c), q = *reinterpret_cast<const float4*>(a.query + c);
    const float4 w = make_float4(g.x * q.x, g.y * q.y, g.z * q.z, g.w * q.w);
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      part[2 * i] = fmaf(v[i].x, w.x, fmaf(v[i].y, w.y, fmaf(v[i].z, w.z, fmaf(v[i].w, w.w, part[2 * i]))));
      part[2 * i + 1] = fmaf(v[i].x, v[i].x, fmaf(v[i].y, v[i].y, fmaf(v[i].z, v[i].z, fmaf(v[i].w, v[i].w, part[2 * i + 1]))));
    }
  }
  __syncthreads();
  s.part[warp][lane] = warp_sums_complete(part);  // lane l: value l, the first 2 kMost of them
  __syncthreads();
  float total = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += s.part[w][lane];
  const float dot = __shfl_sync(~0u, total, 2 * lane & 31), square = __shfl_sync(~0u, total, (2 * lane + 1) & 31);
  const float score = lane < n ? dot / sqrtf(square / float(a.width) + a.mix_eps) : -INFINITY;
  const float e = expf(score - warp_max(score));
  return e / warp_sum(e);
}

// One row by all threads, into `out` (width) float32 in shared memory.
__device__ void block_row(const StepInput& a, int64_t row, float* out, Parts& s) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, n = a.sources;
  auto source = [&](int i, int c) { return *reinterpret_cast<const float4*>(a.v[i] + row * a.stride + c); };
  float weight = 1.f;
  if (n > 4) weight = mix_weights<kStepSources>(a, row, s);
  else if (n > 1) weight = mix_weights<4>(a, row, s);
  float square = 0.f;
  for (int c = threadIdx.x * 4; c < (a.width + 127) / 128 * 128; c += kThreads * 4) {  // whole warps, for the shuffles
    const bool there = c < a.width;
    float4 h = there ? source(0, c) : make_float4(0.f, 0.f, 0.f, 0.f);
    if (n > 1) {
      const float first = __shfl_sync(~0u, weight, 0);
      h = make_float4(h.x * first, h.y * first, h.z * first, h.w * first);
#pragma unroll 4
      for (int i = 1; i < n; ++i) {
        const float w = __shfl_sync(~0u, weight, i);
        const float4 v = there ? source(i, c) : make_float4(0.f, 0.f, 0.f, 0.f);
        h = make_float4(fmaf(v.x, w, h.x), fmaf(v.y, w, h.y), fmaf(v.z, w, h.z), fmaf(v.w, w, h.w));
      }
    }
    if (!there) continue;
    square = fmaf(h.x, h.x, fmaf(h.y, h.y, fmaf(h.z, h.z, fmaf(h.w, h.w, square))));
    *reinterpret_cast<float4*>(out + c) = h;
  }
  if (a.gain) {
    __syncthreads();
    square = warp_sum(square);
    if (lane == 0) s.part[warp][0] = square;
    __syncthreads();
    square = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) square += s.part[w][0];
    const float r = 1.f / sqrtf(square / float(a.width) + a.eps);
    for (int c = threadIdx.x * 4; c < a.width; c += kThreads * 4) {
      const float4 h = *reinterpret_cast<float4*>(out + c), g = *reinterpret_cast<const float4*>(a.gain + c);
      *reinterpret_cast<float4*>(out + c) = make_float4(h.x * r * g.x, h.y * r * g.y, h.z * r * g.z, h.w * r * g.w);
    }
  }
  __syncthreads();
}

__device__ __forceinline__ float4 gated4(const StepInput& a, int64_t row, int c) {
  const float4 x = *reinterpret_cast<const float4*>(a.v[0] + row * a.stride + c), u = *reinterpret_cast<const float4*>(a.v[1] + row * a.stride + c);
  return make_float4(glu_value(a.activation, x.x, u.x), glu_value(a.activation, x.y, u.y), glu_value(a.activation, x.z, u.z),
                     glu_value(a.activation, x.w, u.w));
}

// A row, normed (up to kWarpNorm columns) or not, by one warp: f(c, four values) for all columns.
template <class F>
__device__ void warp_row(const StepInput& a, int64_t row, F f) {
  const int lane = threadIdx.x & 31;
  const float* v = a.v[0] + row * a.stride;
  if (!a.gain) {
#pragma unroll 4
    for (int c = lane * 4; c < a.width; c += 128) f(c, *reinterpret_cast<const float4*>(v + c));
    return;
  }
  constexpr int kEach = kWarpNorm / 128;
  float4 x[kEach];
  float square = 0.f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int c = lane * 4 + 128 * i;
    x[i] = c < a.width ? *reinterpret_cast<const float4*>(v + c) : make_float4(0.f, 0.f, 0.f, 0.f);
    square = fmaf(x[i].x, x[i].x, fmaf(x[i].y, x[i].y, fmaf(x[i].z, x[i].z, fmaf(x[i].w, x[i].w, square))));
  }
  const float r = 1.f / sqrtf(warp_sum(square) / float(a.width) + a.eps);
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (const int c = lane * 4 + 128 * i; c < a.width) {
      const float4 g = *reinterpret_cast<const float4*>(a.gain + c);
      f(c, make_float4(x[i].x * r * g.x, x[i].y * r * g.y, x[i].z * r * g.z, x[i].w * r * g.w));
    }
}

__device__ __forceinline__ void narrow4(nv_bf16* to, const float4& x) { *reinterpret_cast<uint2*>(to) = make_uint2(pack(x.x, x.y), pack(x.z, x.w)); }

// Input `a` of rows first .. first+count-1 as bfloat16 into shared memory, zeros up to a whole run of 32 columns.
__device__ void prepare(const StepInput& a, int64_t first, int count, nv_bf16* to, int stride, float* wide, Parts& s) {
  const int end = padded(a.width), warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (by_block(a)) {
    for (int r = 0; r < count; ++r) {
      block_row(a, first + r, wide + r * a.width, s);
      for (int c = threadIdx.x * 4; c < a.width; c += kThreads * 4) narrow4(to + r * stride + c, *reinterpret_cast<float4*>(wide + r * a.width + c));
    }
  } else if (a.gated && !a.gain) {
    for (int i = threadIdx.x * 4; i < count * a.width; i += kThreads * 4) {
      const int r = i / a.width, c = i % a.width;
      const float4 x = gated4(a, first + r, c);
      narrow4(to + r * stride + c, x);
      if (wide) *reinterpret_cast<float4*>(wide + i) = x;
    }
  } else {
    for (int r = warp; r < count; r += kWarps)
      warp_row(a, first + r, [&](int c, const float4& x) {
        narrow4(to + r * stride + c, x);
        if (wide) *reinterpret_cast<float4*>(wide + r * a.width + c) = x;
      });
  }
  for (int r = warp; r < count; r += kWarps)
    for (int c = a.width + lane; c < end; c += 32) to[r * stride + c] = nv_bf16(0.f);
}

__host__ __device__ __forceinline__ bool exact(const StepPart& p) { return p.exact || !p.bf16; }
__device__ __forceinline__ float with_added(const StepPart& p, int64_t at, float y) {
  if (p.add) y = p.add[at] + y;
  return p.add2 ? y + p.add2[at] : y;
}

struct Tiles {
  int begin[kStepParts + 1];  // first tile of each part
  int group;                  // rows of x a block takes
  bool wide;                  // float32 rows in shared memory too
};

template <int NT>
__global__ void __launch_bounds__(kThreads, NT > 4 ? 1 : 2) product_kernel(const __grid_constant__ StepProductArgs a, const __grid_constant__ Tiles tiles) {
  extern __shared__ __align__(16) unsigned char shared[];
  constexpr int kTurns = NT > 4 ? 1 : 2;  // with two a barrier a tile is enough
  __shared__ float sums[kTurns][kWarps][NT * 8][kTile + 1];
  __shared__ Parts parts;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int64_t first = int64_t(blockIdx.y) * tiles.group;
  const int count = int(min(int64_t(tiles.group), a.rows - first));
  const int K = a.x.width, K2 = a.x2.width, runs = padded(K) / 32, all = runs + padded(K2) / 32, stride = row_of(padded(K) + padded(K2));
  nv_bf16* x = reinterpret_cast<nv_bf16*>(shared);                          // (group, stride)
  float* wide = reinterpret_cast<float*>(x + int64_t(tiles.group) * stride);  // (group, K)
  const int batches = (all + kWarps * kAhead - 1) / (kWarps * kAhead);

  auto part_of = [&](int tile) {
    int p = 0;
    while (tile >= tiles.begin[p + 1]) ++p;
    return p;
  };
  auto load = [&](Eight (&w)[kAhead], int tile, int batch) {
    if (tile >= tiles.begin[a.parts]) return;
    const int p = part_of(tile), row = (tile - tiles.begin[p]) * kTile + g;
    const StepPart& part = a.part[p];
    if (exact(part)) return;
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      w[u] = no_weights();
      int run = warp + kWarps * (batch * kAhead + u);
      if (run >= all) continue;
      const bool second = run >= runs;
      if (second) run -= runs;
      const int k = run * 32 + t * 8, width = second ? K2 : K;
      if (k >= width) continue;
      const nv_bf16* from = static_cast<const nv_bf16*>(second ? a.w2 : part.w) + int64_t(row) * width + k;
      if (row < part.out) w[u].low = stream16(from);
      if (row + 8 < part.out) w[u].high = stream16(from + 8 * int64_t(width));
    }
  };

  let_next_kernel_begin();
  Eight now[kAhead], next[kAhead];
  int tile = blockIdx.x, batch = 0, turn = 0;
  load(now, tile, 0);
  wait_for_kernel_in_front();
  prepare(a.x, first, count, x, stride, tiles.wide || by_block(a.x) ? wide : nullptr, parts);
  if (K2) prepare(a.x2, first, count, x + padded(K), stride, nullptr, parts);
  __syncthreads();

  float sum[NT][4] = {};
  while (tile < tiles.begin[a.parts]) {
    const int p = part_of(tile);
    const StepPart& part = a.part[p];
    const int row0 = (tile - tiles.begin[p]) * kTile;
    const bool ends = exact(part) || batch + 1 == batches;
    load(next, ends ? tile + gridDim.x : tile, ends ? 0 : batch + 1);
    if (exact(part)) {  // a warp two rows of W and four tokens at a time, a lane every 32nd four columns
      for (int i = warp; i < kTile && row0 + i < part.out; i += kWarps)
        for (int r0 = 0; r0 < count; r0 += 4) {
          const int64_t w = int64_t(row0 + i) * K;
          float total[4] = {};
#pragma unroll 4
          for (int c = lane * 4; c < K; c += 128) {
            float4 m;
            if (part.bf16) {
              const uint2 two = *reinterpret_cast<const uint2*>(static_cast<const nv_bf16*>(part.w) + w + c);
              m = make_float4(low(two.x), high(two.x), low(two.y), high(two.y));
            } else {
              m = *reinterpret_cast<const float4*>(static_cast<const float*>(part.w) + w + c);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              if (r0 + j >= count) break;
              const float4 y = *reinterpret_cast<const float4*>((tiles.wide ? wide + (r0 + j) * K : a.x.v[0] + (first + r0 + j) * a.x.stride) + c);
              total[j] = fmaf(m.x, y.x, fmaf(m.y, y.y, fmaf(m.z, y.z, fmaf(m.w, y.w, total[j]))));
            }
          }
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float y = warp_sum(total[j]);
            const int64_t at = (first + r0 + j) * part.stride + row0 + i;
            if (lane == 0 && r0 + j < count) part.y[at] = with_added(part, at, y);
          }
        }
    } else {
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const int run = warp + kWarps * (batch * kAhead + u);
        if (run >= all) break;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          const int r = n * 8 + g;
          multiply(sum[n], now[u], r < count ? *reinterpret_cast<const uint4*>(x + r * stride + run * 32 + t * 8) : make_uint4(0, 0, 0, 0));
        }
      }
      if (ends) {
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[turn][warp][n * 8 + 2 * t + (e & 1)][g + 8 * (e >> 1)] = sum[n][e], sum[n][e] = 0.f;
        __syncthreads();
        for (int i = threadIdx.x; i < count * kTile; i += kThreads) {
          const int r = i / kTile, o = i % kTile;
          if (row0 + o >= part.out) continue;
          float total = 0.f;
#pragma unroll
          for (int w = 0; w < kWarps; ++w) total += sums[turn][w][r][o];
          const int64_t at = (first + r) * part.stride + row0 + o;
          part.y[at] = with_added(part, at, total);
        }
        if (kTurns == 1) __syncthreads();
        else turn ^= 1;
      }
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) now[u] = next[u];
    if (ends) tile += gridDim.x, batch = 0;
    else ++batch;
  }
}

__global__ void __launch_bounds__(kThreads) input_kernel(const __grid_constant__ StepInput a, int rows, float* to) {
  extern __shared__ __align__(16) float row[];
  __shared__ Parts parts;
  let_next_kernel_begin();
  wait_for_kernel_in_front();
  if (by_block(a)) {
    block_row(a, blockIdx.x, row, parts);
    for (int c = threadIdx.x * 4; c < a.width; c += kThreads * 4)
      *reinterpret_cast<float4*>(to + int64_t(blockIdx.x) * a.width + c) = *reinterpret_cast<float4*>(row + c);
  } else if (a.gated) {
    for (int c = threadIdx.x * 4; c < a.width; c += kThreads * 4) *reinterpret_cast<float4*>(to + int64_t(blockIdx.x) * a.width + c) = gated4(a, blockIdx.x, c);
  } else if (threadIdx.x < 32) {
    warp_row(a, blockIdx.x, [&](int c, const float4& x) { *reinterpret_cast<float4*>(to + int64_t(blockIdx.x) * a.width + c) = x; });
  }
}

template <int NT>
const char* launch(const StepProductArgs& a, Tiles tiles, size_t row_bytes, size_t wide_bytes, void* stream) {
  tiles.group = a.rows < NT * 8 ? a.rows : NT * 8;
  const size_t bytes = size_t(tiles.group) * (row_bytes + wide_bytes);
  const int groups = (a.rows + tiles.group - 1) / tiles.group, most = 132 * (bytes > 90 << 10 || NT > 4 ? 1 : 2);
  const unsigned blocks = unsigned(tiles.begin[a.parts] < most ? tiles.begin[a.parts] : most);
  return launch_step(product_kernel<NT>, dim3(blocks, unsigned(groups)), kThreads, bytes, stream, a, tiles);
}

const char* check(const StepInput& x) {
  if (x.width % 8 || x.stride % 4) return "[step] widths must be multiples of 8, strides of 4";
  if (x.gated && (x.gain || x.sources > 1)) return "[step] a gated unit is neither normed nor mixed";
  if (x.sources > kStepSources) return "[step] at most 16 sources are mixed";
  return nullptr;
}

}  // namespace

const char* step_input(const StepInput& x, int rows, float* to, void* stream) {
  if (rows == 0) return nullptr;
  if (const char* e = check(x)) return e;
  return launch_step(input_kernel, dim3(unsigned(rows)), kThreads, size_t(x.width) * 4, stream, x, rows, to);
}

const char* step_product(const StepProductArgs& args, void* stream) {
  StepProductArgs a = args;
  if (a.rows == 0) return nullptr;
  for (const StepInput* x : {&a.x, &a.x2})
    if (const char* e = check(*x)) return e;
  Tiles tiles{};
  bool wide = false;
  for (int p = 0; p < a.parts; ++p) tiles.begin[p + 1] = tiles.begin[p] + (a.part[p].out + kTile - 1) / kTile, wide = wide || exact(a.part[p]);
  if (a.rows > 2 && (by_block(a.x) || (wide && (a.x.gain || a.x.gated)))) {
    if (!a.normed) return "[step] a product of more than two rows needs room for its input";
    if (const char* e = step_input(a.x, a.rows, a.normed, stream)) return e;
    StepInput made;
    made.width = a.x.width, made.stride = a.x.width, made.v[0] = a.normed;
    a.x = made;
  }
  const bool made_here = by_block(a.x) || (wide && (a.x.gain || a.x.gated));
  tiles.wide = wide && made_here;
  const size_t row_bytes = size_t(row_of(padded(a.x.width) + padded(a.x2.width))) * 2, wide_bytes = made_here ? size_t(a.x.width) * 4 : 0;
  constexpr size_t kMost = 190 << 10;
  if (size_t(a.rows < 8 ? a.rows : 8) * (row_bytes + wide_bytes) > kMost) return "[step] a product's rows are too wide";
  const size_t fit = kMost / (row_bytes + wide_bytes);
  if (a.rows <= 8 || fit < 16) return launch<1>(a, tiles, row_bytes, wide_bytes, stream);
  if (a.rows <= 16 || fit < 32) return launch<2>(a, tiles, row_bytes, wide_bytes, stream);
  if (a.rows <= 32 || fit < 64) return launch<4>(a, tiles, row_bytes, wide_bytes, stream);
  return launch<8>(a, tiles, row_bytes, wide_bytes, stream);
}

}  // namespace k3::cuda
