// The warpgroup that feeds the consumers: it loads chunks by TMA, two ahead, and makes P = scale Q K^T o decay one
// ahead.
#pragma once

#include "gdn/sm90/collective/pipeline.cuh"

namespace cula::gdn::sm90 {

template <class T, int kKeyDim, int kValueTiles>
struct Feeder {
  using Shared = ForwardShared<kKeyDim, kValueTiles>;
  static constexpr int kKeyTiles = Shared::kKeyTiles;

  const ForwardArgs& args;
  const Unit& unit;
  typename Shared::Map shared;

  // By one thread.
  __device__ __forceinline__ void load(int chunk, int stage) const {
    const uint32_t barrier = shared.full_barrier(stage);
    mbarrier_arrive_expect(barrier, sizeof(typename Shared::Stage) + sizeof(ChunkFactors));
    uint32_t tile = shared.stage(stage);
    BoxOrigin at = {0, unit.key_head, static_cast<int>(unit.sequence.begin) + chunk * kRows,
                    static_cast<int>(unit.sequence.batch)};
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i, tile += kTileBytes) {
      at.column = 64 * i;
      tma_load(tile, args.maps.k, at, barrier);
    }
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i, tile += kTileBytes) {
      at.column = 64 * i;
      tma_load(tile, args.maps.q, at, barrier);
    }
    at.head = unit.head;
#pragma unroll
    for (int i = 0; i < kValueTiles; ++i, tile += kTileBytes) {
      at.column = unit.value + 64 * i;
      tma_load(tile, args.maps.v, at, barrier);
    }
    at.column = 0;
    tma_load(tile, args.maps.A, at, barrier);
    bulk_load(shared.factor(stage), args.factors + (unit.sequence.first_slot + chunk) * args.value_heads + unit.head,
              sizeof(ChunkFactors), barrier);
  }

  // Zeroes the rows past the sequence's end, which hold tokens of the next one, in every tile of the stage.
  __device__ __forceinline__ void trim(int stage, int thread) const {
    const int pieces = (kRows - unit.tail_length) * 8;
#pragma unroll 1
    for (int tile = 0; tile < static_cast<int>(sizeof(typename Shared::Stage)) / kTileBytes; ++tile) {
      const uint32_t rows = shared.stage(stage) + tile * kTileBytes + unit.tail_length * 128;
#pragma unroll 1
      for (int i = thread; i < pieces; i += kWarpgroupThreads) {
        asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(rows + 16 * i), "r"(0) : "memory");
      }
    }
    fence_async_shared();
    sync_named(static_cast<int>(NamedBarrier::kLoader), kWarpgroupThreads);
    if (thread == 0) mbarrier_arrive(shared.trimmed_barrier());
  }

  __device__ __forceinline__ void run() const {
    const int thread = warpgroup_thread();
    const int lane = lane_id();
    const int warp = thread / 32;
    const int n = unit.num_chunks;
    // Above the diagonal blocks the buffers stay zero.
    for (int i = thread; i < kScoreBuffers * kTileBytes / 16; i += kWarpgroupThreads) {
      asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(shared.score(0) + 16 * i), "r"(0) : "memory");
    }
    if (thread == 0) {
      for (int c = 0; c < kStages - 1 && c < n; ++c) load(c, c);
    }
    const uint32_t operand = wgmma_operand(shared.base);
    const int row = warp * 16 + lane / 4;
    const int column = 2 * (lane & 3);
    const uint32_t store_row = (warp * 16 + (lane & 7) + ((lane >> 3) & 1) * 8) * 128;
    int stage = 0;
    int phase = 0;
#pragma unroll 1
    for (int c = 0; c < n; ++c) {
      const uint32_t tiles = operand + stage * (sizeof(typename Shared::Stage) / 16);
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
      const float gamma0 = load_shared(factors + offsetof(ChunkFactors, gamma) + 4 * row);
      const float gamma1 = load_shared(factors + offsetof(ChunkFactors, gamma) + 4 * row + 32);
      wgmma_wait<0>();
      const auto gate = [&](int i, int j) {  // 8 columns from 8 i on; j: the block of 16 that they are in
        const int at = 8 * i + column;
        const float2 gamma = load_shared_pair(factors + offsetof(ChunkFactors, gamma) + 4 * at);
        p[4 * i] *= args.scale * exp2_approx(gamma0 - gamma.x);
        p[4 * i + 1] *= args.scale * exp2_approx(gamma0 - gamma.y);
        p[4 * i + 2] *= args.scale * exp2_approx(gamma1 - gamma.x);
        p[4 * i + 3] *= args.scale * exp2_approx(gamma1 - gamma.y);
        if (j == warp) {
          if (at > row) p[4 * i] = 0.0f;
          if (at + 1 > row) p[4 * i + 1] = 0.0f;
          if (at > row + 8) p[4 * i + 2] = 0.0f;
          if (at + 1 > row + 8) p[4 * i + 3] = 0.0f;
        }
      };
      const auto first_row = [&](int r) {
        uint32_t first;
        asm volatile("ld.shared.u8 %0, [%1];"
                     : "=r"(first)
                     : "r"(factors + static_cast<uint32_t>(offsetof(ChunkFactors, first)) + r));
        return static_cast<int>(first);
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
        stmatrix_x4(target + (((2 * j + (lane >> 4)) ^ (lane & 7)) * 16), pack2<T>(p[8 * j], p[8 * j + 1]),
                    pack2<T>(p[8 * j + 2], p[8 * j + 3]), pack2<T>(p[8 * j + 4], p[8 * j + 5]),
                    pack2<T>(p[8 * j + 6], p[8 * j + 7]));
      }
      fence_async_shared();
      sync_named(static_cast<int>(NamedBarrier::kLoader), kWarpgroupThreads);
      if (thread == 0) {
        mbarrier_arrive(shared.scored_barrier(c & 1));
        const int ahead = c + kStages - 1;
        const int next = stage == 0 ? kStages - 1 : stage - 1;  // the stage of chunk c - 1, and of chunk c + 2
        if (c >= 1) mbarrier_wait(shared.empty_barrier(next), ((c - 1) / kStages) & 1);
        if (ahead < n) load(ahead, next);
      }
      // The scores of chunk c + 1 go where those of chunk c - 1 were: nobody goes on before these are read.
      sync_named(static_cast<int>(NamedBarrier::kLoader), kWarpgroupThreads);
      if (++stage == kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
  }
};

}  // namespace cula::gdn::sm90
