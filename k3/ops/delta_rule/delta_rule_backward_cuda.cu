// The scan of the backward of the chunked gated delta rule, last chunk first. Notation of delta_rule_cuda.cu; dO' = scale s dO, all operands raw
// (unnormalised); D the gradient of the memory leaving:
//   D <- 2^{G_31 - a} D
//   dU = M^T dO' + K- D        dP = X'^T dU  (= dv)        X' = diag(r) X diag(beta)
//   D <- 2^a ( D + Q+^T dO' - K+^T (r dP) )
// Then every chunk by itself, delta_gradient_cuda.cu. Gates without a bound: a = 0, K- = 2^{G_31 - G} k has the factor of the first line.
//
// Bound: bytes 420 us (T 8192, 96 heads, the gradients of memories written); in practice the chain, as in the forward.
// Split: as the forward's (groups that build ahead of two scan groups). Precision: operands bf16, the rest float32.
#include "k3/ops/delta_rule/delta_ahead.cuh"

namespace k3::cuda {
namespace {

template <bool kBounded>
__device__ void scan_backward(const DeltaBackwardArgs& b, const Ahead& ahead, const Chunk seq, char* shared, uint32_t barriers) {
  const DeltaChunkArgs& a = b.forward;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, head = seq.head;
  const int v0 = warp * 16, row = v0 + (lane >> 2), two = (lane & 3) * 2;
  char* slices = shared + 2 * kHalfBytes<kBounded> + warp * kStages * kSlice;
  const int64_t width = int64_t(a.heads) * D;
  const nv_bf16* d_o = static_cast<const nv_bf16*>(b.d_o) + head * D + v0;
  nv_bf16* dv = static_cast<nv_bf16*>(b.dv) + head * D + v0;
  const int64_t memory = (int64_t(seq.sequence) * a.heads + head) * D * D + row;
  auto load = [&](int i) {
    const int c = seq.chunks - 1 - i;
    if (c >= 0) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        int token = (lane >> 1) + 16 * x, part = lane & 1;
        bool valid = c * C + token < seq.length;
        copy16(shared_address(slices + (i % kStages) * kSlice + slice_offset(token, part)), d_o + (seq.begin + (valid ? c * C + token : 0)) * width + part * 8, valid);
      }
    }
    copy_commit();
  };
  load(0), load(1), load(2);
  float state[64];  // D^T: [4j + 2h + e]: v = row + 8h, k = 8j + two + e
#pragma unroll
  for (int i = 0; i < 64; ++i) state[i] = b.d_state ? b.d_state[memory + ((i >> 2) * 8 + two + (i & 1)) * D + ((i >> 1) & 1) * 8] : 0.f;

  Turns<kBounded> turns(shared, barriers, ahead);
  for (int i = 0; i < seq.chunks; ++i) {
    const int c = seq.chunks - 1 - i;
    turns.next();
    char* s = turns.place();
    char* slice = slices + (i % kStages) * kSlice;
    const uint32_t place[2] = {shared_address(slice + slice_offset((lane >> 4) * 8 + (lane & 7), (lane >> 3) & 1)),
                               shared_address(slice + slice_offset((2 + (lane >> 4)) * 8 + (lane & 7), (lane >> 3) & 1))};
    __syncwarp();
    load(i + 3);
    turns.await();
    // 1. D <- 2^{G_31 - a} D; without a bound after it has been packed, for K- has the factor
    uint32_t packed[8][4];
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      float2 m = *reinterpret_cast<const float2*>(s + Half::post + (j * 8 + two) * 4);
      auto decay = [&] { state[4 * j] *= m.x, state[4 * j + 1] *= m.y, state[4 * j + 2] *= m.x, state[4 * j + 3] *= m.y; };
      if constexpr (kBounded) decay();
      packed[j >> 1][(j & 1) * 2] = pack(state[4 * j], state[4 * j + 1]), packed[j >> 1][(j & 1) * 2 + 1] = pack(state[4 * j + 2], state[4 * j + 3]);
      if constexpr (!kBounded) decay();
    }
    keep_memory(b.d_snapshots, a.chunk_begins[seq.sequence] + c, seq, a.heads, packed);
    // 2. dU^T = D^T K-^T + dO'^T M
    float left[16], dp[16];
    const uint64_t minus = describe(shared_address(s + Half::minus)), xm = describe(shared_address(s + Half::xm), 1024, 1024);
    const uint64_t stack = describe(shared_address(s + Half::stack), 1024, 64 * 128);
    warpgroup_fence();
#pragma unroll
    for (int k = 0; k < 8; ++k) wgmma<32, 0>(left, packed[k], minus + (k >> 2) * (C * 128 / 16) + (k & 3) * 2, k > 0);
    copy_wait<3>();
    __syncwarp();
    uint32_t u[4], given[2][4], operand[2][4];
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      ldmatrix4_transposed(u, place[x]);
#pragma unroll
      for (int y = 0; y < 4; ++y) {
        float2 q = *reinterpret_cast<const float2*>(s + Half::token + (C + (2 * x + (y >> 1)) * 8 + two) * 4);
        given[x][y] = pack(q.x * low(u[y]), q.y * high(u[y]));
      }
    }
    warpgroup_fence();
    wgmma<32, 1>(left, given[0], xm + 4, 1);
    wgmma<32, 1>(left, given[1], xm + 4 + 2048 / 16, 1);
    warpgroup_commit();
    warpgroup_wait<0>();
    pin(left);
#pragma unroll
    for (int n = 0; n < 4; ++n) operand[n >> 1][(n & 1) * 2] = pack(left[4 * n], left[4 * n + 1]), operand[n >> 1][(n & 1) * 2 + 1] = pack(left[4 * n + 2], left[4 * n + 3]);
    // 3. dP^T = dU^T X';   D^T += dO'^T Q+ meanwhile
    warpgroup_fence();
    wgmma<32, 1>(dp, operand[0], xm, 0);
    wgmma<32, 1>(dp, operand[1], xm + 2048 / 16, 1);
    warpgroup_commit();
    wgmma<128, 1>(state, given[0], stack + C * 128 / 16, 1);
    wgmma<128, 1>(state, given[1], stack + C * 128 / 16 + 2048 / 16, 1);
    warpgroup_commit();
    warpgroup_wait<1>();
    pin(dp);
    uint32_t out[2][4], back[2][4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float2 r = *reinterpret_cast<const float2*>(s + Half::token + (n * 8 + two) * 4);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float x = dp[4 * n + 2 * h], y = dp[4 * n + 2 * h + 1];
        out[n >> 1][(n & 1) * 2 + h] = pack(x, y), back[n >> 1][(n & 1) * 2 + h] = pack(-r.x * x, -r.y * y);
      }
    }
    // 4. D^T -= (r dP)^T K+
    warpgroup_fence();
    wgmma<128, 1>(state, back[0], stack, 1);
    wgmma<128, 1>(state, back[1], stack + 2048 / 16, 1);
    warpgroup_commit();
    // 5. dv, through the slice that held dO
    stmatrix4_transposed(place[0], out[0]), stmatrix4_transposed(place[1], out[1]);
    __syncwarp();
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      int token = (lane >> 1) + 16 * x, part = lane & 1;
      uint4 y = *reinterpret_cast<const uint4*>(slice + slice_offset(token, part));
      if (c * C + token < seq.length) *reinterpret_cast<uint4*>(dv + (seq.begin + c * C + token) * width + part * 8) = y;
    }
    // 6. D <- 2^a D
    float2 m[16];
    if constexpr (kBounded) {
#pragma unroll
      for (int j = 0; j < 16; ++j) m[j] = *reinterpret_cast<const float2*>(s + Half::pre + (j * 8 + two) * 4);
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
  if (b.d_state_in)
#pragma unroll
    for (int i = 0; i < 64; ++i) b.d_state_in[memory + ((i >> 2) * 8 + two + (i & 1)) * D + ((i >> 1) & 1) * 8] = state[i];
}

template <bool kBounded>
__global__ void __launch_bounds__(kScanThreads, 1) delta_backward_scan_kernel(const __grid_constant__ DeltaBackwardArgs b, const __grid_constant__ Ahead ahead) {
  scan_or_build<kBounded, true>(b.forward, ahead, [&](const Chunk& seq, char* shared, uint32_t barriers) { scan_backward<kBounded>(b, ahead, seq, shared, barriers); });
}

}  // namespace

const char* delta_chunk_backward(const DeltaBackwardArgs& b, void* stream) {
  const DeltaChunkArgs& a = b.forward;
  if (a.gate.bounded && !(a.gate.bound < 0.f && a.gate.bound >= -5.f)) return "[delta_rule] gate.bound must lie in [-5, 0); use the softplus gate's kernel";
  if (!a.snapshots || !a.u || !a.chunk_begins) return "[delta_rule] the backward needs the forward's snapshots, u and chunk_begins";
  if (a.sequences == 0 || a.heads == 0 || b.chunks == 0) return nullptr;
  const char* e = a.gate.bounded ? launch_scan<true>(delta_backward_scan_kernel<true>, b, a, cudaStream_t(stream))
                                 : launch_scan<false>(delta_backward_scan_kernel<false>, b, a, cudaStream_t(stream));
  return e ? e : delta_gradients(b, stream);
}

}  // namespace k3::cuda
