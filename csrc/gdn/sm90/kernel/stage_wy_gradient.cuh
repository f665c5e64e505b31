// The stage prepare_wy_repr_bwd, the gradients of W = A diag(beta decay) K, U = A diag(beta) V and of the inverse A:
//
//   Z_w = A^T dW      dA = tril1(dW (diag(beta decay) K)^T + dU (diag(beta) V)^T)      dP = -tril1(A^T dA A^T) o E
//   Z_u = A^T dU      dK = diag(beta)(diag(decay) Z_w + dP K) + dP^T diag(beta) K      dV = diag(beta) Z_u
//
//   dbeta = decay rows(Z_w o K) + rows(Z_u o V) + rows(dP o K K^T)
//   dg = beta (decay rows(Z_w o K) + rows(dP o K K^T)) - columns(diag(beta) dP o K K^T)
//
// A warpgroup a 64-wide block of key columns and one of value columns; what concerns pairs of rows each makes for
// itself. The other warpgroup feeds them, a step (value head of a chunk) a stage:
//
//   full[s]    the loads of stage s have landed      loader -> consumers
//   empty[s]   all warps have left it                consumers -> loader
#pragma once

#include "gdn/sm90/collective/stage_feed.cuh"

namespace cula::gdn::sm90 {

struct WyGradientArgs {
  StageGrid grid;  // heads: key heads
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap A;
  CUtensorMap dw;
  CUtensorMap du;
  CUtensorMap dk;
  CUtensorMap dv;
  TensorArg dk_rows;
  TensorArg dv_rows;
  TensorArg dbeta;
  TensorArg dg;
};

inline constexpr int kWyStages = 2;

template <int kKeyDim, int kValueDim>
inline constexpr int kWyConsumers = (kKeyDim > kValueDim ? kKeyDim : kValueDim) / 64;
template <int kKeyDim, int kValueDim>
inline constexpr int kWyThreads = (kWyConsumers<kKeyDim, kValueDim> + 1) * kWarpgroupThreads;
// 384 threads start with 168 registers each.
inline constexpr int kWyConsumerRegisters = 216;
inline constexpr int kWyFeederRegisters = 72;
static_assert(2 * kWyConsumerRegisters + kWyFeederRegisters <= 3 * 168);

template <int kKeyDim, int kValueDim>
struct WyGradientShared {
  static constexpr int kKeyTiles = kKeyDim / 64;
  static constexpr int kValueTiles = kValueDim / 64;
  static constexpr int kConsumers = kWyConsumers<kKeyDim, kValueDim>;
  struct Stage {
    SwizzledTile k[kKeyTiles];
    SwizzledTile dw[kKeyTiles];
    SwizzledTile v[kValueTiles];
    SwizzledTile du[kValueTiles];
    SwizzledTile A;
  };
  static constexpr int kStageTiles = 2 * kKeyTiles + 2 * kValueTiles + 1;

  Stage stages[kWyStages];
  SwizzledTile pairs[kConsumers];
  SwizzledTile out[kConsumers];  // dV and dK on their way
  StepStore store;
  // By buffers and warpgroups.
  float key_rows[2][kConsumers][kRows];    // <Z_w, k>
  float value_rows[2][kConsumers][kRows];  // <Z_u, v>
  float pair_rows[2][kRows];
  float pair_columns[2][4][kRows];  // by warps
  uint64_t full[kWyStages];
  uint64_t empty[kWyStages];

  __device__ void init() {
    StepStore::init(store, 4 * kConsumers);
    for (int s = 0; s < kWyStages; ++s) {
      mbarrier_init(shared_address(&full[s]), 1);
      mbarrier_init(shared_address(&empty[s]), warp_arrivals(4 * kConsumers));
    }
    mbarrier_init_fence();
  }
};

template <int kKeyDim, int kValueDim>
struct WyGradientLoader {
  using Shared = WyGradientShared<kKeyDim, kValueDim>;

  const WyGradientArgs& args;
  const Shared& shared;

  __device__ __forceinline__ void load_step(const BoxOrigin& tokens, int key_head, int number) const {
    const int s = number % kWyStages;
    const typename Shared::Stage& stage = shared.stages[s];
    const uint32_t barrier = shared_address(&shared.full[s]);
    if (number >= kWyStages) mbarrier_wait(shared_address(&shared.empty[s]), (number / kWyStages - 1) & 1);
    mbarrier_arrive_expect(barrier, Shared::kStageTiles * kTileBytes);
    load_tiles<Shared::kKeyTiles>(shared_address(stage.dw), args.dw, tokens, barrier);
    load_tiles<Shared::kKeyTiles>(shared_address(stage.k), args.k, {0, key_head, tokens.token, tokens.batch}, barrier);
    load_tiles<Shared::kValueTiles>(shared_address(stage.du), args.du, tokens, barrier);
    load_tiles<Shared::kValueTiles>(shared_address(stage.v), args.v, tokens, barrier);
    load_tiles<1>(shared_address(&stage.A), args.A, tokens, barrier);
  }

  __device__ __forceinline__ void run() const {
    const int group = static_cast<int>(args.grid.group);
    int number = 0;
    for_each_item(args.grid, [&](const Chunk& chunk, int key_head) {
#pragma unroll 1
      for (int j = 0; j < group; ++j) {
        if (lane_id() == 0) {
          load_step({0, key_head * group + j, static_cast<int>(chunk.token), static_cast<int>(chunk.batch)}, key_head,
                    number);
        }
        sync_warp();
        ++number;
      }
    });
  }
};

template <class T, int kKeyDim, int kValueDim>
struct WyGradientConsumer {
  using Shared = WyGradientShared<kKeyDim, kValueDim>;
  static constexpr int kKeyTiles = Shared::kKeyTiles;
  static constexpr int kValueTiles = Shared::kValueTiles;
  static constexpr int kConsumers = Shared::kConsumers;

  const WyGradientArgs& args;
  Shared& shared;
  int group;  // index of the warpgroup

  // Where there are fewer blocks of columns than warpgroups, the others repeat the first one's and keep it for
  // themselves.
  __device__ __forceinline__ bool has_keys() const { return kKeyTiles == kConsumers || group < kKeyTiles; }
  __device__ __forceinline__ bool has_values() const { return kValueTiles == kConsumers || group < kValueTiles; }

  __device__ __forceinline__ static void sync_consumers() {
    sync_named(1 + kConsumers, kConsumers * kWarpgroupThreads);
  }
  // c <- c times factors of its columns.
  __device__ __forceinline__ static void scale_columns(float (&c)[32], uint32_t factors, size_t which) {
    const uint32_t at = factors + static_cast<uint32_t>(which) + 4 * accumulator_column();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 f = load_shared_pair(at + 32 * i);
      c[4 * i] *= f.x;
      c[4 * i + 1] *= f.y;
      c[4 * i + 2] *= f.x;
      c[4 * i + 3] *= f.y;
    }
  }
  // Selected: what is dropped may be infinite.
  __device__ __forceinline__ static void keep_lower(float (&c)[32]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int row = accumulator_row() + 8 * (i / 2 % 2);
      const int column = accumulator_column() + 8 * (i / 4) + i % 2;
      if (column >= row) c[i] = 0.0f;
    }
  }

  // By one warp, behind the sums.
  __device__ __forceinline__ void store_row_gradients(const GradientStep& step, int buffer,
                                                      const ChunkFactors& f) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = 2 * lane_id() + r;
      if (row >= step.length) continue;
      float keys = 0.0f;
      float values = 0.0f;
      float columns = 0.0f;
#pragma unroll
      for (int g = 0; g < kKeyTiles; ++g) keys += shared.key_rows[buffer][g][row];
#pragma unroll
      for (int g = 0; g < kValueTiles; ++g) values += shared.value_rows[buffer][g][row];
#pragma unroll
      for (int w = 0; w < 4; ++w) columns += shared.pair_columns[buffer][w][row];
      const float decayed = f.out_decay[row] * keys + shared.pair_rows[buffer][row];
      args.dbeta.store(args.dbeta.offset(step.batch, step.token + row, step.head), decayed + values);
      if (args.dg) {
        args.dg.store(args.dg.offset(step.batch, step.token + row, step.head), f.beta[row] * decayed - columns);
      }
    }
  }

  __device__ __forceinline__ void run() const {
    const int key_tile = (has_keys() ? group : 0) * kTileBytes;
    const int value_tile = (has_values() ? group : 0) * kTileBytes;
    const uint32_t pairs_tile = shared_address(&shared.pairs[group]);
    const uint32_t out = shared_address(&shared.out[group]);
    float dk[32];
#pragma unroll 1
    for (int number = 0;; ++number) {
      const int buffer = number & 1;
      mbarrier_wait(shared_address(&shared.store.made[buffer]), (number >> 1) & 1);
      const GradientStep step = shared.store.steps[buffer];
      if (shuffle(step.length, 0) == 0) break;
      const uint32_t factors = shared_address(&shared.store.factors[buffer]);
      const int s = shuffle(number % kWyStages, 0);
      typename Shared::Stage& stage = shared.stages[s];
      const uint32_t k = shared_address(stage.k);
      const uint32_t v = shared_address(stage.v) + value_tile;
      const uint32_t A = shared_address(&stage.A);
#pragma unroll
      for (int i = 0; i < 32; ++i) dk[i] = step.is_first ? 0.0f : dk[i];
      mbarrier_wait(shared_address(&shared.full[s]), (number / kWyStages) & 1);
      if (step.length < kRows) {
        trim_tiles(shared_address(&stage), Shared::kStageTiles, step.length, static_cast<int>(threadIdx.x),
                   kConsumers * kWarpgroupThreads);
        sync_consumers();
      }
      uint32_t transposed[16];  // A^T
      load_operand_transposed(transposed, A);
      const float2 beta = row_factors(factors, offsetof(ChunkFactors, beta));
      float z[32];
      float c[32];
      uint32_t operand[16];
      {
        float y[32];
        float d[32];
        const uint32_t dw = wgmma_operand(shared_address(stage.dw));
        const uint32_t du = wgmma_operand(shared_address(stage.du));
        wgmma_fence();
        operand_by_columns<T>(y, transposed, du + value_tile / 16);  // Z_u
        operand_by_columns<T>(z, transposed, dw + key_tile / 16);    // Z_w
        rows_by_rows<T, kKeyTiles>(c, dw, wgmma_operand(k));
        rows_by_rows<T, kValueTiles>(d, du, wgmma_operand(shared_address(stage.v)));
        wgmma_commit();
        wait_sent();  // what was put out before
        sync_warpgroup(group);
        wgmma_wait<0>();
        // dA: its operands are scaled by rows of K and V, which are its columns.
        scale_columns(c, factors, offsetof(ChunkFactors, out_decay));
#pragma unroll
        for (int i = 0; i < 32; ++i) c[i] += d[i];
        scale_columns(c, factors, offsetof(ChunkFactors, beta));
        keep_lower(c);
        pack_accumulators<T>(operand, c);
        wgmma_fence();
        operand_by_rows<T>(c, operand, wgmma_operand(A));  // dA A^T
        wgmma_commit();
        if (has_values()) store_row_sums(shared.value_rows[buffer][group], row_products<T>(y, v));
        if (has_keys()) store_row_sums(shared.key_rows[buffer][group], row_products<T>(z, k + key_tile));
        scale_rows(y, beta);
        store_accumulators<T>(out, y);
        if (has_values()) {
          send_tile<T>(args.dv, args.dv_rows, {64 * group, step.head, step.token, step.batch}, out, step.length, group);
        }
        wgmma_wait<0>();
        pack_accumulators<T>(operand, c);
        store_packed(pairs_tile, operand);
        fence_async_shared();
        sync_warpgroup(group);
        wgmma_fence();
        operand_by_columns<T>(c, transposed, wgmma_operand(pairs_tile));  // A^T dA A^T
        rows_by_rows<T, kKeyTiles>(d, wgmma_operand(k), wgmma_operand(k));
        wgmma_commit();
        wgmma_wait<0>();
        gate_pairs<Later::kRow, true>(c, factors, -1.0f, step.length);
        pack_accumulators<T>(operand, c);
        if (group == 0) {
          store_pair_sums([&](int i) { return c[i] * d[i]; }, beta, shared.pair_rows[buffer],
                          shared.pair_columns[buffer][warpgroup_thread() / 32]);
        }
      }
      scale_rows(c, beta);
      sync_warpgroup(group);  // all have multiplied by what lies there
      uint32_t scaled[16];
      pack_accumulators<T>(scaled, c);
      store_packed(pairs_tile, scaled);
      sync_warpgroup(group);
      load_operand_transposed(scaled, pairs_tile);
      float e[32];
      wgmma_fence();
      operand_by_columns<T>(c, operand, wgmma_operand(k + key_tile));  // dP K
      operand_by_columns<T>(e, scaled, wgmma_operand(k + key_tile));   // (diag(beta) dP)^T K
      wgmma_commit();
      const float2 decay = row_factors(factors, offsetof(ChunkFactors, out_decay));
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const bool upper = (i & 2) == 0;
        z[i] = (upper ? beta.x : beta.y) * ((upper ? decay.x : decay.y) * z[i] + c[i]) + e[i];
      }
      mbarrier_arrive_warp(shared_address(&shared.empty[s]));
#pragma unroll
      for (int i = 0; i < 32; ++i) dk[i] += z[i];
      sync_consumers();  // all sums are there
      if (group == 0 && (warp_id() & 3) == 0) store_row_gradients(step, buffer, shared.store.factors[buffer]);
      StepStore::finish(shared.store, number);
      if (step.is_last && has_keys()) {
        wait_sent();
        sync_warpgroup(group);
        store_accumulators<T>(out, dk);
        send_tile<T>(args.dk, args.dk_rows, {64 * group, step.key_head, step.token, step.batch}, out, step.length,
                     group);
      }
    }
    wait_sent();
  }
};

template <class T, int kKeyDim, int kValueDim>
__global__ void __launch_bounds__(kWyThreads<kKeyDim, kValueDim>, 1)
    wy_gradient_kernel(const __grid_constant__ WyGradientArgs args) {
  using Shared = WyGradientShared<kKeyDim, kValueDim>;
  constexpr int kConsumers = Shared::kConsumers;
  Shared& shared = *reinterpret_cast<Shared*>(swizzled_shared_memory());
  if (threadIdx.x == 0) shared.init();
  sync_block();
  const int group = warpgroup_id();
  if (group == kConsumers) {
    if constexpr (kConsumers == 2) release_registers<kWyFeederRegisters>();
    const int warp = warp_id() & 3;
    if (warp == 0) WyGradientLoader<kKeyDim, kValueDim>{args, shared}.run();
    if (warp == 1) make_steps(args.grid, shared.store);
  } else {
    if constexpr (kConsumers == 2) acquire_registers<kWyConsumerRegisters>();
    WyGradientConsumer<T, kKeyDim, kValueDim>{args, shared, group}.run();
  }
}

}  // namespace cula::gdn::sm90
