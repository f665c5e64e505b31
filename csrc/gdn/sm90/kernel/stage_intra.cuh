// The stages inside a chunk:
//
//   intra         A = (I + L)^-1, L_ij = beta_i decay(i, j) (k_i . k_j) for i > j      (then recompute)
//   recompute     U = A diag(beta) V      W = A diag(beta decay) K
#pragma once

#include "gdn/sm90/collective/inverse.cuh"
#include "gdn/sm90/collective/stage_tiles.cuh"

namespace cula::gdn::sm90 {

inline constexpr int kIntraHeads = 4;  // value heads a block, a warp each
inline constexpr int kIntraThreads = 32 * kIntraHeads;

struct IntraArgs {
  StageGrid grid;  // blocks: slots, groups of value heads
  int64_t head_blocks;
  CUtensorMap k;
  TensorArg A_rows;  // [B, T, HV, C]
};

// kKeyHeads: how many key heads the value heads of a block have at most.
template <int kKeyTiles, int kKeyHeads>
struct IntraShared {
  InverseScratch scratch[kIntraHeads];
  union alignas(1024) KeyHead {  // the products follow the keys behind a barrier
    SwizzledTile keys[kKeyTiles];
    Products products;
  } key_heads[kKeyHeads];
  ChunkFactors factors[kIntraHeads];
  uint64_t loaded;
};

template <class T, int kKeyDim, int kKeyHeads>
__global__ void __launch_bounds__(kIntraThreads, kKeyHeads == 1 ? 4 : (kKeyHeads == 2 ? 3 : 2))
    intra_kernel(const __grid_constant__ IntraArgs args) {
  constexpr int kKeyTiles = kKeyDim / 64;
  using Shared = IntraShared<kKeyTiles, kKeyHeads>;
  Shared& shared = *reinterpret_cast<Shared*>(swizzled_shared_memory());
  const int64_t slot = blockIdx.x / static_cast<unsigned>(args.head_blocks);
  const int first_head = static_cast<int>((blockIdx.x - slot * args.head_blocks) * kIntraHeads);
  Chunk chunk;
  if (!find_chunk(args.grid.sequences, slot, chunk)) return;
  const int heads = static_cast<int>(args.grid.heads);
  const int group = static_cast<int>(args.grid.group);
  const int last_head = min(first_head + kIntraHeads, heads) - 1;
  const int first_key = first_head / group;
  const int keys = last_head / group - first_key + 1;
  const int token = static_cast<int>(chunk.token);
  const int batch = static_cast<int>(chunk.batch);
  const uint32_t barrier = shared_address(&shared.loaded);
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(barrier, keys * kKeyTiles * kTileBytes);
    for (int i = 0; i < keys; ++i) {
      load_tiles<kKeyTiles>(shared_address(shared.key_heads[i].keys), args.k, {0, first_key + i, token, batch},
                            barrier);
    }
  }
  const int warp = warp_id();
  const int head = first_head + warp;
  const bool active = head <= last_head;
  ChunkFactors& factors = shared.factors[warp];
  if (active) make_stage_factors(factors, args.grid.gates, chunk, head, 1.0f);
  sync_block();  // the barrier exists
  mbarrier_wait(barrier, 0);
  {
    float c[kKeyHeads][32];
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kKeyHeads; ++i) {  // those that are absent too: no branch may stand around a wgmma
      const uint32_t rows = wgmma_operand(shared_address(shared.key_heads[i].keys));
      rows_by_rows<T, kKeyTiles>(c[i], rows, rows);
    }
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kKeyHeads; ++i) wgmma_complete(c[i]);
    sync_block();
#pragma unroll
    for (int i = 0; i < kKeyHeads; ++i) {
      if (i < keys) store_products(shared.key_heads[i].products, c[i], chunk.length);
    }
    sync_block();
  }
  if (!active) return;

  T* out = static_cast<T*>(args.A_rows.data) + args.A_rows.offset(chunk.batch, chunk.token, head);
  InverseScratch& scratch = shared.scratch[warp];
  invert_triangle<T>(shared.key_heads[kKeyHeads == 1 ? 0 : head / group - first_key].products, factors, scratch,
                     TriangleStore<T>(out, args.A_rows.stride[1], chunk.length, true, scratch));
}

struct RecomputeStageArgs {
  StageGrid grid;
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap A;
  CUtensorMap w;
  CUtensorMap u;
  TensorArg w_rows;
  TensorArg u_rows;
};

template <int kKeyTiles, int kValueTiles>
struct RecomputeStageShared {
  SwizzledTile A;
  SwizzledTile k[kKeyTiles];
  SwizzledTile v[kValueTiles];  // U takes its place
  SwizzledTile w[kKeyTiles];    // not K's: it may have two readers
  ChunkFactors factors;
  uint64_t loaded;
};

// A as an operand, its columns times factors of theirs.
template <class T>
__device__ __forceinline__ void load_scaled(uint32_t (&a)[16], uint32_t tile, uint32_t factors, size_t which) {
  load_operand(a, tile);
  const uint32_t at = factors + static_cast<uint32_t>(which) + 4 * accumulator_column();
#pragma unroll
  for (int j = 0; j < 8; ++j) {  // 8 columns from 8 j on
    const float2 f = load_shared_pair(at + 32 * j);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 x = unpack2<T>(a[2 * j + h]);
      a[2 * j + h] = pack_operand<T>(f.x * x.x, f.y * x.y);
    }
  }
}

template <int kKeyDim, int kValueDim>
inline constexpr int kRecomputeThreads = (kKeyDim > kValueDim ? kKeyDim : kValueDim) / 64 * kWarpgroupThreads;

// A block a (chunk, value head); a warpgroup a 64-wide part of W and one of U, where there are as many.
template <class T, int kKeyDim, int kValueDim>
__global__ void __launch_bounds__(kRecomputeThreads<kKeyDim, kValueDim>, 3)
    recompute_stage_kernel(const __grid_constant__ RecomputeStageArgs args) {
  constexpr int kKeyTiles = kKeyDim / 64;
  constexpr int kValueTiles = kValueDim / 64;
  using Shared = RecomputeStageShared<kKeyTiles, kValueTiles>;
  Shared& shared = *reinterpret_cast<Shared*>(swizzled_shared_memory());
  const int64_t slot = blockIdx.x / static_cast<unsigned>(args.grid.heads);
  const int head = static_cast<int>(blockIdx.x - slot * args.grid.heads);
  Chunk chunk;
  if (!find_chunk(args.grid.sequences, slot, chunk)) return;
  const int token = static_cast<int>(chunk.token);
  const int batch = static_cast<int>(chunk.batch);
  const uint32_t barrier = shared_address(&shared.loaded);
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(barrier, (1 + kKeyTiles + kValueTiles) * kTileBytes);
    load_tiles<1>(shared_address(&shared.A), args.A, {0, head, token, batch}, barrier);
    load_tiles<kKeyTiles>(shared_address(shared.k), args.k, {0, head / static_cast<int>(args.grid.group), token, batch},
                          barrier);
    load_tiles<kValueTiles>(shared_address(shared.v), args.v, {0, head, token, batch}, barrier);
  }
  if (warp_id() == 1) make_stage_factors(shared.factors, args.grid.gates, chunk, head, 1.0f);
  sync_block();

  const int group = warpgroup_id();
  const bool has_keys = kKeyTiles >= kValueTiles || group < kKeyTiles;
  const bool has_values = kValueTiles >= kKeyTiles || group < kValueTiles;
  const uint32_t k = shared_address(shared.k) + (has_keys ? group : 0) * kTileBytes;
  // A warpgroup without values multiplies its keys in their place and drops the result.
  const uint32_t v = has_values ? shared_address(shared.v) + group * kTileBytes : k;
  const uint32_t factors = shared_address(&shared.factors);
  mbarrier_wait(barrier, 0);
  if (chunk.length < kRows) {
    trim_tiles(shared_address(&shared.A), 1 + kKeyTiles + kValueTiles, chunk.length, static_cast<int>(threadIdx.x),
               kRecomputeThreads<kKeyDim, kValueDim>);
    sync_block();
  }
  const uint32_t A = shared_address(&shared.A);
  uint32_t scaled[16];
  float c[32];
  load_scaled<T>(scaled, A, factors, offsetof(ChunkFactors, beta));
  wgmma_fence();
  operand_by_columns<T>(c, scaled, wgmma_operand(v));
  wgmma_commit();
  wgmma_wait<0>();
  if (has_values) {
    sync_warpgroup(group);  // all have read V
    store_accumulators<T>(v, c);
    send_tile<T>(args.u, args.u_rows, {64 * group, head, token, batch}, v, chunk.length, group);
  }
  load_scaled<T>(scaled, A, factors, offsetof(ChunkFactors, beta_decay));
  wgmma_fence();
  operand_by_columns<T>(c, scaled, wgmma_operand(k));
  wgmma_commit();
  wgmma_wait<0>();
  if (has_keys) {
    const uint32_t w = shared_address(shared.w) + group * kTileBytes;
    store_accumulators<T>(w, c);
    send_tile<T>(args.w, args.w_rows, {64 * group, head, token, batch}, w, chunk.length, group);
  }
  wait_sent();
}

}  // namespace cula::gdn::sm90
