// One token of a KDA mixer between its projections, for each of `rows` sequences:
//   q, k, v = silu(conv4(...)); q, k normalised; a = exp(gate); beta = sigmoid(b)
//   m = sum_k a_k k_k S_k     p = sum_k a_k q_k S_k      both reads in one pass over the old state
//   u = beta (v - m)          S' = a S + k u^T           o = scale (p + (q.k) u)
//   y = rms_norm(o) w sigmoid(g)
//
// Bound: bytes, 128 KiB of state a head and token (B 64, 96 heads: 196 us); at B 1 latency.
// Split: a block is one head of one sequence, 8 warps; warp w has key rows 16w..16w+15 in registers (requested first, so that they fly while the
// convolution runs), lane l has columns 4l..4l+3. Sums over rows: within a thread in order, then over the 8 warps in order.
// Precision: float32 throughout; bf16 inputs, windows and y.
#include "k3/core/tile.cuh"
#include "k3/ops/delta_rule/delta_rule_cuda.h"

namespace k3::cuda {
namespace {

constexpr int D = kDeltaHead;

__global__ void __launch_bounds__(256, 2) delta_step_kernel(const __grid_constant__ DeltaStepArgs a) {
  __shared__ float q[D], k[D], v[D], decay[D], reads[2][8][D];
  const int head = blockIdx.x, row = blockIdx.y, t = threadIdx.x & 127, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int channel = head * D + t, channels = a.heads * D;
  nv_bf16* y = static_cast<nv_bf16*>(a.y) + row * a.y_stride + head * D;
  const int slot = a.slots[row];
  if (slot < 0) {
    asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
    if (threadIdx.x < 64) reinterpret_cast<uint32_t*>(y)[threadIdx.x] = 0;
    return;
  }

  // 1. ask for the state
  float* state = a.state + (int64_t(slot) * a.heads + head) * D * D + warp * 16 * D + lane * 4;
  float4 S[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) S[i] = *reinterpret_cast<const float4*>(state + i * D);

  // 2. convolutions and the decay: 128 threads take q and v, the others k and the gate. Windows and weights are read before the kernel in front of
  // this one has finished, its results after.
  const bool first = threadIdx.x < 128;
  nv_bf16* windows = static_cast<nv_bf16*>(a.window) + int64_t(slot) * 9 * channels + channel;
  struct Conv {
    nv_bf16 x0, x1, x2;
    float4 w;
  };
  auto before = [&](const float* weight, int which) {
    const nv_bf16* w = windows + which * channels;
    return Conv{w[0], w[3 * channels], w[6 * channels], *reinterpret_cast<const float4*>(weight + channel * 4)};
  };
  auto convolve = [&](const Conv& c, const void* in, int64_t stride, int which) {
    nv_bf16 now = static_cast<const nv_bf16*>(in)[row * stride + channel], *w = windows + which * channels;
    float sum = c.w.x * to_f32(c.x0) + c.w.y * to_f32(c.x1) + c.w.z * to_f32(c.x2) + c.w.w * to_f32(now);
    w[0] = c.x1, w[3 * channels] = c.x2, w[6 * channels] = now;
    return sum * sigmoid(sum);
  };
  Conv one = before(first ? a.q_conv : a.k_conv, first ? 0 : 1), two{};
  float bias = 0.f, rate = 0.f;
  if (first) two = before(a.v_conv, 2); else bias = a.gate.dt_bias[channel], rate = expf(a.gate.A_log[head]);
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  if (first) {
    q[t] = convolve(one, a.q, a.q_stride, 0);
    v[t] = convolve(two, a.v, a.v_stride, 2);
  } else {
    k[t] = convolve(one, a.k, a.k_stride, 1);
    float z = to_f32(static_cast<const nv_bf16*>(a.x)[row * a.x_stride + channel]) + bias;
    float g = a.gate.bounded ? a.gate.bound / (1.f + expf(-rate * z)) : -rate * (fmaxf(z, 0.f) + log1pf(expf(-fabsf(z))));
    decay[t] = expf(g);
  }
  const float beta = sigmoid(to_f32(static_cast<const nv_bf16*>(a.b)[row * a.b_stride + head]));
  __syncthreads();
  const float4 q4 = *reinterpret_cast<float4*>(q + lane * 4), k4 = *reinterpret_cast<float4*>(k + lane * 4), v4 = *reinterpret_cast<float4*>(v + lane * 4);
  const float r_q = rsqrtf(warp_sum(q4.x * q4.x + q4.y * q4.y + q4.z * q4.z + q4.w * q4.w) + 1e-6f);
  const float r_k = rsqrtf(warp_sum(k4.x * k4.x + k4.y * k4.y + k4.z * k4.z + k4.w * k4.w) + 1e-6f);
  const float qk = warp_sum(q4.x * k4.x + q4.y * k4.y + q4.z * k4.z + q4.w * k4.w) * r_q * r_k;

  // 3. decay the rows, read them twice
  float4 m = make_float4(0, 0, 0, 0), p = m;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float e = decay[warp * 16 + i], kk = k[warp * 16 + i], qq = q[warp * 16 + i];
    S[i].x *= e, S[i].y *= e, S[i].z *= e, S[i].w *= e;
    m.x += kk * S[i].x, m.y += kk * S[i].y, m.z += kk * S[i].z, m.w += kk * S[i].w;
    p.x += qq * S[i].x, p.y += qq * S[i].y, p.z += qq * S[i].z, p.w += qq * S[i].w;
  }
  *reinterpret_cast<float4*>(&reads[0][warp][lane * 4]) = m, *reinterpret_cast<float4*>(&reads[1][warp][lane * 4]) = p;
  __syncthreads();
  auto total = [&](int which) {
    float4 s = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int w = 0; w < 8; ++w) {
      float4 x = *reinterpret_cast<const float4*>(&reads[which][w][lane * 4]);
      s.x += x.x, s.y += x.y, s.z += x.z, s.w += x.w;
    }
    return s;
  };

  // 4. write u
  m = total(0);
  const float4 u = make_float4(beta * (v4.x - r_k * m.x), beta * (v4.y - r_k * m.y), beta * (v4.z - r_k * m.z), beta * (v4.w - r_k * m.w));
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float kk = k[warp * 16 + i] * r_k;
    S[i].x += kk * u.x, S[i].y += kk * u.y, S[i].z += kk * u.z, S[i].w += kk * u.w;
    *reinterpret_cast<float4*>(state + i * D) = S[i];
  }

  // 5. output, normed and gated
  if (warp == 0) {
    p = total(1);
    float o[4] = {a.scale * (r_q * p.x + qk * u.x), a.scale * (r_q * p.y + qk * u.y), a.scale * (r_q * p.z + qk * u.z), a.scale * (r_q * p.w + qk * u.w)};
    float r = rsqrtf(warp_sum(o[0] * o[0] + o[1] * o[1] + o[2] * o[2] + o[3] * o[3]) / D + a.eps);
    uint2 gate = *reinterpret_cast<const uint2*>(static_cast<const nv_bf16*>(a.g) + row * a.g_stride + head * D + lane * 4);
    float4 w = *reinterpret_cast<const float4*>(a.norm + lane * 4);
    *reinterpret_cast<uint2*>(y + lane * 4) = make_uint2(pack(o[0] * r * w.x * sigmoid(low(gate.x)), o[1] * r * w.y * sigmoid(high(gate.x))),
                                                         pack(o[2] * r * w.z * sigmoid(low(gate.y)), o[3] * r * w.w * sigmoid(high(gate.y))));
  }
}

}  // namespace

const char* delta_step(const DeltaStepArgs& a, void* stream) {
  if (a.rows == 0 || a.heads == 0) return nullptr;
  if (a.g_stride % 4 || a.y_stride % 4) return "[delta_rule] the step's g and y need row strides that are multiples of 4 elements";
  cudaLaunchAttribute chain{cudaLaunchAttributeProgrammaticStreamSerialization, {}, {}};
  chain.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{dim3(a.heads, a.rows), dim3(256), 0, cudaStream_t(stream), &chain, a.chained ? 1u : 0u};
  cudaError_t e = cudaLaunchKernelEx(&config, delta_step_kernel, a);
  return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}

}  // namespace k3::cuda
