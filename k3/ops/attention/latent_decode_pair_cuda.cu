// Decode over the paged latent cache with many heads: a cluster of two blocks shares a page's channels. latent_decode_cuda.cu has the equation.
//
// Block r keeps channels [256 r, 256 r + 256) and [512 + 32 r, 512 + 32 r + 32) of the query and of every page, so a page is read once, no head is
// padded, and its 256 output channels of all heads fit the registers. Tokens (or channels) are a product's rows, heads its columns. Of a page:
//   S^T [64 tokens, H]  = C q^T        partial: own 288 channels. Two warpgroups in turns, even and odd pages
//   the other block's half of the heads is sent to it, its share of the own half is awaited and added; softmax of the own half of the heads
//   P^T's own half goes into shared memory here and there
//   O^T [256, H]       += C^T P^T      two warpgroups, 128 channels each
// Both blocks keep their own heads first: columns 0 .. H/2 of S, P and O are theirs.
// The running maximum is moved only when a score exceeds it by 2^8, which one vote finds; it is handed from page to page between the two scoring
// warpgroups. Three pages are in memory; an output warpgroup asks for its own panels of the page after next as soon as it is done with a page's.
// Precision as in latent_decode_cuda.cu.
#include "k3/core/tensor_map.cuh"
#include "k3/core/tile.cuh"
#include "k3/core/wgmma.cuh"
#include "k3/ops/attention/attention_cuda.h"

namespace k3::cuda {
namespace {

constexpr int kStages = 3, kThreads = 512;  // warpgroups: output, output, scores of even pages, of odd pages
constexpr int kPanelBytes = 64 * 128, kStageBytes = 4 * kPanelBytes + 64 * 64;  // of a page: 64 tokens x (4 panels of 64 + 32 channels)

template <int H>
struct Plan {
  static constexpr int own = H / 2;
  static constexpr int query = 0;                              // 4 panels [H][64], and [H][32]
  static constexpr int ring = query + H * 576;                 // [3] pages; at the end, the output
  static constexpr int prob = ring + kStages * kStageBytes;    // [2][H][64 tokens]: even and odd pages
  static constexpr int came = prob + 2 * H * 128;              // [2][H / 16][128 threads] float4: the other block's share of the scores
  static constexpr int factor = came + 2 * H * 128;            // [2][2][64] float: what a maximum's move does to older sums, own and other heads; [63] != 0: one moved
  static constexpr int top = factor + 2 * 2 * 64 * 4;          // [64] float: running maxima of the own heads
  static constexpr int part = top + 64 * 4;                    // [8 warps][64] float: maxima or sums of a warp
  static constexpr int total = part + 8 * 64 * 4;              // [2][64] float: sum of P, own and other heads
  static constexpr int moves = total + 2 * 64 * 4;             // int: how often maxima moved
  static constexpr int barriers = moves + 16;                  // full[3][3], came[2], P full[2], P empty[2]
  static constexpr int bytes = barriers + (kStages * 3 + 6) * 8 + 1024;
};

__device__ __forceinline__ uint32_t there(uint32_t address, uint32_t rank) {  // the same place in another block of the cluster
  uint32_t r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
  return r;
}
__device__ __forceinline__ void send16(uint32_t to, float a, float b, float c, float d, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier) : "memory");
}
__device__ __forceinline__ void bulk_send(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "r"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ __forceinline__ bool any_of(int id, int threads, bool x) {  // a barrier that also says whether any thread's x holds
  int r;
  asm volatile("{.reg .pred p, q;\nsetp.ne.b32 p, %1, 0;\nbarrier.cta.red.or.aligned.pred q, %2, %3, p;\nselp.b32 %0, 1, 0, q;}" : "=r"(r) : "r"(int(x)), "r"(id), "r"(threads) : "memory");
  return r;
}
__device__ __forceinline__ uint64_t describe64(uint32_t shared_address) {  // as describe(), K-major, rows of 64 bytes swizzled by 64 bytes
  return uint64_t((shared_address & 0x3FFFF) >> 4) | (uint64_t(1) << 16) | (uint64_t(512 >> 4) << 32) | (uint64_t(2) << 62);
}

template <int H>
__global__ void __launch_bounds__(kThreads, 1) latent_pair_kernel(const __grid_constant__ CUtensorMap panels, const __grid_constant__ CUtensorMap narrow, const __grid_constant__ LatentDecodeArgs a) {
  extern __shared__ char memory[];
  using P = Plan<H>;
  constexpr int kOwn = P::own, kGroups = kOwn / 8;  // groups of 8 columns
  char* s = memory + ((1024 - (shared_address(memory) & 1023)) & 1023);
  const uint32_t at = shared_address(s);
  const uint32_t full = at + P::barriers, came = full + kStages * 3 * 8, p_full = came + 16, p_empty = p_full + 16;
  const uint32_t rank = cluster_rank(), other = rank ^ 1;
  const int row = blockIdx.y, split = blockIdx.x / 2, splits = gridDim.x / 2, group = threadIdx.x >> 7, tid = threadIdx.x & 127, lane = threadIdx.x & 31, warp = tid >> 5;
  const int length = a.lengths[row], pages = (length + kPageTokens - 1) / kPageTokens;
  const int first = split * a.split_pages, count = min(pages - first, a.split_pages), two = (lane & 3) * 2;
  nv_bf16* out = static_cast<nv_bf16*>(a.out) + int64_t(row) * a.heads * kLatent;
  if (count <= 0) {  // nothing here; an empty row gives zeros
    if (split == 0 && rank == 0)
      for (int i = threadIdx.x; i < a.heads * kLatent / 8; i += kThreads) reinterpret_cast<uint4*>(out)[i] = make_uint4(0, 0, 0, 0);
    return;
  }
  float* top_of = reinterpret_cast<float*>(s + P::top);
  float* factor = reinterpret_cast<float*>(s + P::factor);
  float* total = reinterpret_cast<float*>(s + P::total);
  volatile int* moves = reinterpret_cast<int*>(s + P::moves);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages * 3; ++i) barrier_init(full + i * 8, 1);
    for (int i = 0; i < 2; ++i) barrier_init(came + i * 8, 1), barrier_init(p_full + i * 8, kGroupArrivals), barrier_init(p_empty + i * 8, 4 * kGroupArrivals);
    barrier_init_done();
    *moves = 0;
  }
  __syncthreads();
  auto head_of = [&](int column) { int h = column + int(rank) * kOwn; return h >= H ? h - H : h; };
  // asked for by the first thread of output warpgroup g: its two panels of page i, and by the first the block's share of the last 64 channels
  const int* table = a.table + int64_t(row) * a.table_stride + first;
  auto ask = [&](int i, int page) {
    const uint32_t stage = i % kStages, bar = full + (stage * 3 + group) * 8;
    arrive_expect(bar, 2 * kPanelBytes);
    panel_load(at + P::ring + stage * kStageBytes + group * 2 * kPanelBytes, panels, int(rank) * 4 + group * 2, 0, page, bar);
  };
  auto ask_shared = [&](int i, int page) {
    const uint32_t stage = i % kStages, bar = full + (stage * 3 + 2) * 8;
    arrive_expect(bar, 64 * 64);
    tensor_load(at + P::ring + stage * kStageBytes + 4 * kPanelBytes, narrow, kLatent + int(rank) * 32, 0, page, bar);
  };
  if (group < 2 && tid == 0)
    for (int i = 0; i < min(count, kStages); ++i) {
      if (group == 0) ask_shared(i, table[i]);
      ask(i, table[i]);
    }
  {  // the query; heads past the last are zero
    const nv_bf16* q = static_cast<const nv_bf16*>(a.q) + row * a.q_stride;
    for (int i = threadIdx.x; i < H * 36; i += kThreads) {
      const int n = i / 36, chunk = i % 36, head = head_of(n), channel = chunk < 32 ? int(rank) * 256 + chunk * 8 : kLatent + int(rank) * 32 + (chunk - 32) * 8;
      const bool valid = head < a.heads;
      const uint32_t to = chunk < 32 ? (chunk >> 3) * H * 128 + swizzle128(n, (chunk & 7) * 16) : 4 * H * 128 + n * 64 + ((chunk & 3) ^ (n >> 1 & 3)) * 16;
      copy16(at + P::query + to, q + (valid ? head : 0) * kLatentRow + channel, valid);
    }
    copy_commit();
    copy_wait<0>();
    publish();
  }
  __syncthreads();
  cluster_sync();

  if (group >= 2) {
    fewer_registers<120>();
    const int w = group - 2;
    float top[2 * kGroups], sum[2 * kGroups];
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) top[i] = -INFINITY, sum[i] = 0.f;
    int seen = 0, met = 0;  // met: barriers of these threads, at most five a page
    auto follow = [&] {  // maxima that the other scoring warpgroup moved
      if (*moves == seen) return;
      seen = *moves;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        float2 t = *reinterpret_cast<float2*>(top_of + g * 8 + two);
        sum[2 * g] *= ex2(top[2 * g] - t.x), top[2 * g] = t.x;
        sum[2 * g + 1] *= ex2(top[2 * g + 1] - t.y), top[2 * g + 1] = t.y;
      }
    };
    const float scale = a.scale * kLog2e;
    const uint32_t x_here = P::came + w * H * 128 + tid * 16, x_there = there(at + x_here, other), came_there = there(came + w * 8, other);
    const uint32_t p_here = at + P::prob + w * H * 128, p_there = there(p_here + kOwn * 128, other), p_full_there = there(p_full + w * 8, other);
    const uint32_t f_here = at + P::factor + w * 512, f_there = there(f_here + 256, other);
    for (int i = w; i < count; i += 2) {
      const int stage = i % kStages, turn = i >> 1, valid = min(kPageTokens, length - (first + i) * kPageTokens);
      const uint32_t page = P::ring + stage * kStageBytes, bar = full + stage * 3 * 8, phase = i / kStages & 1;
      if (tid == 0) arrive_expect(came + w * 8, kOwn * 256);
      if (valid < kPageTokens) {  // what lies behind the last token may be anything, NaN too
#pragma unroll 1
        for (int p = 0; p < 5; ++p) {
          const int units = p < 4 ? 8 : 4;
          wait(bar + (p >> 1) * 8, phase);
          for (int x = valid * units + tid; x < 64 * units; x += 128) reinterpret_cast<uint4*>(s + page + p * kPanelBytes)[x] = make_uint4(0, 0, 0, 0);
        }
        publish();
        named_barrier(5 + w, 128), ++met;
      }
      // partial scores
      float S[H / 2];
#pragma unroll
      for (int p = 0; p < 3; ++p) {  // what is asked for first comes first
        const int b = p == 0 ? 2 : p - 1;
        wait(bar + b * 8, phase);
        warpgroup_fence();
        if (p == 0) {
#pragma unroll
          for (int k = 0; k < 2; ++k) wgmma<H, 0, 0>(S, describe64(at + page + 4 * kPanelBytes) + k * 2, describe64(at + P::query + 4 * H * 128) + k * 2, k > 0);
        } else {
#pragma unroll
          for (int k = 0; k < 8; ++k) {
            const int c = b * 2 + k / 4;
            wgmma<H, 0, 0>(S, describe(at + page + c * kPanelBytes) + (k & 3) * 2, describe(at + P::query + c * H * 128) + (k & 3) * 2, 1);
          }
        }
      }
      warpgroup_commit();
      warpgroup_wait<0>();
      pin(S);
      // the other block's heads go to it, its share of ours comes
      if (turn > 0) wait(p_full + w * 8, (turn - 1) & 1);  // so it has read what was sent two pages ago
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const float* x = S + 4 * (kGroups + g);
        send16(x_there + g * 128 * 16, x[0], x[1], x[2], x[3], came_there);
      }
      wait(came + w * 8, turn & 1);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        float4 x = *reinterpret_cast<float4*>(s + x_here + g * 128 * 16);
        S[4 * g] += x.x, S[4 * g + 1] += x.y, S[4 * g + 2] += x.z, S[4 * g + 3] += x.w;
      }
      if (valid < kPageTokens) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (warp * 16 + (lane >> 2) + h * 8 >= valid) {
#pragma unroll
            for (int g = 0; g < kGroups; ++g) S[4 * g + 2 * h] = S[4 * g + 2 * h + 1] = -INFINITY;
          }
      }
      // after the page before
      if (i > 0) named_barrier(3 + w, 256), ++met;
      follow();
      wait(p_empty + w * 8, (turn & 1) ^ 1);  // the output warpgroups, here and there, are done with this place's last page
      // P, by the maximum so far
      uint32_t p[2 * kGroups];
      auto exponentials = [&] {
#pragma unroll
        for (int g = 0; g < kGroups; ++g)
#pragma unroll
          for (int h = 0; h < 2; ++h) p[2 * g + h] = pack(ex2(fmaf(S[4 * g + 2 * h], scale, -top[2 * g])), ex2(fmaf(S[4 * g + 2 * h + 1], scale, -top[2 * g + 1])));
#pragma unroll
        for (int g = 0; g < kGroups; g += 2) {
          const uint32_t r[4] = {p[2 * g], p[2 * g + 1], p[2 * g + 2], p[2 * g + 3]};
          stmatrix4_transposed(p_here + swizzle128((g + (lane >> 4)) * 8 + (lane & 7), (warp * 2 + (lane >> 3 & 1)) * 16), r);
        }
      };
      exponentials();
      uint32_t most = p[0];
#pragma unroll
      for (int x = 1; x < 2 * kGroups; ++x) asm("max.bf16x2 %0, %0, %1;" : "+r"(most) : "r"(p[x]));
      if (tid == 0) factor[w * 128 + 63] = 0.f;
      publish();
      ++met;
      if (any_of(5 + w, 128, fmaxf(low(most), high(most)) > 256.f)) {  // a maximum moves: P again
        float* part = reinterpret_cast<float*>(s + P::part) + w * 4 * 64;
#pragma unroll
        for (int c = 0; c < 2 * kGroups; ++c) {
          const int x = (c >> 1) * 4 + (c & 1);
          float m = fmaxf(S[x], S[x + 2]);
          m = fmaxf(m, __shfl_xor_sync(~0u, m, 4)), m = fmaxf(m, __shfl_xor_sync(~0u, m, 8)), m = fmaxf(m, __shfl_xor_sync(~0u, m, 16));
          if (lane < 4) part[warp * 64 + (c >> 1) * 8 + two + (c & 1)] = m * scale;
        }
        named_barrier(5 + w, 128);
#pragma unroll
        for (int c = 0; c < 2 * kGroups; ++c) {
          const int n = (c >> 1) * 8 + two + (c & 1);
          const float m = fmaxf(fmaxf(part[n], part[64 + n]), fmaxf(part[128 + n], part[192 + n])), next = m > top[c] + 8.f ? m : top[c], f = ex2(top[c] - next);
          sum[c] *= f, top[c] = next;
          if (warp == 0 && lane < 4) factor[w * 128 + n] = f, top_of[n] = next;
        }
        ++seen, met += 2;
        if (tid == 0) *moves = seen, factor[w * 128 + 63] = 1.f;
        exponentials();
        publish();
        named_barrier(5 + w, 128);
      }
      if (tid == 0) {
        arrive_expect(p_full + w * 8, kOwn * 128 + 256);
        bulk_send(p_there, p_here, kOwn * 128, p_full_there);
        bulk_send(f_there, f_here, 256, p_full_there);
      } else if (kForTheChecker) {
        arrive(p_full + w * 8);
      }
      if (i + 1 < count) named_arrive(3 + (w ^ 1), 256);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) sum[2 * g] += low(p[2 * g]) + low(p[2 * g + 1]), sum[2 * g + 1] += high(p[2 * g]) + high(p[2 * g + 1]);
    }
    for (; kForTheChecker && met < (count + 1) / 2 * 5; ++met) named_barrier(5 + w, 128);
    named_barrier(7, 256);
    follow();
    float* part = reinterpret_cast<float*>(s + P::part) + w * 4 * 64;
#pragma unroll
    for (int c = 0; c < 2 * kGroups; ++c) {
      float t = sum[c];
      t += __shfl_xor_sync(~0u, t, 4), t += __shfl_xor_sync(~0u, t, 8), t += __shfl_xor_sync(~0u, t, 16);
      if (lane < 4) part[warp * 64 + (c >> 1) * 8 + two + (c & 1)] = t;
    }
    named_barrier(7, 256);
    if (w == 0 && tid < kOwn) {
      const float* x = reinterpret_cast<float*>(s + P::part) + tid;
      float t = 0.f;
#pragma unroll
      for (int i = 0; i < 8; ++i) t += x[i * 64];
      total[tid] = t;
      asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there(at + P::total + (64 + tid) * 4, other)), "f"(t) : "memory");
    }
    cluster_sync();
  } else {
    more_registers<136>();  // 2 x 136 + 2 x 120 = 4 x 128, what the block was launched with
    float O[2][H / 2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < H / 2; ++j) O[i][j] = 0.f;
    int next = tid == 0 && count > kStages ? table[kStages] : 0;
    for (int i = 0; i < count; ++i) {
      const int w = i & 1, turn = i >> 1, stage = i % kStages;
      const uint32_t page = at + P::ring + stage * kStageBytes;
      const uint64_t p = describe(at + P::prob + w * H * 128);
      wait(p_full + w * 8, turn & 1);
      const float* f = factor + w * 128;
      if (f[63] != 0.f || f[127] != 0.f) {
        const bool mine = f[63] != 0.f, its = f[127] != 0.f;
#pragma unroll
        for (int j = 0; j < H / 8; ++j) {
          float2 x = make_float2(1.f, 1.f);
          if (j < kGroups ? mine : its) x = *reinterpret_cast<const float2*>(f + (j < kGroups ? j * 8 : 64 + (j - kGroups) * 8) + two);
#pragma unroll
          for (int m = 0; m < 2; ++m) O[m][4 * j] *= x.x, O[m][4 * j + 1] *= x.y, O[m][4 * j + 2] *= x.x, O[m][4 * j + 3] *= x.y;
        }
      }
      warpgroup_fence();
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const uint64_t left = describe(page + (group * 2 + x) * kPanelBytes);
#pragma unroll
        for (int k = 0; k < 4; ++k) wgmma<H, 1, 0>(O[x], left + k * (2048 / 16), p + k * 2, 1);
      }
      warpgroup_commit();
      const bool more = tid == 0 && i + kStages < count;
      if (more && group == 0) ask_shared(i + kStages, next);  // P is there, so scores are done with it
      warpgroup_wait<0>();
      pin(O[0]), pin(O[1]);
      named_barrier(1 + group, 128);
      if (more) ask(i + kStages, next);
      if (kForTheChecker || tid == 0) arrive(p_empty + w * 8), arrive_at(p_empty + w * 8, other);
      if (more && i + kStages + 1 < count) next = table[i + kStages + 1];
    }
    cluster_sync();  // the sums are known; nobody reads the ring any more
    if (pages <= a.split_pages) {  // the only split: normalise, transpose through the ring's place, store
      char* stage = s + P::ring;
      constexpr int kRow = 256 * 2 + 16;
#pragma unroll
      for (int j = 0; j < H / 8; ++j) {
        const float2 t = *reinterpret_cast<float2*>(total + (j < kGroups ? j * 8 : 64 + (j - kGroups) * 8) + two);
        const float2 r = make_float2(1.f / t.x, 1.f / t.y);
        uint32_t u[4] = {pack(O[0][4 * j] * r.x, O[0][4 * j + 1] * r.y), pack(O[0][4 * j + 2] * r.x, O[0][4 * j + 3] * r.y),
                         pack(O[1][4 * j] * r.x, O[1][4 * j + 1] * r.y), pack(O[1][4 * j + 2] * r.x, O[1][4 * j + 3] * r.y)};
        const int channel = group * 128 + (lane >> 4) * 64 + warp * 16 + (lane >> 3 & 1) * 8;
        stmatrix4_transposed(shared_address(stage + (j * 8 + (lane & 7)) * kRow + channel * 2), u);
      }
      named_barrier(1, 256);
      for (int i = threadIdx.x; i < H * 32; i += 256) {
        const int head = head_of(i / 32);
        if (head < a.heads) *reinterpret_cast<uint4*>(out + head * kLatent + rank * 256 + i % 32 * 8) = *reinterpret_cast<uint4*>(stage + i / 32 * kRow + i % 32 * 16);
      }
    } else {
      float* part = a.partial + (int64_t(row) * splits + split) * a.heads * (kLatent + 2);
      if (threadIdx.x < kOwn && head_of(threadIdx.x) < a.heads) part[head_of(threadIdx.x)] = top_of[threadIdx.x], part[a.heads + head_of(threadIdx.x)] = total[threadIdx.x];
      part += 2 * a.heads;
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int x = 0; x < H / 2; ++x) {
          const int head = head_of((x >> 2) * 8 + two + (x & 1)), channel = rank * 256 + group * 128 + m * 64 + warp * 16 + (lane >> 2) + ((x >> 1) & 1) * 8;
          if (head < a.heads) part[head * kLatent + channel] = O[m][x];
        }
    }
  }
}

template <int H>
const char* launch(const CUtensorMap& panels, const CUtensorMap& narrow, const LatentDecodeArgs& a, cudaStream_t stream) {
  auto kernel = latent_pair_kernel<H>;
  cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Plan<H>::bytes);
  if (e != cudaSuccess) return cudaGetErrorString(e);
  cudaLaunchAttribute cluster{cudaLaunchAttributeClusterDimension, {}, {}};
  cluster.val.clusterDim = {2, 1, 1};
  cudaLaunchConfig_t config{dim3(latent_decode_splits(a.longest, a.split_pages) * 2, a.rows), dim3(kThreads), size_t(Plan<H>::bytes), stream, &cluster, 1};
  e = cudaLaunchKernelEx(&config, kernel, panels, narrow, a);
  return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}

}  // namespace

const char* latent_decode_pair(const LatentDecodeArgs& a, void* stream) {
  CUtensorMap panels, narrow;
  if (const char* e = make_panel_map(panels, a.pages, kLatentRow / 64, kPageTokens, a.page_count, kLatentRow, kPageTokens * kLatentRow, kPageTokens, 2)) return e;
  if (const char* e = make_tensor_map(narrow, a.pages, kLatentRow, kPageTokens, a.page_count, kLatentRow, kPageTokens * kLatentRow, kPageTokens, 32)) return e;
  return a.heads <= 64 ? launch<64>(panels, narrow, a, cudaStream_t(stream)) : launch<96>(panels, narrow, a, cudaStream_t(stream));
}


}  // namespace k3::cuda
