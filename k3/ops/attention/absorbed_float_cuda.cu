// Latent attention in its absorbed form, float32: 1 q_L = W_UK^T q_nope; 2 rows (token, head) against pieces of the context, scores over rank + rope,
// values the latents; 3 the pieces are joined in order; 4 o = W_UV o_L.
//
// Bound: reading the cache once for every 32 heads, and W once for every 8 tokens. Split: 1, 4 a block is a head and 8 tokens; 2 a block is 32 rows
// of one piece; 3 a block is a row.
#include "k3/ops/attention/attend_float.cuh"
#include "k3/ops/attention/attention_float_cuda.h"

namespace k3::cuda {
namespace {

using cpu::AbsorbedArgs;
using cpu::AbsorbedItem;
using cpu::AbsorbedSequence;
using cpu::kAbsorbedRows;
using cpu::kKeyTile;

constexpr int kTokens = 8, kRows = 32;

template <class W>
__global__ void __launch_bounds__(256) absorb_kernel(const AbsorbedArgs a) {  // 1
  extern __shared__ float q[];  // (kTokens, nope)
  const int64_t h = blockIdx.x, first = int64_t(blockIdx.y) * kTokens, width = a.rank + a.rope, key_dim = a.nope + a.rope;
  const int count = int(min(int64_t(kTokens), a.token_count - first));
  auto row = [&](int i) { return a.q + (int64_t(a.rows[first + i]) * a.heads + h) * key_dim; };
  auto to = [&](int i) { return a.q_latent + ((first + i) * a.heads + h) * width; };
  for (int e = threadIdx.x; e < kTokens * a.nope; e += 256) q[e] = e / a.nope < count ? row(int(e / a.nope))[e % a.nope] : 0.f;
  for (int e = threadIdx.x; e < count * a.rope; e += 256) to(int(e / a.rope))[a.rank + e % a.rope] = row(int(e / a.rope))[a.nope + e % a.rope];
  __syncthreads();
  const W* w = static_cast<const W*>(a.kv_b) + h * (a.nope + a.value) * a.rank;
  for (int64_t c = threadIdx.x; c < a.rank; c += 256) {
    float sum[kTokens] = {};
    for (int64_t i = 0; i < a.nope; ++i) {
      const float x = to_f32(w[i * a.rank + c]);
#pragma unroll
      for (int t = 0; t < kTokens; ++t) sum[t] = __fmaf_rn(q[t * a.nope + i], x, sum[t]);
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t)
      if (t < count) to(t)[c] = sum[t];
  }
}

template <int J>
__global__ void __launch_bounds__(kAttendThreads) absorbed_attend_kernel(const AbsorbedArgs a) {  // 2
  extern __shared__ __align__(16) float shared[];
  const AbsorbedItem item = a.items[blockIdx.x];
  const AbsorbedSequence s = a.sequences[item.sequence];
  const int64_t width = a.rank + a.rope, all = s.queries * a.heads, first = item.first_row + int64_t(blockIdx.y) * kRows;
  const int64_t rest = min(all, item.first_row + kAbsorbedRows) - first;
  if (rest <= 0) return;
  const int n = int(min(int64_t(kRows), rest)), tx = threadIdx.x & 15, ty = threadIdx.x >> 4;
  auto limit = [&](int r) { return s.first + (first + r) / a.heads + 1; };
  const int64_t last = limit(n - 1), at = s.partial_at + item.chunk * all + first;
  Attend<2, J> w;
  w.begin(shared, n, int(width), int(a.rank), [&](int r) { return a.q_latent + (s.tokens_at * a.heads + first + r) * width; });
  for (int64_t j = item.t0; j < item.t1 && j * kKeyTile < last; ++j) {
    const float* block = a.blocks[s.blocks_at + j];
    w.template tile<false>(
        int(min(last - j * kKeyTile, kKeyTile)), a.scale, [&](int r) { return r < n ? int(max(int64_t(0), min(limit(r) - j * kKeyTile, kKeyTile))) : 0; },
        [&](int c, int i) { return block[i * width + c]; }, [&](int i, int c) { return block[i * width + c]; });
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = ty + 16 * i;
    if (r >= n) continue;
    if (tx == 0) a.partial_m[at + r] = w.m[i], a.partial_l[at + r] = w.l[i];
#pragma unroll
    for (int j = 0; j < J; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (const int c = tx * 4 + 64 * j + e; c < a.rank) a.partial[(at + r) * a.rank + c] = w.o[i][j][e];
  }
}

__global__ void __launch_bounds__(128) join_kernel(const AbsorbedArgs a) {  // 3
  const AbsorbedItem item = a.items[blockIdx.x];
  const AbsorbedSequence s = a.sequences[item.sequence];
  const int64_t width = a.rank + a.rope, all = s.queries * a.heads, row = item.first_row + blockIdx.y;
  if (row >= all) return;
  float top = -INFINITY, total = 0.f;
  for (int64_t c = 0; c < s.chunks; ++c) top = fmaxf(top, a.partial_m[s.partial_at + c * all + row]);
  for (int64_t c = 0; c < s.chunks; ++c) total = __fmaf_rn(expf(a.partial_m[s.partial_at + c * all + row] - top), a.partial_l[s.partial_at + c * all + row], total);
  float* out = a.q_latent + (s.tokens_at * a.heads + row) * width;
  for (int64_t i = threadIdx.x; i < a.rank; i += 128) {
    float sum = 0.f;
    for (int64_t c = 0; c < s.chunks; ++c) {
      const int64_t at = s.partial_at + c * all + row;
      sum = __fmaf_rn(expf(a.partial_m[at] - top), a.partial[at * a.rank + i], sum);
    }
    out[i] = sum * (1.f / total);
  }
  if (threadIdx.x == 0) a.m[int64_t(a.rows[s.tokens_at + row / a.heads]) * a.heads + row % a.heads] = top;
}

template <class W>
__global__ void __launch_bounds__(256) expand_kernel(const AbsorbedArgs a) {  // 4
  extern __shared__ float o[];  // (kTokens, rank)
  const int64_t h = blockIdx.x, first = int64_t(blockIdx.y) * kTokens, width = a.rank + a.rope;
  const int count = int(min(int64_t(kTokens), a.token_count - first)), lane = threadIdx.x & 31;
  for (int e = threadIdx.x; e < kTokens * a.rank; e += 256) {
    const int64_t t = e / a.rank;
    o[e] = t < count ? a.q_latent[((first + t) * a.heads + h) * width + e % a.rank] : 0.f;
  }
  __syncthreads();
  const W* w = static_cast<const W*>(a.kv_b) + (h * (a.nope + a.value) + a.nope) * a.rank;
  for (int64_t v = threadIdx.x >> 5; v < a.value; v += 8) {
    float sum[kTokens] = {};
    for (int64_t c = lane; c < a.rank; c += 32) {
      const float x = to_f32(w[v * a.rank + c]);
#pragma unroll
      for (int t = 0; t < kTokens; ++t) sum[t] = __fmaf_rn(o[t * a.rank + c], x, sum[t]);
    }
    const float total = warp_sums_complete(sum);  // lane t: token t
    if (lane < count) a.y[(int64_t(a.rows[first + lane]) * a.heads + h) * a.value + v] = total;
  }
}

template <int J>
cudaError_t attend(const AbsorbedArgs& a, cudaStream_t stream) {
  const size_t bytes = attend_shared_bytes(kRows, int(a.rank + a.rope), J);
  cudaError_t e = cudaFuncSetAttribute(absorbed_attend_kernel<J>, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
  if (e != cudaSuccess) return e;
  absorbed_attend_kernel<J><<<dim3(unsigned(a.item_count), unsigned(kAbsorbedRows / kRows)), kAttendThreads, bytes, stream>>>(a);
  return cudaGetLastError();
}

template <class W>
cudaError_t forward(const AbsorbedArgs& a, cudaStream_t s) {
  const dim3 grid{unsigned(a.heads), unsigned((a.token_count + kTokens - 1) / kTokens)};
  absorb_kernel<W><<<grid, 256, size_t(kTokens * a.nope) * 4, s>>>(a);
  const int64_t tiles = (a.rank + 63) / 64;
  cudaError_t e = tiles <= 1 ? attend<1>(a, s) : tiles <= 4 ? attend<4>(a, s) : attend<8>(a, s);
  if (e != cudaSuccess) return e;
  join_kernel<<<dim3(unsigned(a.first_chunk_items), unsigned(kAbsorbedRows)), 128, 0, s>>>(a);
  expand_kernel<W><<<grid, 256, size_t(kTokens * a.rank) * 4, s>>>(a);
  return cudaGetLastError();
}

}  // namespace

const char* absorbed_forward(const AbsorbedArgs& a, void* stream) {
  if (a.token_count == 0) return nullptr;
  if (a.rank > 512 || a.rope > 64 || a.nope > 256) return "[attention] the GPU serves latents of rank up to 512 with up to 64 shared and 256 own channels";
  if ((a.token_count + kTokens - 1) / kTokens > 65535) return "[attention] the GPU takes up to 524280 tokens in an absorbed call";
  cudaError_t e = a.kv_b_is_bf16 ? forward<nv_bf16>(a, cudaStream_t(stream)) : forward<float>(a, cudaStream_t(stream));
  return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}

}  // namespace k3::cuda
