// The warpgroup that feeds the consumers: it loads chunks by TMA, as many ahead as there are stages but one, and makes
// P = scale Q K^T o decay one ahead. It must be the faster side, so nothing of it waits for another of its warps but
// the product: loads are issued behind that, and each warp hands its rows of P on by itself.
#pragma once

#include "gdn/sm90/collective/pipeline.cuh"

namespace cula::gdn::sm90 {

// Loads chunks. All by one thread.
template <int kKeyDim, int kValueTiles, bool kOutput>
struct Loader {
  using Shared = ForwardShared<kKeyDim, kValueTiles, kOutput>;
  static constexpr int kKeyTiles = Shared::kKeyTiles;

  const ForwardArgs& args;
  const Unit& unit;
  typename Shared::Map shared;

  __device__ __forceinline__ void load(int chunk, int stage) const {
    const uint32_t barrier = shared.full_barrier(stage);
    int bytes = sizeof(typename Shared::Stage) + sizeof(ChunkFactors);
    if (!kOutput && !unit.has_values) bytes -= kValueTiles * kTileBytes;
    mbarrier_arrive_expect(barrier, bytes);
    const uint32_t tiles = shared.stage(stage);
    BoxOrigin at = {0, unit.key_head, unit.token + chunk * kRows, unit.batch};
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
      at.column = 64 * i;
      tma_load(tiles + i * kTileBytes, args.maps.k, at, barrier);
    }
    if constexpr (kOutput) {
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) {
        at.column = 64 * i;
        tma_load(tiles + Shared::kQ + i * kTileBytes, args.maps.q, at, barrier);
      }
    }
    at.head = unit.head;
    if (kOutput || unit.has_values) {
#pragma unroll
      for (int i = 0; i < kValueTiles; ++i) {
        at.column = unit.value + 64 * i;
        tma_load(tiles + Shared::kV + i * kTileBytes, args.maps.v, at, barrier);
      }
    }
    at.column = 0;
    tma_load(tiles + Shared::kA, args.maps.A_upper, at, barrier);
    at.token += kRows / 2;
    tma_load(tiles + Shared::kA + kTileBytes / 2, args.maps.A_lower, at, barrier);
    bulk_load(shared.factor(stage),
              args.factors + static_cast<int64_t>(unit.slot + chunk) * args.value_heads + unit.head,
              sizeof(ChunkFactors), barrier);
  }
};

template <class T, int kKeyDim, int kValueTiles>
struct Feeder {
  using Shared = ForwardShared<kKeyDim, kValueTiles, true>;

  const ForwardArgs& args;
  const Unit& unit;
  typename Shared::Map shared;

  // Zeroes the rows past the sequence's end, which hold tokens of the next one, in every tile of the stage.
  __device__ __forceinline__ void trim(int stage, int thread) const {
    const int pieces = (kRows - unit.tail_length) * 8;
#pragma unroll 1
    for (int tile = 0; tile < static_cast<int>(sizeof(typename Shared::Stage)) / kTileBytes; ++tile) {
      const uint32_t rows = shared.stage(stage) + tile * kTileBytes + unit.tail_length * 128;
#pragma unroll 1
      for (int i = thread; i < pieces; i += kWarpgroupThreads) {
        clear_shared_vector(rows + 16 * i);
      }
    }
    fence_async_shared();
    sync_named(static_cast<int>(NamedBarrier::kLoader), kWarpgroupThreads);
    mbarrier_arrive_group(shared.trimmed_barrier());
  }

  __device__ __forceinline__ void run() const {
    const int thread = warpgroup_thread();
    const int lane = lane_id();
    const int warp = thread / 32;
    const int n = unit.num_chunks;
    const Loader<kKeyDim, kValueTiles, true> loader = {args, unit, shared};
    if (thread == 0) {
      for (int c = 0; c < Shared::kStages && c < n; ++c) loader.load(c, c);
    }
    // Above the diagonal blocks the buffers stay zero.
    for (int i = thread; i < kScoreBuffers * kTileBytes / 16; i += kWarpgroupThreads) {
      clear_shared_vector(shared.score(0) + 16 * i);
    }
    sync_named(static_cast<int>(NamedBarrier::kLoader), kWarpgroupThreads);
    const uint32_t operand = wgmma_operand(shared.base);
    const int row = warp * 16 + lane / 4;
    const int column = 2 * (lane & 3);
    const uint32_t store_row = (warp * 16 + (lane & 7) + ((lane >> 3) & 1) * 8) * 128;
    int stage = 0;
    int phase = 0;
#pragma unroll 1
    for (int c = 0; c < n; ++c) {
      const uint32_t tiles = operand + stage * static_cast<uint32_t>(sizeof(typename Shared::Stage) / 16);
      const uint32_t factors = shared.factor(stage);
      const uint32_t target = shared.score(c & 1) + store_row;
      mbarrier_wait(shared.full_barrier(stage), phase);
      if (c == n - 1 && unit.tail_length < kRows) trim(stage, thread);

      float p[32];
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kKeyDim / 16; ++k) {
        const int at = (k / 4) * kTileBytes + (k % 4) * 32;
        const uint64_t q_step = wgmma_descriptor(tiles, Shared::kQ + at);
        const uint64_t k_step = wgmma_descriptor(tiles, at);
        if (k == 0) {
          wgmma_ss_n64_first<T>(p, q_step, k_step);
        } else {
          wgmma_ss_n64<T>(p, q_step, k_step);
        }
      }
      wgmma_commit();
      const float gamma0 = load_shared(factors + offsetof(ChunkFactors, gamma) + 4 * row) + args.log2_scale;
      const float gamma1 = load_shared(factors + offsetof(ChunkFactors, gamma) + 4 * row + 32) + args.log2_scale;
      // Chunk c - 2 had this buffer of scores; its stage is the next one to load.
      static_assert(kScoreBuffers == 2);
      const int next = stage < 2 ? stage + Shared::kStages - 2 : stage - 2;
      if (c >= 2) {
        mbarrier_wait(shared.empty_barrier(next), ((c - 2) / Shared::kStages) & 1);
        const int ahead = c - 2 + Shared::kStages;
        if (thread == 0 && ahead < n) loader.load(ahead, next);
      }
      wgmma_wait<0>();
      const auto gate = [&](int i, int j) {  // 8 columns from 8 i on; j: the block of 16 that they are in
        const int at = 8 * i + column;
        const float2 gamma = load_shared_pair(factors + offsetof(ChunkFactors, gamma) + 4 * at);
        p[4 * i] *= exp2_approx(gamma0 - gamma.x);
        p[4 * i + 1] *= exp2_approx(gamma0 - gamma.y);
        p[4 * i + 2] *= exp2_approx(gamma1 - gamma.x);
        p[4 * i + 3] *= exp2_approx(gamma1 - gamma.y);
        if (j == warp) {
          if (at > row) p[4 * i] = 0.0f;
          if (at + 1 > row) p[4 * i + 1] = 0.0f;
          if (at > row + 8) p[4 * i + 2] = 0.0f;
          if (at + 1 > row + 8) p[4 * i + 3] = 0.0f;
        }
      };
      const auto first_row = [&](int r) {
        return load_shared_byte(factors + static_cast<uint32_t>(offsetof(ChunkFactors, first)) + r);
      };
      const bool restarts = first_row(kRows - 1) != 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j > warp) continue;
        gate(2 * j, j);
        gate(2 * j + 1, j);
        if (restarts) {
          const int first0 = first_row(row);
          const int first1 = first_row(row + 8);
#pragma unroll
          for (int i = 2 * j; i < 2 * j + 2; ++i) {
            const int at = 8 * i + column;
            if (at < first0) p[4 * i] = 0.0f;
            if (at + 1 < first0) p[4 * i + 1] = 0.0f;
            if (at < first1) p[4 * i + 2] = 0.0f;
            if (at + 1 < first1) p[4 * i + 3] = 0.0f;
          }
        }
        stmatrix_x4(target + (((2 * j + (lane >> 4)) ^ (lane & 7)) * 16),
                    pack2<T>(p[8 * j], p[8 * j + 1]) ^ args.scale_sign,
                    pack2<T>(p[8 * j + 2], p[8 * j + 3]) ^ args.scale_sign,
                    pack2<T>(p[8 * j + 4], p[8 * j + 5]) ^ args.scale_sign,
                    pack2<T>(p[8 * j + 6], p[8 * j + 7]) ^ args.scale_sign);
      }
      fence_async_shared();
      mbarrier_arrive_warp(shared.scored_barrier(c & 1));
      if (++stage == Shared::kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
  }
};

// Without output: loads alone. One thread of the warpgroup does them.
template <int kKeyDim, int kValueTiles>
struct SummaryFeeder {
  using Shared = ForwardShared<kKeyDim, kValueTiles, false>;

  const ForwardArgs& args;
  const Unit& unit;
  typename Shared::Map shared;

  __device__ __forceinline__ void run() const {
    const Loader<kKeyDim, kValueTiles, false> loader = {args, unit, shared};
    if (!unit.has_values) {
#pragma unroll 1
      for (int stage = 0; stage < Shared::kStages; ++stage) {
        for (int i = warpgroup_thread(); i < kValueTiles * kTileBytes / 16; i += kWarpgroupThreads) {
          clear_shared_vector(shared.stage(stage) + Shared::kV + 16 * i);
        }
      }
      sync_named(static_cast<int>(NamedBarrier::kLoader), kWarpgroupThreads);
    }
    if (warpgroup_thread() != 0) return;
    int stage = 0;
    int phase = 1;  // of the stages' release: nobody has to release them for the first round
#pragma unroll 1
    for (int c = 0; c < unit.num_chunks; ++c) {
      if (c >= Shared::kStages) mbarrier_wait(shared.empty_barrier(stage), phase);
      loader.load(c, stage);
      if (++stage == Shared::kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
  }
};

}  // namespace cula::gdn::sm90
