// The chunked gated delta rule on Hopper's warpgroup products.
//
// In a chunk of 32 tokens, G_i the running sum of log gates (base 2) per key channel, a = rint(G_15) an anchor, S the state entering:
//   K+_i = 2^{G_i - a} k_i    Q+_i = 2^{G_i - a} q_i    K-_j = 2^{a - G_j} k_j      (raw k, q; their norms r, s go to token scalars)
//   A = tril(K+ K-^T, -1)     M = tril(Q+ K-^T)         S~ = 2^a S
//   X = (I + diag(beta r) A diag(r))^-1                 R = V - diag(r) K+ S~       U = diag(r) X diag(beta) R
//   O = scale diag(s) (Q+ S~ + M U)                     S' = 2^{G_31 - a} (S~ + K-^T U)
// The anchor is a power of two, so it shifts exponents and nothing else: a later token's gate does not move an earlier token's result by more
// than a rare last bit of an operand. |g| <= 5 bounds every exponent by 16 * 5 * log2(e) + 1 < 117. Gates without a bound: see the template.
//
// Bound: bytes 237 us at T 8192, 96 heads; the chain of T / 32 dependent steps and instruction issue (~1800 slots a step) come first.
// Split: a block is one head of one sequence, 512 threads. Two scan warpgroups hold 64 rows each of S^T (v, k) in float32 accumulators; two
// prep warpgroups take turns at building the operands of a chunk, one chunk ahead.
// Precision: operands of products bf16; gates, sums, norms, state float32; inverse float32 with one tf32 merge.
#include "k3/ops/delta_rule/delta_ahead.cuh"

namespace k3::cuda {
namespace {

template <bool kBounded>
__device__ void scan(const DeltaChunkArgs& a, const Ahead& ahead, const Chunk seq, char* shared, uint32_t barriers) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, head = seq.head;  // warps 0-7; a warp owns 16 rows of S^T
  const int v0 = warp * 16, row = v0 + (lane >> 2), two = (lane & 3) * 2;
  char* slices = shared + 2 * kHalfBytes<kBounded> + warp * kStages * kSlice;
  const nv_bf16* v = static_cast<const nv_bf16*>(a.v) + head * D + v0;
  nv_bf16* o = static_cast<nv_bf16*>(a.o) + head * D + v0;
  const int64_t slot = a.slots ? a.slots[seq.sequence] : seq.sequence;

  auto load = [&](int c) {
    if (c < seq.chunks) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int token = (lane >> 1) + 16 * i, part = lane & 1;
        bool valid = c * C + token < seq.length;
        copy16(shared_address(slices + (c % kStages) * kSlice + slice_offset(token, part)), v + (seq.begin + (valid ? c * C + token : 0)) * a.v_stride + part * 8, valid);
      }
    }
    copy_commit();
  };
  load(0), load(1), load(2);

  const bool panels = a.head_stride > 0;
  const int pitch = panels ? 32 : D;  // from one k to the next
  const int64_t place = panels ? slot * a.slot_stride + head * a.head_stride + (row >> 5) * 32 * D + (row & 31) : (slot * a.heads + head) * D * D + row;
  float state[64];  // state[4j + 2h + e]: v = row + 8h, k = 8j + two + e
  if (a.state_in && slot >= 0) {
    const float* from = a.state_in + place;
#pragma unroll
    for (int i = 0; i < 64; ++i) state[i] = from[((i >> 2) * 8 + two + (i & 1)) * pitch + ((i >> 1) & 1) * 8];
  } else {
#pragma unroll
    for (int i = 0; i < 64; ++i) state[i] = 0.f;
  }

  Turns<kBounded> turns(shared, barriers, ahead);
  for (int c = 0; c < seq.chunks; ++c) {
    turns.next();
    char* s = turns.place();
    char* slice = slices + (c % kStages) * kSlice;
    __syncwarp();
    load(c + 3);
    turns.await();

    // 1. S~ = 2^a S, packed as a left operand
    uint32_t packed[8][4];
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      if constexpr (kBounded) {
        float2 m = *reinterpret_cast<const float2*>(s + Half::pre + (j * 8 + two) * 4);
        state[4 * j] *= m.x, state[4 * j + 1] *= m.y, state[4 * j + 2] *= m.x, state[4 * j + 3] *= m.y;
      }
      packed[j >> 1][(j & 1) * 2] = pack(state[4 * j], state[4 * j + 1]);
      packed[j >> 1][(j & 1) * 2 + 1] = pack(state[4 * j + 2], state[4 * j + 3]);
    }
    if (a.snapshots) keep_memory(a.snapshots, a.chunk_begins[seq.sequence] + c, seq, a.heads, packed);
    // 2. (K+ S~)^T and (Q+ S~)^T
    float both[32], u[16], right[16];
    const uint64_t stack = describe(shared_address(s + Half::stack));
    warpgroup_fence();
#pragma unroll
    for (int k = 0; k < 8; ++k) wgmma<64, 0>(both, packed[k], stack + (k >> 2) * (64 * 128 / 16) + (k & 3) * 2, k > 0);
    warpgroup_commit();
    // 3. R = V - r (K+ S~)
    copy_wait<3>();
    __syncwarp();
    uint32_t vs[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) ldmatrix4_transposed(vs[i], shared_address(slice + slice_offset((2 * i + (lane >> 4)) * 8 + (lane & 7), (lane >> 3) & 1)));
    float2 scales[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) scales[n] = *reinterpret_cast<const float2*>(s + Half::token + (n * 8 + two) * 4);
    warpgroup_wait<0>();
    pin(both);
#pragma unroll
    for (int i = 0; i < 16; ++i) right[i] = both[16 + i];
    uint32_t operand[2][4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float2 r = scales[n];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint32_t x = vs[n >> 1][(n & 1) * 2 + h];
        operand[n >> 1][(n & 1) * 2 + h] = pack(low(x) - r.x * both[4 * n + 2 * h], high(x) - r.y * both[4 * n + 2 * h + 1]);
      }
    }
    // 4. U^T = R^T (diag(r) X diag(beta))^T
    const uint64_t xm = describe(shared_address(s + Half::xm));
    warpgroup_fence();
    wgmma<32, 0>(u, operand[0], xm, 0);
    wgmma<32, 0>(u, operand[1], xm + 2, 1);
    warpgroup_commit();
    if constexpr (!kBounded) {
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        float2 m = *reinterpret_cast<const float2*>(s + Half::post + (j * 8 + two) * 4);
        state[4 * j] *= m.x, state[4 * j + 1] *= m.y, state[4 * j + 2] *= m.x, state[4 * j + 3] *= m.y;
      }
    }
    warpgroup_wait<0>();
    pin(u);
#pragma unroll
    for (int n = 0; n < 4; ++n) operand[n >> 1][(n & 1) * 2] = pack(u[4 * n], u[4 * n + 1]), operand[n >> 1][(n & 1) * 2 + 1] = pack(u[4 * n + 2], u[4 * n + 3]);
    if (a.u) {  // for the backward, through the slice that held V
#pragma unroll
      for (int i = 0; i < 2; ++i) stmatrix4_transposed(shared_address(slice + slice_offset((2 * i + (lane >> 4)) * 8 + (lane & 7), (lane >> 3) & 1)), operand[i]);
      __syncwarp();
      nv_bf16* to = static_cast<nv_bf16*>(a.u) + head * D + v0;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int token = (lane >> 1) + 16 * i, part = lane & 1;
        uint4 x = *reinterpret_cast<const uint4*>(slice + slice_offset(token, part));
        if (c * C + token < seq.length) *reinterpret_cast<uint4*>(to + (seq.begin + c * C + token) * a.heads * D + part * 8) = x;
      }
      __syncwarp();
    }
    // 5. (Q+ S~ + M U)^T and S~^T += U^T K-
    const uint64_t minus = describe(shared_address(s + Half::minus), 1024, C * 128);
    warpgroup_fence();
    wgmma<32, 0>(right, operand[0], xm + 4, 1);
    wgmma<32, 0>(right, operand[1], xm + 6, 1);
    warpgroup_commit();
    wgmma<128, 1>(state, operand[0], minus, 1);
    wgmma<128, 1>(state, operand[1], minus + 2048 / 16, 1);
    warpgroup_commit();
    // 6. store O through the slice that held V
#pragma unroll
    for (int n = 0; n < 4; ++n) scales[n] = *reinterpret_cast<const float2*>(s + Half::token + (C + n * 8 + two) * 4);
    warpgroup_wait<1>();
    pin(right);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        int n = 2 * i + m;
        const float2 q = scales[n];
        vs[i][2 * m] = pack(q.x * right[4 * n], q.y * right[4 * n + 1]), vs[i][2 * m + 1] = pack(q.x * right[4 * n + 2], q.y * right[4 * n + 3]);
      }
      stmatrix4_transposed(shared_address(slice + slice_offset((2 * i + (lane >> 4)) * 8 + (lane & 7), (lane >> 3) & 1)), vs[i]);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int token = (lane >> 1) + 16 * i, part = lane & 1;
      uint4 u = *reinterpret_cast<const uint4*>(slice + slice_offset(token, part));
      if (c * C + token < seq.length) *reinterpret_cast<uint4*>(o + (seq.begin + c * C + token) * a.o_stride + part * 8) = u;
    }
    // 7. S' = 2^{G_31 - a} (S~ + K-^T U)
    float2 m[16];
    if constexpr (kBounded) {
#pragma unroll
      for (int j = 0; j < 16; ++j) m[j] = *reinterpret_cast<const float2*>(s + Half::post + (j * 8 + two) * 4);
    }
    warpgroup_wait<0>();
    pin(state);
    if constexpr (kBounded) {
#pragma unroll
      for (int j = 0; j < 16; ++j) state[4 * j] *= m[j].x, state[4 * j + 1] *= m[j].y, state[4 * j + 2] *= m[j].x, state[4 * j + 3] *= m[j].y;
    }
    __syncwarp();
    turns.leave();
  }
  copy_wait<0>();

  if (a.state_out && slot >= 0) {
    float* to = a.state_out + place;
#pragma unroll
    for (int i = 0; i < 64; ++i) to[((i >> 2) * 8 + two + (i & 1)) * pitch + ((i >> 1) & 1) * 8] = state[i];
  }
}

template <bool kBounded>
__global__ void __launch_bounds__(kScanThreads, 1) delta_chunk_kernel(const __grid_constant__ DeltaChunkArgs a, const __grid_constant__ Ahead ahead) {
  scan_or_build<kBounded, false>(a, ahead, [&](const Chunk& seq, char* shared, uint32_t barriers) { scan<kBounded>(a, ahead, seq, shared, barriers); });
}

// One block a (head, sequence); thread = column v, the state's column in registers would be 128 values: kept in shared memory [k][v].
__global__ void __launch_bounds__(128) delta_plain_kernel(const DeltaChunkArgs a) {
  extern __shared__ char memory[];
  float* S = reinterpret_cast<float*>(memory);           // [128][128]
  float *q = S + D * D, *k = q + D, *decay = k + D, *part = decay + D;
  const int t = threadIdx.x, head = blockIdx.x;
  const int64_t begin = a.begins ? a.begins[blockIdx.y] : 0, end = a.begins ? a.begins[blockIdx.y + 1] : a.tokens;
  const int64_t slot = a.slots ? a.slots[blockIdx.y] : int(blockIdx.y);
  const bool resume = a.state_in && slot >= 0;
  for (int i = 0; i < D; ++i) S[i * D + t] = resume ? a.state_in[((slot * a.heads + head) * D + i) * D + t] : 0.f;
  const float rate = expf(a.gate.A_log[head]), bias = a.gate.dt_bias[head * D + t];
  auto sum = [&](float x) {
    x = warp_sum(x);
    __syncthreads();
    if ((t & 31) == 0) part[t >> 5] = x;
    __syncthreads();
    return part[0] + part[1] + part[2] + part[3];
  };
  for (int64_t n = begin; n < end; ++n) {
    float qt = static_cast<const float*>(a.q)[n * a.q_stride + head * D + t], kt = static_cast<const float*>(a.k)[n * a.k_stride + head * D + t];
    float vt = static_cast<const float*>(a.v)[n * a.v_stride + head * D + t], z = static_cast<const float*>(a.x)[n * a.x_stride + head * D + t] + bias;
    float g = a.gate.bounded ? a.gate.bound / (1.f + expf(-rate * z)) : fmaxf(-rate * (fmaxf(z, 0.f) + log1pf(expf(-fabsf(z)))), -20.f);
    float beta = 1.f / (1.f + expf(-static_cast<const float*>(a.b)[n * a.b_stride + head]));
    q[t] = qt * rsqrtf(sum(qt * qt) + 1e-6f), k[t] = kt * rsqrtf(sum(kt * kt) + 1e-6f), decay[t] = expf(g);
    __syncthreads();
    float read = 0.f, out = 0.f;
    for (int i = 0; i < D; ++i) read += k[i] * (S[i * D + t] *= decay[i]);
    float u = beta * (vt - read);
    for (int i = 0; i < D; ++i) out += q[i] * (S[i * D + t] += k[i] * u);
    static_cast<float*>(a.o)[n * a.o_stride + head * D + t] = a.scale * out;
    __syncthreads();
  }
  if (a.state_out && slot >= 0)
    for (int i = 0; i < D; ++i) a.state_out[((slot * a.heads + head) * D + i) * D + t] = S[i * D + t];
}

const char* error_of(cudaError_t e) { return e == cudaSuccess ? nullptr : cudaGetErrorString(e); }

template <bool kBounded>
const char* launch(const DeltaChunkArgs& a, cudaStream_t stream) {
  return launch_scan<kBounded>(delta_chunk_kernel<kBounded>, a, a, stream);
}

}  // namespace

const char* delta_chunk_forward(const DeltaChunkArgs& a, void* stream) {
  for (int64_t s : {a.q_stride, a.k_stride, a.v_stride, a.x_stride, a.o_stride})
    if (s % 8) return "[delta_rule] row strides must be multiples of 8 elements (16-byte loads); copy the view first";
  if (a.gate.bounded && !(a.gate.bound < 0.f && a.gate.bound >= -5.f)) return "[delta_rule] gate.bound must lie in [-5, 0); use the softplus gate's kernel";
  if (a.sequences == 0 || a.heads == 0) return nullptr;
  return a.gate.bounded ? launch<true>(a, cudaStream_t(stream)) : launch<false>(a, cudaStream_t(stream));
}

const char* delta_plain_forward(const DeltaChunkArgs& a, void* stream) {
  if (a.sequences == 0 || a.heads == 0) return nullptr;
  constexpr int bytes = (D * D + 3 * D + 4) * 4;
  cudaError_t e = cudaFuncSetAttribute(delta_plain_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e != cudaSuccess) return cudaGetErrorString(e);
  delta_plain_kernel<<<dim3(a.heads, a.sequences), 128, bytes, cudaStream_t(stream)>>>(a);
  return error_of(cudaGetLastError());
}

}  // namespace k3::cuda
