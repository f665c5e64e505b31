// The warpgroup of a scan that loads chunks by TMA, as many ahead as there are stages but one, and for the adjoint
// makes P = scale Q K^T o decay one ahead.
#pragma once

#include "gdn/sm90/collective/scan_pipeline.cuh"

namespace cula::gdn::sm90 {

// Loads chunks, counted in the order of the pass. All by one thread.
template <int kKeyDim, bool kAdjoint>
struct ScanLoader {
  using Shared = ScanShared<kKeyDim, kAdjoint>;
  static constexpr int kKeyTiles = Shared::kKeyTiles;

  const ScanArgs& args;
  const ScanUnit& unit;
  typename Shared::Map shared;

  __device__ __forceinline__ int chunk_at(int step) const { return kAdjoint ? unit.num_chunks - 1 - step : step; }

  __device__ __forceinline__ void load(int step, int stage) const {
    const int chunk = chunk_at(step);
    const uint32_t barrier = shared.full_barrier(stage);
    const bool has_values = kAdjoint || !unit.is_transition;
    const int absent = has_values ? 0 : kTileBytes;
    mbarrier_arrive_expect(barrier, static_cast<int>(sizeof(typename Shared::Stage) + sizeof(ChunkFactors)) - absent);
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

  // Zeroes the rows past the sequence's end, which hold tokens of the next one. By a warpgroup; a barrier must follow.
  __device__ __forceinline__ void trim(int stage) const {
    const int pieces = (kRows - unit.tail_length) * 8;
#pragma unroll 1
    for (int tile = 0; tile < Shared::kStageTiles; ++tile) {
      const uint32_t rows = shared.stage(stage) + tile * kTileBytes + unit.tail_length * 128;
#pragma unroll 1
      for (int i = warpgroup_thread(); i < pieces; i += kWarpgroupThreads) {
        clear_shared_vector(rows + 16 * i);
      }
    }
    fence_async_shared();
  }
};

template <class T, int kKeyDim, bool kAdjoint>
struct ScanFeeder {
  using Shared = ScanShared<kKeyDim, kAdjoint>;

  const ScanArgs& args;
  const ScanUnit& unit;
  typename Shared::Map shared;

  __device__ __forceinline__ static void sync_feeder() {
    sync_named(static_cast<int>(NamedBarrier::kLoader), kWarpgroupThreads);
  }

  // P = scale Q K^T o decay, on and below the diagonal, of the chunk whose tiles these are. wait: until its place is
  // free.
  template <class F>
  __device__ __forceinline__ void make_scores(uint32_t tiles, uint32_t factors, uint32_t target, int warp,
                                              F&& wait) const {
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
    wait();
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
    const ScanLoader<kKeyDim, kAdjoint> loader = {args, unit, shared};
    if (thread == 0) {
      for (int c = 0; c < Shared::kStages - 1 && c < n; ++c) loader.load(c, c);
    }
    if constexpr (kAdjoint) {  // above the diagonal blocks the buffers stay zero
      for (int i = thread; i < kScoreBuffers * kTileBytes / 16; i += kWarpgroupThreads) {
        clear_shared_vector(shared.score(0) + 16 * i);
      }
      sync_feeder();
    }
    const uint32_t operand = wgmma_operand(shared.base);
    const uint32_t store_row = (warp * 16 + (lane & 7) + ((lane >> 3) & 1) * 8) * 128;
    int stage = 0;
    int phase = 0;
#pragma unroll 1
    for (int c = 0; c < n; ++c) {
      mbarrier_wait(shared.full_barrier(stage), phase);
      if (loader.chunk_at(c) == n - 1 && unit.tail_length < kRows) {
        loader.trim(stage);
        sync_feeder();
        mbarrier_arrive_group(shared.trimmed_barrier());
      }
      if constexpr (kAdjoint) {
        const int buffer = c % kScoreBuffers;
        make_scores(operand + stage * (sizeof(typename Shared::Stage) / 16), shared.factor(stage),
                    shared.score(buffer) + store_row, warp, [&] {
                      if (c >= kScoreBuffers) {
                        mbarrier_wait(shared.read_barrier(buffer), (c / kScoreBuffers - 1) & 1);
                      }
                    });
        fence_async_shared();
        mbarrier_arrive_warp(shared.scored_barrier(buffer));
      }
      if (thread == 0) {
        const int ahead = c + Shared::kStages - 1;
        const int next = stage == 0 ? Shared::kStages - 1 : stage - 1;  // the stage of chunk c - 1
        if (c >= 1) mbarrier_wait(shared.empty_barrier(next), ((c - 1) / Shared::kStages) & 1);
        if (ahead < n) loader.load(ahead, next);
      }
      if constexpr (kAdjoint) {
        sync_warp();
      } else {
        sync_feeder();  // else a warp might miss a whole phase of a stage, whose release does not wait for it
      }
      if (++stage == Shared::kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
  }
};

}  // namespace cula::gdn::sm90
