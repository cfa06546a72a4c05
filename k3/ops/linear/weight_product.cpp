#include "k3/ops/linear/weight_product.h"

#include <algorithm>

#include "k3/core/error.h"
#include "k3/core/threads.h"
#include "k3/ops/linear/codes_kernels.h"
#include "k3/ops/linear/product_kernels.h"

namespace k3 {

namespace {

// Weights read in place are cut into pieces of a sixteenth of all, within these bounds, and small ones are put together: more than a thread's start
// costs, and runs that are long enough to be foreseen by the memory. From the sizes only.
constexpr int64_t kLeastPiece = 256 << 10, kLargestPiece = 2 << 20, kColumns = 64;

int64_t row_bytes(const Weight& w) {
  switch (w.stored) {
    case Stored::f32:
      return 4 * w.in;
    case Stored::bf16:
      return 2 * w.in;
    case Stored::mxfp4:
      return w.in / 2;
    case Stored::q8:
      return w.in;
  }
  return 0;
}
bool is_mxfp4(const Param& w) { return w.scale.dtype() == DType::u8 && !w.scale.empty(); }

}  // namespace

Shape weight_shape(const Param& w) { return is_mxfp4(w) ? Shape{w.value.rows(), w.value.cols() * 2} : w.value.shape(); }

void check_scales(Param& w) {
  if (w.scales_checked || !is_mxfp4(w)) return;
  const uint8_t *begin = w.scale.as<uint8_t>(), *end = begin + w.scale.size(), *bad = std::find(begin, end, 255);
  K3_CHECK(bad == end, "[weight] {}_scale holds 255 (not a number) at {}; the file is damaged, download it again", w.name, bad - begin);
  w.scales_checked = true;
}

Weight weight_of(const Param& w, int64_t first, int64_t last) {
  Tensor value = w.value.row_range(first, last);
  if (!w.scale.empty()) {
    const bool mxfp4 = is_mxfp4(w);
    const int64_t groups = mxfp4 ? value.cols() * 2 / kGroupMxfp4 : (value.cols() + kGroupQ8 - 1) / kGroupQ8;
    K3_CHECK(value.dtype() == DType::u8 && (mxfp4 ? value.cols() % 16 == 0 : w.scale.dtype() == DType::f32) && w.scale.rows() == w.value.rows() &&
                 w.scale.cols() == groups,
             "[weight] {} is {} ({}) with scales {} ({}); MXFP4 is U8 (out x in/2) with U8 (out x in/32), q8 is U8 (out x in) with F32 (out x in/64)",
             w.name, name_of(value.dtype()), to_string(w.value.shape()), name_of(w.scale.dtype()), to_string(w.scale.shape()));
    return {mxfp4 ? Stored::mxfp4 : Stored::q8, last - first, mxfp4 ? value.cols() * 2 : value.cols(), value.data(),
            w.scale.row_range(first, last).data()};
  }
  K3_CHECK(value.dtype() == DType::f32 || value.dtype() == DType::bf16, "[weight] {} is {}; weights are F32, BF16, or U8 with a scale", w.name,
           name_of(value.dtype()));
  return {value.dtype() == DType::f32 ? Stored::f32 : Stored::bf16, last - first, value.cols(), value.data(), nullptr};
}

void widen(const Weight& w, int64_t first, int64_t last, float* to) {
  parallel_blocks(last - first, std::max<int64_t>(1, (1 << 16) / std::max<int64_t>(1, w.in)),
                  [&](int64_t a, int64_t b) { cpu::product_kernels().widen(w, first + a, first + b, to + a * w.in); });
}

int64_t room_bytes(int64_t rows, int64_t in) { return rows * ((in + 127) / 128) * int64_t(sizeof(cpu::FixedX)); }

namespace {

// Columns first..last-1 of a product.
struct Piece {
  const WeightProduct* of;
  const cpu::FixedX* fixed;  // where w is codes
  int64_t first, last;

  int64_t bytes() const { return (last - first) * row_bytes(of->w); }
  void run() const {
    const Weight& w = of->w;
    if (fixed)
      cpu::codes_kernels().codes_product({w.stored, of->rows, w.in, first, last, fixed, w.data, w.scale, of->y, w.out});
    else
      cpu::product_kernels().weight_product({w.stored, of->rows, w.in, first, last, of->x, w.in, w.data, row_bytes(w), of->y, w.out, false});
  }
};

// Runs f(i) for i < n, neighbours in one call until they make `least` of size(i) together.
template <class Size, class F>
void in_runs(int64_t n, int64_t least, Size size, F f) {
  std::vector<int64_t> ends;
  int64_t sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    sum += size(i);
    if (sum >= least || i + 1 == n) ends.push_back(i + 1), sum = 0;
  }
  parallel_for(int64_t(ends.size()), [&](int64_t run) {
    for (int64_t i = run ? ends[size_t(run - 1)] : 0; i < ends[size_t(run)]; ++i) f(i);
  });
}

constexpr int64_t kFixInputs = 1 << 15;  // of x, made whole numbers in one call

}  // namespace

void weight_products(const std::vector<WeightProduct>& list, void* room) {
  std::vector<Product> wide;
  std::vector<Piece> pieces;
  std::vector<cpu::FixArgs> fixes;
  int64_t total = 0;
  for (const WeightProduct& p : list) total += p.rows ? p.w.out * row_bytes(p.w) : 0;
  const int64_t piece = std::clamp(total / 16, kLeastPiece, kLargestPiece);
  const WeightProduct* before = nullptr;
  cpu::FixedX *fixed = nullptr, *free = static_cast<cpu::FixedX*>(room);
  for (const WeightProduct& p : list) {
    const Weight& w = p.w;
    if (p.rows == 0) continue;
    if (p.rows >= kFewRows && w.stored == Stored::f32) {
      wide.push_back(x_wt(p.x, static_cast<const float*>(w.data), p.y, p.rows, w.out, w.in));
      continue;
    }
    if (is_codes(w.stored) && !(before && before->x == p.x && before->rows == p.rows && before->w.in == w.in && before->w.stored == w.stored)) {
      K3_CHECK(room, "[weight] products with codes need room");
      before = &p, fixed = free;
      const int64_t blocks = (w.in + 127) / 128, rows = std::max<int64_t>(1, kFixInputs / w.in);
      for (int64_t at = 0; at < p.rows; at += rows)
        fixes.push_back({w.stored, std::min(rows, p.rows - at), w.in, p.x + at * w.in, fixed + at * blocks});
      free += p.rows * blocks;
    }
    const int64_t step = std::max<int64_t>(1, piece / std::max<int64_t>(1, row_bytes(w) * kColumns)) * kColumns;
    for (int64_t at = 0; at < w.out; at += step) pieces.push_back({&p, is_codes(w.stored) ? fixed : nullptr, at, std::min(at + step, w.out)});
  }
  in_runs(
      int64_t(fixes.size()), kFixInputs, [&](int64_t i) { return fixes[size_t(i)].rows * fixes[size_t(i)].in; },
      [&](int64_t i) { cpu::codes_kernels().fix(fixes[size_t(i)]); });
  in_runs(
      int64_t(pieces.size()), piece / 2, [&](int64_t i) { return pieces[size_t(i)].bytes(); }, [&](int64_t i) { pieces[size_t(i)].run(); });
  products(wide);
}

}  // namespace k3
