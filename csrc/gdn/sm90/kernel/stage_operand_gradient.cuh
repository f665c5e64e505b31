// The stage chunk_bwd_dqkwg:
//
//   dS = scale tril(dO V'^T o E)      dQ = scale diag(decay) dO S^T + dS K       dW = -X S^T
//                                     dK = diag(to_end) V' D^T + dS^T Q
//
//   dg = rows(Q o scale diag(decay) dO S^T) - rows(K o diag(to_end) V' D^T) + rows(G) - columns(G), G = dS o Q K^T
//   below
//        the diagonal; the last row gains what the others lose to D, and chunk_decay <S, D>
//
// That is rows(dQ o Q - dK o K) without the parts that cancel, which at strong decay is all of it but rounding.
//
// A warpgroup a 64-wide block of key columns, and one that feeds them: of a step, that is a value head of a chunk, come
//
//   dO | V' | S, by blocks of 64 value columns | X | D, likewise       in the order in which they are left
//
// through a ring of slots that runs on over steps and items:
//
//   full[s]      the piece of slot s has landed             loader -> consumers
//   empty[s]     all warps have left it                     consumers -> loader
//   keys_full    q and k of the item have landed            loader -> consumers
//   keys_empty   dq and dk, put in their place, have left   consumers -> loader
#pragma once

#include "gdn/sm90/collective/stage_feed.cuh"

namespace cula::gdn::sm90 {

struct OperandGradientArgs {
  StageGrid grid;  // heads: key heads
  int64_t num_chunks;
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;  // V'
  CUtensorMap h;
  CUtensorMap dv;  // X
  CUtensorMap grad_output;
  CUtensorMap dh;
  CUtensorMap dq;
  CUtensorMap dk;
  CUtensorMap dw;
  TensorArg dq_rows;
  TensorArg dk_rows;
  TensorArg dw_rows;
  TensorArg dg;
};

inline constexpr int kPieceSlots = 10;

template <int kKeyDim>
inline constexpr int kOperandGradientThreads = (kKeyDim / 64 + 1) * kWarpgroupThreads;
// 384 threads start with 168 registers each.
inline constexpr int kOperandGradientRegisters = 216;
inline constexpr int kOperandFeederRegisters = 72;
static_assert(2 * kOperandGradientRegisters + kOperandFeederRegisters <= 3 * 168);

// A place in the ring.
struct PiecePlace {
  int slot = 0;
  int phase = 0;
  __device__ __forceinline__ PiecePlace ahead(int pieces) const {
    const int next = slot + pieces;
    return next >= kPieceSlots ? PiecePlace{next - kPieceSlots, phase ^ 1} : PiecePlace{next, phase};
  }
};

template <int kKeyDim, int kValueDim>
struct OperandGradientShared {
  static constexpr int kKeyTiles = kKeyDim / 64;
  static constexpr int kValueTiles = kValueDim / 64;
  static constexpr int kSlotTiles = kKeyTiles > kValueTiles ? kKeyTiles : kValueTiles;
  static constexpr int kResidual = 1;  // pieces of a step; dO is the first
  static constexpr int kStates = 2;
  static constexpr int kX = kStates + kValueTiles;
  static constexpr int kStateGradients = kX + 1;
  static constexpr int kPieces = kStateGradients + kValueTiles;
  static_assert(kPieces <= kPieceSlots);

  SwizzledTile q[kKeyTiles];
  SwizzledTile k[kKeyTiles];
  SwizzledTile dw[kKeyTiles];  // on its way out
  SwizzledTile ring[kPieceSlots * kSlotTiles];
  StepStore store;
  // By buffers and warpgroups.
  float outputs[2][kKeyTiles][kRows];  // what rows of dQ o Q owe to S
  float updates[2][kKeyTiles][kRows];  // what rows of dK o K owe to D
  float states[2][4 * kKeyTiles];      // <S, D>, by warps
  float pair_rows[2][kRows];
  float pair_columns[2][4][kRows];  // by warps
  uint64_t full[kPieceSlots];
  uint64_t empty[kPieceSlots];
  uint64_t keys_full;
  uint64_t keys_empty;

  __device__ uint32_t slot(int s) const { return shared_address(ring) + s * kSlotTiles * kTileBytes; }
  __device__ uint32_t full_barrier(int s) const { return shared_address(&full[s]); }
  __device__ uint32_t empty_barrier(int s) const { return shared_address(&empty[s]); }

  __device__ void init() {
    StepStore::init(store, 4 * kKeyTiles);
    for (int s = 0; s < kPieceSlots; ++s) {
      mbarrier_init(full_barrier(s), 1);
      mbarrier_init(empty_barrier(s), warp_arrivals(4 * kKeyTiles));
    }
    mbarrier_init(shared_address(&keys_full), 1);
    mbarrier_init(shared_address(&keys_empty), group_arrivals(kKeyTiles));
    mbarrier_init_fence();
  }
};

template <int kKeyDim, int kValueDim, bool kValueFirst>
struct OperandGradientLoader {
  using Shared = OperandGradientShared<kKeyDim, kValueDim>;
  static constexpr int kKeyTiles = Shared::kKeyTiles;
  static constexpr int kValueTiles = Shared::kValueTiles;

  const OperandGradientArgs& args;
  const Shared& shared;

  __device__ __forceinline__ void load_state(uint32_t slot, const CUtensorMap& map, int head, int value_tile, int index,
                                             uint32_t barrier) const {
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
      const BoxOrigin at = kValueFirst ? BoxOrigin{64 * i, head, 64 * value_tile, index}
                                       : BoxOrigin{64 * value_tile, head, 64 * i, index};
      tma_load(slot + i * kTileBytes, map, at, barrier);
    }
  }

  // By one thread. place: of the step's first piece; number: of it over all steps.
  __device__ __forceinline__ void load_step(const BoxOrigin& tokens, int index, PiecePlace place, int64_t number,
                                            int key_head, int items) const {
#pragma unroll
    for (int piece = 0; piece < Shared::kPieces; ++piece) {
      const PiecePlace at = place.ahead(piece);
      const uint32_t barrier = shared.full_barrier(at.slot);
      if (number + piece >= kPieceSlots) mbarrier_wait(shared.empty_barrier(at.slot), at.phase ^ 1);
      const bool of_states = (piece >= Shared::kStates && piece < Shared::kX) || piece >= Shared::kStateGradients;
      mbarrier_arrive_expect(barrier, (of_states ? kKeyTiles : kValueTiles) * kTileBytes);
      const uint32_t target = shared.slot(at.slot);
      if (piece == 0) {
        load_tiles<kValueTiles>(target, args.grad_output, tokens, barrier);
      } else if (piece == Shared::kResidual) {
        load_tiles<kValueTiles>(target, args.v, tokens, barrier);
      } else if (piece == Shared::kX) {
        load_tiles<kValueTiles>(target, args.dv, tokens, barrier);
      } else if (piece < Shared::kX) {
        load_state(target, args.h, tokens.head, piece - Shared::kStates, index, barrier);
      } else {
        load_state(target, args.dh, tokens.head, piece - Shared::kStateGradients, index, barrier);
      }
      // Behind the states, so that what waits for the last item's end does not hold up all of the next one.
      if (piece == Shared::kX - 1 && key_head >= 0) {
        const uint32_t keys = shared_address(&shared.keys_full);
        if (items > 0) mbarrier_wait(shared_address(&shared.keys_empty), (items - 1) & 1);
        mbarrier_arrive_expect(keys, 2 * kKeyTiles * kTileBytes);
        const BoxOrigin origin = {0, key_head, tokens.token, tokens.batch};
        load_tiles<kKeyTiles>(shared_address(shared.q), args.q, origin, keys);
        load_tiles<kKeyTiles>(shared_address(shared.k), args.k, origin, keys);
      }
    }
  }

  __device__ __forceinline__ void run() const {
    const int group = static_cast<int>(args.grid.group);
    PiecePlace place;
    int64_t number = 0;
    int items = 0;
    for_each_item(args.grid, [&](const Chunk& chunk, int key_head) {
      const int64_t index = dense_chunk_index(args.grid.sequences, chunk.sequence, chunk.index);
#pragma unroll 1
      for (int j = 0; j < group; ++j) {
        const BoxOrigin tokens = {0, key_head * group + j, static_cast<int>(chunk.token),
                                  static_cast<int>(chunk.batch)};
        if (lane_id() == 0) {
          load_step(tokens, static_cast<int>(chunk.batch * args.num_chunks + index), place, number,
                    j == 0 ? key_head : -1, items);
        }
        sync_warp();
        place = place.ahead(Shared::kPieces);
        number += Shared::kPieces;
      }
      ++items;
    });
  }
};

template <class T, int kKeyDim, int kValueDim, bool kValueFirst>
struct OperandGradientConsumer {
  using Shared = OperandGradientShared<kKeyDim, kValueDim>;
  static constexpr int kKeyTiles = Shared::kKeyTiles;
  static constexpr int kValueTiles = Shared::kValueTiles;

  const OperandGradientArgs& args;
  Shared& shared;
  int group;  // index of the warpgroup, and of its block of key columns

  __device__ __forceinline__ static void sync_consumers() { sync_named(1 + kKeyTiles, kKeyTiles * kWarpgroupThreads); }
  __device__ __forceinline__ void wait_full(PiecePlace place) const {
    mbarrier_wait(shared.full_barrier(place.slot), place.phase);
  }
  __device__ __forceinline__ void release(PiecePlace place) const {
    mbarrier_arrive_warp(shared.empty_barrier(place.slot));
  }
  __device__ __forceinline__ void trim(uint32_t tiles, int count, int length) const {
    trim_tiles(tiles, count, length, static_cast<int>(threadIdx.x), kKeyTiles * kWarpgroupThreads);
  }

  // d = a S^T, S lying in the slots from `states` on.
  __device__ __forceinline__ void multiply_state(float (&d)[32], PiecePlace a, PiecePlace states) const {
    const uint32_t left = wgmma_operand(shared.slot(a.slot));
#pragma unroll
    for (int i = 0; i < kValueTiles; ++i) {
      const uint32_t right = wgmma_operand(shared.slot(states.ahead(i).slot) + group * kTileBytes);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint64_t x = wgmma_descriptor(left, i * kTileBytes + k * 32);
        const uint64_t y = wgmma_descriptor(right, kValueFirst ? k * 2048 : k * 32);
        if constexpr (kValueFirst) {
          if (i == 0 && k == 0) {
            wgmma_ss_n64_transposed_first<T>(d, x, y);
          } else {
            wgmma_ss_n64_transposed<T>(d, x, y);
          }
        } else {
          if (i == 0 && k == 0) {
            wgmma_ss_n64_first<T>(d, x, y);
          } else {
            wgmma_ss_n64<T>(d, x, y);
          }
        }
      }
    }
  }

  // This thread's share of <S, D> in the warpgroup's block of keys.
  __device__ __forceinline__ float multiply_states(PiecePlace S, PiecePlace D) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kValueTiles; ++i) {
      const int at = group * kTileBytes + 16 * warpgroup_thread();
      const uint32_t s_at = shared.slot(S.ahead(i).slot) + at;
      const uint32_t d_at = shared.slot(D.ahead(i).slot) + at;
#pragma unroll
      for (int part = 0; part < kTileBytes / (16 * kWarpgroupThreads); ++part) {
        const uint4 x = load_shared_vector(s_at + part * 16 * kWarpgroupThreads);
        const uint4 y = load_shared_vector(d_at + part * 16 * kWarpgroupThreads);
        const auto add = [&](uint32_t a, uint32_t b) {
          const float2 left = unpack2<T>(a);
          const float2 right = unpack2<T>(b);
          sum += left.x * right.x + left.y * right.y;
        };
        add(x.x, y.x);
        add(x.y, y.y);
        add(x.z, y.z);
        add(x.w, y.w);
      }
    }
    return sum;
  }

  // By one warp, behind the row sums.
  __device__ __forceinline__ void store_gate_gradient(const GradientStep& step, int buffer,
                                                      const ChunkFactors& factors) const {
    if (!args.dg) return;
    const int lane = lane_id();
    float gradients[2];
    float moved = 0.0f;  // from rows to the last one
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = 2 * lane + r;
      float update = 0.0f;
      gradients[r] = shared.pair_rows[buffer][row];
#pragma unroll
      for (int w = 0; w < 4; ++w) gradients[r] -= shared.pair_columns[buffer][w][row];
#pragma unroll
      for (int g = 0; g < kKeyTiles; ++g) {
        gradients[r] += shared.outputs[buffer][g][row];
        update += shared.updates[buffer][g][row];
      }
      if (row < step.length - 1) {  // the last row would move it to itself
        gradients[r] -= update;
        moved += update;
      }
    }
    moved = warp_sum(moved);
    float states = 0.0f;
#pragma unroll
    for (int w = 0; w < 4 * kKeyTiles; ++w) states += shared.states[buffer][w];
    // A decay of zero ends what the state in front can do, whatever it holds.
    const float at_end = moved + (factors.chunk_decay == 0.0f ? 0.0f : factors.chunk_decay * states);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = 2 * lane + r;
      if (row >= step.length) continue;
      args.dg.store(args.dg.offset(step.batch, step.token + row, step.head),
                    gradients[r] + (row == step.length - 1 ? at_end : 0.0f));
    }
  }

  __device__ __forceinline__ void run() const {
    const uint32_t q = shared_address(shared.q) + group * kTileBytes;
    const uint32_t k = shared_address(shared.k) + group * kTileBytes;
    const uint32_t dw = shared_address(shared.dw) + group * kTileBytes;
    float dq[32];
    float dk[32];
    PiecePlace place;
    int items = 0;
#pragma unroll 1
    for (int number = 0;; ++number) {
      const int buffer = number & 1;
      mbarrier_wait(shared_address(&shared.store.made[buffer]), (number >> 1) & 1);
      const GradientStep step = shared.store.steps[buffer];
      if (shuffle(step.length, 0) == 0) break;
      const bool tail = step.length < kRows;
      const uint32_t factors = shared_address(&shared.store.factors[buffer]);
      // Uniform, and known to be so: otherwise each wgmma's descriptor goes through vector registers.
      place = {shuffle(place.slot, 0), shuffle(place.phase, 0)};
      const PiecePlace output = place;
      const PiecePlace residual = place.ahead(Shared::kResidual);
      const PiecePlace states = place.ahead(Shared::kStates);
      const PiecePlace x = place.ahead(Shared::kX);
      const PiecePlace gradients = place.ahead(Shared::kStateGradients);
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        dq[i] = step.is_first ? 0.0f : dq[i];
        dk[i] = step.is_first ? 0.0f : dk[i];
      }

      wait_full(output);
      wait_full(residual);
      if (tail) {
        trim(shared.slot(output.slot), kValueTiles, step.length);
        trim(shared.slot(residual.slot), kValueTiles, step.length);
        sync_consumers();
      }
      uint32_t pairs[16];       // dS
      uint32_t transposed[16];  // dS^T
      float c[32];
      {
        float d[32];
        const uint32_t do_rows = wgmma_operand(shared.slot(output.slot));
        const uint32_t v_rows = wgmma_operand(shared.slot(residual.slot));
        wgmma_fence();
        rows_by_rows<T, kValueTiles>(c, do_rows, v_rows);
        rows_by_rows<T, kValueTiles>(d, v_rows, do_rows);
        wgmma_commit();
        wgmma_wait<0>();
        gate_pairs<Later::kRow, false>(c, factors, args.grid.scale, step.length);
        gate_pairs<Later::kColumn, false>(d, factors, args.grid.scale, step.length);
        pack_accumulators<T>(pairs, c);
        pack_accumulators<T>(transposed, d);
      }

      if (step.is_first) {
        mbarrier_wait(shared_address(&shared.keys_full), items & 1);
        if (tail) {
          trim(shared_address(shared.q), kKeyTiles, step.length);
          trim(shared_address(shared.k), kKeyTiles, step.length);
          sync_consumers();
        }
      }
#pragma unroll
      for (int i = 0; i < kValueTiles; ++i) wait_full(states.ahead(i));
      {
        float p[32];
        wgmma_fence();
        multiply_state(c, output, states);  // dO S^T
        rows_by_rows<T, kKeyTiles>(p, wgmma_operand(shared_address(shared.q)), wgmma_operand(shared_address(shared.k)));
        wgmma_commit();
        wgmma_wait<0>();
        release(output);
        scale_rows(c, row_factors(factors, offsetof(ChunkFactors, out_decay)));
        store_row_sums(shared.outputs[buffer][group], row_products<T>(c, q));
        wgmma_fence();
        add_operand_by_columns<T>(c, pairs, wgmma_operand(k));  // dS K
        wgmma_commit();
        if (group == 0) {
          const auto below_diagonal = [&](int i) {
            const float2 ds = unpack2<T>(pairs[i / 2]);
            const int row = accumulator_row() + 8 * (i / 2 % 2);
            const int column = accumulator_column() + 8 * (i / 4) + i % 2;
            return column < row ? (i % 2 == 0 ? ds.x : ds.y) * p[i] : 0.0f;
          };
          store_pair_sums(below_diagonal, make_float2(1.0f, 1.0f), shared.pair_rows[buffer],
                          shared.pair_columns[buffer][warpgroup_thread() / 32]);
        }
        wgmma_wait<0>();
      }
#pragma unroll
      for (int i = 0; i < 32; ++i) dq[i] += c[i];

      wait_full(x);
      wgmma_fence();
      multiply_state(c, x, states);  // X S^T
      wgmma_commit();
      wait_sent();  // dW of the step before
      sync_warpgroup(group);
      wgmma_wait<0>();
      release(x);
#pragma unroll
      for (int i = 0; i < 32; ++i) c[i] = -c[i];
      store_accumulators<T>(dw, c);
      send_tile<T>(args.dw, args.dw_rows, {64 * group, step.head, step.token, step.batch}, dw, step.length, group);

#pragma unroll
      for (int i = 0; i < kValueTiles; ++i) wait_full(gradients.ahead(i));
      wgmma_fence();
      multiply_state(c, residual, gradients);  // V' D^T
      wgmma_commit();
      const float products = warp_sum(multiply_states(states, gradients));
      if (lane_id() == 0) shared.states[buffer][4 * group + warpgroup_thread() / 32] = products;
      wgmma_wait<0>();
      release(residual);
#pragma unroll
      for (int i = 0; i < kValueTiles; ++i) {
        release(states.ahead(i));
        release(gradients.ahead(i));
      }
      scale_rows(c, row_factors(factors, offsetof(ChunkFactors, to_end)));
      store_row_sums(shared.updates[buffer][group], row_products<T>(c, k));
      wgmma_fence();
      add_operand_by_columns<T>(c, transposed, wgmma_operand(q));  // dS^T Q
      wgmma_commit();
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < 32; ++i) dk[i] += c[i];
      sync_consumers();  // all sums are there, and nobody reads q or k any more
      if (group == 0 && (warp_id() & 3) == 0) store_gate_gradient(step, buffer, shared.store.factors[buffer]);
      StepStore::finish(shared.store, number);

      if (step.is_last) {
        store_accumulators<T>(q, dq);
        store_accumulators<T>(k, dk);
        send_tile<T>(args.dq, args.dq_rows, {64 * group, step.key_head, step.token, step.batch}, q, step.length, group);
        send_tile<T>(args.dk, args.dk_rows, {64 * group, step.key_head, step.token, step.batch}, k, step.length, group);
        wait_sent();
        sync_warpgroup(group);
        mbarrier_arrive_group(shared_address(&shared.keys_empty));
        ++items;
      }
      place = place.ahead(Shared::kPieces);
    }
    wait_sent();
  }
};

template <class T, int kKeyDim, int kValueDim, bool kValueFirst>
__global__ void __launch_bounds__(kOperandGradientThreads<kKeyDim>, 1)
    operand_gradient_kernel(const __grid_constant__ OperandGradientArgs args) {
  using Shared = OperandGradientShared<kKeyDim, kValueDim>;
  Shared& shared = *reinterpret_cast<Shared*>(swizzled_shared_memory());
  if (threadIdx.x == 0) shared.init();
  sync_block();
  const int group = warpgroup_id();
  if (group == kKeyDim / 64) {
    if constexpr (kKeyDim == 128) release_registers<kOperandFeederRegisters>();
    const int warp = warp_id() & 3;
    if (warp == 0) OperandGradientLoader<kKeyDim, kValueDim, kValueFirst>{args, shared}.run();
    if (warp == 1) make_steps(args.grid, shared.store);
  } else {
    if constexpr (kKeyDim == 128) acquire_registers<kOperandGradientRegisters>();
    OperandGradientConsumer<T, kKeyDim, kValueDim, kValueFirst>{args, shared, group}.run();
  }
}

}  // namespace cula::gdn::sm90
