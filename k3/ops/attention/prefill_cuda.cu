// Causal softmax attention of one head: o = softmax(scale q k^T) v. A panel is 64 channels; narrower shared ones are filled up with zeros.
//
// Bound: tensor units (T 8192, 96 heads: 2610 us) with T^2 H / 2 exponentials (0.9 ms of the special function units) to be hidden under them.
// Split: a block is 128 queries of a head; two warpgroups own 64 rows each, a third warpgroup's thread loads by tensor copies, two stages of 128
// keys. Tiles of one head run side by side, longest first, so its keys and values are read from the L2 cache.
// Steps: the scores of block j run together with the output product of block j - 1; the softmax of j hides under the latter.
// Precision: scores, statistics, output float32; P bf16. Rows without a key give 0 and a log-sum of -infinity.
#include "k3/core/tensor_map.cuh"
#include "k3/core/tile.cuh"
#include "k3/core/wgmma.cuh"
#include "k3/ops/attention/attention_cuda.h"

namespace k3::cuda {
namespace {

constexpr int kRows = 128, kKeys = 128, kStages = 2, kPanel = 128 * 128;  // bytes of 128 rows x 64 columns
template <class W>
struct Plan {
  static constexpr int own = W::w.own / 64, keys = own + 1, values = W::w.value / 64;  // panels
  static constexpr int q = 0, k = q + keys * kPanel, v = k + kStages * keys * kPanel, barriers = v + kStages * values * kPanel, bytes = barriers + 128 + 1024;
};
struct Wide {
  static constexpr PrefillWidths w = kPrefillWide;
};
struct Small {
  static constexpr PrefillWidths w = kPrefillSmall;
};

struct Tile {
  int q0, queries, keys, blocks;  // first query of the tile; queries and keys of the sequence; blocks of keys it sees
  int64_t q_begin, k_begin;
};

template <class W>
__global__ void __launch_bounds__(384, 1) prefill_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                                                         const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap shared_map,
                                                         const __grid_constant__ PrefillArgs a) {
  using Plan = Plan<W>;
  constexpr int V = W::w.value;
  extern __shared__ char memory[];
  const uint32_t s = (shared_address(memory) + 1023) & ~1023u;
  const uint32_t q_full = s + Plan::barriers, k_full = q_full + 8, v_full = k_full + 16, k_empty = v_full + 16, v_empty = k_empty + 16;
  const int head = blockIdx.y, lane = threadIdx.x & 31, group = threadIdx.x >> 7;
  Tile t;
  t.q_begin = a.q_begins[blockIdx.z], t.queries = a.q_begins[blockIdx.z + 1] - int(t.q_begin);
  t.k_begin = a.k_begins[blockIdx.z], t.keys = a.k_begins[blockIdx.z + 1] - int(t.k_begin);
  t.q0 = (gridDim.x - 1 - blockIdx.x) * kRows;
  if (t.q0 >= t.queries) return;
  const int offset = t.keys - t.queries;
  t.blocks = max(0, (min(t.keys, t.q0 + kRows + offset) + kKeys - 1) / kKeys);
  if (threadIdx.x == 0) {
    barrier_init(q_full, 1);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(k_full + i * 8, 1), barrier_init(v_full + i * 8, 1);
      barrier_init(k_empty + i * 8, 8 * kWarpArrivals), barrier_init(v_empty + i * 8, 8 * kWarpArrivals);
    }
    barrier_init_done();
  }
  __syncthreads();

  if (group == 2) {
    fewer_registers<24>();
    if (threadIdx.x == 256) {
      arrive_expect(q_full, Plan::keys * kPanel);
      for (int p = 0; p < Plan::keys; ++p) tensor_load(s + Plan::q + p * kPanel, q_map, p * 64, int(t.q_begin) + t.q0, head, q_full);
      for (int i = 0; i < t.blocks; ++i) {  // blocks from the diagonal back to the first key
        const int stage = i & 1, row = int(t.k_begin) + (t.blocks - 1 - i) * kKeys;
        const uint32_t phase = (i >> 1 & 1) ^ 1, k = s + Plan::k + stage * Plan::keys * kPanel, v = s + Plan::v + stage * Plan::values * kPanel;
        wait(k_empty + stage * 8, phase);
        arrive_expect(k_full + stage * 8, Plan::keys * kPanel);
        for (int p = 0; p < Plan::own; ++p) tensor_load(k + p * kPanel, k_map, p * 64, row, head, k_full + stage * 8);
        tensor_load(k + Plan::own * kPanel, shared_map, 0, row, 0, k_full + stage * 8);
        wait(v_empty + stage * 8, phase);
        arrive_expect(v_full + stage * 8, Plan::values * kPanel);
        for (int p = 0; p < Plan::values; ++p) tensor_load(v + p * kPanel, v_map, p * 64, row, head, v_full + stage * 8);
      }
    }
    return;
  }
  more_registers<240>();

  const int warp = (threadIdx.x >> 5) & 3, two = (lane & 3) * 2, row0 = t.q0 + group * 64 + warp * 16 + (lane >> 2);  // rows row0 and row0 + 8
  const float scale = a.scale * kLog2e;
  float O[V / 2], S[64], top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f};
  uint32_t P[8][4];
#pragma unroll
  for (int i = 0; i < V / 2; ++i) O[i] = 0.f;

  auto scores = [&](int i) {  // S = Q K^T of block i, in flight
    const uint32_t q = s + Plan::q + group * 64 * 128, k = s + Plan::k + (i & 1) * Plan::keys * kPanel;
    wait(k_full + (i & 1) * 8, i >> 1 & 1);
    warpgroup_fence();
#pragma unroll
    for (int p = 0; p < Plan::keys; ++p)
#pragma unroll
      for (int kk = 0; kk < (p < Plan::own ? 64 : W::w.shared) / 16; ++kk) wgmma<128, 0, 0>(S, describe(q + p * kPanel) + kk * 2, describe(k + p * kPanel) + kk * 2, p + kk > 0);
    warpgroup_commit();
  };
  auto values = [&](int i) {  // O += P V of block i, in flight
    const uint32_t v = s + Plan::v + (i & 1) * Plan::values * kPanel;
    wait(v_full + (i & 1) * 8, i >> 1 & 1);
    const int valid = t.keys - (t.blocks - 1 - i) * kKeys;
    if (valid < kKeys) {  // what lies behind the last key may be anything, NaN too
      const int tid = threadIdx.x & 255;
      for (int x = valid * 8 + tid; x < kKeys * 8; x += 256)
        for (int p = 0; p < Plan::values; ++p) asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(v + p * kPanel + x * 16), "r"(0) : "memory");
      publish();
      named_barrier(1, 256);
    }
    warpgroup_fence();
#pragma unroll
    for (int kk = 0; kk < 8; ++kk) wgmma<V, 1>(O, P[kk], describe(v, 1024, kPanel) + kk * 2048 / 16, 1);
    warpgroup_commit();
  };
  float shrink[2];
  auto softmax = [&](int i) {  // S becomes P; `shrink` is what O must be multiplied with
    const int first = (t.blocks - 1 - i) * kKeys;
    if (first + kKeys - 1 > t.q0 + group * 64 + offset || first + kKeys > t.keys) {
#pragma unroll
      for (int x = 0; x < 64; ++x) {
        int key = first + (x >> 2) * 8 + two + (x & 1), row = row0 + 8 * (x >> 1 & 1);
        if (key > row + offset || key >= t.keys) S[x] = -INFINITY;
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float m = S[2 * h];
#pragma unroll
      for (int n = 0; n < 16; ++n) m = fmaxf(m, fmaxf(S[4 * n + 2 * h], S[4 * n + 2 * h + 1]));
      m = fmaxf(m, __shfl_xor_sync(~0u, m, 1)), m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
      m = fmaxf(top[h], m * scale);
      const float from = m == -INFINITY ? 0.f : m;
      shrink[h] = ex2(top[h] - from), top[h] = m;
      float l = 0.f;
#pragma unroll
      for (int n = 0; n < 16; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) l += S[4 * n + 2 * h + e] = ex2(S[4 * n + 2 * h + e] * scale - from);
      sum[h] = sum[h] * shrink[h] + l;
    }
  };
  auto pack_p = [&] {
#pragma unroll
    for (int x = 0; x < 32; ++x) P[x >> 2][x & 3] = pack(S[2 * x], S[2 * x + 1]);
  };

  if (t.blocks > 0) {
    wait(q_full, 0);
    scores(0);
    warpgroup_wait<0>();
    pin(S);
    arrive_warp(k_empty);
    softmax(0);
    pack_p();
    for (int i = 1; i < t.blocks; ++i) {
      scores(i);
      values(i - 1);
      warpgroup_wait<1>();
      pin(S);
      arrive_warp(k_empty + (i & 1) * 8);
      softmax(i);
      warpgroup_wait<0>();
      pin(O);
      arrive_warp(v_empty + ((i - 1) & 1) * 8);
      pack_p();
#pragma unroll
      for (int x = 0; x < V / 2; ++x) O[x] *= shrink[x >> 1 & 1];
    }
    values(t.blocks - 1);
    warpgroup_wait<0>();
    pin(O);
  }

#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float l = sum[h];
    l += __shfl_xor_sync(~0u, l, 1), l += __shfl_xor_sync(~0u, l, 2);
    const int row = row0 + 8 * h;
    if (row >= t.queries) continue;
    const float r = l > 0.f ? 1.f / l : 0.f;
    const int64_t n = t.q_begin + row;
    const int64_t place = n * (a.row_heads ? a.row_heads : a.heads) + head;
    if ((lane & 3) == 0) {
      if (a.lse) a.lse[place] = l > 0.f ? top[h] * kLn2 + logf(l) : -INFINITY;
      if (a.largest) a.largest[place] = top[h] * kLn2;
    }
    nv_bf16* o = static_cast<nv_bf16*>(a.o) + place * V + two;
    const nv_bf16* gate = static_cast<const nv_bf16*>(a.gate) + n * a.gate_stride + head * V + two;
#pragma unroll
    for (int c = 0; c < V / 8; ++c) {
      float x = O[4 * c + 2 * h] * r, y = O[4 * c + 2 * h + 1] * r;
      if (a.raw) *reinterpret_cast<float2*>(a.raw + place * V + c * 8 + two) = make_float2(x, y);
      if (!a.o) continue;
      if (a.gate) {
        uint32_t g = *reinterpret_cast<const uint32_t*>(gate + c * 8);
        x *= sigmoid(low(g)), y *= sigmoid(high(g));
      }
      *reinterpret_cast<uint32_t*>(o + c * 8) = pack(x, y);
    }
  }
}

template <class W>
const char* launch(const PrefillArgs& a, cudaStream_t stream) {
  constexpr PrefillWidths w = W::w;
  CUtensorMap q, k, v, shared;
  const char* e;
  if ((e = make_tensor_map(q, a.q, w.key(), a.q_rows, a.heads, a.q_stride, w.key(), kRows)) ||
      (e = make_tensor_map(k, a.k, w.own, a.k_rows, a.heads, a.kv_stride, a.kv_head_stride, kKeys)) ||
      (e = make_tensor_map(v, a.v, w.value, a.k_rows, a.heads, a.kv_stride, a.kv_head_stride, kKeys)) ||
      (e = make_tensor_map(shared, a.shared, w.shared, a.k_rows, 1, a.shared_stride, w.shared, kKeys)))
    return e;
  if (cudaError_t r = cudaFuncSetAttribute(prefill_kernel<W>, cudaFuncAttributeMaxDynamicSharedMemorySize, Plan<W>::bytes); r != cudaSuccess) return cudaGetErrorString(r);
  prefill_kernel<W><<<dim3((a.longest_q + kRows - 1) / kRows, a.heads, a.sequences), 384, Plan<W>::bytes, stream>>>(q, k, v, shared, a);
  cudaError_t r = cudaGetLastError();
  return r == cudaSuccess ? nullptr : cudaGetErrorString(r);
}

}  // namespace

const char* prefill_forward(const PrefillArgs& a, void* stream) {
  if (a.sequences == 0 || a.longest_q == 0) return nullptr;
  if (a.widths == kPrefillWide) return launch<Wide>(a, cudaStream_t(stream));
  if (a.widths == kPrefillSmall) return launch<Small>(a, cudaStream_t(stream));
  return "[attention] there are kernels for heads of 128 + 64 / 128 and 64 + 32 / 64 channels";
}

}  // namespace k3::cuda
