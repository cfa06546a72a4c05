#pragma once
// Operands of chunks from multiprocessors that have no memory of their own to keep.
//
// A scan is one block a (head, sequence); where there are fewer of them than multiprocessors, the rest of the grid are builders. Of a scan's chunks
// some stay its own (Share), the others are items: builder group w of W makes items w, w + W, ... (item = turn of the pair x pairs + pair, a
// pair = a head of a sequence), writes what prepare() made, kOperandBytes as they lie, into the pair's ring in global memory, and raises made; the
// scan's block copies an item into a stage of shared memory and raises taken when it has been left. prepare() is the same code on both sides, so
// where a chunk is built changes no bit. The launch is cooperative: all blocks are resident, so waiting for each other ends.
#include "k3/ops/delta_rule/delta_chunk.cuh"

namespace k3::cuda {
namespace {

constexpr int kRing = kDeltaRing;
constexpr int kOperandBytes = Half::given;                              // what a scan reads of a Half
constexpr int kOperandRoom = (kOperandBytes + 1023) / 1024 * 1024;      // of a stage in shared memory, and of a ring's slot
template <bool kBounded>
constexpr int kStagesBeside = kBounded ? 2 : 1;                         // stages beside a scan's own two halves
constexpr int kStagesAlone = 4;                                         // where the scan builds nothing itself: in the halves' place
template <bool kBounded>
constexpr int kBuilderGroups = kBounded ? 3 : 2;                        // groups of four warps that build, in a builder
constexpr int kNextItem = (6 + 2 * kStagesAlone + 3) * 8;               // behind the barriers: the item to fetch next
static_assert(kOperandRoom == kDeltaOperands && kStagesAlone * kOperandRoom <= 2 * kHalfBytes<true> - 256);

struct Ahead {
  char* ring;              // (pairs, kRing, kOperandRoom)
  uint32_t *made, *taken;  // (pairs, kRing) each: item + 1
  Share share;
  int builders;  // blocks
  __device__ int items(int chunks) const {  // of so many chunks
    const int left = chunks % share.period;
    return chunks / share.period * (share.period - share.own) + left - __popc(share.mask & ((1u << left) - 1));
  }
};

__device__ __forceinline__ uint32_t acquire(const uint32_t* p) {
  uint32_t x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ void release(uint32_t* p, uint32_t x) { asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory"); }
__device__ __forceinline__ uint32_t acquire_in_block(uint32_t shared) {
  uint32_t x;
  if constexpr (kForTheChecker) asm volatile("atom.acquire.cta.shared.or.b32 %0, [%1], 0;" : "=r"(x) : "r"(shared) : "memory");  // it knows atomics alone
  else asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(x) : "r"(shared) : "memory");
  return x;
}
__device__ __forceinline__ void release_in_block(uint32_t shared, uint32_t x) {
  if constexpr (kForTheChecker) asm volatile("{ .reg .b32 was; atom.release.cta.shared.exch.b32 was, [%0], %1; }" ::"r"(shared), "r"(x) : "memory");
  else asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(shared), "r"(x) : "memory");
}
__device__ __forceinline__ void between_proxies() { asm volatile("fence.proxy.async;" ::: "memory"); }

// The items of builder group `group`.
template <bool kReverse>
struct Items {
  const DeltaChunkArgs& a;
  const Share& share;
  const int pairs, groups;
  int number, last;  // items that exist have numbers below `last`
  int pair, turn;    // of the item handed out last

  __device__ Items(const DeltaChunkArgs& a, const Ahead& h, int group, int groups)
      : a(a), share(h.share), pairs(a.heads * a.sequences), groups(groups), number(group - groups), last(0) {
    int longest = int(a.tokens);
    if (a.begins) {
      longest = 0;
      for (int s = 0; s < a.sequences; ++s) longest = max(longest, a.begins[s + 1] - a.begins[s]);
    }
    last = h.items((longest + C - 1) / C) * pairs;
  }
  __device__ Item next() {
    for (number += groups; number < last; number += groups) {
      turn = number / pairs, pair = number - turn * pairs;
      const int sequence = pair / a.heads, each = share.period - share.own, i = turn / each * share.period + int(share.item_at >> 4 * (turn % each) & 15);
      const int64_t begin = a.begins ? a.begins[sequence] : 0;
      const int length = a.begins ? a.begins[sequence + 1] - int(begin) : int(a.tokens), chunks = (length + C - 1) / C;
      if (i < chunks) return {begin, length, kReverse ? chunks - 1 - i : i, pair - sequence * a.heads};
    }
    return {0, 0, -1, 0};
  }
};

// A builder's block.
template <bool kBounded, bool kReverse>
__device__ void build_ahead(const DeltaChunkArgs& a, const Ahead& h, char* shared, uint32_t full, uint32_t empty, int builder) {
  constexpr int kGroups = kBuilderGroups<kBounded>;
  const int group = threadIdx.x >> 7;
  if (group < kGroups) {
    prepare<kBounded, Part::all_but_inverse, true>(a, Items<kReverse>(a, h, builder * kGroups + group, h.builders * kGroups), shared + group * kHalfBytes<kBounded>, 1 + group,
                                   full + (6 + 2 * kStagesAlone + group) * 8, full + group * 8, empty + group * 8, [](int) {});
  } else if (const int which = (threadIdx.x >> 5) & 3; group == 3 && which < kGroups) {  // a warp for each group inverts and sends what it made
    const int lane = threadIdx.x & 31;
    char* s = shared + which * kHalfBytes<kBounded>;
    Items<kReverse> items(a, h, builder * kGroups + which, h.builders * kGroups);
    uint32_t parity = 0;
    for (Item item = items.next(); item.chunk >= 0; item = items.next(), parity ^= 1) {
      wait(full + which * 8, parity);
      invert<Half>(s, lane, reinterpret_cast<const float*>(s + Half::token)[lane], reinterpret_cast<const float*>(s + Half::betas)[lane]);
      publish();
      __syncwarp();
      if (lane == 0) {
        const int slot = items.pair * kRing + items.turn % kRing;
        if (items.turn >= kRing)
          while (acquire(h.taken + slot) != uint32_t(items.turn - kRing) + 1) __nanosleep(100);
        between_proxies();
        bulk_store(h.ring + int64_t(slot) * kOperandRoom, shared_address(s), kOperandBytes);
        bulk_commit();
        bulk_wait_read();
        arrive(empty + which * 8);
        bulk_wait();
        between_proxies();
        release(h.made + slot, uint32_t(items.turn) + 1);
      }
      __syncwarp();
    }
  }
}

// Item j of the block's pair into its stage of kCount; one thread. `full` and `empty`: barriers of the stages.
template <int kCount>
__device__ __forceinline__ void fetch(const Ahead& h, int pair, int j, uint32_t stages, uint32_t full, uint32_t empty) {
  const int stage = j % kCount, slot = pair * kRing + j % kRing;
  wait(empty + stage * 8, (j / kCount & 1) ^ 1);
  if (j >= kCount) release(h.taken + pair * kRing + (j - kCount) % kRing, uint32_t(j - kCount) + 1);  // its copy has been read, so it had come
  while (acquire(h.made + slot) != uint32_t(j) + 1) __nanosleep(20);
  between_proxies();
  arrive_expect(full + stage * 8, kOperandBytes);
  bulk_load(stages + stage * kOperandRoom, h.ring + int64_t(slot) * kOperandRoom, kOperandBytes, full + stage * 8);
}

// Where a scan finds its i-th chunk: a half that its own groups fill, or a stage.
template <bool kBounded>
struct Turns {
  char* const shared;
  char* const stages;
  const uint32_t full, empty, stage_full, stage_empty;  // barriers
  const Share& share;
  const int count;
  int phase, turn, stage;
  uint32_t own_parity, stage_parity;
  bool own;

  __device__ Turns(char* shared, uint32_t barriers, const Ahead& h)
      : shared(shared),
        stages(h.share.own ? shared + 2 * kHalfBytes<kBounded> + kScanBytes : shared),
        full(barriers),
        empty(barriers + 3 * 8),
        stage_full(barriers + 6 * 8),
        stage_empty(barriers + (6 + kStagesAlone) * 8),
        share(h.share),
        count(h.share.own ? kStagesBeside<kBounded> : kStagesAlone),
        phase(0),
        turn(1),
        stage(-1),
        own_parity(1),
        stage_parity(0),
        own(true) {}
  __device__ void next() {
    own = share.mask >> phase & 1;
    if (++phase >= share.period) phase = 0;
    if (own) turn ^= 1, own_parity ^= turn == 0;
    else if (++stage == count) stage = 0, stage_parity ^= 1;
  }
  __device__ char* place() const { return own ? shared + turn * kHalfBytes<kBounded> : stages + stage * kOperandRoom; }
  __device__ void await() const { own ? wait(full + turn * 8, own_parity) : wait(stage_full + stage * 8, stage_parity); }
  __device__ void leave() const { arrive_warp(own ? empty + turn * 8 : stage_empty + stage * 8); }
};

constexpr int kScanThreads = 512;  // two groups that scan, two that build

template <bool kBounded>
constexpr int kSharedBytes = 1024 + 2 * kHalfBytes<kBounded> + kScanBytes + kStagesBeside<kBounded> * kOperandRoom;
static_assert(kSharedBytes<true> <= 227 << 10 && kSharedBytes<false> <= 227 << 10 && 1024 + 3 * kHalfBytes<true> <= kSharedBytes<true>);

// A memory between two chunks, as the gradient kernel multiplies it: blocks of 8 x 8 (v, k) of 128 bytes each, 16 of them along k, not swizzled. So
// what a warp's store writes is one line of memory.
__device__ __forceinline__ void keep_memory(void* to, int64_t chunk, const Chunk& seq, int heads, const uint32_t (&packed)[8][4]) {
  uint32_t* p = static_cast<uint32_t*>(to) + (chunk * heads + seq.head) * (D * D / 2) + (threadIdx.x >> 5) * 1024 + (threadIdx.x & 31);
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int x = 0; x < 4; ++x) p[((x & 1) * 16 + 2 * j + (x >> 1)) * 32] = packed[j][x];
}

// The body of a scan kernel: scan(sequence, shared, barriers), run by the first 256 threads of the block of a pair.
template <bool kBounded, bool kReverse, class Scan>
__device__ void scan_or_build(const DeltaChunkArgs& a, const Ahead& ahead, Scan scan) {
  extern __shared__ char memory[];
  char* shared = memory + ((1024 - (shared_address(memory) & 1023)) & 1023);
  const uint32_t barriers = shared_address(shared + 2 * kHalfBytes<kBounded> - 256);  // full[3], empty[3] of halves; full[], empty[] of stages; arrived[3]
  const int pairs = a.heads * a.sequences, group = threadIdx.x >> 7;
  const bool builder = int(blockIdx.x) >= pairs;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 3; ++i) barrier_init(barriers + (6 + 2 * kStagesAlone + i) * 8, 128), barrier_init(barriers + i * 8, 128), barrier_init(barriers + (3 + i) * 8, builder ? 1 : 8 * kWarpArrivals);
    for (int i = 0; i < kStagesAlone; ++i) barrier_init(barriers + (6 + i) * 8, 1), barrier_init(barriers + (6 + kStagesAlone + i) * 8, 8 * kWarpArrivals);
    barrier_init_done();
    release_in_block(barriers + kNextItem, 0);
  }
  __syncthreads();
  if (builder) {
    build_ahead<kBounded, kReverse>(a, ahead, shared, barriers, barriers + 3 * 8, blockIdx.x - pairs);
    return;
  }
  Chunk seq;
  seq.sequence = blockIdx.x / a.heads, seq.head = blockIdx.x - seq.sequence * a.heads;
  seq.begin = a.begins ? a.begins[seq.sequence] : 0;
  seq.length = a.begins ? a.begins[seq.sequence + 1] - int(seq.begin) : int(a.tokens);
  seq.chunks = (seq.length + C - 1) / C;
  if (group < 2) {
    more_registers<168>();
    scan(seq, shared, barriers);
  } else {
    fewer_registers<88>();
    const Turns<kBounded> turns(shared, barriers, ahead);
    const Share& share = ahead.share;
    const int mine = group - 2, pair = blockIdx.x, items = ahead.items(seq.chunks);
    const uint32_t stages = shared_address(turns.stages), next_item = barriers + kNextItem;
    if (share.own) {
      auto then = [&](int round) {  // the items between the chunk just built and the block's next own
        const int k = mine + 2 * round;
        auto before = [&](int k) { return k / share.own * share.period + int(share.own_at >> 4 * (k % share.own) & 15) - k; };
        const int first = before(k), end = min(before(k + 1), items);
        if (first >= end) return;
        while (acquire_in_block(next_item) != uint32_t(first)) __nanosleep(20);  // the two groups in turn: a stage's barrier tells two uses apart, no more
        for (int j = first; j < end; ++j) fetch<kStagesBeside<kBounded>>(ahead, pair, j, stages, turns.stage_full, turns.stage_empty);
        release_in_block(next_item, uint32_t(end));
      };
      prepare<kBounded, Part::all, false>(a, Own<kReverse>(seq, share, mine, 2), shared + mine * kHalfBytes<kBounded>, group - 1,
                                      barriers + (6 + 2 * kStagesAlone + mine) * 8, turns.full + mine * 8,
                                      turns.empty + mine * 8, then);
    } else if (threadIdx.x == 256) {
      for (int j = 0; j < items; ++j) fetch<kStagesAlone>(ahead, pair, j, stages, turns.stage_full, turns.stage_empty);
    }
  }
}

// Launches kernel(args, Ahead). How many chunks builders take follows from how many of their groups there are for each pair: a group takes about as
// long for a chunk as a scan's own two take for one each.
template <bool kBounded, class Args>
const char* launch_scan(void (*kernel)(Args, Ahead), const Args& args, const DeltaChunkArgs& a, cudaStream_t stream) {
  const int pairs = a.heads * a.sequences;
  Ahead h{};
  int period = 1, own = 1;
  cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes<kBounded>);
  if (e == cudaSuccess && a.ahead && pairs <= kDeltaAhead) {
    int device = 0, processors = 0;
    e = cudaGetDevice(&device);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    h.builders = processors - pairs;
    const int groups = h.builders * kBuilderGroups<kBounded> * 10 / pairs;  // for each pair, in tenths
    if (a.period) period = a.period, own = a.own;
    else if (a.tokens < 4 * C * a.sequences || groups < 7) period = own = 1;
    else if (groups < 9) period = 3, own = 2;
    else if (groups < 15) period = 2, own = 1;
    else if (groups < 25) period = 3, own = 1;
    else own = 0;
    if (h.builders < 1) period = own = 1;
    if (period == own) h.builders = 0;
  }
  if (period < 1 || period > 8 || own < 0 || own > period) return "[delta_rule] period must be 1 to 8, own between 0 and it";
  h.share = {period, own, 0, 0, 0};
  for (int i = 0, owns = 0; i < period; ++i) {
    if (i * own % period < own) h.share.mask |= 1u << i, h.share.own_at |= uint32_t(i) << 4 * owns++;
    else h.share.item_at |= uint32_t(i) << 4 * (i - owns);
  }
  if (h.builders) {
    uint32_t* flags = static_cast<uint32_t*>(a.ahead);
    h.made = flags, h.taken = flags + pairs * kRing, h.ring = static_cast<char*>(a.ahead) + ((pairs * kRing * 8 + 1023) & ~1023);
    if (e == cudaSuccess) e = cudaMemsetAsync(flags, 0, pairs * kRing * 8, stream);
  }
  cudaLaunchAttribute together{};
  together.id = cudaLaunchAttributeCooperative, together.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = pairs + h.builders, config.blockDim = kScanThreads, config.dynamicSmemBytes = kSharedBytes<kBounded>, config.stream = stream;
  config.attrs = &together, config.numAttrs = h.builders ? 1 : 0;
  if (e == cudaSuccess) e = cudaLaunchKernelEx(&config, kernel, args, h);
  return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}

}  // namespace
}  // namespace k3::cuda
