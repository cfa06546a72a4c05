#pragma once
// What the GPU itself can do, for `k3 bench`. Null, or why the launch failed.
#include <cstdint>

namespace k3::cuda {

const char* copy_through_memory(const void* from, void* to, int64_t bytes, void* stream);  // reads and writes `bytes`
// blocks * 256 threads, each 16 * rounds fused multiply-adds in float32
const char* multiply_adds(float* out, int blocks, int rounds, void* stream);

}  // namespace k3::cuda
