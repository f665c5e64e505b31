// Shared memory of the gradient kernel, and who waits for whom in it.
//
// A block goes through items, each one key head of one chunk, and in each through the value heads of the group. What a
// value head brings comes in pieces of up to kSlotTiles tiles, through a ring of slots that runs on over heads and
// items:
//
//   dO | dv | V' | v | S, by blocks of 64 value columns | D, likewise
//
//   full[s]        the piece of slot s has landed (with dv: the factors of the head)   loader -> all
//   empty[s]       everybody has read it; who waits for full[s] must arrive here       all -> loader
//   keys_full[b]   q and k of the item have landed, and items[b] says which it is     loader -> consumers
//   keys_empty[b]  dq and dk, put in their place, have left                           consumers -> loader
//   summed[b]      all row sums of the head are in sums[b]                            all -> gate warp
//   finished[b]    sums[b] and factors[b] are free again                              gate warp -> loader
#pragma once

#include "gdn/sm90/collective/scan_pipeline.cuh"

namespace cula::gdn::sm90 {

inline constexpr int kGradientConsumers = 2;  // warpgroups
inline constexpr int kGradientThreads = (kGradientConsumers + 1) * kWarpgroupThreads;
inline constexpr int kGradientConsumerRegisters = 224;
inline constexpr int kGradientHelperRegisters = 56;
inline constexpr int kRingSlots = 8;
inline constexpr int kKeyBuffers = 2;  // with one, loads of an item would wait for the end of the one before

// Warps of the third warpgroup.
enum class GradientHelper { kLoader = 0, kGate = 1, kValues0 = 2, kValues1 = 3 };

enum class GradientBarrier { kConsumers = 1, kConsumer0 = 2, kConsumer1 = 3 };

struct GradientArgs {
  BackwardMaps maps;
  SequenceTable sequences;
  SlotWindow window;
  int heads;
  int group;
  float scale;
  float beta_scale;
  bool beta_sigmoid;
  const ChunkFactors* factors;  // [slot, HV]
  const SwizzledTile* S;        // images, as the scans wrote them
  const SwizzledTile* D;
  const SwizzledTile* residual;
  TensorArg q_rstd;  // [B, T, H]: dq and dk are taken through the norms of q and k; none: there were no norms
  TensorArg k_rstd;
  TensorArg dq;  // these two in the problem's type, for the copy engine
  TensorArg dk;
  TensorArg dv;  // as the adjoint left it
  TensorArg dg;  // by the log decay
  TensorArg dbeta;
};

// What the rows of one value head add up to, each warpgroup's share.
enum class RowSum {
  kPairs,     // gate: through the pairs of rows, as their later row
  kStrength,  // beta: likewise
  kOutput,    // scale decay <q, dO S^T>
  kResidual,  // decay <k, dv S^T>
  kUpdate,    // to_end <k, V' D^T>
  kCount
};
struct alignas(16) HeadSums {
  float rows[kGradientConsumers][static_cast<int>(RowSum::kCount)][kRows];
  float columns[kGradientConsumers][4][kRows];  // by warps: gate, through the pairs of rows, as their earlier row
  float values[kRows];                          // <dv, v>
  float states[4 * kGradientConsumers];         // <S, D>, by warps
};

// What a block works on at a time. Narrow, since registers are short where items are gone through.
struct GradientItem {
  int slot;
  int key_head;
  int batch;
  int token;   // first, in its row of the batch
  int length;  // of the chunk
};

template <int kKeyDim, int kValueDim>
struct GradientShared {
  static constexpr int kKeyTiles = kKeyDim / 64;
  static constexpr int kValueTiles = kValueDim / 64;
  static constexpr int kSlotTiles = kKeyTiles > kValueTiles ? kKeyTiles : kValueTiles;
  static constexpr int kSlotBytes = kSlotTiles * kTileBytes;
  static constexpr int kPieces = 4 + 2 * kValueTiles;  // of a value head
  static constexpr int kDv = 1;
  static constexpr int kResidual = 2;
  static constexpr int kV = 3;
  static constexpr int kFirstS = 4;
  static constexpr int kFirstD = 4 + kValueTiles;
  static_assert(kPieces <= kRingSlots);
  // Of a slot's release: each of the consumers' warps gives two, at dv one; of the two warps that read values each
  // gives four at dv and eight at v.
  static constexpr int kSlotShares = 2 * 4 * kGradientConsumers;

  SwizzledTile keys[kKeyBuffers][2 * kKeyTiles];  // q, k
  SwizzledTile pairs[kGradientConsumers];         // sums over the group: of dP, and of what the inverse adds to K K^T
  SwizzledTile ring[kRingSlots * kSlotTiles];
  ChunkFactors factors[2];
  HeadSums sums[2];
  float norms[kGradientConsumers][2][kRows];  // row sums of dq o q and dk o k, each warpgroup's share
  GradientItem items[kKeyBuffers];            // of the consumers; length 0: no more
  uint64_t full[kRingSlots];
  uint64_t empty[kRingSlots];
  uint64_t keys_full[kKeyBuffers];
  uint64_t keys_empty[kKeyBuffers];
  uint64_t summed[2];
  uint64_t finished[2];

  struct Map {
    uint32_t base;
    __device__ uint32_t keys(int b) const { return base + b * 2 * kKeyTiles * kTileBytes; }
    __device__ uint32_t pair(int group) const { return at(offsetof(GradientShared, pairs)) + group * kTileBytes; }
    __device__ uint32_t slot(int s) const { return at(offsetof(GradientShared, ring)) + s * kSlotBytes; }
    __device__ uint32_t factor(int b) const {
      return at(offsetof(GradientShared, factors)) + b * static_cast<uint32_t>(sizeof(ChunkFactors));
    }
    __device__ uint32_t sums(int b) const {
      return at(offsetof(GradientShared, sums)) + b * static_cast<uint32_t>(sizeof(HeadSums));
    }
    __device__ uint32_t norms(int group) const {
      return at(offsetof(GradientShared, norms)) + group * 2 * kRows * static_cast<uint32_t>(sizeof(float));
    }
    __device__ uint32_t item(int b) const {
      return at(offsetof(GradientShared, items)) + b * static_cast<uint32_t>(sizeof(GradientItem));
    }
    __device__ uint32_t full_barrier(int s) const { return at(offsetof(GradientShared, full)) + 8 * s; }
    __device__ uint32_t empty_barrier(int s) const { return at(offsetof(GradientShared, empty)) + 8 * s; }
    __device__ uint32_t keys_full_barrier(int b) const { return at(offsetof(GradientShared, keys_full)) + 8 * b; }
    __device__ uint32_t keys_empty_barrier(int b) const { return at(offsetof(GradientShared, keys_empty)) + 8 * b; }
    __device__ uint32_t summed_barrier(int b) const { return at(offsetof(GradientShared, summed)) + 8 * b; }
    __device__ uint32_t finished_barrier(int b) const { return at(offsetof(GradientShared, finished)) + 8 * b; }

   private:
    __device__ uint32_t at(size_t offset) const { return base + static_cast<uint32_t>(offset); }
  };

  __device__ static void init(const Map& shared) {
    for (int s = 0; s < kRingSlots; ++s) {
      mbarrier_init(shared.full_barrier(s), 1);
      mbarrier_init(shared.empty_barrier(s), warp_arrivals(kSlotShares));
    }
    for (int b = 0; b < kKeyBuffers; ++b) {
      mbarrier_init(shared.keys_full_barrier(b), 1);
      mbarrier_init(shared.keys_empty_barrier(b), group_arrivals(kGradientConsumers));
    }
    for (int b = 0; b < 2; ++b) {
      mbarrier_init(shared.summed_barrier(b), warp_arrivals(4 * kGradientConsumers + 2));
      mbarrier_init(shared.finished_barrier(b), warp_arrivals(1));
    }
    mbarrier_init_fence();
  }
};

// A place in the ring.
struct RingPlace {
  int slot = 0;
  int phase = 0;
  __device__ __forceinline__ static RingPlace of_piece(int number) {
    const int round = number / kRingSlots;
    return {number - round * kRingSlots, round & 1};
  }
  __device__ __forceinline__ RingPlace ahead(int pieces) const {
    const int next = slot + pieces;
    return next >= kRingSlots ? RingPlace{next - kRingSlots, phase ^ 1} : RingPlace{next, phase};
  }
};

// The items of a block, in order: f(item, its number) for each; all lanes of a warp must call.
template <class F>
__device__ __forceinline__ void for_each_item(const GradientArgs& args, F&& f) {
  const int heads = static_cast<int>(args.heads);
  const int items = args.window.slots() * heads;
  const ChunkFinder chunks(args.sequences);
  int number = 0;
#pragma unroll 1
  for (int i = static_cast<int>(blockIdx.x); i < items; i += static_cast<int>(gridDim.x)) {
    GradientItem item;
    item.slot = i / heads;
    item.key_head = i - item.slot * heads;
    item.slot += args.window.begin;
    Chunk chunk;
    if (!chunks.find(item.slot, chunk)) continue;
    item.batch = static_cast<int>(chunk.batch);
    item.token = static_cast<int>(chunk.token);
    item.length = chunk.length;
    f(item, number);
    ++number;
  }
}

}  // namespace cula::gdn::sm90
