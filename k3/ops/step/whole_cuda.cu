#include <cstring>

#include "k3/ops/step/experts.cuh"
#include "k3/ops/step/kda.cuh"
#include "k3/ops/step/latent.cuh"
#include "k3/ops/step/product.cuh"
#include "k3/ops/step/whole_cuda.h"

namespace k3::cuda {
namespace {

constexpr int kBlocks = 132, kMostPhases = 512;  // blocks: all at once on the card

struct Product {
  StepProductArgs a;
  StepTiles tiles;
};
__device__ __forceinline__ void begin_row(const StepBegin& a, int64_t r, Stamp stamp) {
  const int64_t from = int64_t(a.ids[r]) * a.width;
  for (int c = threadIdx.x; c < a.width; c += kThreads) {
    const float x = from < 0 ? NAN : a.bf16 ? to_f32(static_cast<const nv_bf16*>(a.table)[from + c]) : static_cast<const float*>(a.table)[from + c];
    give<true>(a.x, r * a.width + c, x, stamp);
  }
}

template <int D, bool kCodes>
__global__ void __launch_bounds__(kThreads, 1) whole_kernel(const StepPhase* phases, int count, uint32_t* counters) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ StepPhase two[2];
  __shared__ int2 heads[kMostPhases];  // tasks and turn
  let_next_kernel_begin();
  const Stamp stamp{*static_cast<volatile uint32_t*>(counters) + 1};
  for (int p = threadIdx.x; p < count; p += kThreads) heads[p] = make_int2(phases[p].tasks, phases[p].turn);
  __syncthreads();
  auto first_task = [&](int p) { return (int(blockIdx.x) + heads[p].y) % kBlocks; };
  auto after = [&](int p) {  // the next phase that has something for this block
    for (++p; p < count && first_task(p) >= heads[p].x; ++p) {}
    return p;
  };
  auto fetch = [&](int p, StepPhase& to) {
    for (int i = threadIdx.x; i < int(sizeof(StepPhase) / 16) && p < count; i += kThreads)
      copy16(shared_address(reinterpret_cast<char*>(&to) + i * 16), reinterpret_cast<const char*>(phases + p) + i * 16);
    copy_commit();
  };
  int next = after(-1), turn = 0;
  fetch(next, two[0]);
  for (int p = next; p < count; p = next, turn ^= 1) {
    copy_wait<0>();
    __syncthreads();  // this phase is there, and nothing of the one before is read any more
    next = after(p);
    fetch(next, two[turn ^ 1]);
    const StepPhase& phase = two[turn];
    for (int task = first_task(p); task < phase.tasks; task += kBlocks) {
      switch (phase.kind) {
        case StepPhase::Kind::begin:
          begin_row(*reinterpret_cast<const StepBegin*>(phase.args), task, stamp);
          break;
        case StepPhase::Kind::input:
        case StepPhase::Kind::product: {
          const Product& a = *reinterpret_cast<const Product*>(phase.args);
          const bool input = phase.kind == StepPhase::Kind::input;
          product_tiles<1, true, 4>(a.a, a.tiles, stamp, input ? task : 0, input ? 0 : task, kBlocks, shared);
          if (!input) task = phase.tasks;
          break;
        }
        case StepPhase::Kind::kda: {
          const StepKdaArgs& a = *reinterpret_cast<const StepKdaArgs*>(phase.args);
          kda_head<D, true>(a, task % a.heads, task / a.heads, stamp);
          break;
        }
        case StepPhase::Kind::query: {
          const StepLatentArgs& a = *reinterpret_cast<const StepLatentArgs*>(phase.args);
          query_head<true>(a, task % a.heads, task / a.heads, stamp);
          break;
        }
        case StepPhase::Kind::attend: {
          const StepLatentArgs& a = *reinterpret_cast<const StepLatentArgs*>(phase.args);
          attend_piece<5, true>(a, task % kStepSplits, task / kStepSplits % a.rows, task / kStepSplits / a.rows, stamp,
                                reinterpret_cast<float*>(shared));
          break;
        }
        case StepPhase::Kind::values: {
          const StepLatentArgs& a = *reinterpret_cast<const StepLatentArgs*>(phase.args);
          const int tiles = (a.value + kValues - 1) / kValues;
          values_of_head<true>(a, task % tiles, task / tiles % a.heads, task / tiles / a.heads, stamp);
          break;
        }
        case StepPhase::Kind::first: {
          const StepExpertsArgs& a = *reinterpret_cast<const StepExpertsArgs*>(phase.args);
          const int tiles = (a.inner + kTile - 1) / kTile;
          first_products<kCodes, true>(a, task % tiles * kTile, task / tiles, stamp, shared);
          break;
        }
        case StepPhase::Kind::second: {
          const StepExpertsArgs& a = *reinterpret_cast<const StepExpertsArgs*>(phase.args);
          const int tiles = (a.latent + kTile - 1) / kTile;
          second_products<kCodes, true>(a, task % tiles * kTile, task / tiles, stamp, shared);
          break;
        }
      }
      if (task + kBlocks < phase.tasks) __syncthreads();
    }
  }
  __syncthreads();
  if (threadIdx.x == 0 && atomicAdd(counters + 1, 1) == kBlocks - 1) counters[1] = 0, counters[0] = stamp.now;  // the last block counts the step
}

template <int D>
const char* launch(bool codes, size_t shared, const StepPhase* phases, int count, uint32_t* counters, void* stream) {
  auto kernel = codes ? whole_kernel<D, true> : whole_kernel<D, false>;
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)); e != cudaSuccess)
    return cudaGetErrorString(e);
  kernel<<<kBlocks, kThreads, shared, stream_of(stream)>>>(phases, count, counters);
  return launched();
}

}  // namespace

template <class Args>
void StepList::add(StepPhase::Kind kind, int tasks, size_t shared, const Args& args) {
  static_assert(sizeof(Args) <= sizeof(StepPhase::args));
  StepPhase& p = phases_.emplace_back();
  p.kind = kind, p.tasks = tasks, p.turn = (kBlocks - begun_) % kBlocks;
  std::memset(p.args, 0, sizeof(p.args)), std::memcpy(p.args, &args, sizeof(Args));
  begun_ = (begun_ + tasks) % kBlocks, shared_ = shared > shared_ ? shared : shared_;
}

const char* StepList::begin(const StepBegin& a) {
  if (a.rows > kStampedRows) return "[step] one kernel takes up to 2 rows";
  add(StepPhase::Kind::begin, a.rows, 0, a);
  return nullptr;
}
const char* StepList::input(const StepInput& x, int rows, float* to, bool plain) {
  Product p;
  if (const char* e = step_tiles_of_input(x, rows, to, !plain, p.a, p.tiles)) return e;
  if (x.sources > 4) return "[step] one kernel mixes up to four sources";
  add(StepPhase::Kind::input, rows, size_t(p.tiles.row_bytes), p);
  return nullptr;
}
const char* StepList::product(const StepProductArgs& args) {
  Product p{args, {}};
  StepInput before;
  if (const char* e = step_tiles(p.a, true, p.tiles, before)) return e;
  if (p.a.x.sources > 4) return "[step] one kernel mixes up to four sources";
  if (before.width || p.tiles.group < args.rows) return "[step] one kernel takes up to 2 rows, of no more than shared memory holds";
  add(StepPhase::Kind::product, p.tiles.begin[p.a.parts], size_t(p.tiles.group) * size_t(p.tiles.row_bytes), p);
  return nullptr;
}
const char* StepList::kda(const StepKdaArgs& a) {
  if (a.dim != 16 && a.dim != 32 && a.dim != 64) return "[step] one kernel takes KDA heads of 16, 32 or 64 channels";
  dim_ = a.dim;
  add(StepPhase::Kind::kda, a.heads * a.rows, 0, a);
  return nullptr;
}
const char* StepList::latent(const StepLatentArgs& a) {
  const int width = a.rank + a.rope;
  if (width > 160 || a.nope > 256) return "[step] one kernel takes latents of up to 160 channels";
  add(StepPhase::Kind::query, a.heads * a.rows, 0, a);
  add(StepPhase::Kind::attend, kStepSplits * a.rows * ((a.heads + kHeads - 1) / kHeads), attend_shared(width), a);
  add(StepPhase::Kind::values, (a.value + kValues - 1) / kValues * a.heads * a.rows, 0, a);
  return nullptr;
}
const char* StepList::experts(const StepExpertsArgs& a) {
  if (a.experts > 32) return "[step] one kernel takes up to 32 experts";
  codes_ = a.w1.scales != nullptr;
  add(StepPhase::Kind::first, (a.inner + kTile - 1) / kTile * a.rows * a.top_k, first_shared(a), a);
  add(StepPhase::Kind::second, (a.latent + kTile - 1) / kTile * a.rows, second_shared(a), a);
  return nullptr;
}

bool whole_fits() {
  int device = 0, has = 0;
  return cudaGetDevice(&device) == cudaSuccess && cudaDeviceGetAttribute(&has, cudaDevAttrMultiProcessorCount, device) == cudaSuccess &&
         has >= kBlocks;
}

const char* step_whole(const StepList& list, const void* phases, uint32_t* counters, void* stream) {
  const auto* p = static_cast<const StepPhase*>(phases);
  const int n = int(list.phases_.size());
  if (n > kMostPhases) return "[step] a step has at most 512 phases";
  switch (list.dim_) {
    case 16:
      return launch<16>(list.codes_, list.shared_, p, n, counters, stream);
    case 32:
      return launch<32>(list.codes_, list.shared_, p, n, counters, stream);
    default:
      return launch<64>(list.codes_, list.shared_, p, n, counters, stream);
  }
}

}  // namespace k3::cuda
