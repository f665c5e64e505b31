// What depends on one chunk alone: A = (I + L)^-1 with L_ij = beta_i decay(i, j) (k_i . k_j) for i > j, and the factors
// of its rows.
//
// Four neighbouring value heads a block, a warp each: together they multiply K K^T of their key heads, then each makes
// and stores its own A without waiting for the others.
#pragma once

#include "common/device/dependent_launch.cuh"
#include "common/device/mbarrier.cuh"
#include "common/device/tma.cuh"
#include "common/device/wgmma.cuh"
#include "gdn/sm90/collective/inverse.cuh"
#include "gdn/sm90/collective/segments.cuh"
#include "gdn/sm90/collective/tile.cuh"
#include "gdn/sm90/schedule.h"

namespace cula::gdn::sm90 {

inline constexpr int kPrepareHeads = 4;  // value heads a block
inline constexpr int kPrepareThreads = 32 * kPrepareHeads;
// Blocks that a multiprocessor holds at once, by the number of key heads that they may have.
inline constexpr int prepare_occupancy(int key_heads) { return key_heads == 1 ? 5 : (key_heads == 2 ? 4 : 3); }

struct PrepareArgs {
  CUtensorMap k;
  SequenceTable sequences;
  int64_t value_heads;
  int64_t group;        // value heads a key head
  int64_t head_blocks;  // ceil(value_heads / kPrepareHeads)
  float scale;
  GateArgs gates;
  TensorArg A_rows;  // [B, T, HV, C]; absent: A is not wanted
  bool whole;        // with the zeros right of the 32nd column in the first 32 rows, which the forward does not read
  ChunkFactors* factors;  // [slot, HV]; null: not wanted
  int32_t* order;         // [N]: for ForwardArgs::order; null: not wanted
};

// A row's g and beta as they lie in memory.
struct alignas(16) RawGate {
  uint2 g;
  uint2 beta;
};

// kKeyHeads: how many key heads the value heads of a block have at most.
template <int kKeyDim, int kKeyHeads>
struct PrepareShared {
  struct Keys {
    SwizzledTile tiles[kKeyDim / 64];
  };
  struct Behind {
    Products products;
    InverseScratch scratch;
  };
  union alignas(1024) KeyHead {
    Keys keys;
    Behind behind;  // a barrier
  };
  union Rows {
    RawGate gates[kRows];
    ChunkFactors factors;
  };
  static constexpr int kMoreScratch = kPrepareHeads - kKeyHeads;

  KeyHead key_heads[kKeyHeads];
  InverseScratch more_scratch[kMoreScratch == 0 ? 1 : kMoreScratch];
  Rows rows[kPrepareHeads];
  uint64_t loaded;

  __device__ __forceinline__ InverseScratch& scratch(int warp) {
    if (kMoreScratch == 0 || warp < kKeyHeads) return key_heads[warp].behind.scratch;
    return more_scratch[warp - kKeyHeads];
  }
};

// K K^T by the four warps, 16 rows each.
template <class T, int kKeyDim>
__device__ __forceinline__ void multiply_keys(float (&c)[32], uint32_t keys) {
  const uint32_t operand = wgmma_operand(keys);
#pragma unroll
  for (int k = 0; k < kKeyDim / 16; ++k) {
    const uint64_t step = wgmma_descriptor(operand, (k / 4) * kTileBytes + (k % 4) * 32);
    if (k == 0) {
      wgmma_ss_n64_first<T>(c, step, step);
    } else {
      wgmma_ss_n64<T>(c, step, step);
    }
  }
}

// Brings what a later block reads to L2: the one that starts about when this one ends. A block waits longest for its
// gates, of which a thread brings a row of g or beta, all heads at once.
template <int kKeyDim, int kKeyHeads>
__device__ __forceinline__ void prefetch_ahead(const PrepareArgs& args) {
  constexpr uint32_t kAhead = prepare_occupancy(kKeyHeads) * kMultiprocessors;
  const uint32_t index = blockIdx.x + kAhead;
  if (index >= gridDim.x) return;
  const auto head_blocks = static_cast<uint32_t>(args.head_blocks);
  const uint32_t slot = index / head_blocks;
  const int head = static_cast<int>((index - slot * head_blocks) * kPrepareHeads);
  Chunk chunk;
  if (!find_chunk(args.sequences, slot, chunk)) return;
  static_assert(kPrepareThreads == 2 * kRows);
  const int thread = static_cast<int>(threadIdx.x);
  prefetch_gate(thread < kRows ? args.gates.g : args.gates.beta, chunk, thread % kRows, head);
  if (threadIdx.x < kKeyDim / 64) {
    tma_prefetch(args.k, {64 * static_cast<int>(threadIdx.x), head / static_cast<int>(args.group),
                          static_cast<int>(chunk.token), static_cast<int>(chunk.batch)});
  }
}

// Heads that are neighbours lie side by side, so each warp loads some rows of all of them. Prefetches for a later block
// go out meanwhile.
template <int kKeyDim, int kKeyHeads, class Rows>
__device__ __forceinline__ void load_block_gates(Rows (&rows)[kPrepareHeads], const PrepareArgs& args,
                                                 const Chunk& chunk, int first_head, int last_head) {
  constexpr int kStep = kPrepareThreads / kPrepareHeads;
  static_assert(2 * kStep == kRows);
  const int head = static_cast<int>(threadIdx.x) % kPrepareHeads;
  const int row = static_cast<int>(threadIdx.x) / kPrepareHeads;
  const bool active = first_head + head <= last_head;
  RawGate raw[2] = {};
  if (active) {
    const auto load = [&](const TensorArg& x, uint2& upper, uint2& lower) {
      const int64_t at = x.offset(chunk.batch, chunk.token + row, first_head + head);
      if (row < chunk.length) upper = load_bits(x.data, x.dtype, at);
      if (row + kStep < chunk.length) lower = load_bits(x.data, x.dtype, at + kStep * x.stride[1]);
    };
    load(args.gates.g, raw[0].g, raw[1].g);
    load(args.gates.beta, raw[0].beta, raw[1].beta);
  }
  prefetch_ahead<kKeyDim, kKeyHeads>(args);
  if (!active) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) rows[head].gates[row + r * kStep] = raw[r];
}

template <class T, int kKeyDim, int kKeyHeads>
__global__ void __launch_bounds__(kPrepareThreads, prepare_occupancy(kKeyHeads))
    prepare_kernel(const __grid_constant__ PrepareArgs args) {
  using Shared = PrepareShared<kKeyDim, kKeyHeads>;
  Shared& shared = *reinterpret_cast<Shared*>(swizzled_shared_memory());
  launch_dependents();
  if (blockIdx.x == 0 && args.order != nullptr) order_sequences(args.order, args.sequences);
  const int64_t slot = blockIdx.x / static_cast<unsigned>(args.head_blocks);
  const int first_head = static_cast<int>((blockIdx.x - slot * args.head_blocks) * kPrepareHeads);
  Chunk chunk;
  if (!find_chunk(args.sequences, slot, chunk)) return;
  const int heads = static_cast<int>(args.value_heads);
  const int group = static_cast<int>(args.group);
  const int last_head = first_head + kPrepareHeads < heads ? first_head + kPrepareHeads - 1 : heads - 1;
  const int first_key = first_head / group;
  const int keys = kKeyHeads == 1 ? 1 : last_head / group - first_key + 1;
  const uint32_t barrier = shared_address(&shared.loaded);
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(barrier, keys * static_cast<int>(sizeof(typename Shared::Keys)));
#pragma unroll 1
    for (int i = 0; i < keys; ++i) {
#pragma unroll
      for (int j = 0; j < kKeyDim / 64; ++j) {
        tma_load(shared_address(&shared.key_heads[i].keys.tiles[j]), args.k,
                 {64 * j, first_key + i, static_cast<int>(chunk.token), static_cast<int>(chunk.batch)}, barrier);
      }
    }
  }
  const int warp = warp_id();
  const int lane = lane_id();
  const int head = first_head + warp;
  const bool active = head <= last_head;
  ChunkFactors& factors = shared.rows[warp].factors;
  load_block_gates<kKeyDim, kKeyHeads>(shared.rows, args, chunk, first_head, last_head);
  sync_block();  // the barrier exists, too
  if (active) {
    RawGates raw;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const RawGate row = shared.rows[warp].gates[2 * lane + r];
      raw.g[r] = row.g;
      raw.beta[r] = row.beta;
    }
    sync_warp();
    make_factors(factors, raw, args.gates, chunk, head, args.scale);
  }
  mbarrier_wait(barrier, 0);

  {
    float c[kKeyHeads][32];
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kKeyHeads; ++i) {  // those that are absent too: no branch may stand around a wgmma
      multiply_keys<T, kKeyDim>(c[i], shared_address(&shared.key_heads[i].keys));
    }
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kKeyHeads; ++i) wgmma_complete(c[i]);
    sync_block();
#pragma unroll
    for (int i = 0; i < kKeyHeads; ++i) {
      if (i < keys) store_products(shared.key_heads[i].behind.products, c[i], chunk.length);
    }
    sync_block();
  }
  if (!active) return;

  const Products& products = shared.key_heads[kKeyHeads == 1 ? 0 : head / group - first_key].behind.products;
  if (args.A_rows) {
    T* out = static_cast<T*>(args.A_rows.data) + args.A_rows.offset(chunk.batch, chunk.token, head);
    InverseScratch& scratch = shared.scratch(warp);
    invert_triangle<T>(products, factors, scratch,
                       TriangleStore<T>(out, args.A_rows.stride[1], chunk.length, args.whole, scratch));
  }
  if (args.factors != nullptr) {
    const float squares[2] = {products.square(2 * lane), products.square(2 * lane + 1)};
    const float log2_norm = transition_log2_norm(factors, squares);
    if (lane == 0) factors.log2_norm = log2_norm;
    sync_warp();
    const uint4* source = reinterpret_cast<const uint4*>(&factors);
    uint4* target = reinterpret_cast<uint4*>(args.factors + slot * args.value_heads + head);
    constexpr int kPieces = sizeof(ChunkFactors) / 16;
#pragma unroll
    for (int i = 0; i < (kPieces + 31) / 32; ++i) {
      if (32 * i + lane < kPieces) target[32 * i + lane] = source[32 * i + lane];
    }
  }
}

}  // namespace cula::gdn::sm90
