#pragma once
// Products of a decode step, within a kernel of 256 threads.
// Split: a block is 16 rows of W at a time, its eight warps every eighth run of 32 columns; their sums are added in order. Blocks walk over the rows
// of all parts; the next weights are on their way while these are used, the first ones before the input is there.
// Inputs that need the whole block for a row (a mix, or a norm of more than kWarpNorm columns) are made by every block for 1 and 2 rows, and once, by
// the same function, for more: so the same bits.
#include "k3/ops/step/product_cuda.h"
#include "k3/ops/step/step.cuh"

namespace k3::cuda {
namespace {

constexpr int kAhead = 4, kWarpNorm = 512;

__host__ __device__ constexpr int padded(int width) { return (width + 31) / 32 * 32; }
// A row of bfloat16 in shared memory: its length is an odd multiple of 16 banks, so that eight lanes' loads of two rows meet all banks.
__host__ __device__ constexpr int row_of(int columns) { return (columns + 63) / 64 * 64 + 32; }
__host__ __device__ inline bool by_block(const StepInput& x) { return x.sources > 1 || (x.gain && x.width > kWarpNorm); }

struct Parts {
  float part[kWarps][33], share[kWarps][kStepSources];
};

// A row of sources mixed, and normed as asked, by all threads: f(c, four values) for all columns. Up to four sources of 1024 columns stay in
// registers; else they are read twice, and the mix of more columns lies in `room` (width, shared memory). Older sources are read and summed up before
// the newest is waited for.
template <bool kStamped, int kMost, class F>
__device__ void block_row(const StepInput& a, int64_t row, Stamp stamp, float* room, Parts& s, F f) {
  constexpr int kGroup = 4;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, n = a.sources;
  const int64_t at = row * a.stride;
  const bool once = a.width <= kThreads * 4;
  float4 v[kGroup], newest;  // older sources, four at a time, and the last one
  auto take_old = [&](int i0, int c) { take4_each<kStamped>(v, n - 1 - i0, stamp, at + c, [&](int i) { return a.v[i0 + i]; }); };
  auto take_new = [&](int c) { newest = take4<kStamped>(a.v[n - 1], at + c, stamp); };
  // read early, for it comes from memory
  const float4 gain = a.gain && once && threadIdx.x * 4 < a.width ? load4(a.gain + threadIdx.x * 4) : zero4();
  if (n > 1) {
    float old[2 * kMost] = {}, last[2] = {};  // dot and square of each source
    auto weights_at = [&](int c) { return times4(load4(a.mix_gain + c), load4(a.query + c)); };
    float4 w = zero4();
    for (int c = threadIdx.x * 4; c < a.width; c += kThreads * 4) {
      w = weights_at(c);
#pragma unroll
      for (int i0 = 0; i0 < kMost; i0 += kGroup) {
        if (i0 >= n - 1) break;
        take_old(i0, c);
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          float &dot = old[2 * (i0 + i)], &square = old[2 * (i0 + i) + 1];
          dot = dot4(v[i], w, dot), square = dot4(v[i], v[i], square);
        }
      }
    }
    __syncthreads();
    s.part[warp][lane] = warp_sums_complete(old);  // lane l: value l, the first 2 kMost of them; the newest source's come at the end
    for (int c = threadIdx.x * 4; c < a.width; c += kThreads * 4) {
      if (!once) w = weights_at(c);
      take_new(c);
      last[0] = dot4(newest, w, last[0]), last[1] = dot4(newest, newest, last[1]);
    }
    __syncwarp();
    const float sums = warp_sums_complete(last);
    if (lane < 2) s.part[warp][2 * (n - 1) + lane] = sums;
    __syncthreads();
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += s.part[w][lane];
    const float dot = __shfl_sync(~0u, total, 2 * lane & 31), square = __shfl_sync(~0u, total, (2 * lane + 1) & 31);
    const float score = lane < n ? dot * rsqrtf(__fdividef(square, float(a.width)) + a.mix_eps) : -INFINITY;
    float top = score;
#pragma unroll
    for (int d = kMost / 2; d > 0; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    const float e = __expf(score - top);
    float sum = e;
#pragma unroll
    for (int d = kMost / 2; d > 0; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
    if (lane < kMost) s.share[warp][lane] = __fdividef(e, sum);
    __syncwarp();
  }
  float4 h;
  float square = 0.f;
  for (int c = threadIdx.x * 4; c < a.width; c += kThreads * 4) {
    const bool again = n == 1 || kMost > kGroup || !once;
    if (again) take_new(c);
    h = newest;
    if (n > 1) {
      float4 sum = zero4();
#pragma unroll
      for (int i0 = 0; i0 < kMost; i0 += kGroup) {
        if (i0 >= n - 1) break;
        if (again) take_old(i0, c);
#pragma unroll
        for (int i = 0; i < kGroup; ++i)
          if (i0 + i < n - 1) sum = fma4(s.share[warp][i0 + i], v[i], sum);
      }
      h = fma4(s.share[warp][n - 1], h, sum);
    }
    square = dot4(h, h, square);
    if (!a.gain)
      f(c, h);
    else if (!once)
      *reinterpret_cast<float4*>(room + c) = h;
  }
  if (!a.gain) return;
  if (n == 1) __syncthreads();  // a row before may still be read
  __syncwarp();
  square = warp_sum(square);
  if (lane == 0) s.part[warp][32] = square;
  __syncthreads();
  square = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) square += s.part[w][32];
  const float r = rsqrtf(__fdividef(square, float(a.width)) + a.eps);
  for (int c = threadIdx.x * 4; c < a.width; c += kThreads * 4) {
    if (!once) h = load4(room + c);
    f(c, times4(times4(r, h), once ? gain : load4(a.gain + c)));
  }
}
// kMost: sources that the kernel has code for; 1: and none for rows that take the whole block
template <bool kStamped, int kMost, class F>
__device__ __forceinline__ void any_block_row(const StepInput& a, int64_t row, Stamp stamp, float* room, Parts& s, F f) {
  if (kMost > 4 && a.sources > 4)
    block_row<kStamped, kMost>(a, row, stamp, room, s, f);
  else
    block_row<kStamped, 4>(a, row, stamp, room, s, f);
}

template <bool kStamped>
__device__ __forceinline__ float4 gated4(const StepInput& a, int64_t row, int c, Stamp stamp) {
  float4 x[2];
  take4_each<kStamped>(x, 2, stamp, row * a.stride + c, [&](int i) { return a.v[i]; });
  return each4([&](float gate, float up) { return gated_unit(a.activation, gate, up); }, x[0], x[1]);
}

// A row, normed (up to kWarpNorm columns) or not, by one warp: f(c, four values) for all columns.
template <bool kStamped, class F>
__device__ void warp_row(const StepInput& a, int64_t row, Stamp stamp, F f) {
  constexpr int kNormed = kWarpNorm / 128, kEach = kStamped ? kNormed : 2 * kNormed;
  const int lane = threadIdx.x & 31;
  for (int c0 = 0; c0 < a.width; c0 += 128 * kEach) {
    float4 x[kEach], gain[kNormed];
#pragma unroll
    for (int i = 0; i < kNormed; ++i)
      if (const int c = c0 + lane * 4 + 128 * i; a.gain && c < a.width) gain[i] = load4(a.gain + c);
    bool all;
    do {  // all columns at once
      all = true;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int c = c0 + lane * 4 + 128 * i;
        x[i] = zero4();
        if (c >= a.width) continue;
        const float* v = a.v[0];
        const int64_t at = row * a.stride + c;
        if constexpr (kStamped) {
          const Stamped p = look2(v, at), q = look2(v, at + 2);
          x[i] = make_float4(__uint_as_float(p.x), __uint_as_float(p.y), __uint_as_float(q.x), __uint_as_float(q.y));
          all = all && p.is(stamp.now) && q.is(stamp.now);
        } else {
          x[i] = load4(v + at);
        }
      }
    } while (!all);
    float square = 0.f, r = 1.f;
    if (a.gain) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) square = dot4(x[i], x[i], square);
      __syncwarp();
      r = rsqrtf(__fdividef(warp_sum(square), float(a.width)) + a.eps);
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (const int c = c0 + lane * 4 + 128 * i; c < a.width) {
        f(c, i < kNormed && a.gain ? times4(times4(r, x[i]), gain[min(i, kNormed - 1)]) : x[i]);
      }
  }
}

__device__ __forceinline__ void narrow4(nv_bf16* to, const float4& x) { *reinterpret_cast<uint2*>(to) = make_uint2(pack(x.x, x.y), pack(x.z, x.w)); }

// Input `a` of rows first .. first+count-1 by put(r, c, four values).
template <bool kStamped, int kMost, class F>
__device__ __forceinline__ void make_rows(const StepInput& a, int64_t first, int count, Stamp stamp, float* room, Parts& s, F put) {
  const int warp = threadIdx.x >> 5;
  if (kMost > 1 && by_block(a)) {
#pragma unroll 1
    for (int r = 0; r < count; ++r)
      any_block_row<kStamped, kMost>(a, first + r, stamp, room + r * a.width, s, [&](int c, const float4& x) { put(r, c, x); });
  } else if (a.gated || (!a.gain && count * a.width <= kThreads * 4)) {
#pragma unroll 1
    for (int i = threadIdx.x * 4; i < count * a.width; i += kThreads * 4) {
      const int r = count == 1 ? 0 : i / a.width, c = i - r * a.width;
      put(r, c, a.gated ? gated4<kStamped>(a, first + r, c, stamp) : take4<kStamped>(a.v[0], (first + r) * a.stride + c, stamp));
    }
  } else {
#pragma unroll 1
    for (int r = kWarps - 1 - warp; r < count; r += kWarps)  // the first warps may still be at a second input
      warp_row<kStamped>(a, first + r, stamp, [&](int c, const float4& x) { put(r, c, x); });
  }
}

__host__ __device__ __forceinline__ bool exact(const StepPart& p) { return p.exact || !p.bf16; }
template <bool kStamped>
__device__ __forceinline__ void finish(const StepPart& p, int64_t at, float y, float add, Stamp stamp) {
  if (p.add) y = add + y;
  if (p.add2) y = y + take<kStamped>(p.add2, at, stamp);
  give<kStamped>(p.y, at, y, stamp);
}

// All tiles from `tile` on, `tile_step` apart, of the rows from `first` on, up to tiles.group of them, for which there is room in `shared`.
template <int NT, bool kStamped, int kMost>
__device__ __forceinline__ void product_tiles(const StepProductArgs& a, const StepTiles& tiles, Stamp stamp, int64_t first, int tile, int tile_step,
                                              unsigned char* shared) {
  constexpr int kTurns = NT > 4 ? 1 : 2;                     // with two a barrier a tile is enough
  __shared__ float sums[kTurns][kWarps][NT * 8][kTile + 4];  // which spreads a warp's stores over the banks
  __shared__ Parts parts;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int count = int(min(int64_t(tiles.group), a.rows - first));
  const int K = a.x.width, K2 = a.x2.width, runs = padded(K) / 32, all = runs + padded(K2) / 32, stride = row_of(padded(K) + padded(K2));
  nv_bf16* x = reinterpret_cast<nv_bf16*>(shared);                            // (group, stride)
  float* wide = reinterpret_cast<float*>(x + int64_t(tiles.group) * stride);  // (group, K)
  const int batches = (all + kWarps * kAhead - 1) / (kWarps * kAhead);

  auto part_of = [&](int tile) {
    int p = 0;
    while (tile >= tiles.begin[p + 1]) ++p;
    return p;
  };
  auto load = [&](Eight(&w)[kAhead], int tile, int batch) {
    if (tile >= tiles.begin[a.parts]) return;
    const int p = part_of(tile), row = (tile - tiles.begin[p]) * kTile + g;
    const StepPart& part = a.part[p];
    if (exact(part)) {  // read when they are used, but on their way from memory
      const int64_t bytes = int64_t(K) * (part.bf16 ? 2 : 4), from = (tile - tiles.begin[p]) / tiles.fours * kTile * bytes,
                    end = min(from + kTile * bytes, part.out * bytes);
      for (int64_t i = from + threadIdx.x * 128; i < end; i += kThreads * 128)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(part.w) + i));
      return;
    }
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

  Eight now[kAhead], next[kAhead];
  int batch = 0, turn = 0;
  load(now, tile, 0);
  meet<kStamped>();
#pragma unroll 1
  for (int second = K2 > 0; second >= 0; --second) {  // the second comes first
    const StepInput& in = second ? a.x2 : a.x;
    nv_bf16* to = x + (second ? padded(K) : 0);
    make_rows<kStamped, kMost>(in, first, count, stamp, wide, parts, [&](int r, int c, const float4& y) {
      narrow4(to + r * stride + c, y);
      if (!second && tiles.wide) *reinterpret_cast<float4*>(wide + r * K + c) = y;
      if (!tiles.x) return;
      const int64_t at = (first + r) * K + c;
      if (kStamped && tiles.stamps)
        give<true>(tiles.x, at, y.x, stamp), give<true>(tiles.x, at + 1, y.y, stamp), give<true>(tiles.x, at + 2, y.z, stamp),
            give<true>(tiles.x, at + 3, y.w, stamp);
      else
        *reinterpret_cast<float4*>(tiles.x + at) = y;
    });
    for (int r = warp; r < count; r += kWarps)  // zeros up to a whole run of 32 columns
      for (int c = in.width + lane; c < padded(in.width); c += 32) to[r * stride + c] = nv_bf16(0.f);
  }
  __syncthreads();

  float sum[NT][4] = {};
  while (tile < tiles.begin[a.parts]) {
    const int p = part_of(tile);
    const StepPart& part = a.part[p];
    const int at_part = tile - tiles.begin[p], row0 = (exact(part) ? at_part / tiles.fours : at_part) * kTile;
    const bool ends = exact(part) || batch + 1 == batches;
    load(next, ends ? tile + tile_step : tile, ends ? 0 : batch + 1);
    if (exact(part)) {  // a warp two rows of W and four tokens, a lane every 32nd four columns
      if (const int r0 = at_part % tiles.fours * 4; r0 < count)
        for (int i = warp; i < kTile && row0 + i < part.out; i += kWarps) {
          const int64_t w = int64_t(row0 + i) * K;
          float total[4] = {};
#pragma unroll 4
          for (int c = lane * 4; c < K; c += 128) {
            float4 m;
            if (part.bf16) {
              const uint2 two = *reinterpret_cast<const uint2*>(static_cast<const nv_bf16*>(part.w) + w + c);
              m = make_float4(low(two.x), high(two.x), low(two.y), high(two.y));
            } else {
              m = load4(static_cast<const float*>(part.w) + w + c);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              if (r0 + j >= count) break;
              const float4 y = load4((tiles.wide ? wide + (r0 + j) * K : a.x.v[0] + (first + r0 + j) * a.x.stride) + c);
              total[j] = dot4(m, y, total[j]);
            }
          }
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float y = warp_sum(total[j]);
            const int64_t at = (first + r0 + j) * part.stride + row0 + i;
            if (lane == 0 && r0 + j < count) finish<kStamped>(part, at, y, part.add ? take<kStamped>(part.add, at, stamp) : 0.f, stamp);
          }
        }
    } else {
      float early = 0.f;  // what is added, of the up to kThreads elements of a stamped step
      if (kStamped && ends && part.add) {
        const int r = threadIdx.x / kTile, o = threadIdx.x % kTile;
        if (r < count && row0 + o < part.out) early = take<kStamped>(part.add, (first + r) * part.stride + row0 + o, stamp);
      }
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
          finish<kStamped>(part, at, total, kStamped ? early : part.add ? part.add[at] : 0.f, stamp);
        }
        if (kTurns == 1)
          __syncthreads();
        else
          turn ^= 1;
      }
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) now[u] = next[u];
    if (ends)
      tile += tile_step, batch = 0;
    else
      ++batch;
  }
}

}  // namespace
}  // namespace k3::cuda
