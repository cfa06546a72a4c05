#pragma once
// A small vocabulary for GPU kernels (sm_90a): packed bf16, shared-memory tiles, warp products, asynchronous copies, barriers.
// Everything is a thin name over one or a few instructions; the warpgroup product has its own file, wgmma.cuh.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace k3 {

using nv_bf16 = __nv_bfloat16;

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// ---- packed bf16 -----------------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ uint32_t pack(float lo, float hi) {  // nearest even; lo in the low half
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
__device__ __forceinline__ float low(uint32_t x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high(uint32_t x) { return __uint_as_float(x & 0xffff0000u); }
__device__ __forceinline__ float to_f32(float x) { return x; }
__device__ __forceinline__ float to_f32(nv_bf16 x) { return __bfloat162float(x); }
template <class T> __device__ __forceinline__ T from_f32(float x);
template <> __device__ __forceinline__ float from_f32<float>(float x) { return x; }
template <> __device__ __forceinline__ nv_bf16 from_f32<nv_bf16>(float x) { return __float2bfloat16_rn(x); }

// Eight neighbouring values, whatever the storage type: one 16-byte access for bf16, two for float.
__device__ __forceinline__ void load8(const nv_bf16* p, float (&x)[8]) {
  uint4 u = *reinterpret_cast<const uint4*>(p);
  x[0] = low(u.x), x[1] = high(u.x), x[2] = low(u.y), x[3] = high(u.y), x[4] = low(u.z), x[5] = high(u.z), x[6] = low(u.w), x[7] = high(u.w);
}
__device__ __forceinline__ void load8(const float* p, float (&x)[8]) {
  float4 a = *reinterpret_cast<const float4*>(p), b = *reinterpret_cast<const float4*>(p + 4);
  x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}
__device__ __forceinline__ void store8(nv_bf16* p, const float (&x)[8]) {
  *reinterpret_cast<uint4*>(p) = make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
}
__device__ __forceinline__ void store8(float* p, const float (&x)[8]) {
  *reinterpret_cast<float4*>(p) = make_float4(x[0], x[1], x[2], x[3]);
  *reinterpret_cast<float4*>(p + 4) = make_float4(x[4], x[5], x[6], x[7]);
}

// ---- special functions -----------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float lg2(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float rcp(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float sigmoid(float x) { return rcp(1.f + ex2(-kLog2e * x)); }

// ---- sums with a fixed order -----------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int s = 16; s > 0; s >>= 1) x += __shfl_xor_sync(~0u, x, s);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int s = 16; s > 0; s >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, s));
  return x;
}
// N sums over the warp at once (N a power of two, at most 32): lane l returns the sum of x[l % N]. N shuffles, not 5 N.
template <int N>
__device__ __forceinline__ float warp_sums(const float (&x)[N]) {
  if constexpr (N == 1) {
    return x[0];
  } else {
    constexpr int S = N / 2;
    const bool upper = threadIdx.x & S;
    float y[S];
#pragma unroll
    for (int i = 0; i < S; ++i) {
      float keep = upper ? x[i + S] : x[i], send = upper ? x[i] : x[i + S];
      y[i] = keep + __shfl_xor_sync(~0u, send, S);
    }
    return warp_sums(y);
  }
}
// The same where fewer than 32 sums are wanted and every lane is to hold a complete one.
template <int N>
__device__ __forceinline__ float warp_sums_complete(const float (&x)[N]) {
  float y = warp_sums(x);
#pragma unroll
  for (int s = N; s < 32; s <<= 1) y += __shfl_xor_sync(~0u, y, s);
  return y;
}

// ---- shared memory ---------------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }
// Byte offset of (row, byte) in a tile of 128-byte rows; the pattern that wgmma and the tensor copies call 128-byte swizzle.
__device__ __forceinline__ uint32_t swizzle128(uint32_t row, uint32_t byte) { return row * 128 + (byte ^ ((row & 7) << 4)); }

__device__ __forceinline__ void ldmatrix4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}
__device__ __forceinline__ void ldmatrix4_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}
__device__ __forceinline__ void stmatrix4_transposed(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

// The compiler forgets what it knows about x: addresses made from it are computed where they are used, not kept over a whole loop.
__device__ __forceinline__ int opaque(int x) { asm volatile("" : "+r"(x)); return x; }

// ---- warp products: D[16, 8] += A[16, K] B[K, 8] ---------------------------------------------------------------------------------------------
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {  // bf16, K = 16
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ uint32_t to_tf32(float x) { uint32_t y; asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x)); return y; }
__device__ __forceinline__ void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {  // tf32, K = 8
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- asynchronous copies ---------------------------------------------------------------------------------------------------------------------
// 16 bytes; zeros when !valid (the source is then not read, but must be a legal address)
__device__ __forceinline__ void copy16(uint32_t shared, const void* global, bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory"); }
// Ordinary shared-memory writes become visible to wgmma and to the bulk copies; then a barrier.
__device__ __forceinline__ void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// A contiguous run of bytes (multiple of 16), completing on an mbarrier.
__device__ __forceinline__ void bulk_load(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared), "l"(global), "r"(bytes), "r"(barrier) : "memory");
}
// Shared memory to global memory: by one thread, whose groups complete in order. The source is free after bulk_wait_read(), the bytes are there after
// bulk_wait().
__device__ __forceinline__ void bulk_store(void* global, uint32_t shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// ---- barriers --------------------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ void named_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory"); }
__device__ __forceinline__ void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void arrive(uint32_t barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }
// A warp, or a warpgroup, that is done with what a barrier guards: one thread arrives for all, who have met before. The race checker knows of each
// thread only the arrivals of its own, so in a build for it (K3_RACECHECK) every thread arrives, at barriers made for as many. Another blind spot:
// when groups have met among themselves at named barriers, not equally often, and then all meet, it sees races over that last barrier. There a
// kernel makes up for the difference.
#ifdef K3_RACECHECK
constexpr bool kForTheChecker = true;
#else
constexpr bool kForTheChecker = false;
#endif
constexpr int kWarpArrivals = kForTheChecker ? 32 : 1, kGroupArrivals = kForTheChecker ? 128 : 1;
__device__ __forceinline__ void arrive_warp(uint32_t barrier) {
  if (kForTheChecker || (threadIdx.x & 31) == 0) arrive(barrier);
}
__device__ __forceinline__ void arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Returns when the phase of this parity has completed; a fresh barrier counts as having completed parity 1.
__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred p;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra done;\n"
      "bra again;\n"
      "done:}" ::"r"(barrier), "r"(parity) : "memory");
}
// Blocks of a cluster: all of them meet; and an arrival at the same barrier of block `rank`.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ uint32_t cluster_rank() { uint32_t r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
__device__ __forceinline__ void arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile("{.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(barrier), "r"(rank) : "memory");
}
template <int kRegisters> __device__ __forceinline__ void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters)); }
template <int kRegisters> __device__ __forceinline__ void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters)); }

}  // namespace k3
