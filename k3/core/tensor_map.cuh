#pragma once
// Tensor copies: a map made on the host describes a matrix in device memory, a thread on the device asks for a box of it, 128-byte swizzled.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace k3 {

// A bf16 tensor (outer, rows, columns), boxes of box_rows x 64 columns. Strides in elements, multiples of 8. Boxes past the edge read zeros.
// Returns null or what the driver said.
inline const char* make_tensor_map(CUtensorMap& map, const void* base, uint64_t columns, uint64_t rows, uint64_t outer, uint64_t row_stride,
                                   uint64_t outer_stride, uint32_t box_rows) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                              const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static Encode encode = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found);
    return reinterpret_cast<Encode>(f);
  }();
  if (!encode) return "the driver has no cuTensorMapEncodeTiled; it is older than CUDA 12";
  const cuuint64_t size[3] = {columns, rows, outer}, stride[2] = {row_stride * 2, outer_stride * 2};
  const cuuint32_t box[3] = {64, box_rows, 1}, step[3] = {1, 1, 1};
  CUresult r = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(base), size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS ? nullptr : "the tensor map was refused: base must be 16-byte aligned, strides multiples of 8 elements";
}

__device__ __forceinline__ void tensor_load(uint32_t shared, const CUtensorMap& map, int column, int row, int outer, uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared),
               "l"(reinterpret_cast<uint64_t>(&map)), "r"(column), "r"(row), "r"(outer), "r"(barrier)
               : "memory");
}

// The same box into every block of the cluster whose bit is set, at the same place and completing on the same barrier of each.
__device__ __forceinline__ void tensor_load_multicast(uint32_t shared, const CUtensorMap& map, int column, int row, int outer, uint32_t barrier, uint16_t blocks) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared),
               "l"(reinterpret_cast<uint64_t>(&map)), "r"(column), "r"(row), "r"(outer), "r"(barrier), "h"(blocks)
               : "memory");
}

}  // namespace k3
