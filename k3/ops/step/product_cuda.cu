// Launches of products one by one.
#include "k3/ops/step/product.cuh"

namespace k3::cuda {
namespace {

template <int NT, int kMost>
__global__ void __launch_bounds__(kThreads, NT > 5 || kMost > 1 ? 1 : 2)
    product_kernel(const __grid_constant__ StepProductArgs a, const __grid_constant__ StepTiles tiles) {
  extern __shared__ __align__(16) unsigned char shared[];
  let_next_kernel_begin();
  product_tiles<NT, false, kMost>(a, tiles, {}, int64_t(blockIdx.y) * tiles.group, blockIdx.x, gridDim.x, shared);
}

// Into tiles, for groups of so many rows.
void cut(const StepProductArgs& a, int group, StepTiles& tiles) {
  tiles.group = group, tiles.fours = (group + 3) / 4;
  for (int p = 0; p < a.parts; ++p) tiles.begin[p + 1] = tiles.begin[p] + (a.part[p].out + kTile - 1) / kTile * (exact(a.part[p]) ? tiles.fours : 1);
}

template <int NT>
const char* launch(const StepProductArgs& a, StepTiles tiles, void* stream) {
  if (NT > 1) cut(a, a.rows < NT * 8 ? a.rows : NT * 8, tiles);
  const size_t bytes = size_t(tiles.group) * tiles.row_bytes;
  const int groups = (a.rows + tiles.group - 1) / tiles.group, most = 132 * (bytes > 90 << 10 || NT > 5 || by_block(a.x) ? 1 : 2),
            all = a.parts ? tiles.begin[a.parts] : 1;
  // most products read what is made already, and their loop keeps its registers
  constexpr int kMany = NT == 1 ? kStepSources : 1, kFew = NT == 1 ? 4 : 1;
  auto kernel = !by_block(a.x) || NT > 1 ? product_kernel<NT, 1> : a.x.sources > 4 ? product_kernel<NT, kMany> : product_kernel<NT, kFew>;
  return launch_step(kernel, dim3(unsigned(all < most ? all : most), unsigned(groups)), kThreads, bytes, stream, a, tiles);
}

const char* check(const StepInput& x) {
  if (x.width % 8 || x.stride % 4) return "[step] widths must be multiples of 8, strides of 4";
  if (x.gated && (x.gain || x.sources > 1)) return "[step] a gated unit is neither normed nor mixed";
  if (x.sources > kStepSources) return "[step] at most 16 sources are mixed";
  return nullptr;
}

constexpr size_t kMostShared = 190 << 10;

}  // namespace

const char* step_tiles_of_input(const StepInput& in, int rows, float* x, bool stamps, StepProductArgs& a, StepTiles& tiles) {
  a = {}, tiles = {};
  a.rows = rows, a.x = in;
  tiles.group = 1, tiles.x = x, tiles.stamps = stamps;
  tiles.row_bytes = row_of(padded(in.width)) * 2 + in.width * 4;
  return check(in);
}

const char* step_input(const StepInput& x, int rows, float* to, void* stream) {
  StepProductArgs a;
  StepTiles tiles;
  if (rows == 0) return nullptr;
  if (const char* e = step_tiles_of_input(x, rows, to, false, a, tiles)) return e;
  return launch<1>(a, tiles, stream);
}

const char* step_tiles(StepProductArgs& a, bool stamped, StepTiles& tiles, StepInput& before) {
  for (const StepInput* x : {&a.x, &a.x2})
    if (const char* e = check(*x)) return e;
  tiles = {}, before = {};
  bool wide = false;
  for (int p = 0; p < a.parts; ++p) wide = wide || exact(a.part[p]);
  if (a.rows > 2 && (by_block(a.x) || (wide && (a.x.gain || a.x.gated)))) {
    if (!a.normed) return "[step] a product of more than two rows needs room for its input";
    before = a.x;
    a.x = {};
    a.x.width = before.width, a.x.stride = before.width, a.x.v[0] = a.normed;
  }
  const bool made_here = by_block(a.x) || (wide && (stamped || a.x.gain || a.x.gated));
  tiles.wide = wide && made_here, tiles.row_bytes = row_of(padded(a.x.width) + padded(a.x2.width)) * 2 + (made_here ? a.x.width * 4 : 0);
  const int fit = int(kMostShared / size_t(tiles.row_bytes));
  const int most = a.rows < 8 ? a.rows : 8;
  cut(a, most < fit ? most : fit, tiles);
  return fit == 0 ? "[step] a product's rows are too wide" : nullptr;
}

const char* step_product(const StepProductArgs& args, void* stream) {
  StepProductArgs a = args;
  if (a.rows == 0) return nullptr;
  StepTiles tiles;
  StepInput before;
  if (const char* e = step_tiles(a, false, tiles, before)) return e;
  if (before.width)
    if (const char* e = step_input(before, a.rows, a.normed, stream)) return e;
  const size_t fit = kMostShared / size_t(tiles.row_bytes);
  if (a.rows <= 8 || fit < 16) return launch<1>(a, tiles, stream);
  if (a.rows <= 16 || fit < 32) return launch<2>(a, tiles, stream);
  if (a.rows <= 32 || fit < 40) return launch<4>(a, tiles, stream);
  if (a.rows <= 40 || fit < 64) return launch<5>(a, tiles, stream);
  return launch<8>(a, tiles, stream);
}

}  // namespace k3::cuda
