// One query row against a paged latent cache, all heads at once:  s = q c^T,  p = softmax(scale s),  o = p c[:, :512].
//
// Bound: with 96 heads both memory (2.26 us a page of 64 tokens and multiprocessor) and tensor units (2.23 us); with few heads memory.
// Split: a cluster is `split_pages` pages of one row; pages are cut at fixed places of the row's own sequence. More than 32 heads: two blocks share
// the heads and each tensor copy goes to both, so a page is read once.
//   S [64 heads, 64 tokens] = q C^T      one warpgroup, q in its registers for good (144 a thread), leaves P in shared memory, a page ahead
//   O^T [256 channels, H]  += C^T P^T    two warpgroups own half of the output channels each; tokens' channels are the rows, heads the columns
// The first warp feeds a ring of 26 panels, 64 tokens x 64 channels: nearly three pages. (All 96 heads in one block, or q in shared memory, leave
// room for 12 to 20 panels, and the next page comes too late: 393 and 320 us at B 64, L 8192.)
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

template <int H>  // heads of a block, padded
struct Plan {
  static constexpr int ring = 0;                             // 26 panels [64 tokens][64]; before, the query; at the end, the output
  static constexpr int prob = ring + kRing * kPanelBytes;    // [2][H][64 tokens]: even and odd pages
  static constexpr int factor = prob + 2 * H * 128;          // [2][64] float: what a maximum's move does to older sums
  static constexpr int top = factor + 2 * 64 * 4;            // [64] float: the last maximum
  static constexpr int total = top + 64 * 4;                 // [64] float: sum of P
  static constexpr int flags = total + 64 * 4;               // [2][4] int: did a maximum of a warp move
  static constexpr int barriers = flags + 32;                // full[26], empty[26], P full[2], P empty[2]
  static constexpr int bytes = barriers + 2 * kRing * 8 + 32 + 1024;
};

template <int H, int kCluster>
__global__ void __launch_bounds__(kThreads, 1) latent_decode_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ LatentDecodeArgs a) {
  extern __shared__ char memory[];
  using P = Plan<H>;
  char* s = memory + ((1024 - (shared_address(memory) & 1023)) & 1023);
  const uint32_t full = shared_address(s + P::barriers), empty = full + kRing * 8, p_full = empty + kRing * 8, p_empty = p_full + 16;
  const int rank = kCluster > 1 ? int(cluster_rank()) : 0, head0 = rank * H, heads = min(H, a.heads - head0);
  const int row = blockIdx.y, split = blockIdx.x / kCluster, splits = gridDim.x / kCluster, group = threadIdx.x >> 7, lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  const int length = a.lengths[row], pages = (length + kPageTokens - 1) / kPageTokens;
  const int first = split * a.split_pages, last = min(pages, first + a.split_pages);
  nv_bf16* out = static_cast<nv_bf16*>(a.out) + (int64_t(row) * a.heads + head0) * kLatent;
  if (first >= last) {  // nothing here; an empty row gives zeros
    if (split == 0)
      for (int i = threadIdx.x; i < heads * kLatent / 8; i += kThreads) reinterpret_cast<uint4*>(out)[i] = make_uint4(0, 0, 0, 0);
    return;
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < kRing; ++i) barrier_init(full + i * 8, 1), barrier_init(empty + i * 8, 4 * kCluster);
    for (int i = 0; i < 2; ++i) barrier_init(p_full + i * 8, 128), barrier_init(p_empty + i * 8, 8);
    barrier_init_done();
  }
  __syncthreads();
  auto give_back = [&](int slot) {  // to whoever fills it again
#pragma unroll
    for (int r = 0; r < kCluster; ++r) {
      if constexpr (kCluster > 1) arrive_at(empty + slot * 8, r); else arrive(empty + slot * 8);
    }
  };

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
    const nv_bf16* q = static_cast<const nv_bf16*>(a.q) + row * a.q_stride + head0 * kLatentRow;
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
    if constexpr (kCluster > 1) cluster_sync(); else named_barrier(2, kThreads);  // the ring (here and there) is free for pages

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
      if (lane == 0) give_back(slot == 0 ? kRing - 1 : slot - 1);  // the shared 64 channels are no values
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
    named_barrier(2, kThreads);
    if constexpr (kCluster > 1) cluster_sync();
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
      if constexpr (kCluster == 1) tensor_load(at, map, lane * 64, 0, where, bar);
      else if ((m & 1) == rank) tensor_load_multicast(at, map, lane * 64, 0, where, bar, (1 << kCluster) - 1);  // the blocks take turns
    }
    __syncwarp();
  };
  if constexpr (kCluster > 1) cluster_sync(); else named_barrier(2, kThreads);
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
        for (int i = 0; i < 4; ++i) O[i][4 * j] *= f.x, O[i][4 * j + 1] *= f.y, O[i][4 * j + 2] *= f.x, O[i][4 * j + 3] *= f.y;
      }
    }
    // 5. O^T += C^T P^T; panels are given back as they are done
    uint32_t A[2][2][4];  // half a panel is loaded while the half before is multiplied
#pragma unroll
    for (int x = 0; x < 8; ++x) {
      if (x >= 2) warpgroup_wait<1>();
      if (x >= 3 && (x & 1) && lane == 0) give_back(place((x - 3) / 2));
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
    if (lane == 0) give_back(place(3));
#pragma unroll
    for (int i = 0; i < 4; ++i) pin(O[i]);
    __syncwarp();
    if (lane == 0) arrive(p_empty + odd * 8);
    ask(i + 2, kPanels - 1, kPanels);  // its place held this page's first panel
  }

  named_barrier(2, kThreads);  // the sums are known, nobody reads the ring any more
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
    float* part = a.partial + (int64_t(row) * splits + split) * a.heads * (kLatent + 2);
    for (int i = threadIdx.x; i < heads; i += 256) part[head0 + i] = top_of[i], part[a.heads + head0 + i] = total[i];
    part += 2 * a.heads + head0 * kLatent;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int x = 0; x < H / 2; ++x) {
        int head = (x >> 2) * 8 + two + (x & 1), channel = group * 256 + i * 64 + warp * 16 + (lane >> 2) + ((x >> 1) & 1) * 8;
        if (head < heads) part[head * kLatent + channel] = O[i][x];
      }
  }
  if constexpr (kCluster > 1) cluster_sync();  // the other block may still send panels or give them back here
}

// one block a (head, row): the splits in order
__global__ void __launch_bounds__(128) latent_join_kernel(const LatentDecodeArgs a, int splits) {
  const int head = blockIdx.x, row = blockIdx.y, pages = (a.lengths[row] + kPageTokens - 1) / kPageTokens;
  const int used = (pages + a.split_pages - 1) / a.split_pages;
  if (used <= 1) return;
  const int64_t size = int64_t(a.heads) * (kLatent + 2);
  const float* part = a.partial + int64_t(row) * splits * size;
  float top = -INFINITY, sum = 0.f;
  for (int i = 0; i < used; ++i) top = fmaxf(top, part[i * size + head]);
  float4 o = make_float4(0, 0, 0, 0);
#pragma unroll 4
  for (int i = 0; i < used; ++i) {
    float w = ex2(part[i * size + head] - top);
    float4 x = *reinterpret_cast<const float4*>(part + i * size + 2 * a.heads + head * kLatent + threadIdx.x * 4);
    sum += w * part[i * size + a.heads + head];
    o.x += w * x.x, o.y += w * x.y, o.z += w * x.z, o.w += w * x.w;
  }
  float r = 1.f / sum;
  *reinterpret_cast<uint2*>(static_cast<nv_bf16*>(a.out) + (int64_t(row) * a.heads + head) * kLatent + threadIdx.x * 4) =
      make_uint2(pack(o.x * r, o.y * r), pack(o.z * r, o.w * r));
}

template <int H, int kCluster>
const char* launch(const CUtensorMap& map, const LatentDecodeArgs& a, cudaStream_t stream) {
  auto kernel = latent_decode_kernel<H, kCluster>;
  cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Plan<H>::bytes);
  if (e != cudaSuccess) return cudaGetErrorString(e);
  const int splits = latent_decode_splits(a.longest, a.split_pages);
  cudaLaunchAttribute cluster{cudaLaunchAttributeClusterDimension, {}, {}};
  cluster.val.clusterDim = {kCluster, 1, 1};
  cudaLaunchConfig_t config{dim3(splits * kCluster, a.rows), dim3(kThreads), size_t(Plan<H>::bytes), stream, &cluster, 1};
  if ((e = cudaLaunchKernelEx(&config, kernel, map, a)) != cudaSuccess) return cudaGetErrorString(e);
  if (splits > 1) latent_join_kernel<<<dim3(a.heads, a.rows), 128, 0, stream>>>(a, splits);
  e = cudaGetLastError();
  return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
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
  CUtensorMap map;
  if (const char* e = make_tensor_map(map, a.pages, kLatentRow, kPageTokens, a.page_count, kLatentRow, kPageTokens * kLatentRow, kPageTokens)) return e;
  return a.heads <= 32 ? launch<32, 1>(map, a, cudaStream_t(stream)) : a.heads <= 64 ? launch<32, 2>(map, a, cudaStream_t(stream)) : launch<48, 2>(map, a, cudaStream_t(stream));
}

}  // namespace k3::cuda
