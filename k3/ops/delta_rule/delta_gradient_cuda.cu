// Gradients of a chunk of the gated delta rule, all chunks at once, after the scan of delta_rule_backward_cuda.cu, whose notation this is. With
// W = [-r dP; dO'] and the saved U, S~ = 2^a S entering, D~ = 2^{G_31 - a} D:
//   [dK+; dQ+] = W S~^T + Y K-      Y = [dA; dM] = W U^T, masked      dK- = U D~^T + Y^T [K+; Q+]
//   dq = 2^{G - a} dQ+    dk = 2^{G - a} dK+ + 2^{a - G} dK-    dG = Q+ dQ+ + K+ dK+ - K- dK-    dG_31 += rowsum(S' D)
//   then the norms, dg_t = sum_{i >= t} dG_i, the gate, and beta: dlogit = (dP.U) (1 - beta) / (r beta)
// Nothing is divided by a decay; r beta divides a U that carries it as a factor.
// Gates without a bound: a = 0, K- = 2^{G_31 - G} k, S and D as they are, so what passes between the state and a chunk has exponents below 0; within
// the chunk (products with Y) blocks of 8 x 8 tokens have anchors of their own, as in the forward.
//
// Bound: bytes 780 us (T 8192, 96 heads). Split: a block a (head, chunk), two groups of four warps.
// Precision: operands bf16; sums, gates, dG float32. dA_log and ddt_bias: a row a chunk, then the chunks in order.
#include "k3/ops/delta_rule/delta_chunk.cuh"

namespace k3::cuda {
namespace {

__device__ __forceinline__ float rounded(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

// A memory as the scans keep it (keep_memory), as an operand whose K is v.
__device__ __forceinline__ uint64_t describe_memory(uint32_t shared_address) {
  return uint64_t((shared_address & 0x3FFFF) >> 4) | (uint64_t(2048 >> 4) << 16) | (uint64_t(128 >> 4) << 32);
}

// Where things lie. With a bound two blocks share a multiprocessor: D~ comes into the place of the raw rows when the operands are built, Y and the sums
// into that of W, and the results of the products over U, S~ and D~.
template <bool kBounded>
struct Places : Half {
  static constexpr int u = kHalfBytes<kBounded>;  // 2 panels [32][64]: U
  static constexpr int s = u + 8192;              // [16][16] blocks of [8 v][8]: S~
  static constexpr int d = s + 32768;             // the same: D~
  static constexpr int w = d + 32768;             // 2 panels [64][64]: -r dP over dO'
  static constexpr int y = w + 16384;             // [64][64]: dA over dM, columns 32-63 are not used
  static constexpr int summed = y + 8192;         // float: [8][128] and [8][16]
  static constexpr int dots = summed + (8 * 128 + 8 * 16) * 4;  // [32] float: dP.U
  static constexpr int ends = dots;  // not used
  static constexpr int barrier = dots + 32 * 4, bytes = barrier + 64 + 1024;
  static constexpr int tiles = u, pitch = 132;  // dK+, dQ+, dK-, U D^T and dG, each [32][132] float
  static_assert(tiles + 5 * 32 * pitch * 4 <= y);
};
template <>
struct Places<true> {
  static constexpr int stack = 0;
  static constexpr int minus = stack + 2 * 64 * 128;
  static constexpr int w = minus + 2 * C * 128, y = w, summed = w + 8192;
  static constexpr int u = w + 16384;
  static constexpr int s = u + 8192;
  static constexpr int d = s + 32768, raw = d;
  static constexpr int pre = raw + 3 * C * kRawRow, post = pre + D * 4, last = post + D * 4, norms = last + D * 4;
  static constexpr int ends = summed + (8 * 128 + 8 * 16) * 4;  // [128] float
  static constexpr int token = d + 32768, middle = token + 2 * C * 4, dots = middle + D * 4;
  static constexpr int barrier = dots + 32 * 4, bytes = barrier + 64;
  static constexpr int tiles = u, pitch = 132;  // all but dG
  static constexpr int xm = 0, lower = 0, inverse = 0, sums = 0;  // not built
  static_assert(norms + 2 * C * 4 <= d + 32768 && tiles + 3 * 32 * pitch * 4 <= token && ends + D * 4 <= u && bytes <= 113 << 10);
};

// Without a bound, what tokens of a chunk give each other: dk and dq as the later token into tiles 0 and 1, dk as the earlier one into tile 2, and
// into tile 4 dG of these and of what came from the memory. A warp has 16 channels, and goes through the ten pairs of blocks of 8 tokens, later block
// i, earlier j; the anchor n lies between them.
__device__ void gradients_within_chunk(const char* s, const char* y, float* tiles, int pitch) {
  const int lane = threadIdx.x & 31, g = lane >> 2, two = (lane & 3) * 2, tile = C * pitch, first = (threadIdx.x >> 5) * 16;
  const float* sums = reinterpret_cast<const float*>(s + Half::sums);
  auto entry = [&](int row, int column) { return uint32_t(*reinterpret_cast<const uint16_t*>(y + swizzle128(row, column * 2))); };
  auto raw = [&](int row, int channel) { return to_f32(*reinterpret_cast<const nv_bf16*>(s + Half::raw + row * kRawRow + channel * 2)); };  // q, then k
  auto raws = [&](int row, int channel) { return *reinterpret_cast<const uint32_t*>(s + Half::raw + row * kRawRow + channel * 2); };
  auto place = [&](int which, int token, int channel) { return reinterpret_cast<float2*>(tiles + which * tile + token * pitch + channel); };
  for (int t = g; t < C; t += 8)
#pragma unroll
    for (int x = 0; x < 16; x += 8) {
      const int channel = first + x + two;
      const uint32_t q = raws(t, channel), k = raws(C + t, channel);
      const float2 dk = *place(0, t, channel), dq = *place(1, t, channel);
      *place(4, t, channel) = make_float2(low(q) * dq.x + low(k) * dk.x, high(q) * dq.y + high(k) * dk.y);
    }
#pragma unroll 1
  for (int pair = 0; pair < 10; ++pair) {
    const int bi = pair < 1 ? 0 : pair < 3 ? 1 : pair < 6 ? 2 : 3, i = bi * 8, j = (pair - bi * (bi + 1) / 2) * 8, n = i == j ? i + 3 : i - 1;
    const uint32_t plus[4] = {*reinterpret_cast<const uint32_t*>(y + swizzle128(i + g, (j + two) * 2)),
                              *reinterpret_cast<const uint32_t*>(y + swizzle128(C + i + g, (j + two) * 2)), 0, 0};
    const uint32_t minus[4] = {entry(i + two, j + g) | entry(i + two + 1, j + g) << 16, 0, entry(C + i + two, j + g) | entry(C + i + two + 1, j + g) << 16, 0};
#pragma unroll
    for (int x = 0; x < 16; x += 8) {
      const float* G = sums + first + x + g;
      const float p0 = ex2(G[(i + two) * 136] - G[n * 136]), p1 = ex2(G[(i + two + 1) * 136] - G[n * 136]);
      const float m0 = ex2(G[n * 136] - G[(j + two) * 136]), m1 = ex2(G[n * 136] - G[(j + two + 1) * 136]);
      float later[4] = {}, earlier[4] = {};
      const int column = first + x + g, channel = first + x + two;
      mma(later, plus, pack(raw(C + j + two, column) * m0, raw(C + j + two + 1, column) * m1), 0);
      mma(earlier, minus, pack(raw(C + i + two, column) * p0, raw(C + i + two + 1, column) * p1), pack(raw(i + two, column) * p0, raw(i + two + 1, column) * p1));
      auto sum = [&](int token) { return *reinterpret_cast<const float2*>(sums + token * 136 + channel); };
      auto add = [&](int which, int token, float a, float b) {
        float2* r = place(which, token, channel);
        *r = make_float2(r->x + a, r->y + b);
      };
      const float2 gi = sum(i + g), gj = sum(j + g), gn = sum(n);
      const float u0 = ex2(gi.x - gn.x), u1 = ex2(gi.y - gn.y), d0 = ex2(gn.x - gj.x), d1 = ex2(gn.y - gj.y);
      const uint32_t q = raws(i + g, channel), k = raws(C + i + g, channel), kj = raws(C + j + g, channel);
      add(0, i + g, u0 * later[0], u1 * later[1]);
      add(1, i + g, u0 * later[2], u1 * later[3]);
      add(2, j + g, d0 * earlier[0], d1 * earlier[1]);
      // as the products had them: what a pair of tokens adds to the one it must take from the other
      add(4, i + g, rounded(low(k) * u0) * later[0] + rounded(low(q) * u0) * later[2], rounded(high(k) * u1) * later[1] + rounded(high(q) * u1) * later[3]);
      add(4, j + g, -rounded(low(kj) * d0) * earlier[0], -rounded(high(kj) * d1) * earlier[1]);
    }
  }
}

template <bool kBounded>
__global__ void __launch_bounds__(256, kBounded ? 2 : 1) delta_gradient_kernel(const __grid_constant__ DeltaBackwardArgs b) {
  using Place = Places<kBounded>;
  extern __shared__ char memory[];
  const DeltaChunkArgs& a = b.forward;
  char* s = memory + (kBounded ? 0 : (1024 - (shared_address(memory) & 1023)) & 1023);
  const uint32_t base = shared_address(s), full = base + Place::barrier, empty = full + 8, loaded = full + 16;  // loaded: S~, D~
  if (kBounded && (base & 1023)) __trap();  // there is no byte to spare: dynamic shared memory begins at a multiple of 1024
  const int head = blockIdx.x, number = blockIdx.y, group = __shfl_sync(~0u, int(threadIdx.x) >> 7, 0), tid = threadIdx.x & 127, lane = tid & 31, warp = tid >> 5;
  const int64_t width = int64_t(a.heads) * D;
  int sequence = 0;
  for (int hi = a.sequences - 1; sequence < hi;) {
    int mid = (sequence + hi + 1) >> 1;
    if (a.chunk_begins[mid] <= number) sequence = mid; else hi = mid - 1;
  }
  const int64_t sequence_begin = a.begins ? a.begins[sequence] : 0, sequence_end = a.begins ? a.begins[sequence + 1] : a.tokens;
  const int64_t begin = sequence_begin + int64_t(number - a.chunk_begins[sequence]) * C;
  const Chunk seq{begin, int(min(int64_t(C), sequence_end - begin)), 1, head, sequence};
  if (threadIdx.x == 0) barrier_init(full, 128), barrier_init(empty, 1), barrier_init(loaded, 1), barrier_init(loaded + 8, 1), barrier_init(loaded + 16, 128), barrier_init_done();
  __syncthreads();
  float *dots = reinterpret_cast<float*>(s + Place::dots), *ends = reinterpret_cast<float*>(s + Place::ends);

  if (group == 1) {
    prepare<kBounded, Part::operands, false, Place>(a, Alone{{begin, seq.length, 0, head}}, s, 1, loaded + 16, full, empty, [](int) {});
  } else {
    const int64_t memory_at = (int64_t(number) * a.heads + head) * D * D;
    auto load_memory = [&](int to, const void* from, uint32_t barrier) {
      arrive_expect(barrier, D * D * 2);
      bulk_load(base + to, static_cast<const nv_bf16*>(from) + memory_at, D * D * 2, barrier);
    };
    if (tid == 0) {
      load_memory(Place::s, a.snapshots, loaded);
      if (!kBounded) load_memory(Place::d, b.d_snapshots, loaded + 8);
    }
    uint4 dp[4], g[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int row = (tid >> 4) + i * 8, c = tid & 15;
      bool valid = row < seq.length;
      const int64_t at = (begin + row) * width + head * D + c * 8;
      const uint4 none = make_uint4(0, 0, 0, 0);
      dp[i] = valid ? *reinterpret_cast<const uint4*>(static_cast<const nv_bf16*>(b.dv) + at) : none;
      g[i] = valid ? *reinterpret_cast<const uint4*>(static_cast<const nv_bf16*>(b.d_o) + at) : none;
      uint4 u = valid ? *reinterpret_cast<const uint4*>(static_cast<const nv_bf16*>(a.u) + at) : none;
      *reinterpret_cast<uint4*>(s + Place::u + (c >> 3) * 4096 + swizzle128(row, (c & 7) * 16)) = u;
      float dot = low(dp[i].x) * low(u.x) + high(dp[i].x) * high(u.x) + low(dp[i].y) * low(u.y) + high(dp[i].y) * high(u.y) + low(dp[i].z) * low(u.z) + high(dp[i].z) * high(u.z) +
                  low(dp[i].w) * low(u.w) + high(dp[i].w) * high(u.w);
#pragma unroll
      for (int x = 1; x < 16; x <<= 1) dot += __shfl_xor_sync(~0u, dot, x);
      if (c == 0) dots[row] = dot;
    }
    wait(full, 0);
    if (kBounded && tid == 0) {
      publish();
      load_memory(Place::d, b.d_snapshots, loaded + 8);
    }
    const float* token = reinterpret_cast<const float*>(s + Place::token);
    auto times = [](const uint4& u, float f) {
      return make_uint4(pack(f * low(u.x), f * high(u.x)), pack(f * low(u.y), f * high(u.y)), pack(f * low(u.z), f * high(u.z)), pack(f * low(u.w), f * high(u.w)));
    };
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int row = (tid >> 4) + i * 8, c = tid & 15;
      char* to = s + Place::w + (c >> 3) * 8192;
      *reinterpret_cast<uint4*>(to + swizzle128(row, (c & 7) * 16)) = times(dp[i], -token[row]);
      *reinterpret_cast<uint4*>(to + swizzle128(row + 32, (c & 7) * 16)) = times(g[i], token[C + row]);
    }
    publish();
    for (int i = 0; kForTheChecker && i < 2; ++i) named_barrier(2, 128);  // as often as those who prepare
  }
  __syncthreads();

  // 1. products. The first group has rows of tokens, K and Q; the second rows of channels, columns of tokens: dK- and, kept apart, U D~^T
  const int row0 = warp * 16 + (lane >> 2), two = (lane & 3) * 2;
  float acc[64], part[2][16], end_sums[4];
  uint32_t operand[2][4];
  wait(loaded, 0);
  if (group == 0) {
    float y[16];
    warpgroup_fence();
#pragma unroll
    for (int k = 0; k < 8; ++k)
      wgmma<32, 0, 0>(y, describe(base + Place::w + (k >> 2) * 8192) + (k & 3) * 2, describe(base + Place::u + (k >> 2) * 4096) + (k & 3) * 2, k > 0);
    warpgroup_commit();
#pragma unroll
    for (int k = 0; k < 8; ++k) wgmma<128, 0, 1>(acc, describe(base + Place::w + (k >> 2) * 8192) + (k & 3) * 2, describe_memory(base + Place::s) + k * 4096 / 16, k > 0);
    warpgroup_commit();
    warpgroup_wait<1>();
    pin(y);
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int i = (row0 + 8 * h) & 31, j = n * 8 + two, last = row0 < 32 ? i - 1 : i;  // dA strictly below the diagonal, dM with it
        operand[n >> 1][(n & 1) * 2 + h] = pack(j <= last ? y[4 * n + 2 * h] : 0.f, j + 1 <= last ? y[4 * n + 2 * h + 1] : 0.f);
      }
    warpgroup_wait<0>();
    pin(acc);
    if constexpr (kBounded) named_barrier(1, 128);  // nobody reads W any more
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        *reinterpret_cast<uint32_t*>(s + Place::y + swizzle128(row0 + 8 * h, (n * 8 + two) * 2)) = operand[n >> 1][(n & 1) * 2 + h];
    publish();
  } else {
    if constexpr (kBounded && kForTheChecker) named_barrier(2, 128);  // as often as the others
    wait(loaded + 8, 0);
    warpgroup_fence();
#pragma unroll
    for (int k = 0; k < 8; ++k)
#pragma unroll
      for (int m = 0; m < 2; ++m)
        wgmma<32, 1, 0>(part[m], describe_memory(base + Place::d + m * 1024) + k * 4096 / 16, describe(base + Place::u + (k >> 2) * 4096) + (k & 3) * 2, k > 0);
    warpgroup_commit();
    warpgroup_wait<0>();
    pin(part[0]), pin(part[1]);
    if constexpr (kBounded) {  // sum over tokens of K- dK-, what the chunk wrote takes from dG_31 and its own tokens: channel by channel
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int channel = row0 + 8 * h;
          float sum = 0.f;
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const nv_bf16 k = *reinterpret_cast<const nv_bf16*>(s + Place::minus + m * C * 128 + swizzle128((i >> 1) * 8 + two + (i & 1), channel * 2));
            sum += to_f32(k) * part[m][4 * (i >> 1) + 2 * h + (i & 1)];
          }
          sum += __shfl_xor_sync(~0u, sum, 1), sum += __shfl_xor_sync(~0u, sum, 2);
          end_sums[2 * m + h] = sum;
        }
    }
  }
  __syncthreads();  // Y is complete
  if constexpr (kBounded) {
    if (group == 0) {
      const uint64_t minus = describe(base + Place::minus, 1024, C * 128);
      warpgroup_fence();
      wgmma<128, 1>(acc, operand[0], minus, 1);
      wgmma<128, 1>(acc, operand[1], minus + 2048 / 16, 1);
      warpgroup_commit();
      warpgroup_wait<0>();
      pin(acc);
    } else {
      warpgroup_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int m = 0; m < 2; ++m)
          wgmma<32, 1, 1>(part[m], describe(base + Place::stack + m * 8192) + k * 2048 / 16, describe(base + Place::y) + k * 2048 / 16, 1);
      warpgroup_commit();
      if ((lane & 3) == 0)
#pragma unroll
        for (int i = 0; i < 4; ++i) ends[(i >> 1) * 64 + row0 + 8 * (i & 1)] = end_sums[i];
      warpgroup_wait<0>();
      pin(part[0]), pin(part[1]);
    }
  }

  // 2. rowsum(S D) of the memory entering; a thread has two channels and 32 rows
  const int pair = threadIdx.x & 63, quarter = threadIdx.x >> 6, channel = pair * 2;
  float* sums = reinterpret_cast<float*>(s + Place::summed);
  wait(loaded + 8, 0);
  {
    float e0 = 0.f, e1 = 0.f;
#pragma unroll 8
    for (int i = 0; i < 32; ++i) {  // in an order that keeps lanes' banks apart
      const int v = quarter * 32 + (i & 24) + ((i + (pair >> 2)) & 7), at = ((v >> 3) * 16 + (pair >> 2)) * 128 + (v & 7) * 16 + (pair & 3) * 4;
      const uint32_t x = *reinterpret_cast<uint32_t*>(s + Place::s + at), y = *reinterpret_cast<uint32_t*>(s + Place::d + at);
      e0 += low(x) * low(y), e1 += high(x) * high(y);
    }
    const float2 f = kBounded ? make_float2(1.f, 1.f) : *reinterpret_cast<float2*>(s + Place::post + channel * 4);
    *reinterpret_cast<float2*>(sums + quarter * 128 + channel) = make_float2(e0 * f.x, e1 * f.y);
  }
  __syncthreads();
  float* tiles = reinterpret_cast<float*>(s + Place::tiles);
  constexpr int P = Place::pitch, kTile = C * P;
  if (group == 0) {
#pragma unroll
    for (int i = 0; i < 64; i += 2) {
      int row = row0 + 8 * (i >> 1 & 1), column = (i >> 2) * 8 + two;
      if constexpr (!kBounded) {
        const float2 G = *reinterpret_cast<const float2*>(s + Place::sums + ((row & 31) * 136 + column) * 4);
        acc[i] *= ex2(G.x), acc[i + 1] *= ex2(G.y);
      }
      *reinterpret_cast<float2*>(tiles + (row >> 5) * kTile + (row & 31) * P + column) = make_float2(acc[i], acc[i + 1]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      float* to = tiles + 2 * kTile + ((i >> 2 & 3) * 8 + two + (i & 1)) * P + (i >> 4) * 64 + row0 + 8 * (i >> 1 & 1);
      if (kBounded) to[0] = part[i >> 4][i & 15];
      else to[0] = 0.f, to[kTile] = part[i >> 4][i & 15];
    }
  }

  if constexpr (!kBounded) {
    __syncthreads();
    gradients_within_chunk(s, s + Place::y, tiles, P);
  }

  // 3. gates again; a thread has two channels of 8 tokens
  const float rate = expf(a.gate.A_log[head]), bound = a.gate.bound;
  const float bias[2] = {a.gate.dt_bias[head * D + channel], a.gate.dt_bias[head * D + channel + 1]};
  const int t0 = quarter * 8;
  float sigma[8][2], G[8][2];
  uint32_t q[8], k[8];
  {
    float run[2] = {0.f, 0.f};
#pragma unroll
    for (int t = 0; t < 8; ++t) {
      const bool valid = t0 + t < seq.length;
      const int64_t n = begin + (valid ? t0 + t : 0);
      uint32_t x = *reinterpret_cast<const uint32_t*>(static_cast<const nv_bf16*>(a.x) + n * a.x_stride + head * D + channel);
      q[t] = valid ? *reinterpret_cast<const uint32_t*>(static_cast<const nv_bf16*>(a.q) + n * a.q_stride + head * D + channel) : 0;
      k[t] = valid ? *reinterpret_cast<const uint32_t*>(static_cast<const nv_bf16*>(a.k) + n * a.k_stride + head * D + channel) : 0;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if constexpr (kBounded) {
          sigma[t][e] = sigmoid(rate * ((e ? high(x) : low(x)) + bias[e]));
          run[e] += valid ? bound * kLog2e * sigma[t][e] : 0.f;
        } else {
          const float z = ((e ? high(x) : low(x)) + bias[e]) * kLog2e;
          run[e] += valid ? fmaxf(-rate * (fmaxf(z, 0.f) + lg2(1.f + ex2(-fabsf(z)))), -20.f * kLog2e) : 0.f;
        }
        G[t][e] = run[e];
      }
    }
    *reinterpret_cast<float2*>(sums + (4 + quarter) * 128 + channel) = make_float2(run[0], run[1]);
  }
  __syncthreads();
  float dq[8][2], dk[8][2], dG[8][2], end[2], dots_here[16];
  {
    float2 middle = *reinterpret_cast<float2*>(s + Place::middle + channel * 4), before = make_float2(-rintf(middle.x), -rintf(middle.y)), all = make_float2(0.f, 0.f);
    if constexpr (!kBounded) before = make_float2(0.f, 0.f);
    for (int i = 0; i < 4; ++i) {
      float2 x = *reinterpret_cast<float2*>(sums + (4 + i) * 128 + channel);
      if (i < quarter) before.x += x.x, before.y += x.y;
      all.x += x.x, all.y += x.y;
    }
    const bool whole = kBounded && quarter == 0;
    end[0] = whole ? ends[channel] : 0.f, end[1] = whole ? ends[channel + 1] : 0.f;
#pragma unroll
    for (int t = 0; t < 8; ++t) {
      float dots_q = 0.f, dots_k = 0.f;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float* tile = tiles + (t0 + t) * P + channel + e;
        float exponent = G[t][e] + (e ? before.y : before.x), up = ex2(exponent);
        float down = kBounded ? ex2(-exponent) : ex2((e ? all.y : all.x) - exponent);
        float qq = e ? high(q[t]) : low(q[t]), kk = e ? high(k[t]) : low(k[t]);
        if constexpr (kBounded) {
          dq[t][e] = up * tile[kTile], dk[t][e] = up * tile[0] + down * tile[2 * kTile];
          // as the products had them: what a pair of tokens adds to the one it must take from the other
          const float q_plus = rounded(qq * up), k_plus = rounded(kk * up), k_minus = rounded(kk * down);
          dG[t][e] = q_plus * tile[kTile] + k_plus * tile[0] - k_minus * tile[2 * kTile];
        } else {
          const float leaving = down * tile[3 * kTile];
          dq[t][e] = tile[kTile], dk[t][e] = tile[0] + tile[2 * kTile] + leaving;
          dG[t][e] = tile[4 * kTile] - kk * leaving;
          end[e] += kk * leaving;
        }
        dots_q += qq * dq[t][e], dots_k += kk * dk[t][e];
      }
      dots_here[t] = dots_q, dots_here[8 + t] = dots_k;
    }
  }
  float* norms = sums + 8 * 128;  // [8 warps][16]
  {
    float x = warp_sums_complete(dots_here);
    if ((threadIdx.x & 31) < 16) norms[(threadIdx.x >> 5) * 16 + (threadIdx.x & 31)] = x;
    float later[2] = {0.f, 0.f};
#pragma unroll
    for (int t = 7; t >= 0; --t)
#pragma unroll
      for (int e = 0; e < 2; ++e) dG[t][e] = later[e] += dG[t][e];
    float2 first = *reinterpret_cast<float2*>(sums + quarter * 128 + channel);
    __syncthreads();  // everybody has read the sums of gates
    *reinterpret_cast<float2*>(sums + quarter * 128 + channel) = make_float2(first.x + end[0], first.y + end[1]);
    *reinterpret_cast<float2*>(sums + (4 + quarter) * 128 + channel) = make_float2(later[0], later[1]);
  }
  __syncthreads();
  float2 after = make_float2(0.f, 0.f);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 x = *reinterpret_cast<float2*>(sums + i * 128 + channel);
    after.x += x.x, after.y += x.y;
  }
  for (int i = 3; i > quarter; --i) {
    float2 x = *reinterpret_cast<float2*>(sums + (4 + i) * 128 + channel);
    after.x += x.x, after.y += x.y;
  }
  const float* token = reinterpret_cast<const float*>(s + Place::token);
  float bias_sum[2] = {0.f, 0.f}, rate_sum[2] = {0.f, 0.f};
#pragma unroll
  for (int t = 0; t < 8; ++t) {
    if (t0 + t >= seq.length) continue;
    const int64_t at = (begin + t0 + t) * width + head * D + channel;
    const float r = token[t0 + t], rq = token[C + t0 + t] / a.scale;
    const float dot_q = (norms[(2 * quarter) * 16 + t] + norms[(2 * quarter + 1) * 16 + t]) * rq * rq, dot_k = (norms[(2 * quarter) * 16 + 8 + t] + norms[(2 * quarter + 1) * 16 + 8 + t]) * r * r;
    float dx[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float dg = dG[t][e] + (e ? after.y : after.x);
      uint32_t u = *reinterpret_cast<const uint32_t*>(static_cast<const nv_bf16*>(a.x) + (begin + t0 + t) * a.x_stride + head * D + channel);
      const float z = (e ? high(u) : low(u)) + bias[e];
      if constexpr (kBounded) {
        dx[e] = dg * bound * sigma[t][e] * (1.f - sigma[t][e]) * rate, rate_sum[e] += dx[e] * z;
      } else {
        const float gate = -rate * kLn2 * (fmaxf(z * kLog2e, 0.f) + lg2(1.f + ex2(-fabsf(z * kLog2e))));
        const bool clamped = gate < -20.f;
        dx[e] = clamped ? 0.f : dg * -rate * sigmoid(z), rate_sum[e] += clamped ? 0.f : dg * gate;
      }
      bias_sum[e] += dx[e];
    }
    *reinterpret_cast<uint32_t*>(static_cast<nv_bf16*>(b.dq) + at) = pack(dq[t][0] - low(q[t]) * dot_q, dq[t][1] - high(q[t]) * dot_q);
    *reinterpret_cast<uint32_t*>(static_cast<nv_bf16*>(b.dk) + at) = pack(dk[t][0] - low(k[t]) * dot_k, dk[t][1] - high(k[t]) * dot_k);
    *reinterpret_cast<uint32_t*>(static_cast<nv_bf16*>(b.dx) + at) = pack(dx[0], dx[1]);
  }
  if (threadIdx.x < seq.length) {
    const int64_t n = begin + threadIdx.x;
    float beta = sigmoid(to_f32(static_cast<const nv_bf16*>(a.b)[n * a.b_stride + head])), divisor = token[threadIdx.x] * beta;
    static_cast<nv_bf16*>(b.db)[n * a.heads + head] = __float2bfloat16_rn(divisor > 0.f ? dots[threadIdx.x] * (1.f - beta) / divisor : 0.f);
  }
  __syncthreads();
  *reinterpret_cast<float2*>(sums + quarter * 128 + channel) = make_float2(bias_sum[0], bias_sum[1]);
  *reinterpret_cast<float2*>(sums + (4 + quarter) * 128 + channel) = make_float2(rate_sum[0], rate_sum[1]);
  __syncthreads();
  const float* mine = sums + group * 512 + tid;
  b.partial[((int64_t(number) * a.heads + head) * 2 + group) * D + tid] = (mine[0] + mine[128]) + (mine[256] + mine[384]);
}

// one block a head: the chunks in order
__global__ void __launch_bounds__(256) delta_parameters_kernel(const DeltaBackwardArgs b) {
  __shared__ float part[8];
  const int head = blockIdx.x, H = b.forward.heads;
  float x = 0.f;
#pragma unroll 8
  for (int c = 0; c < b.chunks; ++c) x += b.partial[(int64_t(c) * H + head) * 2 * D + threadIdx.x];
  if (threadIdx.x < D) b.ddt_bias[head * D + threadIdx.x] += x;
  float total = warp_sum(x);
  if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = total;
  __syncthreads();
  if (threadIdx.x == 0) b.dA_log[head] += (part[4] + part[5]) + (part[6] + part[7]);
}

template <bool kBounded>
const char* launch(const DeltaBackwardArgs& b, cudaStream_t stream) {
  const DeltaChunkArgs& a = b.forward;
  cudaError_t e = cudaFuncSetAttribute(delta_gradient_kernel<kBounded>, cudaFuncAttributeMaxDynamicSharedMemorySize, Places<kBounded>::bytes);
  if (e != cudaSuccess) return cudaGetErrorString(e);
  delta_gradient_kernel<kBounded><<<dim3(a.heads, b.chunks), 256, Places<kBounded>::bytes, stream>>>(b);
  delta_parameters_kernel<<<a.heads, 256, 0, stream>>>(b);
  e = cudaGetLastError();
  return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}

}  // namespace

const char* delta_gradients(const DeltaBackwardArgs& b, void* stream) {
  return b.forward.gate.bounded ? launch<true>(b, cudaStream_t(stream)) : launch<false>(b, cudaStream_t(stream));
}

}  // namespace k3::cuda
