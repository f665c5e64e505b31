// The stages of the output and of its gradient by the updates of one chunk:
//
//   chunk_fwd_o          O = scale (diag(decay) Q S + tril(Q K^T o E) V')
//   chunk_bwd_dv_local   dV = scale tril(Q K^T o E)^T dO
//
// A block a (chunk, value head), a warpgroup 64 of its value columns. What they read is read once, by blocks that stand
// two or more on a multiprocessor: these kernels are bound by memory.
#pragma once

#include "gdn/sm90/collective/stage_tiles.cuh"

namespace cula::gdn::sm90 {

template <int kValueDim>
inline constexpr int kOutputThreads = kValueDim / 64 * kWarpgroupThreads;

struct OutputStageArgs {
  StageGrid grid;
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;  // V', or dO
  CUtensorMap h;  // [B NT, K, HV, V], or with kValueFirst [B NT, V, HV, K]
  CUtensorMap o;  // or dV
  TensorArg o_rows;
  int64_t num_chunks;  // NT
};

template <int kKeyTiles, int kValueTiles, int kStateTiles>
struct OutputStageShared {
  SwizzledTile q[kKeyTiles];
  SwizzledTile k[kKeyTiles];
  SwizzledTile v[kValueTiles];  // the result takes its place
  SwizzledTile h[kStateTiles];
  ChunkFactors factors;
  uint64_t keys_loaded;
  uint64_t values_loaded;
};
template <int kKeyTiles, int kValueTiles>
struct OutputStageShared<kKeyTiles, kValueTiles, 0> {
  SwizzledTile q[kKeyTiles];
  SwizzledTile k[kKeyTiles];
  SwizzledTile v[kValueTiles];
  ChunkFactors factors;
  uint64_t keys_loaded;
  uint64_t values_loaded;
};

// What the blocks of both stages begin with. False: no chunk.
template <int kKeyTiles, int kValueTiles, class Shared>
__device__ __forceinline__ bool begin_output_stage(const OutputStageArgs& args, Shared& shared, Chunk& chunk,
                                                   int& head) {
  const int64_t slot = blockIdx.x / static_cast<unsigned>(args.grid.heads);
  head = static_cast<int>(blockIdx.x - slot * args.grid.heads);
  if (!find_chunk(args.grid.sequences, slot, chunk)) return false;
  const uint32_t keys = shared_address(&shared.keys_loaded);
  const uint32_t values = shared_address(&shared.values_loaded);
  if (threadIdx.x == 0) {
    mbarrier_init(keys, 1);
    mbarrier_init(values, 1);
    mbarrier_init_fence();
    const int token = static_cast<int>(chunk.token);
    const int batch = static_cast<int>(chunk.batch);
    const int key_head = head / static_cast<int>(args.grid.group);
    mbarrier_arrive_expect(keys, 2 * kKeyTiles * kTileBytes);
    load_tiles<kKeyTiles>(shared_address(shared.q), args.q, {0, key_head, token, batch}, keys);
    load_tiles<kKeyTiles>(shared_address(shared.k), args.k, {0, key_head, token, batch}, keys);
    mbarrier_arrive_expect(values, static_cast<int>(offsetof(Shared, factors)) - 2 * kKeyTiles * kTileBytes);
    load_tiles<kValueTiles>(shared_address(shared.v), args.v, {0, head, token, batch}, values);
  }
  return true;
}

template <class T, int kKeyDim, int kValueDim, bool kValueFirst>
__global__ void __launch_bounds__(kOutputThreads<kValueDim>, 2)
    output_stage_kernel(const __grid_constant__ OutputStageArgs args) {
  constexpr int kKeyTiles = kKeyDim / 64;
  constexpr int kValueTiles = kValueDim / 64;
  using Shared = OutputStageShared<kKeyTiles, kValueTiles, kKeyTiles * kValueTiles>;
  Shared& shared = *reinterpret_cast<Shared*>(swizzled_shared_memory());
  Chunk chunk;
  int head;
  if (!begin_output_stage<kKeyTiles, kValueTiles>(args, shared, chunk, head)) return;
  const uint32_t factors = shared_address(&shared.factors);
  const int warp = warp_id();
  if (warp == 0) {
    const int64_t index = dense_chunk_index(args.grid.sequences, chunk.sequence, chunk.index);
    if (lane_id() == 0) {
      constexpr int kRowTiles = kValueFirst ? kValueTiles : kKeyTiles;
      constexpr int kColumnTiles = kValueFirst ? kKeyTiles : kValueTiles;
      load_state_tiles<kRowTiles, kColumnTiles>(shared_address(shared.h), args.h, head,
                                                static_cast<int>(chunk.batch * args.num_chunks + index),
                                                shared_address(&shared.values_loaded));
    }
  } else if (warp == 1) {
    make_stage_factors(shared.factors, args.grid.gates, chunk, head, 1.0f);
  }
  sync_block();

  const int group = warpgroup_id();
  const uint32_t v_tile = shared_address(shared.v) + group * kTileBytes;
  mbarrier_wait(shared_address(&shared.keys_loaded), 0);
  mbarrier_wait(shared_address(&shared.values_loaded), 0);
  if (chunk.length < kRows) {
    trim_tiles(v_tile, 1, chunk.length, warpgroup_thread(), kWarpgroupThreads);
    sync_warpgroup(group);
  }
  float p[32];
  float o[32];
  const uint32_t q = wgmma_operand(shared_address(shared.q));
  wgmma_fence();
  rows_by_rows<T, kKeyTiles>(p, q, wgmma_operand(shared_address(shared.k)));  // Q K^T
  wgmma_commit();
  const uint32_t h = shared_address(shared.h);
  if constexpr (kValueFirst) {  // Q S
    rows_by_rows<T, kKeyTiles>(o, q, wgmma_operand(h + group * kKeyTiles * kTileBytes));
  } else {
    rows_by_columns<T, kKeyTiles>(o, q, wgmma_operand(h + group * kTileBytes), kValueTiles * kTileBytes);
  }
  wgmma_commit();
  wgmma_wait<0>();
  gate_pairs<Later::kRow, false>(p, factors, 1.0f, chunk.length);
  uint32_t p_operand[16];
  pack_accumulators<T>(p_operand, p);
  scale_rows(o, row_factors(factors, offsetof(ChunkFactors, out_decay)));
  wgmma_fence();
  add_operand_by_columns<T>(o, p_operand, wgmma_operand(v_tile));
  wgmma_commit();
  wgmma_wait<0>();
  scale_rows(o, make_float2(args.grid.scale, args.grid.scale));
  sync_warpgroup(group);  // all have read V'
  store_accumulators<T>(v_tile, o);
  send_tile<T>(args.o, args.o_rows, {64 * group, head, static_cast<int>(chunk.token), static_cast<int>(chunk.batch)},
               v_tile, chunk.length, group);
  wait_sent();
}

template <class T, int kKeyDim, int kValueDim>
__global__ void __launch_bounds__(kOutputThreads<kValueDim>, 3)
    local_value_gradient_kernel(const __grid_constant__ OutputStageArgs args) {
  constexpr int kKeyTiles = kKeyDim / 64;
  constexpr int kValueTiles = kValueDim / 64;
  using Shared = OutputStageShared<kKeyTiles, kValueTiles, 0>;
  Shared& shared = *reinterpret_cast<Shared*>(swizzled_shared_memory());
  Chunk chunk;
  int head;
  if (!begin_output_stage<kKeyTiles, kValueTiles>(args, shared, chunk, head)) return;
  const uint32_t factors = shared_address(&shared.factors);
  if (warp_id() == 1) make_stage_factors(shared.factors, args.grid.gates, chunk, head, 1.0f);
  sync_block();

  const int group = warpgroup_id();
  const uint32_t do_tile = shared_address(shared.v) + group * kTileBytes;
  mbarrier_wait(shared_address(&shared.keys_loaded), 0);
  mbarrier_wait(shared_address(&shared.values_loaded), 0);
  if (chunk.length < kRows) {
    trim_tiles(do_tile, 1, chunk.length, warpgroup_thread(), kWarpgroupThreads);
    sync_warpgroup(group);
  }
  float c[32];
  wgmma_fence();
  rows_by_rows<T, kKeyTiles>(c, wgmma_operand(shared_address(shared.k)), wgmma_operand(shared_address(shared.q)));
  wgmma_commit();
  wgmma_wait<0>();
  gate_pairs<Later::kColumn, false>(c, factors, args.grid.scale, chunk.length);
  uint32_t p_operand[16];
  pack_accumulators<T>(p_operand, c);
  wgmma_fence();
  operand_by_columns<T>(c, p_operand, wgmma_operand(do_tile));  // P^T dO
  wgmma_commit();
  wgmma_wait<0>();
  sync_warpgroup(group);  // all have read dO
  store_accumulators<T>(do_tile, c);
  send_tile<T>(args.o, args.o_rows, {64 * group, head, static_cast<int>(chunk.token), static_cast<int>(chunk.batch)},
               do_tile, chunk.length, group);
  wait_sent();
}

}  // namespace cula::gdn::sm90
