// A consumer that carries the transition M of a sequence forward in time. M obeys the recurrence of the state with no
// values, from the identity:
//
//   U' = M' K'           W' = -beta decay U'       V'' = W' A'
//   M' <- chunk_decay M' + (to_end V'') K
//
// Other members of a group rely on M, so what is rounded for these products goes into each as two terms, which together
// have twice an operand's bits.
#pragma once

#include "gdn/sm90/collective/scan_state.cuh"

namespace cula::gdn::sm90 {

template <class T, int kKeyDim>
struct TransitionConsumer : ScanState<T, kKeyDim, ScanKind::kSummary, false> {
  using State = ScanState<T, kKeyDim, ScanKind::kSummary, false>;
  using State::args, State::unit, State::shared;
  using typename State::Shared;

  // d = (first + rest) (rows of the K-major tiles at `offset`)^T
  template <int kSteps>
  __device__ __forceinline__ static void multiply_terms(float (&d)[32], const uint32_t* first, const uint32_t* rest,
                                                        uint32_t tiles, int offset) {
    State::template multiply<kSteps>(d, first, tiles, offset);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      wgmma_rs_n64<T>(d, rest + 4 * k, wgmma_descriptor(tiles, offset + (k / 4) * kTileBytes + (k % 4) * 32));
    }
  }

  __device__ __forceinline__ void run() const {
    const int n = unit.num_chunks;
    const bool has_tail = unit.tail_length < kRows;
    const uint32_t operand = wgmma_operand(shared.base);
    float m[State::kStateRegisters];
    uint32_t first[State::kStateRegisters / 2];
    uint32_t rest[State::kStateRegisters / 2];
    float u[32];
    State::load_state(m, unit.enters);
    split_operands<T>(first, rest, m);
    int stage = 0;
    int phase = 0;
#pragma unroll 1
    for (int c = 0; c < n; ++c) {
      const uint32_t tiles = operand + stage * (sizeof(typename Shared::Stage) / 16);
      const uint32_t factors = shared.factor(stage) + 8 * (lane_id() & 3);
      uint32_t w_first[16];
      uint32_t w_rest[16];
      float2 f[8];
      const auto load_factors = [&](size_t which) {
#pragma unroll
        for (int j = 0; j < 8; ++j) f[j] = load_shared_pair(factors + static_cast<uint32_t>(which) + 32 * j);
      };
      const auto scale_columns = [&](float sign) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          u[4 * j] *= sign * f[j].x;
          u[4 * j + 1] *= sign * f[j].y;
          u[4 * j + 2] *= sign * f[j].x;
          u[4 * j + 3] *= sign * f[j].y;
        }
      };
      mbarrier_wait(shared.full_barrier(stage), phase);
      if (has_tail && c == n - 1) mbarrier_wait(shared.trimmed_barrier(), 0);

      wgmma_fence();
      multiply_terms<kKeyDim / 16>(u, first, rest, tiles, 0);  // U' = M' K'
      wgmma_commit();
      State::sync_group();  // all warps have left the chunk before
      if (c > 0) mbarrier_arrive_group(shared.empty_barrier(stage == 0 ? Shared::kStages - 1 : stage - 1));
      load_factors(offsetof(ChunkFactors, beta_decay));
      wgmma_wait<0>();  // U

      scale_columns(-1.0f);  // W' = -beta decay U'
      split_operands<T>(w_first, w_rest, u);
      wgmma_fence();
      multiply_terms<kRows / 16>(u, w_first, w_rest, tiles, Shared::kA);  // V'' = W' A'
      wgmma_commit();
      const float chunk_decay = load_shared(shared.factor(stage) + offsetof(ChunkFactors, chunk_decay));
      load_factors(offsetof(ChunkFactors, to_end));
#pragma unroll
      for (int i = 0; i < State::kStateRegisters; ++i) m[i] *= chunk_decay;
      wgmma_wait<0>();  // V''

      scale_columns(1.0f);
      split_operands<T>(w_first, w_rest, u);
      wgmma_fence();
      State::update(m, w_first, tiles, 0);  // M' += (to_end V'') K
      State::update(m, w_rest, tiles, 0);
      wgmma_commit();
      wgmma_wait<0>();
      split_operands<T>(first, rest, m);
      if (++stage == Shared::kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
    State::store_state(m, unit.leaves);
  }
};

}  // namespace cula::gdn::sm90
