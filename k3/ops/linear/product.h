#pragma once
// product: C = op(A) op(B) or C += op(A) op(B), float32, row-major; the matrix product under every linear layer on the CPU.
//
// Each element is summed in one order that depends on k alone: blocks of kProductBlock = 384 terms; inside a block one chain of fused
// multiply-adds, k ascending; block sums added in order (to what C held, when accumulating). So a row of C has the same bits whatever the
// number of rows, columns or threads, and in any batch.
//
// oneDNN's AVX-512 kernel sums a block in just this order from 32 rows and 2 columns on, as long as k stays within one block (longer ones
// it cuts in ways that depend on the shape; so we cut). product_is_onednn() checks once that this holds. Smaller products, and all products
// on machines where oneDNN sums otherwise, run on our kernel of the same order (rates of both: docs/log.md).
//
// Products with codes (mxfp4, q8) have an order of their own, since chains of float32 take four instructions a weight where the memory is faster.
// There x is made whole numbers, 32 inputs of a row at a time (a last group of fewer counts as filled with zeros):
//
//   step = 2^(e - bits), where 2^e <= 1.5 max|x| < 2^(e+1), e >= -103;  bits = 22 for mxfp4, 14 for q8
//   n = x / step, to the nearest whole number, ties to even
//
// and sums of codes times n are sums of whole numbers, exact and in any order: of 2 code n over 32 inputs for mxfp4, of code n over 16 for q8. A sum,
// as float32, times step / 2 or step, times the scale, each rounded, is added to one of four chains, k ascending: group i of a row to chain i mod 4.
// Result: (c0 + c2) + (c1 + c3). So the bits are the same at every instruction set, too.
//
// Every code and scale counts exactly; an input counts to within step / 2 <= 0.75 * 2^-bits of the largest in its group: about what sums in float32
// lose for mxfp4, and for q8 a hundredth of what its weights have lost. An input that is not finite, or 2^127 * 4/3 and above, makes its row NaN.
#include <cstdint>
#include <vector>

namespace k3 {

inline constexpr int64_t kProductBlock = 384;

// How a weight W (out, in) lies in memory:
//   f32, bf16
//   mxfp4   two 4-bit codes a byte (out, in / 2), the low four bits first; uint8 scale (out, in / 32): code * 2^(scale - 127), exact in float32
//   q8      int8 codes (out, in); float32 scale (out, ceil(in / 64)): code * scale, rounded to float32
enum class Stored : uint8_t { f32, bf16, mxfp4, q8 };
inline constexpr int64_t kGroupMxfp4 = 32, kGroupQ8 = 64;  // inputs that share a scale
struct Weight {
  Stored stored;
  int64_t out, in;
  const void* data;
  const void* scale;  // mxfp4 and q8
};

struct Product {
  int64_t m, n, k;
  const float* a;  // (m, k), or (k, m) when a_transposed
  int64_t lda;
  bool a_transposed;
  const float* b;  // (k, n), or (n, k) when b_transposed
  int64_t ldb;
  bool b_transposed;
  float* c;  // (m, n)
  int64_t ldc;
  bool accumulate;  // C += instead of C =
};

void product(const Product& p);                   // on all threads
void product_serial(const Product& p);            // on the calling thread; for use inside parallel_for
void products(const std::vector<Product>& list);  // independent products (batched, grouped by expert) over all threads

// x W^T with x (m, k), W (n, k): a linear layer.
inline Product x_wt(const float* x, const float* w, float* y, int64_t m, int64_t n, int64_t k, bool accumulate = false) {
  return {m, n, k, x, k, false, w, k, true, y, n, accumulate};
}
// dy W with dy (m, n), W (n, k): its gradient for x (m, k).
inline Product dy_w(const float* dy, const float* w, float* dx, int64_t m, int64_t n, int64_t k, bool accumulate = true) {
  return {m, k, n, dy, n, false, w, k, false, dx, k, accumulate};
}
// dy^T x: its gradient for W (n, k).
inline Product dyt_x(const float* dy, const float* x, float* dw, int64_t m, int64_t n, int64_t k, bool accumulate = true) {
  return {n, k, m, dy, n, true, x, k, false, dw, k, accumulate};
}

bool product_is_onednn();  // whether oneDNN's bits are ours on this machine at the level in force

}  // namespace k3
