#include "k3/core/enqueue.cuh"
#include "k3/core/tile.cuh"
#include "k3/ops/attention/gather_cuda.h"

namespace k3::cuda {
namespace {

using cpu::kKeyTile;

// A block is 32 keys of one head, or of the shared channels (the last). Keys lie transposed in their tile: 32 x 32 of them are turned at a time.
__global__ void __launch_bounds__(256) gather_kernel(const TilesGather a) {
  follow();
  __shared__ float x[32][33];
  const cpu::KeyTiles& t = a.tiles;
  const int64_t first = int64_t(blockIdx.x) * 32, g = blockIdx.y;
  const bool own = g < a.heads;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, count = int(min(int64_t(32), a.keys - first));
  const float* tile = a.blocks[first / kKeyTile];
  const int64_t place = first % kKeyTile, channels = own ? t.own : t.shared, width = own ? a.heads * (t.own + t.value) : t.shared;
  const int64_t keys_at = own ? kKeyTile * (t.shared + (a.head + g) * (t.own + t.value)) : 0;
  nv_bf16* to = static_cast<nv_bf16*>(own ? a.kv : a.shared) + first * width + (own ? g * (t.own + t.value) : 0);
  for (int64_t c0 = 0; c0 < channels; c0 += 32) {
    __syncthreads();
    for (int c = warp; c < 32 && c0 + c < channels; c += 8) x[c][lane] = tile[keys_at + (c0 + c) * kKeyTile + place + lane];
    __syncthreads();
    for (int r = warp; r < count; r += 8)
      if (c0 + lane < channels) to[r * width + c0 + lane] = __float2bfloat16_rn(x[lane][r]);
  }
  if (!own) return;
  const float* values = tile + keys_at + kKeyTile * t.own + place * t.value;
  for (int r = warp; r < count; r += 8)
    for (int64_t c = lane; c < t.value; c += 32) to[r * width + t.own + c] = __float2bfloat16_rn(values[r * t.value + c]);
}

}  // namespace

const char* gather_tiles(const TilesGather& a, void* stream) {
  if (a.keys == 0) return nullptr;
  enqueue(gather_kernel, dim3(blocks_for(a.keys, 32), unsigned(a.heads) + (a.shared ? 1 : 0)), 256, 0, stream_of(stream), a);
  return launched();
}

}  // namespace k3::cuda
