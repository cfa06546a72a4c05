#pragma once
// product: C = op(A) op(B) or C += op(A) op(B), float32, row-major; the matrix product under every linear layer on the CPU.
//
// Each element is summed in one order that depends on k alone: blocks of kProductBlock = 384 terms; inside a block one chain of fused
// multiply-adds, k ascending; block sums added in order (to what C held, when accumulating). So a row of C has the same bits whatever the
// number of rows, columns or threads, and in any batch.
//
// oneDNN's AVX-512 kernel sums a block in just this order from 32 rows and 2 columns on, as long as k stays within one block (longer ones
// it cuts in ways that depend on the shape; so we cut). product_is_onednn() checks once that this holds. Smaller products, and all products
// on machines where oneDNN sums otherwise, run on our kernel of the same order, which is slower (not yet measured).
#include <cstdint>
#include <vector>

namespace k3 {

inline constexpr int64_t kProductBlock = 384;

// How a weight W (out, in) lies in memory: float32, bfloat16, or mxfp4: two 4-bit codes a byte (out, in / 2), the low four bits first, and a
// byte for each 32 inputs (out, in / 32) that scales them by 2^(byte - 127). All three are read as float32, exactly.
enum class Stored : uint8_t { f32, bf16, mxfp4 };
struct Weight {
  Stored stored;
  int64_t out, in;
  const void* data;
  const uint8_t* scale;  // mxfp4 only
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
