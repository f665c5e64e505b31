// The warpgroup of a scan that loads chunks by TMA, two ahead, and for the adjoint makes P = scale Q K^T o decay one
// ahead.
#pragma once

#include "gdn/sm90/collective/scan_pipeline.cuh"

namespace cula::gdn::sm90 {

template <class T, int kKeyDim, bool kAdjoint>
struct ScanFeeder {
  using Shared = ScanShared<kKeyDim>;
  static constexpr int kKeyTiles = Shared::kKeyTiles;
  static constexpr int kTilesUsed = kAdjoint ? 2 * kKeyTiles + 2 : kKeyTiles + 2;

  const ScanArgs& args;
  const ScanUnit& unit;
  typename Shared::Map shared;

  // Chunks count in the order of the pass.
  __device__ __forceinline__ int chunk_at(int step) const { return kAdjoint ? unit.num_chunks - 1 - step : step; }

  __device__ __forceinline__ void load(int step, int stage) const {
    const int chunk = chunk_at(step);
    const uint32_t barrier = shared.full_barrier(stage);
    const bool has_values = kAdjoint || !unit.is_transition;
    const int tile_count = has_values ? kTilesUsed : kTilesUsed - 1;
    mbarrier_arrive_expect(barrier, tile_count * kTileBytes + static_cast<int>(sizeof(ChunkFactors)));
    const uint32_t tiles = shared.stage(stage);
    BoxOrigin at = {0, unit.key_head, unit.token + chunk * kRows, unit.batch};
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
      at.column = 64 * i;
      tma_load(tiles + i * kTileBytes, args.maps.k, at, barrier);
      if constexpr (kAdjoint) tma_load(tiles + Shared::kQ + i * kTileBytes, args.maps.q, at, barrier);
    }
    at.head = unit.head;
    at.column = 0;
    tma_load(tiles + Shared::kA, args.maps.A, at, barrier);
    at.column = 64 * unit.value_tile;
    if (has_values) tma_load(tiles + Shared::kValues, kAdjoint ? args.maps.grad_output : args.maps.v, at, barrier);
    bulk_load(shared.factor(stage),
              args.factors + static_cast<int64_t>(unit.slot + chunk) * args.value_heads + unit.head,
              sizeof(ChunkFactors), barrier);
  }

  // Zeroes the rows past the sequence's end, which hold tokens of the next one.
  __device__ __forceinline__ void trim(int stage, int thread) const {
    const int pieces = (kRows - unit.tail_length) * 8;
#pragma unroll 1
    for (int tile = 0; tile < kTilesUsed; ++tile) {
      const uint32_t rows = shared.stage(stage) + tile * kTileBytes + unit.tail_length * 128;
#pragma unroll 1
      for (int i = thread; i < pieces; i += kWarpgroupThreads) {
        clear_shared_vector(rows + 16 * i);
      }
    }
    fence_async_shared();
    sync_named(static_cast<int>(NamedBarrier::kLoader), kWarpgroupThreads);
    if (thread == 0) mbarrier_arrive(shared.trimmed_barrier());
  }

  // P = scale Q K^T o decay, on and below the diagonal, of the chunk in `stage`.
  __device__ __forceinline__ void make_scores(uint32_t tiles, uint32_t factors, uint32_t target, int warp) const {
    const int lane = lane_id();
    const int row = warp * 16 + lane / 4;
    const int column = 2 * (lane & 3);
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
    const uint32_t gammas = factors + static_cast<uint32_t>(offsetof(ChunkFactors, gamma));
    const uint32_t firsts = factors + static_cast<uint32_t>(offsetof(ChunkFactors, first));
    const float gamma0 = load_shared(gammas + 4 * row);
    const float gamma1 = load_shared(gammas + 4 * row + 32);
    const int first0 = load_shared_byte(firsts + row);
    const int first1 = load_shared_byte(firsts + row + 8);
    wgmma_wait<0>();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j > warp) continue;
#pragma unroll
      for (int i = 2 * j; i < 2 * j + 2; ++i) {
        const int at = 8 * i + column;
        const float2 gamma = load_shared_pair(gammas + 4 * at);
        const auto gate = [&](int e, int first, int last, float difference, int col) {
          const float x = p[4 * i + e] * args.scale * exp2_approx(difference);
          p[4 * i + e] = col >= first && col <= last ? x : 0.0f;
        };
        gate(0, first0, row, gamma0 - gamma.x, at);
        gate(1, first0, row, gamma0 - gamma.y, at + 1);
        gate(2, first1, row + 8, gamma1 - gamma.x, at);
        gate(3, first1, row + 8, gamma1 - gamma.y, at + 1);
      }
      stmatrix_x4(target + (((2 * j + (lane >> 4)) ^ (lane & 7)) * 16), pack2<T>(p[8 * j], p[8 * j + 1]),
                  pack2<T>(p[8 * j + 2], p[8 * j + 3]), pack2<T>(p[8 * j + 4], p[8 * j + 5]),
                  pack2<T>(p[8 * j + 6], p[8 * j + 7]));
    }
  }

  __device__ __forceinline__ void run() const {
    const int thread = warpgroup_thread();
    const int lane = lane_id();
    const int warp = warp_id() & 3;
    const int n = unit.num_chunks;
    if (thread == 0) {
      for (int c = 0; c < kStages - 1 && c < n; ++c) load(c, c);
    }
    if constexpr (kAdjoint) {  // above the diagonal blocks the buffers stay zero
      for (int i = thread; i < kScoreBuffers * kTileBytes / 16; i += kWarpgroupThreads) {
        clear_shared_vector(shared.score(0) + 16 * i);
      }
      sync_named(static_cast<int>(NamedBarrier::kLoader), kWarpgroupThreads);
    }
    const uint32_t operand = wgmma_operand(shared.base);
    const uint32_t store_row = (warp * 16 + (lane & 7) + ((lane >> 3) & 1) * 8) * 128;
    int stage = 0;
    int phase = 0;
#pragma unroll 1
    for (int c = 0; c < n; ++c) {
      mbarrier_wait(shared.full_barrier(stage), phase);
      if (chunk_at(c) == n - 1 && unit.tail_length < kRows) trim(stage, thread);
      if constexpr (kAdjoint) {
        make_scores(operand + stage * (sizeof(typename Shared::Stage) / 16), shared.factor(stage),
                    shared.score(c & 1) + store_row, warp);
        fence_async_shared();
        sync_named(static_cast<int>(NamedBarrier::kLoader), kWarpgroupThreads);
      }
      if (thread == 0) {
        if (kAdjoint) mbarrier_arrive(shared.scored_barrier(c & 1));
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
