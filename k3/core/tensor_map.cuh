#pragma once
// Tensor copies: a map made on the host describes a matrix in device memory, a thread on the device asks for a box of it, 128-byte swizzled.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace k3 {

inline const char* encode_tensor_map(CUtensorMap& map, const void* base, int rank, const cuuint64_t* size, const cuuint64_t* stride, const cuuint32_t* box) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                              const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static Encode encode = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found);
    return reinterpret_cast<Encode>(f);
  }();
  if (!encode) return "the driver has no cuTensorMapEncodeTiled; it is older than CUDA 12";
  const cuuint32_t step[5] = {1, 1, 1, 1, 1};
  CUresult r = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, cuuint32_t(rank), const_cast<void*>(base), size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                      box[0] == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS ? nullptr : "the tensor map was refused: base must be 16-byte aligned, strides multiples of 8 elements";
}

// A bf16 tensor (outer, rows, columns), boxes of box_rows x 64 columns, or x 32, swizzled by 64 bytes. Strides in elements, multiples of 8.
// Boxes past the edge read zeros. Returns null or what the driver said.
inline const char* make_tensor_map(CUtensorMap& map, const void* base, uint64_t columns, uint64_t rows, uint64_t outer, uint64_t row_stride,
                                   uint64_t outer_stride, uint32_t box_rows, uint32_t box_columns = 64) {
  const cuuint64_t size[3] = {columns, rows, outer}, stride[2] = {row_stride * 2, outer_stride * 2};
  const cuuint32_t box[3] = {box_columns, box_rows, 1};
  return encode_tensor_map(map, base, 3, size, stride, box);
}
// The same tensor as (outer, panels of 64 columns, rows, 64): a box is box_panels panels of box_rows rows, one behind the other.
inline const char* make_panel_map(CUtensorMap& map, const void* base, uint64_t panels, uint64_t rows, uint64_t outer, uint64_t row_stride,
                                  uint64_t outer_stride, uint32_t box_rows, uint32_t box_panels) {
  const cuuint64_t size[4] = {64, rows, panels, outer}, stride[3] = {row_stride * 2, 128, outer_stride * 2};
  const cuuint32_t box[4] = {64, box_rows, box_panels, 1};
  return encode_tensor_map(map, base, 4, size, stride, box);
}

__device__ __forceinline__ void tensor_load(uint32_t shared, const CUtensorMap& map, int column, int row, int outer, uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared),
               "l"(reinterpret_cast<uint64_t>(&map)), "r"(column), "r"(row), "r"(outer), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void panel_load(uint32_t shared, const CUtensorMap& map, int panel, int row, int outer, uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared),
               "l"(reinterpret_cast<uint64_t>(&map)), "r"(0), "r"(row), "r"(panel), "r"(outer), "r"(barrier)
               : "memory");
}

}  // namespace k3
