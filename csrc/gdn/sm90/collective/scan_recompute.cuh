// A consumer that recomputes states, forward in time; the steps are those of the forward pass without its output:
//
//   U' = S' K'           W' = beta V' - beta decay U'       V'' = W' A'
//   S' <- chunk_decay S' + (to_end V'') K
#pragma once

#include "gdn/sm90/collective/scan_state.cuh"

namespace cula::gdn::sm90 {

template <class T, int kKeyDim, ScanKind kKind>
struct RecomputeConsumer : ScanState<T, kKeyDim, kKind, false> {
  using State = ScanState<T, kKeyDim, kKind, false>;
  using State::args, State::unit, State::shared;
  using typename State::Shared;

  __device__ __forceinline__ void run() const {
    const int lane = lane_id();
    const int n = unit.num_chunks;
    const bool has_tail = unit.tail_length < kRows;
    const uint32_t operand = wgmma_operand(shared.base);
    const uint32_t value_at = State::value_offset();
    float s[State::kStateRegisters];
    uint32_t s_operand[State::kStateRegisters / 2];
    float u[32];
    uint32_t rows[16] = {};
    const auto send_rows = [&](int chunk, bool leader) {
      if (leader) bulk_store(args.residual + State::image(chunk), shared.rows(), kTileBytes);
    };
    State::load_state(s, unit.enters);
    pack_operands<T>(s_operand, s);
    int stage = 0;
    int phase = 0;
#pragma unroll 1
    for (int c = 0; c < n; ++c) {
      const uint32_t tiles = operand + stage * (sizeof(typename Shared::Stage) / 16);
      const uint32_t factors = shared.factor(stage) + 8 * (lane & 3);
      uint32_t w[16];
      uint32_t x[16];
      float2 b[8];
      float2 e[8];
      const auto load_factors = [&](float2(&f)[8], size_t which) {
#pragma unroll
        for (int j = 0; j < 8; ++j) f[j] = load_shared_pair(factors + static_cast<uint32_t>(which) + 32 * j);
      };
      mbarrier_wait(shared.full_barrier(stage), phase);
      if (has_tail && c == n - 1) mbarrier_wait(shared.trimmed_barrier(), 0);

      wgmma_fence();
      State::template multiply<kKeyDim / 16>(u, s_operand, tiles, 0);  // U' = S' K'
      wgmma_commit();
      State::put(s_operand, rows, value_at, c, stage == 0 ? Shared::kStages - 1 : stage - 1);
      State::load_values(x, shared.stage(stage) + Shared::kValues, value_at);
      if constexpr (kKind == ScanKind::kSummary) {
#pragma unroll
        for (int i = 0; i < 16; ++i) x[i] = unit.is_transition ? 0 : x[i];
      }
      load_factors(b, offsetof(ChunkFactors, beta));
      load_factors(e, offsetof(ChunkFactors, beta_decay));
      wgmma_wait<0>();  // U

#pragma unroll
      for (int j = 0; j < 8; ++j) {  // W' = beta V' - beta decay U'
        const float2 v0 = unpack2<T>(x[2 * j]);
        const float2 v1 = unpack2<T>(x[2 * j + 1]);
        w[2 * j] = pack_operand<T>(b[j].x * v0.x - e[j].x * u[4 * j], b[j].y * v0.y - e[j].y * u[4 * j + 1]);
        w[2 * j + 1] = pack_operand<T>(b[j].x * v1.x - e[j].x * u[4 * j + 2], b[j].y * v1.y - e[j].y * u[4 * j + 3]);
      }
      wgmma_fence();
      State::template multiply<kRows / 16>(u, w, tiles, Shared::kA);  // V'' = W' A'
      wgmma_commit();
      const float chunk_decay = load_shared(shared.factor(stage) + offsetof(ChunkFactors, chunk_decay));
      load_factors(b, offsetof(ChunkFactors, to_end));
      State::send(c, args.S, c, c - 1, send_rows);
#pragma unroll
      for (int i = 0; i < State::kStateRegisters; ++i) s[i] *= chunk_decay;
      wgmma_wait<0>();  // V''

#pragma unroll
      for (int j = 0; j < 8; ++j) {
        w[2 * j] = pack_operand<T>(b[j].x * u[4 * j], b[j].y * u[4 * j + 1]);
        w[2 * j + 1] = pack_operand<T>(b[j].x * u[4 * j + 2], b[j].y * u[4 * j + 3]);
        rows[2 * j] = pack_operand<T>(u[4 * j], u[4 * j + 1]);
        rows[2 * j + 1] = pack_operand<T>(u[4 * j + 2], u[4 * j + 3]);
      }
      wgmma_fence();
      State::update(s, w, tiles, 0);  // S' += (to_end V'') K
      wgmma_commit();
      wgmma_wait<0>();
      pack_operands<T>(s_operand, s);
      if (++stage == Shared::kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
    if (n > 0) State::send_last_rows(n - 1, rows, value_at, send_rows);
    if constexpr (kKind == ScanKind::kSummary) State::store_state(s, unit.leaves);
  }
};

}  // namespace cula::gdn::sm90
