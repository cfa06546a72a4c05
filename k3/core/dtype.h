#pragma once
// Element types and their conversions. Arithmetic is float32; the others are storage.
#include <bit>
#include <cstddef>
#include <cstdint>

namespace k3 {

enum class DType : uint8_t { f32, bf16, f16, i32, i64, u8, f64 };

constexpr size_t bytes_of(DType t) {
  switch (t) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::bf16:
    case DType::f16:
      return 2;
    case DType::u8:
      return 1;
  }
  return 0;
}

constexpr const char* name_of(DType t) {
  switch (t) {
    case DType::f64:
      return "F64";
    case DType::i64:
      return "I64";
    case DType::f32:
      return "F32";
    case DType::i32:
      return "I32";
    case DType::bf16:
      return "BF16";
    case DType::f16:
      return "F16";
    case DType::u8:
      return "U8";
  }
  return "?";
}

// The upper half of a float32.
struct bf16 {
  uint16_t bits;
};

constexpr float to_float(bf16 x) { return std::bit_cast<float>(uint32_t(x.bits) << 16); }

// Nearest, ties to even; NaN stays NaN.
constexpr bf16 to_bf16(float x) {
  uint32_t u = std::bit_cast<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {uint16_t((u >> 16) | 0x40)};
  return {uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
}

template <class T>
struct dtype_of;
template <>
struct dtype_of<float> {
  static constexpr DType value = DType::f32;
};
template <>
struct dtype_of<double> {
  static constexpr DType value = DType::f64;
};
template <>
struct dtype_of<bf16> {
  static constexpr DType value = DType::bf16;
};
template <>
struct dtype_of<int32_t> {
  static constexpr DType value = DType::i32;
};
template <>
struct dtype_of<int64_t> {
  static constexpr DType value = DType::i64;
};
template <>
struct dtype_of<uint8_t> {
  static constexpr DType value = DType::u8;
};

}  // namespace k3
