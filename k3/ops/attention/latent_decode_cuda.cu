// One query row against a paged latent cache, all heads at once:  s = q c^T,  p = softmax(scale s),  o = p c[:, :512].
//
// Bound: with 96 heads both memory (2.26 us a page of 64 tokens and multiprocessor) and tensor units (2.23 us); with few heads memory.
// Split: a cluster is `split_pages` pages of one row; pages are cut at fixed places of the row's own sequence. More than 32 heads: two blocks share
// the heads and each tensor copy goes to both, so a page is read once. Tokens are the rows (M) of every product and heads the columns (N), so 96
// heads need no padding:
//   S^T [64 tokens, H]    = C q^T        two warpgroups take turns at scoring a page; each leaves P of its page in shared memory
//   O^T [256 channels, H] += C^T P^T     two warpgroups own half of the output channels each
// The first warp feeds a ring of 19 panels, 64 tokens x 64 channels: two pages and a bit. (One block with all 96 heads has
// room for 12 only, and its next page cannot come in while the last one is multiplied: 393 us against this kernel's at B 64, L 8192.)
// Scoring: 1 scores, 2 column maxima, 3 running maximum (moved only when it grows by more than 2^8) and P. Output: 4 rescale, 5 product.
// Precision: scores, maxima, sums, outputs float32; P bf16. Partial results of splits are float32, joined in order by a second kernel.
#include "k3/core/tensor_map.cuh"
#include "k3/core/tile.cuh"
#include "k3/core/wgmma.cuh"
#include "k3/ops/attention/attention_cuda.h"

namespace k3::cuda {
namespace {

constexpr int kPanels = 9, kRing = 19, kPanelBytes = 64 * 128;
constexpr int kThreads = 512;  // warpgroups: output, output, scores of even pages, scores of odd pages

template <int H>  // heads of a block, padded
struct Plan {
  static constexpr int query = 0;                            // 9 panels [H][64]
  static constexpr int ring = query + kPanels * H * 128;     // 19 panels [64 tokens][64]
  static constexpr int prob = ring + kRing * kPanelBytes;    // [2][H][64 tokens]: even and odd pages
  static constexpr int maxima = prob + 2 * H * 128;          // [2][4 warps][H] float
  static constexpr int top = maxima + 8 * H * 4;             // [2][H] float: running maximum after even and odd pages
  static constexpr int factor = top + 2 * H * 4;             // [2][H] float: what the maximum's move does to older sums
  static constexpr int total = factor + 2 * H * 4;           // [H] float
  static constexpr int flag = total + H * 4;                 // [2] int: did a maximum move
  static constexpr int barriers = flag + 16;                 // full[19], empty[19], P full[2], P empty[2], top known[2]
  static constexpr int bytes = barriers + 2 * kRing * 8 + 48 + 1024;
};

template <int H, int kCluster>
__global__ void __launch_bounds__(kThreads, 1) latent_decode_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ LatentDecodeArgs a) {
  extern __shared__ char memory[];
  using P = Plan<H>;
  char* s = memory + ((1024 - (shared_address(memory) & 1023)) & 1023);
  const uint32_t full = shared_address(s + P::barriers), empty = full + kRing * 8, p_full = empty + kRing * 8, p_empty = p_full + 16, known = p_empty + 16;
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
    for (int i = 0; i < 2; ++i) barrier_init(p_full + i * 8, 128), barrier_init(p_empty + i * 8, 8), barrier_init(known + i * 8, 4);
    barrier_init_done();
  }
  if constexpr (kCluster > 1) cluster_sync(); else __syncthreads();
  auto give_back = [&](int panel) {  // to whoever fills it again
#pragma unroll
    for (int r = 0; r < kCluster; ++r) {
      if constexpr (kCluster > 1) arrive_at(empty + panel % kRing * 8, r); else arrive(empty + panel % kRing * 8);
    }
  };

  constexpr int J = H / 8;  // heads in columns of 8
  float* top = reinterpret_cast<float*>(s + P::top);
  float* factor = reinterpret_cast<float*>(s + P::factor);
  float* total = reinterpret_cast<float*>(s + P::total);
  volatile int* flag = reinterpret_cast<int*>(s + P::flag);
  const int two = (lane & 3) * 2;
  const uint64_t prob = describe(shared_address(s + P::prob));

  if (group >= 2) {
    fewer_registers<104>();
    const int odd = group - 2, tid = threadIdx.x & 127;
    float* maxima = reinterpret_cast<float*>(s + P::maxima) + odd * 4 * H;
    // the query, swizzled; heads past the last are zero
    const nv_bf16* q = static_cast<const nv_bf16*>(a.q) + row * a.q_stride + head0 * kLatentRow;
    for (int i = threadIdx.x - 256; i < H * (kLatentRow / 8); i += 256) {
      int head = i / (kLatentRow / 8), chunk = i % (kLatentRow / 8);
      bool valid = head < heads;
      copy16(shared_address(s + P::query + (chunk >> 3) * H * 128 + swizzle128(head, (chunk & 7) * 16)), q + (valid ? head : 0) * kLatentRow + chunk * 8, valid);
    }
    copy_commit();
    if (odd && tid < H) top[H + tid] = -INFINITY;  // before page 0
    copy_wait<0>();
    publish();
    named_barrier(3, 256);

    const float scale = a.scale * kLog2e;
    const uint64_t query = describe(shared_address(s + P::query));
    for (int i = odd; i < last - first; i += 2) {
      const int page = first + i, n = i * kPanels, was = (odd ^ 1) * H, now = odd * H;
      int slot = n % kRing;
      uint32_t phase = n / kRing & 1;
      const int valid = min(kPageTokens, length - page * kPageTokens), token = warp * 16 + (lane >> 2);
      if (valid < kPageTokens) {  // what lies behind the last token may be anything, NaN too
#pragma unroll 1
        for (int p = 0; p < kPanels; ++p) {
          int place = (n + p) % kRing;
          wait(full + place * 8, (n + p) / kRing & 1);
          for (int x = valid * 8 + tid; x < 64 * 8; x += 128) reinterpret_cast<uint4*>(s + P::ring + place * kPanelBytes)[x] = make_uint4(0, 0, 0, 0);
        }
        publish();
        named_barrier(1 + odd, 128);
      }
      bool moved = false;
      {
        // 1. scores
        float S[H / 2];
#pragma unroll
        for (int i = 0; i < H / 2; ++i) S[i] = 0.f;
        // Left operands go through registers: from shared memory, 64 rows feed the tensor units at the speed of N = 128 and more only.
        uint32_t A[2][4][4];
#pragma unroll
        for (int p = 0; p < kPanels; ++p) {
          wait(full + slot * 8, phase);
          if (p >= 2) warpgroup_wait<1>();
          const uint32_t from = shared_address(s + P::ring) + slot * kPanelBytes;
#pragma unroll
          for (int k = 0; k < 4; ++k) ldmatrix4(A[p & 1][k], from + swizzle128(warp * 16 + (lane & 15), (2 * k + (lane >> 4)) * 16));
          warpgroup_fence();
#pragma unroll
          for (int k = 0; k < 4; ++k) wgmma<H, 0>(S, A[p & 1][k], query + p * H * (128 / 16) + k * 2, 1);
          warpgroup_commit();
          if (++slot == kRing) slot = 0, phase ^= 1;
        }
        warpgroup_wait<0>();
        pin(S);
        if (lane == 0) give_back(n + 8);  // the shared 64 channels are no values
        // 2. column maxima over the 64 tokens
#pragma unroll
        for (int j = 0; j < J; ++j) {
#pragma unroll
          for (int x = 0; x < 4; ++x) S[4 * j + x] = token + 8 * (x >> 1) < valid ? S[4 * j + x] * scale : -INFINITY;
          float2 m = make_float2(fmaxf(S[4 * j], S[4 * j + 2]), fmaxf(S[4 * j + 1], S[4 * j + 3]));
#pragma unroll
          for (int x = 4; x < 32; x <<= 1) m.x = fmaxf(m.x, __shfl_xor_sync(~0u, m.x, x)), m.y = fmaxf(m.y, __shfl_xor_sync(~0u, m.y, x));
          if (lane < 4) *reinterpret_cast<float2*>(maxima + warp * H + j * 8 + two) = m;
        }
        wait(p_empty + odd * 8, (i >> 1 & 1) ^ 1);  // the output warpgroups have read this one's last page
        if (i > 0) wait(known + (odd ^ 1) * 8, (i - 1) >> 1 & 1);
        named_barrier(1 + odd, 128);
        // 3. running maximum; P, transposed into [head][token]
#pragma unroll
        for (int j = 0; j < J; ++j) {
          const int column = j * 8 + two;
          float2 m = *reinterpret_cast<float2*>(maxima + column);
#pragma unroll
          for (int w = 1; w < 4; ++w) {
            float2 x = *reinterpret_cast<float2*>(maxima + w * H + column);
            m.x = fmaxf(m.x, x.x), m.y = fmaxf(m.y, x.y);
          }
          float2 f = make_float2(1.f, 1.f), t = *reinterpret_cast<float2*>(top + was + column);
          if (m.x > t.x + 8.f) f.x = ex2(t.x - m.x), t.x = m.x, moved = true;
          if (m.y > t.y + 8.f) f.y = ex2(t.y - m.y), t.y = m.y, moved = true;
          if (warp == 0 && lane < 4) {
            *reinterpret_cast<float2*>(factor + now + column) = f;
            *reinterpret_cast<float2*>(top + now + column) = t;
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) S[4 * j + i] = S[4 * j + i] - (i & 1 ? t.y : t.x);
        }
        __syncwarp();
        if (lane == 0) arrive(known + odd * 8);  // the other warpgroup may go on
#pragma unroll
        for (int j = 0; j < J; j += 2) {
          uint32_t r[4];
#pragma unroll
          for (int x = 0; x < 4; ++x) r[x] = pack(ex2(S[4 * j + 2 * x]), ex2(S[4 * j + 2 * x + 1]));
          stmatrix4_transposed(shared_address(s + P::prob + odd * H * 128 + swizzle128((j + (lane >> 4)) * 8 + (lane & 7), (2 * warp + ((lane >> 3) & 1)) * 16)), r);
        }
      }
      moved = __any_sync(~0u, moved);
      if (tid == 0) flag[odd] = moved;
      publish();
      arrive(p_full + odd * 8);
    }
    if constexpr (kCluster > 1) cluster_sync();
    return;
  }

  more_registers<152>();
  float O[4][H / 2], sum = 0.f;  // sum of P: thread 2h + i adds tokens 32i..32i+31 of head h
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < H / 2; ++j) O[i][j] = 0.f;
  auto ask = [&](int i) {  // nine lanes of the first warp: a panel of page i each, as its place in the ring becomes free
    if (threadIdx.x < kPanels && i < last - first) {
      const int m = i * kPanels + lane, slot = m % kRing, where = a.table[int64_t(row) * a.table_stride + first + i];
      const uint32_t bar = full + slot * 8, to = shared_address(s + P::ring) + slot * kPanelBytes;
      wait(empty + slot * 8, (m / kRing & 1) ^ 1);
      arrive_expect(bar, kPanelBytes);
      if constexpr (kCluster == 1) tensor_load(to, map, lane * 64, 0, where, bar);
      else if ((m & 1) == rank) tensor_load_multicast(to, map, lane * 64, 0, where, bar, (1 << kCluster) - 1);  // the blocks take turns
    }
    __syncwarp();
  };
  ask(0), ask(1);
  int n = group * 4, odd = 0;
  for (int i = 0; i < last - first; ++i, n += kPanels) {
    odd = i & 1;
    const uint64_t p = prob + odd * (H * 128 / 16);
    wait(p_full + odd * 8, i >> 1 & 1);
    // 4. rescale
    if (flag[odd]) {
#pragma unroll
      for (int j = 0; j < H / 8; ++j) {
        float2 f = *reinterpret_cast<float2*>(factor + odd * H + j * 8 + two);
#pragma unroll
        for (int i = 0; i < 4; ++i) O[i][4 * j] *= f.x, O[i][4 * j + 1] *= f.y, O[i][4 * j + 2] *= f.x, O[i][4 * j + 3] *= f.y;
      }
    }
    // 5. O^T += C^T P^T; panels are given back as they are done
    uint32_t A[4][4];
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      if (x > 0) {
        warpgroup_wait<0>();
        if (lane == 0) give_back(n + x - 1);
      }
      const uint32_t from = shared_address(s + P::ring) + (n + x) % kRing * kPanelBytes;
#pragma unroll
      for (int k = 0; k < 4; ++k) ldmatrix4_transposed(A[k], from + swizzle128(k * 16 + (lane >> 4) * 8 + (lane & 7), (2 * warp + (lane >> 3 & 1)) * 16));
      warpgroup_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) wgmma<H, 0>(O[x], A[k], p + k * 2, 1);
      warpgroup_commit();
    }
    if (threadIdx.x < 2 * H) {
      const int head = threadIdx.x >> 1;
      sum *= factor[odd * H + head];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        uint4 u = *reinterpret_cast<const uint4*>(s + P::prob + odd * H * 128 + swizzle128(head, ((threadIdx.x & 1) * 4 + c) * 16));
        sum += ((low(u.x) + high(u.x)) + (low(u.y) + high(u.y))) + ((low(u.z) + high(u.z)) + (low(u.w) + high(u.w)));
      }
    }
    warpgroup_wait<0>();
    if (lane == 0) give_back(n + 3);
#pragma unroll
    for (int i = 0; i < 4; ++i) pin(O[i]);
    __syncwarp();
    if (lane == 0) arrive(p_empty + odd * 8);
    ask(i + 2);
  }

  sum += __shfl_xor_sync(~0u, sum, 1);
  if (threadIdx.x < 2 * H && !(threadIdx.x & 1)) total[threadIdx.x >> 1] = sum;
  named_barrier(4, 256);
  if (pages <= a.split_pages) {  // the only split: normalise, transpose through the query's place, store rows of 512
    char* stage = s + P::query;
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
    named_barrier(4, 256);
    for (int i = threadIdx.x; i < heads * (kLatent / 8); i += 256)
      *reinterpret_cast<uint4*>(out + i * 8) = *reinterpret_cast<uint4*>(stage + i / 64 * (kLatent * 2 + 16) + i % 64 * 16);
  } else {
    float* part = a.partial + (int64_t(row) * splits + split) * a.heads * (kLatent + 2);
    for (int i = threadIdx.x; i < heads; i += 256) part[head0 + i] = top[odd * H + i], part[a.heads + head0 + i] = total[i];
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
