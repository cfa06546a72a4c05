// Backward of the attention of prefill_cuda.cu:
//   P = exp(scale q k^T - lse)    dP = dy v^T    dS = P (dP - d) scale    dv = P^T dy    dk = dS^T q    dq = dS k
//
// Bound: tensor units: five products, of which scores and dP are made twice, so that each gradient has one owner and one order of sums.
// Split: for dk and dv a block is 128 keys of a head and goes through the queries that see them, 64 at a time; for dq it is 128 queries and goes through
// their keys. Two warpgroups own 64 rows each, a third one's first warp loads by tensor copies, three stages ahead.
// Precision: scores, P, dP and all sums float32; P and dS are rounded to bf16 as operands.
#include "k3/core/tensor_map.cuh"
#include "k3/core/tile.cuh"
#include "k3/core/wgmma.cuh"
#include "k3/ops/attention/attention_cuda.h"

namespace k3::cuda {
namespace {

constexpr int kRows = 128, kStep = 64, kStages = 3, kWide = kRows * 128, kPanel = kStep * 128;  // bytes of 64 columns: of the block's rows, of a step's
struct Wide {
  static constexpr PrefillWidths w = kPrefillWide;
};
struct Small {
  static constexpr PrefillWidths w = kPrefillSmall;
};
template <class W>
struct Plan {  // block: q and dy, or k and v, of the block; step: the others'
  static constexpr int own = W::w.own / 64, keys = own + 1, values = W::w.value / 64, panels = keys + values;  // panels of 64 channels
  static constexpr int key = W::w.own + W::w.shared;
  static constexpr int block = 0, step = block + panels * kWide, stats = step + kStages * panels * kPanel, barriers = stats + kStages * 2 * kStep * 4,
                       bytes = barriers + 128 + 1024;
};

// Rows of a step from `valid` on become zeros in its first panels: what lies behind a sequence may be anything, NaN too.
__device__ __forceinline__ void clear_rows(uint32_t step, int valid, int panels) {
  for (int x = valid * 8 + (threadIdx.x & 255); x < kStep * 8; x += 256)
    for (int p = 0; p < panels; ++p) asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(step + p * kPanel + x * 16), "r"(0) : "memory");
  publish();
  named_barrier(1, 256);
}

// 64 rows of the block times 64 of a step, over kChannels
template <int kChannels>
__device__ __forceinline__ void dots(float (&c)[32], uint32_t own, uint32_t step) {
  warpgroup_fence();
#pragma unroll
  for (int k = 0; k < kChannels / 16; ++k) wgmma<64, 0, 0>(c, describe(own + k / 4 * kWide) + k % 4 * 2, describe(step + k / 4 * kPanel) + k % 4 * 2, k > 0);
  warpgroup_commit();
}
// sum += weights (64, 64 of a step) times the step's rows
template <int N>
__device__ __forceinline__ void weighted(float (&sum)[N / 2], const uint32_t (&weights)[4][4], uint32_t step) {
  warpgroup_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma<N, 1>(sum, weights[k], describe(step, 1024, kPanel) + k * 2048 / 16, 1);
  warpgroup_commit();
}

template <class W>
struct Place {
  using P = Plan<W>;
  int64_t begin;
  int length, head;
  uint32_t s, own_full, full, empty;
  __device__ Place(const PrefillBackwardArgs& a, uint32_t shared) : begin(a.begins[blockIdx.z]), length(a.begins[blockIdx.z + 1] - int(begin)), head(blockIdx.y), s(shared) {
    own_full = s + P::barriers, full = own_full + 8, empty = full + 8 * kStages;
  }
  __device__ void init() const {
    if (threadIdx.x == 0) {
      barrier_init(own_full, 1);
      for (int i = 0; i < kStages; ++i) barrier_init(full + i * 8, 33), barrier_init(empty + i * 8, 8 * kWarpArrivals);
      barrier_init_done();
    }
    __syncthreads();
  }
  __device__ uint32_t step(int i) const { return s + P::step + i % kStages * P::panels * kPanel; }
  __device__ uint32_t phase(int i) const { return i / kStages & 1; }
};

template <class W>
__global__ void __launch_bounds__(384, 1) keys_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap dy_map,
                                                      const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                                                      const __grid_constant__ CUtensorMap shared_map, const __grid_constant__ PrefillBackwardArgs a) {
  using P = Plan<W>;
  constexpr int K = P::keys * 64, V = W::w.value;  // K: shared channels filled up to a panel
  extern __shared__ char memory[];
  const uint32_t offset = (1024 - (shared_address(memory) & 1023)) & 1023;
  const Place<W> t(a, shared_address(memory) + offset);
  const int k0 = blockIdx.x * kRows, lane = threadIdx.x & 31, group = threadIdx.x >> 7;
  if (k0 >= t.length) return;
  const int first = k0 / kStep, steps = (t.length + kStep - 1) / kStep - first;
  float* stats = reinterpret_cast<float*>(memory + offset + P::stats);  // (stages, 2, 64) log-sum (base 2) and d of a step's queries
  t.init();

  if (group == 2) {
    fewer_registers<24>();
    if (threadIdx.x >= 288) return;
    if (lane == 0) {
      arrive_expect(t.own_full, P::panels * kWide);
      for (int p = 0; p < P::own; ++p) tensor_load(t.s + p * kWide, k_map, p * 64, int(t.begin) + k0, t.head, t.own_full);
      tensor_load(t.s + P::own * kWide, shared_map, 0, int(t.begin) + k0, 0, t.own_full);
      for (int p = 0; p < P::values; ++p) tensor_load(t.s + (P::keys + p) * kWide, v_map, p * 64, int(t.begin) + k0, t.head, t.own_full);
    }
    for (int i = 0; i < steps; ++i) {
      const int q0 = (first + i) * kStep;
      const uint32_t to = t.step(i), full = t.full + i % kStages * 8;
      wait(t.empty + i % kStages * 8, t.phase(i) ^ 1);
      if (lane == 0) {
        arrive_expect(full, P::panels * kPanel);
        for (int p = 0; p < P::keys; ++p) tensor_load(to + p * kPanel, q_map, p * 64, int(t.begin) + q0, t.head, full);
        for (int p = 0; p < P::values; ++p) tensor_load(to + (P::keys + p) * kPanel, dy_map, p * 64, int(t.begin) + q0, t.head, full);
      }
      float* st = stats + i % kStages * 2 * kStep;
#pragma unroll
      for (int x = lane; x < kStep; x += 32) {
        const bool there = q0 + x < t.length;
        const int64_t at = (t.begin + q0 + x) * a.heads + t.head;
        st[x] = there ? a.lse[at] * kLog2e : 0.f, st[kStep + x] = there ? a.d[at] : 0.f;
      }
      arrive(full);
    }
    return;
  }
  more_registers<240>();

  const int row0 = group * 64 + (threadIdx.x >> 5 & 3) * 16 + (lane >> 2), two = (lane & 3) * 2;  // keys k0 + row0 and eight on
  const uint32_t keys = t.s + group * kPanel, values = keys + P::keys * kWide;
  const float scale = a.scale * kLog2e;
  float dk[K / 2], dv[V / 2];
#pragma unroll
  for (int i = 0; i < K / 2; ++i) dk[i] = 0.f;
#pragma unroll
  for (int i = 0; i < V / 2; ++i) dv[i] = 0.f;
  wait(t.own_full, 0);
  for (int i = 0; i < steps; ++i) {
    const int q0 = (first + i) * kStep;
    const uint32_t step = t.step(i);
    const float* st = stats + i % kStages * 2 * kStep;
    wait(t.full + i % kStages * 8, t.phase(i));
    if (q0 + kStep > t.length) clear_rows(step, t.length - q0, P::panels);
    float s[32];  // (keys, queries)
    dots<P::key>(s, keys, step);
    warpgroup_wait<0>();
    pin(s);
    uint32_t p[4][4], ds[4][4];
    const bool whole = q0 >= k0 + kRows && q0 + kStep <= t.length;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 lse = *reinterpret_cast<const float2*>(st + n * 8 + two);
      float x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int query = q0 + n * 8 + two + (e & 1);
        x[e] = ex2(s[4 * n + e] * scale - (e & 1 ? lse.y : lse.x));
        if (!whole && (k0 + row0 + (e >> 1) * 8 > query || query >= t.length)) x[e] = 0.f;
      }
      p[n >> 1][(n & 1) * 2] = pack(x[0], x[1]), p[n >> 1][(n & 1) * 2 + 1] = pack(x[2], x[3]);
    }
    dots<V>(s, values, step + P::keys * kPanel);  // dP
    weighted<V>(dv, p, step + P::keys * kPanel);
    warpgroup_wait<1>();
    pin(s);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 d = *reinterpret_cast<const float2*>(st + kStep + n * 8 + two);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t w = p[n >> 1][(n & 1) * 2 + h];  // zero where a query does not see the key, and dP is finite: rows behind the end were cleared
        const float x = low(w) * (s[4 * n + 2 * h] - d.x) * a.scale, y = high(w) * (s[4 * n + 2 * h + 1] - d.y) * a.scale;
        ds[n >> 1][(n & 1) * 2 + h] = pack(x, y);
      }
    }
    weighted<K>(dk, ds, step);
    warpgroup_wait<0>();
    pin(dk), pin(dv);
    __syncwarp();
    arrive_warp(t.empty + i % kStages * 8);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int key = k0 + row0 + 8 * h;
    if (key >= t.length) continue;
    const int64_t at = (t.begin + key) * a.kv_stride + t.head * a.kv_head_stride + two;
    float* shared = a.dshared + (t.head * a.rows + t.begin + key) * W::w.shared + two;
    auto add = [](float* to, float x, float y) {
      float2* both = reinterpret_cast<float2*>(to);
      const float2 old = *both;
      *both = make_float2(old.x + x, old.y + y);
    };
#pragma unroll
    for (int j = 0; j < W::w.own / 8; ++j) add(a.dk + at + j * 8, dk[4 * j + 2 * h], dk[4 * j + 2 * h + 1]);
#pragma unroll
    for (int j = W::w.own / 8; j < P::key / 8; ++j)
      *reinterpret_cast<float2*>(shared + j * 8 - W::w.own) = make_float2(dk[4 * j + 2 * h], dk[4 * j + 2 * h + 1]);
#pragma unroll
    for (int j = 0; j < V / 8; ++j) add(a.dv + at + j * 8, dv[4 * j + 2 * h], dv[4 * j + 2 * h + 1]);
  }
}

template <class W>
__global__ void __launch_bounds__(384, 1) queries_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap dy_map,
                                                         const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                                                         const __grid_constant__ CUtensorMap shared_map, const __grid_constant__ PrefillBackwardArgs a) {
  using P = Plan<W>;
  constexpr int K = P::keys * 64, V = W::w.value;  // K: shared channels filled up to a panel
  extern __shared__ char memory[];
  const Place<W> t(a, (shared_address(memory) + 1023) & ~1023u);
  const int q0 = (gridDim.x - 1 - blockIdx.x) * kRows, lane = threadIdx.x & 31, group = threadIdx.x >> 7;  // the longest first
  if (q0 >= t.length) return;
  const int steps = (min(t.length, q0 + kRows) + kStep - 1) / kStep;
  t.init();

  if (group == 2) {
    fewer_registers<24>();
    if (threadIdx.x >= 288) return;
    if (lane == 0) {
      arrive_expect(t.own_full, P::panels * kWide);
      for (int p = 0; p < P::keys; ++p) tensor_load(t.s + p * kWide, q_map, p * 64, int(t.begin) + q0, t.head, t.own_full);
      for (int p = 0; p < P::values; ++p) tensor_load(t.s + (P::keys + p) * kWide, dy_map, p * 64, int(t.begin) + q0, t.head, t.own_full);
    }
    for (int i = 0; i < steps; ++i) {
      const uint32_t to = t.step(i), full = t.full + i % kStages * 8;
      const int row = int(t.begin) + i * kStep;
      wait(t.empty + i % kStages * 8, t.phase(i) ^ 1);
      if (lane == 0) {
        arrive_expect(full, P::panels * kPanel);
        for (int p = 0; p < P::own; ++p) tensor_load(to + p * kPanel, k_map, p * 64, row, t.head, full);
        tensor_load(to + P::own * kPanel, shared_map, 0, row, 0, full);
        for (int p = 0; p < P::values; ++p) tensor_load(to + (P::keys + p) * kPanel, v_map, p * 64, row, t.head, full);
      }
      arrive(full);
    }
    return;
  }
  more_registers<240>();

  const int row0 = group * 64 + (threadIdx.x >> 5 & 3) * 16 + (lane >> 2), two = (lane & 3) * 2;
  const uint32_t queries = t.s + group * kPanel, dys = queries + P::keys * kWide;
  const float scale = a.scale * kLog2e;
  float dq[K / 2], lse[2], d[2];
#pragma unroll
  for (int i = 0; i < K / 2; ++i) dq[i] = 0.f;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int query = q0 + row0 + 8 * h;
    const int64_t at = (t.begin + query) * a.heads + t.head;
    lse[h] = query < t.length ? a.lse[at] * kLog2e : 0.f, d[h] = query < t.length ? a.d[at] : 0.f;
  }
  wait(t.own_full, 0);
  for (int i = 0; i < steps; ++i) {
    const int first = i * kStep;
    const uint32_t step = t.step(i);
    wait(t.full + i % kStages * 8, t.phase(i));
    if (first + kStep > t.length) clear_rows(step, t.length - first, P::keys);
    float s[32], dp[32];
    dots<P::key>(s, queries, step);
    dots<V>(dp, dys, step + P::keys * kPanel);
    warpgroup_wait<1>();
    pin(s);
    const bool whole = first + kStep <= q0 + 1;
#pragma unroll
    for (int x = 0; x < 32; ++x) {
      s[x] = ex2(s[x] * scale - lse[x >> 1 & 1]);
      if (!whole && first + (x >> 2) * 8 + two + (x & 1) > q0 + row0 + (x >> 1 & 1) * 8) s[x] = 0.f;
    }
    warpgroup_wait<0>();
    pin(dp);
    uint32_t ds[4][4];
#pragma unroll
    for (int x = 0; x < 32; x += 2) {
      const float e = d[x >> 1 & 1];
      // a key that is not seen may be another sequence's: its dP may be anything
      ds[x >> 3][x >> 1 & 3] = pack(s[x] != 0.f ? s[x] * (dp[x] - e) * a.scale : 0.f, s[x + 1] != 0.f ? s[x + 1] * (dp[x + 1] - e) * a.scale : 0.f);
    }
    weighted<K>(dq, ds, step);
    warpgroup_wait<0>();
    pin(dq);
    arrive_warp(t.empty + i % kStages * 8);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int query = q0 + row0 + 8 * h;
    if (query >= t.length) continue;
    float2* to = reinterpret_cast<float2*>(a.dq + ((t.begin + query) * a.heads + t.head) * P::key + two);
#pragma unroll
    for (int j = 0; j < P::key / 8; ++j) {
      const float2 old = to[j * 4];
      to[j * 4] = make_float2(old.x + dq[4 * j + 2 * h], old.y + dq[4 * j + 2 * h + 1]);
    }
  }
}

template <class W, class Kernel>
const char* launch(Kernel kernel, const PrefillBackwardArgs& a, uint32_t query_box, uint32_t key_box, cudaStream_t stream) {
  constexpr PrefillWidths w = W::w;
  CUtensorMap q, dy, k, v, shared;
  const char* e;
  if ((e = make_tensor_map(q, a.q, w.key(), a.rows, a.heads, a.q_stride, w.key(), query_box)) ||
      (e = make_tensor_map(dy, a.dy, w.value, a.rows, a.heads, int64_t(a.heads) * w.value, w.value, query_box)) ||
      (e = make_tensor_map(k, a.k, w.own, a.rows, a.heads, a.kv_stride, a.kv_head_stride, key_box)) ||
      (e = make_tensor_map(v, a.v, w.value, a.rows, a.heads, a.kv_stride, a.kv_head_stride, key_box)) ||
      (e = make_tensor_map(shared, a.shared, w.shared, a.rows, 1, a.shared_stride, w.shared, key_box)))
    return e;
  if (cudaError_t r = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Plan<W>::bytes); r != cudaSuccess) return cudaGetErrorString(r);
  kernel<<<dim3((a.longest + kRows - 1) / kRows, a.heads, a.sequences), 384, Plan<W>::bytes, stream>>>(q, dy, k, v, shared, a);
  cudaError_t r = cudaGetLastError();
  return r == cudaSuccess ? nullptr : cudaGetErrorString(r);
}
template <class W>
const char* both(const PrefillBackwardArgs& a, cudaStream_t stream) {
  if (const char* e = launch<W>(keys_kernel<W>, a, kStep, kRows, stream)) return e;
  return launch<W>(queries_kernel<W>, a, kRows, kStep, stream);
}

}  // namespace

const char* prefill_backward(const PrefillBackwardArgs& a, void* stream) {
  if (a.sequences == 0 || a.longest == 0) return nullptr;
  if (a.widths == kPrefillWide) return both<Wide>(a, cudaStream_t(stream));
  if (a.widths == kPrefillSmall) return both<Small>(a, cudaStream_t(stream));
  return "[attention] there are kernels for heads of 128 + 64 / 128 and 64 + 32 / 64 channels";
}

}  // namespace k3::cuda
