// One query row against a paged latent cache, all heads at once:  s = q c^T,  p = softmax(scale s),  o = p c[:, :512].
//
// More than 32 heads are latent_decode_pair_cuda.cu's; here are up to 32, a block each row's split, and the joining of splits.
// Bound: memory, 2.26 us a page of 64 tokens and multiprocessor.
// Split: `split_pages` pages of one row a block; pages are cut at fixed places of the row's own sequence.
//   S [64 heads, 64 tokens] = q C^T      one warpgroup, q in its registers for good (144 a thread), leaves P in shared memory, a page ahead
//   O^T [256 channels, 32]  += C^T P^T   two warpgroups own half of the output channels each; tokens' channels are the rows, heads the columns
// The first warp feeds a ring of 26 panels, 64 tokens x 64 channels: nearly three pages.
// Scoring: 1 scores, 2 row maxima, running maximum (moved only when it grows by more than 2^8), 3 P. Output: 4 rescale, 5 product.
// Precision: scores, maxima, sums, outputs float32; P bf16. Partial results of splits are float32, joined in order by a second kernel.
#include "k3/core/tensor_map.cuh"
#include "k3/core/tile.cuh"
#include "k3/core/wgmma.cuh"
#include "k3/ops/attention/attention_cuda.h"

namespace k3::cuda {
namespace {

constexpr int kPanels = 9, kRing = 26, kPanelBytes = 64 * 128;
constexpr int kThreads = 384;  // warpgroups: output, output, scores
constexpr int H = 32;          // heads, padded

struct Plan {
  static constexpr int ring = 0;                             // 26 panels [64 tokens][64]; before, the query; at the end, the output
  static constexpr int prob = ring + kRing * kPanelBytes;    // [2][H][64 tokens]: even and odd pages
  static constexpr int factor = prob + 2 * H * 128;          // [2][64] float: what a maximum's move does to older sums
  static constexpr int top = factor + 2 * 64 * 4;            // [64] float: the last maximum
  static constexpr int total = top + 64 * 4;                 // [64] float: sum of P
  static constexpr int flags = total + 64 * 4;               // [2][4] int: did a maximum of a warp move
  static constexpr int barriers = flags + 32;                // full[26], empty[26], P full[2], P empty[2], sums
  static constexpr int bytes = barriers + 2 * kRing * 8 + 40 + 1024;
};

__global__ void __launch_bounds__(kThreads, 1) latent_decode_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ LatentDecodeArgs a) {
  extern __shared__ char memory[];
  using P = Plan;
  char* s = memory + ((1024 - (shared_address(memory) & 1023)) & 1023);
  const uint32_t full = shared_address(s + P::barriers), empty = full + kRing * 8, p_full = empty + kRing * 8, p_empty = p_full + 16, sums = p_empty + 16;
  const int row = blockIdx.y, split = blockIdx.x, splits = gridDim.x, heads = a.heads, group = threadIdx.x >> 7, lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  const int length = a.lengths[row], pages = (length + kPageTokens - 1) / kPageTokens;
  const int first = split * a.split_pages, last = min(pages, first + a.split_pages);
  nv_bf16* out = static_cast<nv_bf16*>(a.out) + int64_t(row) * heads * kLatent;
  if (first >= last) {  // nothing here; an empty row gives zeros
    if (split == 0)
      for (int i = threadIdx.x; i < heads * kLatent / 8; i += kThreads) reinterpret_cast<uint4*>(out)[i] = make_uint4(0, 0, 0, 0);
    return;
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < kRing; ++i) barrier_init(full + i * 8, 1), barrier_init(empty + i * 8, 4 * kWarpArrivals);
    for (int i = 0; i < 2; ++i) barrier_init(p_full + i * 8, 128), barrier_init(p_empty + i * 8, 8 * kWarpArrivals);
    barrier_init(sums, 128);
    barrier_init_done();
  }
  __syncthreads();
  auto give_back = [&](int slot) { arrive_warp(empty + slot * 8); };  // to the first warp, which fills it again

  float* top_of = reinterpret_cast<float*>(s + P::top);
  float* factor = reinterpret_cast<float*>(s + P::factor);
  float* total = reinterpret_cast<float*>(s + P::total);
  volatile int* flags = reinterpret_cast<int*>(s + P::flags);
  const int two = (lane & 3) * 2;
  const uint64_t prob = describe(shared_address(s + P::prob));

  if (group == 2) {
    more_registers<216>();
    const int tid = threadIdx.x & 127, row0 = warp * 16 + (lane >> 2);
    // the query, through the ring into registers; heads past the last are zero
    const nv_bf16* q = static_cast<const nv_bf16*>(a.q) + row * a.q_stride;
    for (int i = tid; i < 64 * (kLatentRow / 8); i += 128) {
      int head = i / (kLatentRow / 8), chunk = i % (kLatentRow / 8);
      bool valid = head < heads;
      copy16(shared_address(s + P::ring + (chunk >> 3) * kPanelBytes + swizzle128(head, (chunk & 7) * 16)), q + (valid ? head : 0) * kLatentRow + chunk * 8, valid);
    }
    copy_commit();
    copy_wait<0>();
    named_barrier(1, 128);
    uint32_t Q[4 * kPanels][4];
#pragma unroll
    for (int k = 0; k < 4 * kPanels; ++k)
      ldmatrix4(Q[k], shared_address(s + P::ring) + (k >> 2) * kPanelBytes + swizzle128(warp * 16 + (lane & 15), ((k & 3) * 2 + (lane >> 4)) * 16));
    publish();
    named_barrier(2, kThreads);  // the ring is free for pages

    const float scale = a.scale * kLog2e;
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f};
    int slot = 0;
    uint32_t phase = 0;
    for (int i = 0; i < last - first; ++i) {
      const int odd = i & 1, valid = min(kPageTokens, length - (first + i) * kPageTokens);
      if (valid < kPageTokens) {  // what lies behind the last token may be anything, NaN too
#pragma unroll 1
        for (int p = 0; p < kPanels; ++p) {
          int place = (i * kPanels + p) % kRing;
          wait(full + place * 8, (i * kPanels + p) / kRing & 1);
          for (int x = valid * 8 + tid; x < 64 * 8; x += 128) reinterpret_cast<uint4*>(s + P::ring + place * kPanelBytes)[x] = make_uint4(0, 0, 0, 0);
        }
        publish();
        named_barrier(1, 128);
      }
      // 1. scores
      float S[32];
#pragma unroll
      for (int p = 0; p < kPanels; ++p) {
        wait(full + slot * 8, phase);
        warpgroup_fence();
        const uint64_t panel = describe(shared_address(s + P::ring) + slot * kPanelBytes);
#pragma unroll
        for (int k = 0; k < 4; ++k) wgmma<64, 0>(S, Q[4 * p + k], panel + k * 2, p + k > 0);
        if (++slot == kRing) slot = 0, phase ^= 1;
      }
      warpgroup_commit();
      warpgroup_wait<0>();
      pin(S);
      give_back(slot == 0 ? kRing - 1 : slot - 1);  // the shared 64 channels are no values
      // 2. row maxima
      bool moved = false;
      float grown[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float m = -INFINITY;
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = S[4 * n + 2 * h + e];
            x = n * 8 + two + e < valid ? x * scale : -INFINITY;
            m = fmaxf(m, x);
          }
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 1)), m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
        grown[h] = 1.f;
        if (m > top[h] + 8.f) grown[h] = ex2(top[h] - m), top[h] = m, moved = true;
        sum[h] *= grown[h];
      }
      moved = __any_sync(~0u, moved);
      wait(p_empty + odd * 8, (i >> 1 & 1) ^ 1);  // the output warpgroups are done with this P's last page
      if ((lane & 3) == 0) factor[odd * 64 + row0] = grown[0], factor[odd * 64 + row0 + 8] = grown[1];
      if (lane == 0) flags[odd * 4 + warp] = moved;
      // 3. P
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint32_t r[8];
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          float x = ex2(S[4 * n + 2 * h] - top[h]), y = ex2(S[4 * n + 2 * h + 1] - top[h]);
          sum[h] += x + y, r[n] = pack(x, y);
        }
        if (row0 + 8 * h < H) {
          char* to = s + P::prob + odd * H * 128;
#pragma unroll
          for (int n = 0; n < 8; ++n) *reinterpret_cast<uint32_t*>(to + swizzle128(row0 + 8 * h, (n * 8 + two) * 2)) = r[n];
        }
      }
      publish();
      arrive(p_full + odd * 8);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float t = sum[h];
      t += __shfl_xor_sync(~0u, t, 1), t += __shfl_xor_sync(~0u, t, 2);
      if ((lane & 3) == 0) total[row0 + 8 * h] = t, top_of[row0 + 8 * h] = top[h];
    }
    arrive(sums);
    return;
  }

  fewer_registers<144>();  // 2 x 144 + 216 = 3 x 168, what the block was launched with
  float O[4][H / 2];
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < H / 2; ++j) O[i][j] = 0.f;
  auto ask = [&](int i, int from, int to) {  // lanes of the first warp: a panel of page i each, as its place in the ring becomes free
    if (int(threadIdx.x) >= from && int(threadIdx.x) < to && i < last - first) {
      const int m = i * kPanels + lane, slot = m % kRing, where = a.table[int64_t(row) * a.table_stride + first + i];
      const uint32_t bar = full + slot * 8, at = shared_address(s + P::ring) + slot * kPanelBytes;
      wait(empty + slot * 8, (m / kRing & 1) ^ 1);
      arrive_expect(bar, kPanelBytes);
      tensor_load(at, map, lane * 64, 0, where, bar);
    }
    __syncwarp();
  };
  named_barrier(2, kThreads);
  ask(0, 0, kPanels), ask(1, 0, kPanels);
  int base = group * 4, odd = 0;  // of this page's panels in the ring
  for (int i = 0; i < last - first; ++i, base = base + kPanels >= kRing ? base + kPanels - kRing : base + kPanels) {
    odd = i & 1;
    auto place = [&](int x) { return base + x >= kRing ? base + x - kRing : base + x; };
    const uint64_t p = prob + odd * (H * 128 / 16);
    ask(i + 2, 0, kPanels - 1);
    wait(p_full + odd * 8, i >> 1 & 1);
    // 4. rescale
    if (flags[odd * 4] | flags[odd * 4 + 1] | flags[odd * 4 + 2] | flags[odd * 4 + 3]) {
#pragma unroll
      for (int j = 0; j < H / 8; ++j) {
        float2 f = *reinterpret_cast<float2*>(factor + odd * 64 + j * 8 + two);
#pragma unroll
        for (int m = 0; m < 4; ++m) O[m][4 * j] *= f.x, O[m][4 * j + 1] *= f.y, O[m][4 * j + 2] *= f.x, O[m][4 * j + 3] *= f.y;
      }
    }
    // 5. O^T += C^T P^T; panels are given back as they are done
    uint32_t A[2][2][4];  // half a panel is loaded while the half before is multiplied
#pragma unroll
    for (int x = 0; x < 8; ++x) {
      if (x >= 2) warpgroup_wait<1>();
      if (x >= 3 && (x & 1)) give_back(place((x - 3) / 2));
      const uint32_t from = shared_address(s + P::ring) + place(x / 2) * kPanelBytes;
#pragma unroll
      for (int k = 0; k < 2; ++k)
        ldmatrix4_transposed(A[x & 1][k], from + swizzle128((2 * (x & 1) + k) * 16 + (lane >> 4) * 8 + (lane & 7), (2 * warp + (lane >> 3 & 1)) * 16));
      warpgroup_fence();
#pragma unroll
      for (int k = 0; k < 2; ++k) wgmma<H, 0>(O[x / 2], A[x & 1][k], p + (2 * (x & 1) + k) * 2, 1);
      warpgroup_commit();
    }
    warpgroup_wait<0>();
    give_back(place(3));
#pragma unroll
    for (int m = 0; m < 4; ++m) pin(O[m]);
    __syncwarp();
    arrive_warp(p_empty + odd * 8);
    ask(i + 2, kPanels - 1, kPanels);  // its place held this page's first panel
  }

  named_barrier(1, 256), wait(sums, 0);  // the sums are known, nobody reads the ring any more
  if (pages <= a.split_pages) {  // the only split: normalise, transpose through the ring's place, store rows of 512
    char* stage = s + P::ring;
#pragma unroll
    for (int j = 0; j < H / 8; ++j) {
      float2 t = *reinterpret_cast<float2*>(total + j * 8 + two);
      float2 r = make_float2(1.f / t.x, 1.f / t.y);
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        uint32_t u[4] = {pack(O[i][4 * j] * r.x, O[i][4 * j + 1] * r.y), pack(O[i][4 * j + 2] * r.x, O[i][4 * j + 3] * r.y),
                         pack(O[i + 1][4 * j] * r.x, O[i + 1][4 * j + 1] * r.y), pack(O[i + 1][4 * j + 2] * r.x, O[i + 1][4 * j + 3] * r.y)};
        int channel = group * 256 + (i + (lane >> 4)) * 64 + warp * 16 + ((lane >> 3) & 1) * 8;
        stmatrix4_transposed(shared_address(stage + (j * 8 + (lane & 7)) * (kLatent * 2 + 16) + channel * 2), u);
      }
    }
    named_barrier(1, 256);
    for (int i = threadIdx.x; i < heads * (kLatent / 8); i += 256)
      *reinterpret_cast<uint4*>(out + i * 8) = *reinterpret_cast<uint4*>(stage + i / 64 * (kLatent * 2 + 16) + i % 64 * 16);
  } else {
    float* part = a.partial + (int64_t(row) * splits + split) * heads * (kLatent + 2);
    for (int i = threadIdx.x; i < heads; i += 256) part[i] = top_of[i], part[heads + i] = total[i];
    part += 2 * heads;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int x = 0; x < H / 2; ++x) {
        int head = (x >> 2) * 8 + two + (x & 1), channel = group * 256 + i * 64 + warp * 16 + (lane >> 2) + ((x >> 1) & 1) * 8;
        if (head < heads) part[head * kLatent + channel] = O[i][x];
      }
  }
}

// one block a (head, row): the splits in order, a thread four channels
__global__ void __launch_bounds__(128) latent_join_kernel(const LatentDecodeArgs a, int splits) {
  __shared__ float tops[4], weight[128], total[128];
  const int head = blockIdx.x, row = blockIdx.y, pages = (a.lengths[row] + kPageTokens - 1) / kPageTokens, t = threadIdx.x;
  const int used = (pages + a.split_pages - 1) / a.split_pages;
  if (used <= 1) return;
  const int64_t size = int64_t(a.heads) * (kLatent + 2);
  const float* part = a.partial + int64_t(row) * splits * size;
  float top = -INFINITY, sum = 0.f;
  for (int i = t; i < used; i += 128) top = fmaxf(top, part[i * size + head]);
  top = warp_max(top);
  if ((t & 31) == 0) tops[t >> 5] = top;
  __syncthreads();
  top = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
  float4 o = make_float4(0, 0, 0, 0);
  for (int first = 0; first < used; first += 128) {
    const int count = min(128, used - first);
    __syncthreads();
    if (t < count) {
      const float* from = part + (first + t) * size + head;
      weight[t] = ex2(from[0] - top), total[t] = weight[t] * from[a.heads];
    }
    __syncthreads();
    const float* from = part + first * size + 2 * a.heads + head * kLatent + t * 4;
#pragma unroll 16
    for (int i = 0; i < count; ++i) {
      const float w = weight[i];
      const float4 x = *reinterpret_cast<const float4*>(from + i * size);
      sum += total[i];
      o.x += w * x.x, o.y += w * x.y, o.z += w * x.z, o.w += w * x.w;
    }
  }
  float r = 1.f / sum;
  *reinterpret_cast<uint2*>(static_cast<nv_bf16*>(a.out) + (int64_t(row) * a.heads + head) * kLatent + t * 4) = make_uint2(pack(o.x * r, o.y * r), pack(o.z * r, o.w * r));
}

}  // namespace

int latent_decode_split(int rows, int heads, int longest, int multiprocessors) {
  const int pages = (longest + kPageTokens - 1) / kPageTokens;
  if (rows < 1 || pages < 1) return 1;
  const int splits = multiprocessors / (heads > 32 ? 2 : 1) / rows;  // of each row, so that all run at once
  return splits <= 1 ? (pages > 256 ? 256 : pages) : (pages + splits - 1) / splits;
}

const char* latent_decode(const LatentDecodeArgs& a, void* stream) {
  if (a.rows == 0) return nullptr;
  if (a.heads < 1 || a.heads > 96 || a.heads % 2) return "[attention] the latent kernel serves even head counts up to 96; split the heads over calls";
  if (a.longest > kPageTokens * a.split_pages && !a.partial) return "[attention] latent decode with several splits needs its workspace";
  const int splits = latent_decode_splits(a.longest, a.split_pages);
  if (a.heads > 32) {
    if (const char* e = latent_decode_pair(a, stream)) return e;
  } else {
    CUtensorMap map;
    if (const char* e = make_tensor_map(map, a.pages, kLatentRow, kPageTokens, a.page_count, kLatentRow, kPageTokens * kLatentRow, kPageTokens)) return e;
    if (cudaError_t e = cudaFuncSetAttribute(latent_decode_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Plan::bytes); e != cudaSuccess) return cudaGetErrorString(e);
    latent_decode_kernel<<<dim3(splits, a.rows), kThreads, Plan::bytes, cudaStream_t(stream)>>>(map, a);
  }
  if (splits > 1) latent_join_kernel<<<dim3(a.heads, a.rows), 128, 0, cudaStream_t(stream)>>>(a, splits);
  const cudaError_t e = cudaGetLastError();
  return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}

}  // namespace k3::cuda
