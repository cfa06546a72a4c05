#pragma once
// One source, three instruction sets. Every file named *_cpu.cpp is compiled once per level with K3_ISA = plain, avx2 or avx512 into its
// own namespace k3::cpu::K3_ISA, and offers one table of functions. The level is chosen at run time; tests force each.
//
//   struct NormKernels { void (*rms_norm_forward)(const RmsNormArgs&); ... };
//   K3_KERNEL_TABLE(NormKernels, norm)                 // in the header: cpu::norm() is the table in force
//   K3_KERNELS(NormKernels, norm, rms_norm_forward, ...)  // last line of norm_cpu.cpp
//
// A *_cpu.cpp file includes no header with inline functions of its own other than simd.h and threads.h: an inline function compiled for
// AVX-512 could otherwise be the copy that the linker keeps for everybody.
namespace k3::cpu {

enum class Isa { plain, avx2, avx512 };  // avx2 with fma; avx512: F, BW, VL, DQ and VNNI

Isa best_isa();             // what this processor has
Isa isa();                  // what is in force
void force_isa(Isa level);  // throws Error when the processor lacks it
const char* name_of(Isa level);

}  // namespace k3::cpu

#define K3_KERNEL_TABLE(Type, name) \
  namespace plain {                 \
  extern const Type name;           \
  }                                 \
  namespace avx2 {                  \
  extern const Type name;           \
  }                                 \
  namespace avx512 {                \
  extern const Type name;           \
  }                                 \
  inline const Type& name() {       \
    switch (isa()) {                \
      case Isa::avx512:             \
        return avx512::name;        \
      case Isa::avx2:               \
        return avx2::name;          \
      default:                      \
        return plain::name;         \
    }                               \
  }

#define K3_KERNELS(Type, name, ...)       \
  namespace k3::cpu::K3_ISA {             \
  extern const Type name = {__VA_ARGS__}; \
  }
