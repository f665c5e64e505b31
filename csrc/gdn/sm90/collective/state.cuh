// A consumer warpgroup: 64 value columns of the state, transposed, in registers, advanced chunk by chunk.
//
//   U' = S' K'           W' = beta V' - beta decay U'       V'' = W' A'
//   S' <- chunk_decay S' + (to_end V'') K                   O' = out_decay S' Q' + V'' P'       (S' before the update)
//
// with ' for transposed. Each product takes its left operand from registers and its right one from a tile as it was
// loaded; accumulators of fp32, packed in pairs, are the next product's operand in place. Nothing contracts over the
// value columns, so that warpgroups never exchange data.
#pragma once

#include "gdn/sm90/collective/pipeline.cuh"

namespace cula::gdn::sm90 {

template <class T, int kKeyDim, int kValueTiles, bool kOutput, bool kCheckpoints>
struct StateConsumer {
  using Shared = ForwardShared<kKeyDim, kValueTiles, kOutput>;
  static constexpr int kStateRegisters = kKeyDim / 2;
  // With two warpgroups, one is in U .. V'' while the other is in S .. O: 5% faster than running freely.
  static constexpr bool kTurns = kValueTiles == 2;
  // S' Q' runs behind V'' where registers allow it (218 of them): its scaling then hides behind the state's update.
  static constexpr bool kEarlyOutput = kOutput && kValueTiles == 1;

  const ForwardArgs& args;
  const Unit& unit;
  typename Shared::Map shared;
  int tile;  // of the value columns: the index of the warpgroup

  __device__ __forceinline__ void sync_group() const {
    if (tile == 0) {
      sync_named(static_cast<int>(NamedBarrier::kConsumer0), kWarpgroupThreads);
    } else {
      sync_named(static_cast<int>(NamedBarrier::kConsumer1), kWarpgroupThreads);
    }
  }
  __device__ __forceinline__ void wait_turn() const {
    if (!kTurns) return;
    if (tile == 0) {
      sync_named(static_cast<int>(NamedBarrier::kTurn0), 2 * kWarpgroupThreads);
    } else {
      sync_named(static_cast<int>(NamedBarrier::kTurn1), 2 * kWarpgroupThreads);
    }
  }
  __device__ __forceinline__ void pass_turn() const {
    if (!kTurns) return;
    if (tile == 0) {
      arrive_named(static_cast<int>(NamedBarrier::kTurn1), 2 * kWarpgroupThreads);
    } else {
      arrive_named(static_cast<int>(NamedBarrier::kTurn0), 2 * kWarpgroupThreads);
    }
  }

  // Row (value) and column (key) of s[4 i + j] are first_row() + 8 (j / 2) and first_column() + 8 i + j % 2.
  __device__ __forceinline__ int first_row() const {
    return unit.value + 64 * tile + 16 * (warpgroup_thread() / 32) + lane_id() / 4;
  }
  __device__ __forceinline__ int first_column() const { return 2 * (lane_id() & 3); }

  template <class Source>
  __device__ __forceinline__ void load_state_as(float (&s)[kStateRegisters]) const {
    const StateSource x = unit.enters;
    const Source* p = static_cast<const Source*>(x.data) + first_row() * x.value_stride + first_column() * x.key_stride;
#pragma unroll
    for (int i = 0; i < kStateRegisters; ++i) {
      s[i] = static_cast<float>(p[(8 * (i / 4) + i % 2) * x.key_stride + 8 * (i / 2 % 2) * x.value_stride]);
    }
  }
  __device__ __forceinline__ void load_state(float (&s)[kStateRegisters]) const {
    if (unit.enters.data == nullptr) {
#pragma unroll
      for (int i = 0; i < kStateRegisters; ++i) {
        const bool diagonal = first_row() + 8 * (i / 2 % 2) == first_column() + 8 * (i / 4) + i % 2;
        s[i] = !kOutput && unit.enters.identity && diagonal ? 1.0f : 0.0f;
      }
      return;
    }
    switch (unit.enters.dtype) {
      case DType::kBFloat16:
        return load_state_as<bf16>(s);
      case DType::kFloat16:
        return load_state_as<fp16>(s);
      case DType::kFloat64:
        return load_state_as<double>(s);
      default:
        return load_state_as<float>(s);
    }
  }
  template <class Target>
  __device__ __forceinline__ void store_state_as(const float (&s)[kStateRegisters], const StateTarget& x) const {
    Target* p = static_cast<Target*>(x.data) + first_row() * x.value_stride + first_column() * x.key_stride;
#pragma unroll
    for (int i = 0; i < kStateRegisters; ++i) {
      assign(p[(8 * (i / 4) + i % 2) * x.key_stride + 8 * (i / 2 % 2) * x.value_stride], s[i]);
    }
  }
  __device__ __forceinline__ void store_state(const float (&s)[kStateRegisters]) const {
    const StateTarget x = unit.leaves;
    if (x.data == nullptr) return;
    if constexpr (!kOutput) return store_state_as<float>(s, x);
    switch (x.dtype) {
      case DType::kBFloat16:
        return store_state_as<bf16>(s, x);
      case DType::kFloat16:
        return store_state_as<fp16>(s, x);
      case DType::kFloat64:
        return store_state_as<double>(s, x);
      default:
        return store_state_as<float>(s, x);
    }
  }
  // The state behind the c-th chunk of the segment.
  __device__ __forceinline__ void store_checkpoint(const float (&s)[kStateRegisters], int c) const {
    const CheckpointArgs& x = args.checkpoints;
    const int64_t tokens = (static_cast<int64_t>(unit.first_chunk) + c + 1) * kRows;
    const int64_t row = x.row(args.segments.sequences, unit.sequence, tokens);
    if (row < 0) return;
    float* data = static_cast<float*>(x.states.data) + row * x.states.stride[0] + unit.head * x.states.stride[1];
    store_state_as<float>(s, {data, DType::kFloat32, x.states.stride[2], x.states.stride[3]});
  }

  // Rows of the last chunk that has fewer than 64, from the tile of shared memory.
  __device__ __forceinline__ void store_tail() const {
    const int64_t token = unit.token + static_cast<int64_t>(unit.num_chunks - 1) * kRows;
    const int piece = static_cast<int>(threadIdx.x) & 7;
    T* out =
        static_cast<T*>(args.o.data) + args.o.offset(unit.batch, token, unit.head) + unit.value + 64 * tile + 8 * piece;
#pragma unroll 1
    for (int row = warpgroup_thread() / 8; row < unit.tail_length; row += kWarpgroupThreads / 8) {
      *reinterpret_cast<uint4*>(out + row * args.o.stride[1]) =
          load_shared_vector(shared.output(tile) + swizzled(row, piece));
    }
  }

  __device__ __forceinline__ void run() const {
    const int lane = lane_id();
    const int warp = warpgroup_thread() / 32;
    const bool leader = warpgroup_thread() == 0;
    const int n = unit.num_chunks;
    const uint32_t operand = wgmma_operand(shared.base);
    const uint32_t score_operand = wgmma_operand(shared.score(0));
    // K as a transposed operand wider than one tile.
    constexpr uint32_t kTransposed = ((kTileBytes >> 4) - 1) << 16;
    // This lane's row in transposed 16 x 16 steps through a tile of values: 16 tokens further on at + 2048.
    const uint32_t value_at = swizzled((lane & 7) + ((lane >> 4) & 1) * 8, warp * 2 + ((lane >> 3) & 1));

    float s[kStateRegisters];
    uint32_t s_operand[kStateRegisters / 2];
    float u[32];
    [[maybe_unused]] float o[32];
    load_state(s);
#pragma unroll
    for (int i = 0; i < kStateRegisters / 2; ++i) s_operand[i] = pack_operand<T>(s[2 * i], s[2 * i + 1]);
    [[maybe_unused]] int checkpoint = unit.checkpoint;
    if (kTurns && tile == 1) pass_turn();
    int stage = 0;
    int phase = 0;

    // O goes to shared memory at the end of its chunk, and from there to global memory in the next.
    const auto put_output = [&](int stage) {
      uint32_t packed[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) packed[i] = pack2<T>(o[2 * i], o[2 * i + 1]);
      if (leader) tma_store_wait_read();
      sync_group();  // the tile is free again, and all warps have left the chunk
      mbarrier_arrive_group(shared.empty_barrier(stage));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        stmatrix_x4_trans(shared.output(tile) + value_at + j * 2048, packed[4 * j], packed[4 * j + 1],
                          packed[4 * j + 2], packed[4 * j + 3]);
      }
    };
    const auto send_output = [&](int c) {
      fence_async_shared();
      sync_group();
      if (leader) {
        tma_store(args.maps.o, {unit.value + 64 * tile, unit.head, unit.token + c * kRows, unit.batch},
                  shared.output(tile));
        tma_store_commit();
      }
    };
    // d = (packed) x (rows of a K-major tile pair at `offset`), the first step writing d.
    const auto multiply = [&](float(&d)[32], const uint32_t* a, uint32_t tiles, int offset, auto steps) {
#pragma unroll
      for (int k = 0; k < decltype(steps)::value; ++k) {
        const uint64_t b = wgmma_descriptor(tiles, offset + (k / 4) * kTileBytes + (k % 4) * 32);
        if (k == 0) {
          wgmma_rs_n64_first<T>(d, a + 4 * k, b);
        } else {
          wgmma_rs_n64<T>(d, a + 4 * k, b);
        }
      }
    };
    constexpr std::integral_constant<int, kKeyDim / 16> kKeySteps;

#pragma unroll 1
    for (int c = 0; c < n; ++c) {
      const uint32_t tiles = operand + stage * static_cast<uint32_t>(sizeof(typename Shared::Stage) / 16);
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
      if (kOutput && c == n - 1 && unit.tail_length < kRows) mbarrier_wait(shared.trimmed_barrier(), 0);
      wait_turn();

      wgmma_fence();
      multiply(u, s_operand, tiles, 0, kKeySteps);  // U' = S' K'
      wgmma_commit();
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        ldmatrix_x4_trans(reinterpret_cast<uint32_t(&)[4]>(x[4 * j]),
                          shared.stage(stage) + Shared::kV + tile * kTileBytes + value_at + j * 2048);
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
      // V'' = W' A': the first half of the rows of A has no second half of columns.
#pragma unroll
      for (int k = 0; k < kRows / 16; ++k) {
        const uint64_t upper = wgmma_descriptor(tiles, Shared::kA + k * 32);
        const uint64_t lower = wgmma_descriptor(tiles, Shared::kA + kTileBytes / 2 + k * 32);
        if (k == 0) {
          wgmma_rs_n32_first<T>(u, w, upper);
          wgmma_rs_n32_first<T>(u + 16, w, lower);
        } else {
          if (k < 2) wgmma_rs_n32<T>(u, w + 4 * k, upper);
          wgmma_rs_n32<T>(u + 16, w + 4 * k, lower);
        }
      }
      wgmma_commit();
      if constexpr (kEarlyOutput) {
        multiply(o, s_operand, tiles, Shared::kQ, kKeySteps);  // O' = S' Q', the state before the update
        wgmma_commit();
      }
      pass_turn();
      const float chunk_decay = load_shared(shared.factor(stage) + offsetof(ChunkFactors, chunk_decay));
      load_factors(b, offsetof(ChunkFactors, to_end));
#pragma unroll
      for (int i = 0; i < kStateRegisters; ++i) s[i] *= chunk_decay;
      wgmma_wait<kEarlyOutput ? 1 : 0>();  // V''

#pragma unroll
      for (int j = 0; j < 8; ++j) {
        w[2 * j] = pack_operand<T>(b[j].x * u[4 * j], b[j].y * u[4 * j + 1]);
        w[2 * j + 1] = pack_operand<T>(b[j].x * u[4 * j + 2], b[j].y * u[4 * j + 3]);
        if constexpr (kOutput) {
          x[2 * j] = pack_operand<T>(u[4 * j], u[4 * j + 1]);
          x[2 * j + 1] = pack_operand<T>(u[4 * j + 2], u[4 * j + 3]);
        }
      }
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kRows / 16; ++k) {  // S' += (to_end V'') K
        if constexpr (kKeyDim == 128) {
          wgmma_rs_n128_transposed<T>(s, w + 4 * k, wgmma_descriptor(tiles + kTransposed, k * 2048));
        } else {
          wgmma_rs_n64_transposed<T>(s, w + 4 * k, wgmma_descriptor(tiles, k * 2048));
        }
      }
      wgmma_commit();
      if constexpr (kOutput) {
        if constexpr (!kEarlyOutput) {
          multiply(o, s_operand, tiles, Shared::kQ, kKeySteps);
          wgmma_commit();
        }
        if (c > 0) send_output(c - 1);
        load_factors(e, offsetof(ChunkFactors, out_decay));
        wgmma_wait<kEarlyOutput ? 1 : 0>();  // O, or S and O
        mbarrier_wait(shared.scored_barrier(c & 1), (c >> 1) & 1);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          o[4 * j] *= e[j].x;
          o[4 * j + 1] *= e[j].y;
          o[4 * j + 2] *= e[j].x;
          o[4 * j + 3] *= e[j].y;
        }
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kRows / 16; ++k) {  // O' += V'' P'
          const uint32_t at = score_operand + (c & 1) * (kTileBytes / 16);
          if (k < 2) wgmma_rs_n32<T>(o, x + 4 * k, wgmma_descriptor(at, k * 32));
          wgmma_rs_n32<T>(o + 16, x + 4 * k, wgmma_descriptor(at, kTileBytes / 2 + k * 32));
        }
        wgmma_commit();
      } else {
        wgmma_wait<0>();  // S
        mbarrier_arrive_warp(shared.empty_barrier(stage));
      }
      if constexpr (kEarlyOutput) wgmma_wait<1>();  // S
#pragma unroll
      for (int i = 0; i < kStateRegisters / 2; ++i) s_operand[i] = pack_operand<T>(s[2 * i], s[2 * i + 1]);
      if constexpr (kOutput) {
        wgmma_wait<0>();  // O: nothing may be in flight across the loop's back edge
        put_output(stage);
      }
      if constexpr (kCheckpoints) {
        if (c == checkpoint) {
          checkpoint += static_cast<int>(args.checkpoints.every) / kRows;
          if (unit.tail_length == kRows || c < n - 1) store_checkpoint(s, c);
        }
      }
      if (++stage == Shared::kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
    if constexpr (kOutput) {
      if (n > 0) {
        if (unit.tail_length == kRows) {
          send_output(n - 1);
        } else {
          sync_group();
          store_tail();
        }
        if (leader) tma_store_wait_read();
      }
    }
    store_state(s);
  }
};

}  // namespace cula::gdn::sm90
