// The stages that go through a sequence chunk by chunk, in 64 value columns of one value head, with the state (or its
// gradient) transposed in registers:
//
//   forward    Y' = U' - S' W'                    S' <- chunk_decay S' + (to_end Y') K
//   adjoint    X' = (D' K') to_end + dV'          D' <- chunk_decay D' + (out_decay dO)' Q - X' W
//
// One warpgroup advances the state; of the other one warp loads tiles, and three make the factors of a chunk each.
//
//   full[s]    the loads of stage s have landed and its factors are made    feeder -> consumer
//   empty[s]   the consumer has left the chunk of stage s                   consumer -> feeder
#pragma once

#include "gdn/sm90/collective/operand.cuh"
#include "gdn/sm90/collective/scan_state.cuh"
#include "gdn/sm90/collective/stage_tiles.cuh"

namespace cula::gdn::sm90 {

inline constexpr int kStateStages = 3;
inline constexpr int kStateStageThreads = 2 * kWarpgroupThreads;

struct StateStageArgs {
  StageGrid grid;
  int value_tiles;  // V / 64
  bool value_first;
  int64_t num_chunks;  // NT
  CUtensorMap k;
  CUtensorMap w;
  CUtensorMap u;            // or dV
  CUtensorMap q;            // of the adjoint, as dO
  CUtensorMap grad_output;  //
  CUtensorMap h;            // [B NT, K, HV, V] or, value_first, [B NT, V, HV, K]; or dh
  CUtensorMap rows;         // V' or dV2, if wanted
  TensorArg rows_out;
  TensorArg enters;  // the initial state, or the gradient of the final one
  TensorArg leaves;
};

template <int kKeyTiles, bool kAdjoint>
struct StateStageTiles {
  SwizzledTile k[kKeyTiles];
  SwizzledTile w[kKeyTiles];
  SwizzledTile values;  // U
};
template <int kKeyTiles>
struct StateStageTiles<kKeyTiles, true> {
  SwizzledTile k[kKeyTiles];
  SwizzledTile w[kKeyTiles];
  SwizzledTile values;  // dV
  SwizzledTile q[kKeyTiles];
  SwizzledTile grad_output;
};

struct StateStageUnit {
  int batch;
  int token;  // first, in its row of the batch
  int head;
  int key_head;
  int value_tile;
  int num_chunks;
  int tail_length;      // of the last chunk; 64 if it is full
  int64_t first_index;  // of the chunks, among all rows'
  int64_t sequence;
};

template <int kKeyDim, bool kAdjoint>
struct StateStageShared {
  static constexpr int kKeyTiles = kKeyDim / 64;
  using Stage = StateStageTiles<kKeyTiles, kAdjoint>;
  Stage stages[kStateStages];
  SwizzledTile state[kKeyTiles];  // on their way out
  SwizzledTile rows;
  ChunkFactors factors[kStateStages];
  uint64_t full[kStateStages];
  uint64_t empty[kStateStages];
  StateStageUnit unit;

  // Addresses in the shared window.
  struct Map {
    uint32_t base;
    __device__ uint32_t stage(int s) const { return base + s * static_cast<uint32_t>(sizeof(Stage)); }
    __device__ uint32_t state() const { return at(offsetof(StateStageShared, state)); }
    __device__ uint32_t rows() const { return at(offsetof(StateStageShared, rows)); }
    __device__ uint32_t factor(int s) const {
      return at(offsetof(StateStageShared, factors)) + s * static_cast<uint32_t>(sizeof(ChunkFactors));
    }
    __device__ uint32_t full_barrier(int s) const { return at(offsetof(StateStageShared, full)) + 8 * s; }
    __device__ uint32_t empty_barrier(int s) const { return at(offsetof(StateStageShared, empty)) + 8 * s; }

   private:
    __device__ uint32_t at(size_t offset) const { return base + static_cast<uint32_t>(offset); }
  };
  // Offsets of tiles inside a stage.
  static constexpr int kW = kKeyTiles * kTileBytes;
  static constexpr int kValues = 2 * kW;
  static constexpr int kQ = kValues + kTileBytes;
  static constexpr int kGradOutput = kQ + kW;
};

template <int kKeyDim, bool kAdjoint>
struct StateStageFeeder {
  using Shared = StateStageShared<kKeyDim, kAdjoint>;
  static constexpr int kKeyTiles = Shared::kKeyTiles;

  const StateStageArgs& args;
  const StateStageUnit& unit;
  Shared& memory;
  typename Shared::Map shared;

  // Chunks count in the order of the pass.
  __device__ __forceinline__ int chunk_at(int step) const { return kAdjoint ? unit.num_chunks - 1 - step : step; }
  __device__ __forceinline__ void wait_empty(int step, int stage) const {
    if (step >= kStateStages) mbarrier_wait(shared.empty_barrier(stage), (step / kStateStages - 1) & 1);
  }

  __device__ __forceinline__ void load_all() const {
    for (int step = 0; step < unit.num_chunks; ++step) {
      const int stage = step % kStateStages;
      const uint32_t barrier = shared.full_barrier(stage);
      const uint32_t tiles = shared.stage(stage);
      const int token = unit.token + chunk_at(step) * kRows;
      const BoxOrigin keys = {0, unit.key_head, token, unit.batch};
      const BoxOrigin values = {64 * unit.value_tile, unit.head, token, unit.batch};
      wait_empty(step, stage);
      mbarrier_arrive_expect(barrier, sizeof(typename Shared::Stage));
      load_tiles<kKeyTiles>(tiles, args.k, keys, barrier);
      load_tiles<kKeyTiles>(tiles + Shared::kW, args.w, {0, unit.head, token, unit.batch}, barrier);
      load_tiles<1>(tiles + Shared::kValues, args.u, values, barrier);
      if constexpr (kAdjoint) {
        load_tiles<kKeyTiles>(tiles + Shared::kQ, args.q, keys, barrier);
        load_tiles<1>(tiles + Shared::kGradOutput, args.grad_output, values, barrier);
      }
    }
  }

  // The factors of every kStateStages-th chunk from `first` on.
  __device__ __forceinline__ void make_factors(int first) const {
    for (int step = first; step < unit.num_chunks; step += kStateStages) {
      const int index = chunk_at(step);
      Chunk chunk;
      chunk.batch = unit.batch;
      chunk.token = unit.token + static_cast<int64_t>(index) * kRows;
      chunk.length = index == unit.num_chunks - 1 ? unit.tail_length : kRows;
      wait_empty(step, first);
      make_stage_factors(memory.factors[first], args.grid.gates, chunk, unit.head, args.grid.scale);
      mbarrier_arrive_warp(shared.full_barrier(first));
    }
  }

  __device__ __forceinline__ void run() const {
    const int warp = warp_id() & 3;
    if (warp > 0) return make_factors(warp - 1);
    if (lane_id() == 0) load_all();
  }
};

template <class T, int kKeyDim, bool kAdjoint>
struct StateStageConsumer {
  using Shared = StateStageShared<kKeyDim, kAdjoint>;
  static constexpr int kKeyTiles = Shared::kKeyTiles;
  static constexpr int kStateRegisters = kKeyDim / 2;
  using State = ScanState<T, kKeyDim, ScanKind::kImages, false>;  // for what it does in registers

  const StateStageArgs& args;
  const StateStageUnit& unit;
  typename Shared::Map shared;

  // f(register, offset): row (value) and column (key) of s[4 i + j] are accumulator_row() + 8 (j / 2) and
  // accumulator_column() + 8 i + j % 2.
  template <class F>
  __device__ __forceinline__ void for_each_element(const TensorArg& x, F&& f) const {
    const int64_t first = unit.sequence * x.stride[0] + unit.head * x.stride[1] +
                          (64 * unit.value_tile + accumulator_row()) * x.stride[3] + accumulator_column() * x.stride[2];
#pragma unroll
    for (int i = 0; i < kStateRegisters; ++i) {
      f(i, first + (8 * (i / 4) + i % 2) * x.stride[2] + 8 * (i / 2 % 2) * x.stride[3]);
    }
  }
  __device__ __forceinline__ void load_state(float (&s)[kStateRegisters]) const {
    if (!args.enters) {
#pragma unroll
      for (int i = 0; i < kStateRegisters; ++i) s[i] = 0.0f;
      return;
    }
    with_elements(args.enters.data, args.enters.dtype,
                  [&](auto* p) { for_each_element(args.enters, [&](int i, int64_t at) { s[i] = to_float(p[at]); }); });
  }
  __device__ __forceinline__ void store_state(const float (&s)[kStateRegisters]) const {
    if (!args.leaves) return;
    with_elements(args.leaves.data, args.leaves.dtype,
                  [&](auto* p) { for_each_element(args.leaves, [&](int i, int64_t at) { assign(p[at], s[i]); }); });
  }
  // Factors of tokens, which are this thread's columns.
  __device__ __forceinline__ static void load_factors(float2 (&f)[8], uint32_t factors, size_t which) {
    const uint32_t at = factors + static_cast<uint32_t>(which) + 4 * accumulator_column();
#pragma unroll
    for (int j = 0; j < 8; ++j) f[j] = load_shared_pair(at + 32 * j);
  }

  // Puts the rounded state, and the rows of the chunk before, where copies leave from. Leaves the stage of the chunk
  // before, `previous`, to the feeder. step: 0 has no chunk before it.
  __device__ __forceinline__ void put(const uint32_t (&operand)[kStateRegisters / 2], const uint32_t (&rows)[16],
                                      uint32_t value_at, int step, int previous) const {
    if (warpgroup_thread() == 0) tma_store_wait_read();
    sync_warpgroup(0);  // the tiles are free again, and all warps have left the chunk before
    if (step > 0) mbarrier_arrive_group(shared.empty_barrier(previous));
    if (args.value_first) {
#pragma unroll
      for (int i = 0; i < kKeyDim / 16; ++i) {
        const uint32_t at = block_piece(shared.state() + (i / 4) * kTileBytes, i % 4);
        stmatrix_x4(at, operand[4 * i], operand[4 * i + 1], operand[4 * i + 2], operand[4 * i + 3]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kKeyDim / 16; ++i) {
        const uint32_t at = shared.state() + (i / 4) * kTileBytes + value_at + (i % 4) * 2048;
        stmatrix_x4_trans(at, operand[4 * i], operand[4 * i + 1], operand[4 * i + 2], operand[4 * i + 3]);
      }
    }
    put_rows(rows, value_at);
  }
  __device__ __forceinline__ void put_rows(const uint32_t (&rows)[16], uint32_t value_at) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      stmatrix_x4_trans(shared.rows() + value_at + j * 2048, rows[4 * j], rows[4 * j + 1], rows[4 * j + 2],
                        rows[4 * j + 3]);
    }
  }
  __device__ __forceinline__ BoxOrigin rows_at(int chunk) const {
    return {64 * unit.value_tile, unit.head, unit.token + chunk * kRows, unit.batch};
  }
  __device__ __forceinline__ int chunk_length(int chunk) const {
    return chunk == unit.num_chunks - 1 ? unit.tail_length : kRows;
  }
  // Sends what was put: the state of `chunk`, and the rows of `rows_chunk` if that is one.
  __device__ __forceinline__ void send(int chunk, int rows_chunk) const {
    fence_async_shared();
    sync_warpgroup(0);
    if (warpgroup_thread() == 0) {
      const int index = static_cast<int>(unit.first_index) + chunk;
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) {
        const BoxOrigin at = args.value_first ? BoxOrigin{64 * i, unit.head, 64 * unit.value_tile, index}
                                              : BoxOrigin{64 * unit.value_tile, unit.head, 64 * i, index};
        tma_store(args.h, at, shared.state() + i * kTileBytes);
      }
    }
    if (rows_chunk >= 0 && rows_chunk < unit.num_chunks) send_rows(rows_chunk);
    if (warpgroup_thread() == 0) tma_store_commit();
  }
  __device__ __forceinline__ void send_rows(int chunk) const {
    if (!args.rows_out) return;
    store_tile<T>(args.rows, args.rows_out, rows_at(chunk), shared.rows(), chunk_length(chunk));
  }
  __device__ __forceinline__ void send_last_rows(int chunk, const uint32_t (&rows)[16], uint32_t value_at) const {
    if (warpgroup_thread() == 0) tma_store_wait_read();
    sync_warpgroup(0);
    put_rows(rows, value_at);
    fence_async_shared();
    sync_warpgroup(0);
    send_rows(chunk);
    if (warpgroup_thread() == 0) {
      tma_store_commit();
      tma_store_wait_read();
    }
  }
  __device__ __forceinline__ void trim(int stage, int chunk) const {
    if (chunk_length(chunk) == kRows) return;
    trim_tiles(shared.stage(stage), sizeof(typename Shared::Stage) / kTileBytes, unit.tail_length, warpgroup_thread(),
               kWarpgroupThreads);
    sync_warpgroup(0);
  }

  __device__ __forceinline__ void run() const {
    const int n = shuffle(unit.num_chunks, 0);
    const uint32_t operand = wgmma_operand(shared.base);
    const uint32_t value_at = State::value_offset();
    float s[kStateRegisters];
    uint32_t s_operand[kStateRegisters / 2];
    float y[32];
    uint32_t rows[16] = {};
    load_state(s);
    pack_operands<T>(s_operand, s);
    int stage = 0;
    int phase = 0;
#pragma unroll 1
    for (int c = 0; c < n; ++c) {
      // Uniform, and known to be so: otherwise each wgmma's descriptor goes through vector registers.
      const uint32_t tiles = shuffle(operand + stage * static_cast<uint32_t>(sizeof(typename Shared::Stage) / 16), 0);
      const uint32_t factors = shared.factor(stage);
      const int chunk = kAdjoint ? n - 1 - c : c;
      uint32_t x[16];
      uint32_t update_operand[16];
      float2 f[8];
      mbarrier_wait(shared.full_barrier(stage), phase);
      trim(stage, chunk);

      wgmma_fence();
      State::template multiply<kKeyDim / 16>(y, s_operand, tiles, kAdjoint ? 0 : Shared::kW);  // S' W', or D' K'
      wgmma_commit();
      put(s_operand, rows, value_at, c, stage == 0 ? kStateStages - 1 : stage - 1);
      State::load_values(x, shared.stage(stage) + Shared::kValues, value_at);
      load_factors(f, factors, offsetof(ChunkFactors, to_end));
      const float chunk_decay = load_shared(factors + static_cast<uint32_t>(offsetof(ChunkFactors, chunk_decay)));
      [[maybe_unused]] uint32_t output_operand[16];
      if constexpr (kAdjoint) {
        float2 decay[8];
        load_factors(decay, factors, offsetof(ChunkFactors, out_decay));
        State::load_values(output_operand, shared.stage(stage) + Shared::kGradOutput, value_at);
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          const float2 o = unpack2<T>(output_operand[j]);
          output_operand[j] = pack_operand<T>(decay[j / 2].x * o.x, decay[j / 2].y * o.y);
        }
      }
      send(chunk, kAdjoint ? chunk + 1 : chunk - 1);
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < kStateRegisters; ++i) s[i] *= chunk_decay;

#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const float2 value = unpack2<T>(x[j]);
        const float2 decay = f[j / 2];
        if constexpr (kAdjoint) {  // X' = to_end (D' K') + dV'
          const float low = decay.x * y[2 * j] + value.x;
          const float high = decay.y * y[2 * j + 1] + value.y;
          rows[j] = pack2<T>(low, high);
          update_operand[j] = pack_operand<T>(-low, -high);
        } else {  // Y' = U' - S' W'
          const float low = value.x - y[2 * j];
          const float high = value.y - y[2 * j + 1];
          rows[j] = pack2<T>(low, high);
          update_operand[j] = pack_operand<T>(decay.x * low, decay.y * high);
        }
      }
      wgmma_fence();
      if constexpr (kAdjoint) {
        State::update(s, output_operand, tiles, Shared::kQ);  // D' += (out_decay dO)' Q
        State::update(s, update_operand, tiles, Shared::kW);  // D' -= X' W
      } else {
        State::update(s, update_operand, tiles, 0);  // S' += (to_end Y') K
      }
      wgmma_commit();
      wgmma_wait<0>();
      pack_operands<T>(s_operand, s);
      if (++stage == kStateStages) {
        stage = 0;
        phase ^= 1;
      }
    }
    if (n > 0) send_last_rows(kAdjoint ? 0 : n - 1, rows, value_at);
    store_state(s);
  }
};

}  // namespace cula::gdn::sm90
