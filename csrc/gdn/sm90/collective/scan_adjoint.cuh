// A consumer that carries the gradient of the state back in time:
//
//   X' = (D' K') to_end + dO' P        dW' = X' A        dv = beta dW
//   D' <- chunk_decay D' + (out_decay dO)' Q - (beta decay dW)' K
//
// What passes fp16's range becomes infinite here, as in every conversion, and then shows in the results: gradients that
// overflow must not look like numbers.
#pragma once

#include "gdn/sm90/collective/scan_state.cuh"

namespace cula::gdn::sm90 {

template <class T, int kKeyDim, ScanKind kKind>
struct AdjointConsumer : ScanState<T, kKeyDim, kKind, true> {
  using State = ScanState<T, kKeyDim, kKind, true>;
  using State::args, State::unit, State::shared;
  using typename State::Shared;

  __device__ __forceinline__ static void pack(uint32_t (&operand)[State::kStateRegisters / 2],
                                              const float (&s)[State::kStateRegisters]) {
#pragma unroll
    for (int i = 0; i < State::kStateRegisters / 2; ++i) operand[i] = pack2<T>(s[2 * i], s[2 * i + 1]);
  }

  // Rows of the chunk to dv, but of those past its end none, since they are tokens of the next sequence.
  __device__ __forceinline__ void send_rows(int chunk, bool leader) const {
    const int token = unit.token + chunk * kRows;
    if (chunk == unit.num_chunks - 1 && unit.tail_length < kRows) {
      const int piece = warpgroup_thread() & 7;
      T* out = static_cast<T*>(args.dv.data) + args.dv.offset(unit.batch, token, unit.head) + 64 * unit.value_tile +
               8 * piece;
#pragma unroll 1
      for (int row = warpgroup_thread() / 8; row < unit.tail_length; row += kWarpgroupThreads / 8) {
        *reinterpret_cast<uint4*>(out + row * args.dv.stride[1]) =
            load_shared_vector(shared.rows() + swizzled(row, piece));
      }
    } else if (leader) {
      tma_store(args.maps.dv, {64 * unit.value_tile, unit.head, token, unit.batch}, shared.rows());
    }
  }

  __device__ __forceinline__ void run() const {
    const int lane = lane_id();
    const int n = unit.num_chunks;
    const bool has_tail = unit.tail_length < kRows;
    const uint32_t operand = wgmma_operand(shared.base);
    const uint32_t score_operand = wgmma_operand(shared.score(0));
    const uint32_t value_at = State::value_offset();
    float d[State::kStateRegisters];
    uint32_t d_operand[State::kStateRegisters / 2];
    float x[32];
    uint32_t rows[16] = {};
    State::load_state(d, unit.enters);
    pack(d_operand, d);
    int stage = 0;
    int phase = 0;
#pragma unroll 1
    for (int c = 0; c < n; ++c) {
      const uint32_t tiles = operand + stage * (sizeof(typename Shared::Stage) / 16);
      const uint32_t factors = shared.factor(stage) + 8 * (lane & 3);
      uint32_t w[16];
      uint32_t o[16];
      uint32_t y[16];
      float2 f[8];
      const auto load_factors = [&](size_t which) {
#pragma unroll
        for (int j = 0; j < 8; ++j) f[j] = load_shared_pair(factors + static_cast<uint32_t>(which) + 32 * j);
      };
      mbarrier_wait(shared.full_barrier(stage), phase);
      if (has_tail && c == 0) mbarrier_wait(shared.trimmed_barrier(), 0);

      wgmma_fence();
      State::template multiply<kKeyDim / 16>(x, d_operand, tiles, 0);  // X' = D' K'
      wgmma_commit();
      State::put(d_operand, rows, value_at, c, stage == 0 ? Shared::kStages - 1 : stage - 1);
      State::load_values(o, shared.stage(stage) + Shared::kValues, value_at);
      load_factors(offsetof(ChunkFactors, out_decay));
      const float chunk_decay = load_shared(shared.factor(stage) + offsetof(ChunkFactors, chunk_decay));
      const auto decay_gradient = [&] {
#pragma unroll
        for (int i = 0; i < State::kStateRegisters; ++i) d[i] *= chunk_decay;
      };
      // Under X, but in a summary behind it: in a kernel that has two consumers ptxas would wait for X there by itself.
      if constexpr (kKind == ScanKind::kImages) decay_gradient();
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 o0 = unpack2<T>(o[2 * j]);
        const float2 o1 = unpack2<T>(o[2 * j + 1]);
        y[2 * j] = pack2<T>(f[j].x * o0.x, f[j].y * o0.y);
        y[2 * j + 1] = pack2<T>(f[j].x * o1.x, f[j].y * o1.y);
      }
      load_factors(offsetof(ChunkFactors, to_end));
      wgmma_wait<0>();  // X
      if constexpr (kKind == ScanKind::kSummary) decay_gradient();

#pragma unroll
      for (int j = 0; j < 8; ++j) {
        x[4 * j] *= f[j].x;
        x[4 * j + 1] *= f[j].y;
        x[4 * j + 2] *= f[j].x;
        x[4 * j + 3] *= f[j].y;
      }
      const int buffer = c % kScoreBuffers;
      mbarrier_wait(shared.scored_barrier(buffer), (c / kScoreBuffers) & 1);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kRows / 16; ++k) {  // X' += dO' P
        wgmma_rs_n64_transposed<T>(x, o + 4 * k,
                                   wgmma_descriptor(score_operand + buffer * (kTileBytes / 16), k * 2048));
      }
      wgmma_commit();
      State::update(d, y, tiles, Shared::kQ);  // D' += (out_decay dO)' Q
      wgmma_commit();
      State::send(c, args.D, n - 1 - c, n - c, [&](int chunk, bool leader) { send_rows(chunk, leader); });
      wgmma_wait<1>();  // X
      mbarrier_arrive_warp(shared.read_barrier(buffer));
#pragma unroll
      for (int i = 0; i < 16; ++i) w[i] = pack2<T>(x[2 * i], x[2 * i + 1]);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kRows / 16; ++k) {  // dW' = X' A
        const uint64_t a = wgmma_descriptor(tiles, Shared::kA + k * 2048);
        if (k == 0) {
          wgmma_rs_n64_transposed_first<T>(x, w + 4 * k, a);
        } else {
          wgmma_rs_n64_transposed<T>(x, w + 4 * k, a);
        }
      }
      wgmma_commit();
      load_factors(offsetof(ChunkFactors, beta_decay));
      wgmma_wait<0>();  // dW, D
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        y[2 * j] = pack2<T>(-f[j].x * x[4 * j], -f[j].y * x[4 * j + 1]);
        y[2 * j + 1] = pack2<T>(-f[j].x * x[4 * j + 2], -f[j].y * x[4 * j + 3]);
      }
      wgmma_fence();
      State::update(d, y, tiles, 0);  // D' -= (beta decay dW)' K
      wgmma_commit();
      if constexpr (kKind == ScanKind::kImages) {
        load_factors(offsetof(ChunkFactors, beta));
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float low = row_scale<T>(f[j].x);
          const float high = row_scale<T>(f[j].y);
          rows[2 * j] = pack2<T>(low * x[4 * j], high * x[4 * j + 1]);
          rows[2 * j + 1] = pack2<T>(low * x[4 * j + 2], high * x[4 * j + 3]);
        }
      }
      wgmma_wait<0>();
      pack(d_operand, d);
      if (++stage == Shared::kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
    if (n > 0) {
      State::send_last_rows(0, rows, value_at, [&](int chunk, bool leader) { send_rows(chunk, leader); });
    }
    State::store_state(d, unit.leaves);
  }
};

}  // namespace cula::gdn::sm90
