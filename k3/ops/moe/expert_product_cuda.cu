// y = x W^T for rows sorted by expert, W in MXFP4. Weights are the left operand (M), tokens the right one (N), so few tokens pad to 8, not 64.
//
// Bound: few rows an expert: the stream of weights (0.53 bytes a weight); from 49 rows an expert on: tensor units.
// A thread's codes are its own fragment: 8 of them (two a register) become bf16 in about 15 instructions; sign and magnitude are moved to their
// places in bf16 and a product with 2^126 * scale makes the value, code 0.5 (a subnormal there) included. Exact.
//
// expert_stream: a warp walks the K of 16 weight rows with warp products of 8 tokens; weights are read from memory four blocks of 64 ahead.
// expert_product: a persistent block takes 128 weight rows x up to 256 tokens; two math warpgroups (64 rows each) expand codes into registers
// while the product before runs, a third gathers token rows into four swizzled stages of 64 columns.
// Tiles: expert by expert, weight rows fastest, so a token tile stays in the L2 cache and a weight is read from memory once.
// Precision: exact bf16 operands, float32 sums in one order of K; activation in float32.
#include "k3/core/tile.cuh"
#include "k3/core/wgmma.cuh"
#include "k3/ops/moe/expert_product_cuda.h"

namespace k3::cuda {
namespace {

// Registers a0..a3 of a k16 step from a word of 8 codes. Each half of the word holds one code of each register, and three of the four lie so that
// one shift brings sign and magnitude to bits 15 and 8..6 together; integer instructions run at half rate and are what bounds the stream.
//   register 0: sign 15, magnitude 8 7 6    1: 12, 5 4 3    2: 9, 2 1 0    3: 14, 13 11 10
constexpr uint32_t kSign = 0x80008000u, kMagnitude = 0x01C001C0u;
__device__ __forceinline__ uint32_t times(uint32_t x, uint32_t scale) {
  uint32_t y;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(x), "r"(scale));
  return y;
}
__device__ __forceinline__ void expand(uint32_t w, uint32_t low_scale, uint32_t high_scale, uint32_t (&a)[4]) {
  a[0] = times(w & (kSign | kMagnitude), low_scale);
  a[1] = times(w * 8 & (kSign | kMagnitude), high_scale);
  a[2] = times(w * 64 & (kSign | kMagnitude), low_scale);
  a[3] = times((w * 2 & kSign) | (w >> 5 & 0x01000100u) | (w >> 4 & 0x00C000C0u), high_scale);
}
// The word of eight codes: code e of register r.
__device__ __forceinline__ uint32_t place(uint32_t code, int r, int e) {
  uint32_t sign = code >> 3, m = code & 7;
  uint32_t half = r == 0 ? sign << 15 | m << 6 : r == 1 ? sign << 12 | m << 3 : r == 2 ? sign << 9 | m : sign << 14 | (m >> 2) << 13 | (m & 3) << 10;
  return half << (16 * e);
}
// scales: bytes row g group 0, group 1, row g + 8 group 0, group 1 of a block of 64 columns; a byte is the exponent field of 2^126 * scale
__device__ __forceinline__ void expand_block(const uint4& codes, uint32_t scales, uint32_t (&a)[4][4]) {
  const uint32_t c[4] = {codes.x, codes.y, codes.z, codes.w};
  uint32_t s[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) s[i] = __byte_perm(scales, 0, 0x4440 + i) * 0x00800080u;
#pragma unroll
  for (int k = 0; k < 4; ++k) expand(c[k], s[k >> 1], s[2 + (k >> 1)], a[k]);
}

__device__ __forceinline__ float tanh_exact(float x) {  // relative error near float32's, small x included
  float a = fabsf(x), e = ex2(2.f * kLog2e * a);
  float y = a < 0.1f ? a * (1.f + a * a * (-1.f / 3 + a * a * (2.f / 15 - a * a * (17.f / 315)))) : 1.f - 2.f * rcp(e + 1.f);
  return copysignf(y, x);
}
struct Situ {
  float beta, linear_beta, per_beta, per_linear_beta;
  __device__ explicit Situ(const ExpertProductArgs& a) : beta(a.beta), linear_beta(a.linear_beta), per_beta(1.f / a.beta), per_linear_beta(1.f / a.linear_beta) {}
  __device__ __forceinline__ float operator()(float g, float u) const {
    return beta * tanh_exact(g * per_beta) * sigmoid(g) * linear_beta * tanh_exact(u * per_linear_beta);
  }
};

__global__ void __launch_bounds__(256) mxfp4_pack_kernel(const Mxfp4PackArgs a) {
  const int64_t R = a.up_codes ? 2 * a.rows : a.rows, groups = R / 128, blocks = a.columns / 64;
  const int64_t i = int64_t(blockIdx.x) * 256 + threadIdx.x;  // (expert, group, block, tile of the group, lane)
  if (i >= a.experts * groups * blocks * 8 * 32) return;
  const int lane = i & 31, g = lane >> 2, t = lane & 3;
  const int64_t block = i / 256 % blocks, group = i / 256 / blocks % groups, expert = i / 256 / blocks / groups, tile = group * 8 + i / 32 % 8;
  const uint8_t *codes[2], *scales[2];
  for (int h = 0; h < 2; ++h) {  // rows g and g + 8 of the tile
    const bool up = a.up_codes && h;
    const int64_t row = expert * a.rows + (a.up_codes ? tile * 8 + g : tile * 16 + g + 8 * h);
    codes[h] = (up ? a.up_codes : a.codes) + row * (a.columns / 2) + block * 32;
    scales[h] = (up ? a.up_scales : a.scales) + row * (a.columns / 32) + block * 2;
  }
  uint32_t word[4] = {0, 0, 0, 0};
  for (int k = 0; k < 4; ++k)
    for (int r = 0; r < 4; ++r) {
      uint8_t two = codes[r & 1][(k * 16 + (r >> 1) * 8 + 2 * t) / 2];
      word[k] |= place(two & 15, r, 0) | place(two >> 4, r, 1);
    }
  *reinterpret_cast<uint4*>(a.packed + i * 16) = make_uint4(word[0], word[1], word[2], word[3]);
  if (t == 0) {
    uint32_t word = 0;
    int bad = 0;
    for (int k = 0; k < 4; ++k) {
      uint8_t scale = scales[k >> 1][k & 1];
      bad += scale == 0 || scale > 128;
      word |= uint32_t(uint8_t(scale + 126)) << (8 * k);
    }
    // (expert, group, block / 4, tile, g, block % 4)
    *reinterpret_cast<uint32_t*>(a.packed_scales + (((((expert * groups + group) * (blocks / 4) + block / 4) * 8 + tile % 8) * 8 + g) * 4 + block % 4) * 4) = word;
    if (bad) atomicAdd(a.refused, bad);
  }
}

// ---- streaming: up to 8 rows of an expert at a time ---------------------------------------------------------------------------------------------
constexpr int kAhead = 4;

__device__ __forceinline__ uint4 stream(const uint4* p) {  // read once
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p));
  return x;
}

__global__ void __launch_bounds__(256, 3) expert_stream_kernel(const __grid_constant__ ExpertProductArgs a) {
  extern __shared__ char memory[];
  const int expert = a.active[blockIdx.y];
  if (expert < 0) return;
  const int begin = a.begins[expert], count = a.begins[expert + 1] - begin, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int tile = blockIdx.x * 8 + warp, blocks = a.K / 64, stride = a.K * 2 + 16;
  const nv_bf16* x = static_cast<const nv_bf16*>(a.x);
  const int64_t group = int64_t(expert) * (a.R / 128) + blockIdx.x;
  const uint4* codes = reinterpret_cast<const uint4*>(a.packed) + (group * blocks * 8 + warp) * 32 + lane;
  const uint4* scales = reinterpret_cast<const uint4*>(a.packed_scales) + (group * (blocks / 4) * 8 + warp) * 8 + (lane >> 2);
  for (int first = 0; first < count; first += 8) {
    const int rows = min(8, count - first);
    uint4 c[kAhead], s = stream(scales);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) c[i] = stream(codes + i * 256);
    __syncthreads();
    for (int i = threadIdx.x; i < rows * (a.K / 8); i += 256) {
      int r = i / (a.K / 8), k = i % (a.K / 8), row = begin + first + r;
      copy16(shared_address(memory + r * stride + k * 16), x + int64_t(a.gather ? a.gather[row] : row) * a.K + k * 8);
    }
    copy_commit();
    for (int i = threadIdx.x; i < stride / 16; i += 256) reinterpret_cast<uint4*>(memory + 8 * stride)[i] = make_uint4(0, 0, 0, 0);
    copy_wait<0>();
    __syncthreads();
    const uint32_t from = shared_address(memory + ((lane & 7) < rows ? lane & 7 : 8) * stride + (lane >> 3) * 16);
    float d[4] = {0, 0, 0, 0};
    for (int block = 0; block < blocks; block += kAhead) {
      const bool more = block + kAhead < blocks;
      uint4 s_next = s;
      if (more) s_next = stream(scales + (block / 4 + 1) * 64);
      const uint32_t words[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        uint32_t w[4][4], b[2][4];
        expand_block(c[i], words[i], w);
        if (more) c[i] = stream(codes + (block + i + kAhead) * 256);
        ldmatrix4(b[0], from + (block + i) * 128), ldmatrix4(b[1], from + (block + i) * 128 + 64);
#pragma unroll
        for (int k = 0; k < 4; ++k) mma(d, w[k], b[k >> 1][(k & 1) * 2], b[k >> 1][(k & 1) * 2 + 1]);
      }
      s = s_next;
    }
    const int g = lane >> 2;
    const Situ situ(a);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      int r = (lane & 3) * 2 + e;
      if (r < rows) {
        int64_t row = begin + first + r;
        if (a.situ) {
          static_cast<nv_bf16*>(a.y)[row * (a.R / 2) + tile * 8 + g] = __float2bfloat16_rn(situ(d[e], d[2 + e]));
        } else {
          float w = a.weight ? a.weight[row] : 1.f;
          nv_bf16* y = static_cast<nv_bf16*>(a.y) + row * a.R + tile * 16 + g;
          y[0] = __float2bfloat16_rn(d[e] * w), y[8] = __float2bfloat16_rn(d[2 + e] * w);
        }
      }
    }
  }
}

// ---- many rows ------------------------------------------------------------------------------------------------------------------------------------
constexpr int kRows = 128, kTokens = 256, kStages = 4, kStageBytes = kTokens * 128;
constexpr int kMaxExperts = 1024;
struct Place {  // in shared memory
  static constexpr int stages = 0, out = kStages * kStageBytes, barriers = out + kTokens * 272, ends = barriers + 64,
                       bytes = ends + (kMaxExperts + 1) * 4 + 1024;
};

struct Tile {
  int expert, block, first, rows;  // rows first..first+rows of the sorted order
};
// Tile number i: experts in order; an expert's rows in equal parts of at most 256, each with all blocks of weight rows.
__device__ __forceinline__ bool find(const ExpertProductArgs& a, const int* ends, int i, Tile& t) {
  if (i >= ends[a.experts - 1]) return false;
  int lo = 0, hi = a.experts - 1;
  while (lo < hi) {
    int mid = (lo + hi) >> 1;
    if (ends[mid] > i) hi = mid; else lo = mid + 1;
  }
  const int begin = a.begins[lo], count = a.begins[lo + 1] - begin, parts = (count + kTokens - 1) / kTokens, blocks = a.R / kRows;
  const int local = i - (lo ? ends[lo - 1] : 0), part = local / blocks, size = ((count + parts - 1) / parts + 7) / 8 * 8;
  t.expert = lo, t.block = local % blocks, t.first = begin + part * size, t.rows = min(size, count - part * size);
  return true;
}

template <int N>
__device__ __forceinline__ void multiply(const ExpertProductArgs& a, const Tile& tile, char* s, uint32_t full, uint32_t empty, int& step) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, blocks = a.K / 64, tid = threadIdx.x & 255;
  const int64_t group = int64_t(tile.expert) * (a.R / kRows) + tile.block;
  const uint4* codes = reinterpret_cast<const uint4*>(a.packed) + (group * blocks * 8 + warp) * 32 + lane;
  const uint32_t* scales = reinterpret_cast<const uint32_t*>(a.packed_scales) + (group * (blocks / 4) * 8 + warp) * 32 + (lane >> 2) * 4;
  auto scale_at = [&](int block) { return scales[(block >> 2) * 256 + (block & 3)]; };
  const uint64_t stages = describe(shared_address(s + Place::stages));
  float d[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) d[i] = 0.f;
  uint4 c[2] = {codes[0], codes[256]};
  uint32_t e[2] = {scale_at(0), scale_at(1)}, w[2][4][4];
  expand_block(c[0], e[0], w[0]);
  c[0] = codes[512], e[0] = scale_at(2);
  for (int block = 0; block < blocks; block += 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i, ++step) {
      const int stage = step % kStages;
      wait(full + stage * 8, step / kStages & 1);
      warpgroup_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) wgmma<N, 0>(d, w[i][k], stages + stage * (kStageBytes / 16) + k * 2, 1);
      warpgroup_commit();
      warpgroup_wait<1>();  // the product before: its stage and its fragments are free
      if (block + i > 0) arrive_warp(empty + (step - 1) % kStages * 8);
      if (block + i + 1 < blocks) {
        expand_block(c[i ^ 1], e[i ^ 1], w[i ^ 1]);
        if (block + i + 3 < blocks) c[i ^ 1] = codes[(block + i + 3) * 256], e[i ^ 1] = scale_at(block + i + 3);
      }
    }
  }
  warpgroup_wait<0>();
  pin(d);
  arrive_warp(empty + (step - 1) % kStages * 8);

  // transpose to (token, column) in shared memory, then whole lines out
  char* out = s + Place::out;
  const Situ situ(a);
  const int width = a.situ ? kRows / 2 : kRows, stride = width * 2 + 16;
  named_barrier(1, 256);  // the tile before has left
#pragma unroll
  for (int j = 0; j < N / 8; j += 2) {
    if (a.situ) {
      uint32_t r[2];
#pragma unroll
      for (int jj = 0; jj < 2; ++jj)
        r[jj] = pack(situ(d[4 * (j + jj)], d[4 * (j + jj) + 2]), situ(d[4 * (j + jj) + 1], d[4 * (j + jj) + 3]));
      asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(shared_address(out + ((j + (lane >> 3 & 1)) * 8 + (lane & 7)) * stride + warp * 16)),
                   "r"(r[0]), "r"(r[1])
                   : "memory");
    } else {
      uint32_t r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int token = tile.first + (j + (i >> 1)) * 8 + (lane & 3) * 2, last = tile.first + tile.rows - 1;
        float w0 = a.weight ? a.weight[min(token, last)] : 1.f, w1 = a.weight ? a.weight[min(token + 1, last)] : 1.f;
        r[i] = pack(d[4 * j + 2 * i] * w0, d[4 * j + 2 * i + 1] * w1);
      }
      stmatrix4_transposed(shared_address(out + ((j + (lane >> 4)) * 8 + (lane & 7)) * stride + warp * 32 + (lane >> 3 & 1) * 16), r);
    }
  }
  named_barrier(1, 256);
  const int total = a.situ ? a.R / 2 : a.R;
  nv_bf16* y = static_cast<nv_bf16*>(a.y) + int64_t(tile.first) * total + tile.block * width;
  for (int i = tid; i < tile.rows * (width / 8); i += 256) {
    int row = i / (width / 8), k = i % (width / 8);
    *reinterpret_cast<uint4*>(y + int64_t(row) * total + k * 8) = *reinterpret_cast<const uint4*>(out + row * stride + k * 16);
  }
}

__global__ void __launch_bounds__(384, 1) expert_product_kernel(const __grid_constant__ ExpertProductArgs a) {
  extern __shared__ char memory[];
  char* s = memory + ((1024 - (shared_address(memory) & 1023)) & 1023);
  const uint32_t full = shared_address(s + Place::barriers), empty = full + kStages * 8;
  int* ends = reinterpret_cast<int*>(s + Place::ends);
  if (threadIdx.x == 0)
    for (int i = 0; i < kStages; ++i) barrier_init(full + i * 8, 128), barrier_init(empty + i * 8, 8 * kWarpArrivals);
  if (threadIdx.x == 0) barrier_init_done();
  if (threadIdx.x < 32) {  // running number of tiles, expert by expert
    int before = 0;
    for (int e0 = 0; e0 < a.experts; e0 += 32) {
      int e = e0 + threadIdx.x, n = 0;
      if (e < a.experts) n = (a.begins[e + 1] - a.begins[e] + kTokens - 1) / kTokens * (a.R / kRows);
#pragma unroll
      for (int d = 1; d < 32; d <<= 1) {
        int x = __shfl_up_sync(~0u, n, d);
        if (int(threadIdx.x) >= d) n += x;
      }
      if (e < a.experts) ends[e] = before + n;
      before += __shfl_sync(~0u, n, 31);
    }
  }
  __syncthreads();

  if (threadIdx.x >= 256) {
    fewer_registers<88>();
    const int tid = threadIdx.x - 256, chunk = tid & 7, blocks = a.K / 64, pitch = a.K / 8;  // in chunks of 16 bytes
    const uint4* x = static_cast<const uint4*>(a.x) + chunk;
    const uint32_t to = shared_address(s + Place::stages) + swizzle128(tid >> 3, chunk * 16);
    int step = 0;
    Tile tile;
    for (int i = blockIdx.x; find(a, ends, i, tile); i += gridDim.x) {
      uint32_t from[kTokens / 16];  // of this thread's rows, 16 apart
#pragma unroll
      for (int g = 0; g < kTokens / 16; ++g) {
        int row = tile.first + min(g * 16 + (tid >> 3), tile.rows - 1);
        from[g] = (a.gather ? a.gather[row] : row) * pitch;
      }
      const int n = (tile.rows + 15) / 16;
      for (int block = 0; block < blocks; ++block, ++step) {
        const int stage = step % kStages;
        wait(empty + stage * 8, (step / kStages & 1) ^ 1);
#pragma unroll
        for (int g = 0; g < kTokens / 16; ++g)
          if (g < n) copy16(to + stage * kStageBytes + g * 16 * 128, x + block * 8 + from[g]);
        copy_commit();
        if (step >= 2) {  // two stages stay in flight
          copy_wait<2>();
          publish();
          arrive(full + (step - 2) % kStages * 8);
        }
      }
    }
    copy_wait<0>();
    publish();
    for (int i = max(0, step - 2); i < step; ++i) arrive(full + i % kStages * 8);
    return;
  }

  more_registers<208>();
  int step = 0;
  Tile tile;
  for (int i = blockIdx.x; find(a, ends, i, tile); i += gridDim.x) {
    if (tile.rows <= 16) multiply<16>(a, tile, s, full, empty, step);
    else if (tile.rows <= 32) multiply<32>(a, tile, s, full, empty, step);
    else if (tile.rows <= 64) multiply<64>(a, tile, s, full, empty, step);
    else if (tile.rows <= 96) multiply<96>(a, tile, s, full, empty, step);
    else if (tile.rows <= 128) multiply<128>(a, tile, s, full, empty, step);
    else if (tile.rows <= 160) multiply<160>(a, tile, s, full, empty, step);
    else if (tile.rows <= 192) multiply<192>(a, tile, s, full, empty, step);
    else multiply<256>(a, tile, s, full, empty, step);
  }
}

// ---- combine ---------------------------------------------------------------------------------------------------------------------------------------
__global__ void __launch_bounds__(256) expert_combine_kernel(const ExpertCombineArgs a) {
  __shared__ float part[8];
  const int64_t t = blockIdx.x;
  const nv_bf16* rows = static_cast<const nv_bf16*>(a.rows);
  float y[4][8], square = 0.f;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int c = (threadIdx.x + j * 256) * 8;
#pragma unroll
    for (int e = 0; e < 8; ++e) y[j][e] = 0.f;
    if (c < a.d) {
#pragma unroll 4
      for (int k = 0; k < a.top; ++k) {
        float x[8];
        load8(rows + int64_t(a.where[t * a.top + k]) * a.d + c, x);
#pragma unroll
        for (int e = 0; e < 8; ++e) y[j][e] += x[e];
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        y[j][e] = to_f32(__float2bfloat16_rn(y[j][e]));
        square += y[j][e] * y[j][e];
      }
    }
  }
  float r = 1.f;
  if (a.norm) {
    square = warp_sum(square);
    if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = square;
    __syncthreads();
    r = rsqrtf((((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]))) / a.d + a.eps);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int c = (threadIdx.x + j * 256) * 8;
    if (c < a.d) {
      if (a.norm) {
        float w[8];
        load8(a.norm + c, w);
#pragma unroll
        for (int e = 0; e < 8; ++e) y[j][e] *= r * w[e];
      }
      store8(static_cast<nv_bf16*>(a.y) + t * a.d + c, y[j]);
    }
  }
}

const char* result() {
  cudaError_t e = cudaGetLastError();
  return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}

}  // namespace

const char* mxfp4_pack(const Mxfp4PackArgs& a, void* stream) {
  if (a.columns % 256 || a.rows % (a.up_codes ? 64 : 128)) return "[moe] MXFP4 kernels need rows (gate and up together) that are multiples of 128 and columns of 256";
  const int64_t n = a.experts * (a.up_codes ? 2 : 1) * a.rows / 16 * (a.columns / 64) * 32;
  if (n) mxfp4_pack_kernel<<<unsigned((n + 255) / 256), 256, 0, cudaStream_t(stream)>>>(a);
  return result();
}

const char* expert_stream(const ExpertProductArgs& a, void* stream) {
  if (a.R % kRows || a.K % 256) return "[moe] MXFP4 products need weight rows that are multiples of 128 and columns of 256";
  if (a.actives == 0) return nullptr;
  const int bytes = 9 * (a.K * 2 + 16);
  if (cudaError_t e = cudaFuncSetAttribute(expert_stream_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes); e != cudaSuccess) return cudaGetErrorString(e);
  expert_stream_kernel<<<dim3(a.R / 128, a.actives), 256, bytes, cudaStream_t(stream)>>>(a);
  return result();
}

const char* expert_product(const ExpertProductArgs& a, void* stream) {
  if (a.experts > kMaxExperts) return "[moe] the grouped product serves up to 1024 experts a call";
  if (a.R % kRows || a.K % 256) return "[moe] MXFP4 products need weight rows that are multiples of 128 and columns of 256";
  if (a.rows == 0) return nullptr;  // (offsets of rows are 32-bit, in 16 bytes)
  if (cudaError_t e = cudaFuncSetAttribute(expert_product_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Place::bytes); e != cudaSuccess) return cudaGetErrorString(e);
  expert_product_kernel<<<132, 384, Place::bytes, cudaStream_t(stream)>>>(a);
  return result();
}

const char* expert_combine(const ExpertCombineArgs& a, void* stream) {
  if (a.d % 8 || a.d > 8192) return "[moe] combine serves widths that are multiples of 8 up to 8192";
  if (a.tokens) expert_combine_kernel<<<unsigned(a.tokens), 256, 0, cudaStream_t(stream)>>>(a);
  return result();
}

}  // namespace k3::cuda
