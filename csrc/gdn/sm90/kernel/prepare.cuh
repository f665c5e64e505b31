// What depends on one chunk alone: A = (I + L)^-1 with L_ij = beta_i decay(i, j) (k_i . k_j) for i > j, and the factors
// of its rows.
//
// Four neighbouring value heads a block, a warp each: together they multiply K K^T of their key heads, then each makes
// and stores its own A without waiting for the others.
#pragma once

#include "common/device/dependent_launch.cuh"
#include "common/device/mbarrier.cuh"
#include "common/device/stmatrix.cuh"
#include "common/device/tma.cuh"
#include "gdn/sm90/collective/inverse.cuh"
#include "gdn/sm90/collective/tile.cuh"

namespace cula::gdn::sm90 {

inline constexpr int kPrepareHeads = 4;  // value heads a block
inline constexpr int kPrepareThreads = 32 * kPrepareHeads;

struct PrepareArgs {
  CUtensorMap k;
  CUtensorMap A;
  SequenceTable sequences;
  int64_t value_heads;
  int64_t group;        // value heads a key head
  int64_t head_blocks;  // ceil(value_heads / kPrepareHeads)
  float scale;
  GateArgs gates;
  TensorArg A_rows;       // [B, T, HV, C]
  ChunkFactors* factors;  // [slot, HV]
};

// kKeyHeads: how many key heads the value heads of a block have at most.
template <int kKeyDim, int kKeyHeads>
struct PrepareShared {
  struct Keys {
    SwizzledTile tiles[kKeyDim / 64];
  };
  union Scratch {  // of one warp; the blocks are dead when A, rounded, takes their place
    Block blocks[kInverseBlocks];
    SwizzledTile A;
  };

  Scratch scratch[kPrepareHeads];
  // The products follow the keys behind a barrier.
  union alignas(1024) KeyHead {
    Keys keys;
    Block products[kTriangleBlocks];
  } key_heads[kKeyHeads];
  ChunkFactors factors[kPrepareHeads];
  uint64_t loaded;
};

// The blocks of K K^T on and below the diagonal that fall to this warp: numbers warp, warp + 4, warp + 8.
inline constexpr int kBlocksPerWarp = (kTriangleBlocks + kPrepareHeads - 1) / kPrepareHeads;

__device__ __forceinline__ int block_row(int block) { return block >= 6 ? 3 : (block >= 3 ? 2 : (block >= 1 ? 1 : 0)); }

template <class T, int kKeyDim>
__device__ __forceinline__ void multiply_keys(Accumulators (&c)[kBlocksPerWarp], uint32_t keys) {
  const int lane = lane_id();
#pragma unroll
  for (int i = 0; i < kBlocksPerWarp; ++i) {
    cuda::clear(c[i]);
    const int block = warp_id() + kPrepareHeads * i;
    if (block >= kTriangleBlocks) continue;
    const int row = block_row(block);
    const int column = block - triangle_block(row, 0);
    // Rows of the tile that this lane gives the addresses of; both are the row of the lane modulo 8.
    const uint32_t a_row = keys + (16 * row + (lane & 15)) * 128;
    const uint32_t b_row = keys + (16 * column + (lane & 7) + (lane >> 4) * 8) * 128;
#pragma unroll
    for (int k0 = 0; k0 < kKeyDim / 16; k0 += 4) {  // loads of four steps under way at once
      uint32_t a[4][4];
      uint32_t b[4][4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint32_t tile = (k0 / 4) * kTileBytes;
        ldmatrix_x4(a[k], a_row + tile + (((2 * k + (lane >> 4)) ^ (lane & 7)) << 4));
        ldmatrix_x4(b[k], b_row + tile + (((2 * k + ((lane >> 3) & 1)) ^ (lane & 7)) << 4));
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        mma_m16n8k16<T>(c[i][0], a[k], b[k][0], b[k][1]);
        mma_m16n8k16<T>(c[i][1], a[k], b[k][2], b[k][3]);
      }
    }
  }
}

// Zeroes rows and columns past the chunk's length, where keys of the next sequence stand.
__device__ __forceinline__ void trim_block(Accumulators& c, int row, int column, int length) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = 16 * row + cuda::fragment_row(j);
      if (i >= length || 16 * column + cuda::fragment_column(n, j) >= length) c[n][j] = 0.0f;
    }
  }
}

// The whole tile of A, upper triangle too.
template <class T>
__device__ __forceinline__ void store_rounded(uint32_t tile, const RoundedTriangle<T>& A) {
  const int lane = lane_id();
  const uint32_t row = tile + (lane & 15) * 128;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t at = row + 16 * i * 128 + (((2 * j + (lane >> 4)) ^ (lane & 7)) << 4);
      if (j <= i) {
        const uint32_t(&r)[4] = A.r[triangle_block(i, j <= i ? j : 0)];
        stmatrix_x4(at, r[0], r[1], r[2], r[3]);
      } else {
        stmatrix_x4(at, 0, 0, 0, 0);
      }
    }
  }
}

template <class T, int kKeyDim, int kKeyHeads>
__global__ void __launch_bounds__(kPrepareThreads, kKeyHeads == 4 ? 2 : 4)
    prepare_kernel(const __grid_constant__ PrepareArgs args) {
  using Shared = PrepareShared<kKeyDim, kKeyHeads>;
  extern __shared__ __align__(1024) unsigned char prepare_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(prepare_shared);
  launch_dependents();
  const int64_t slot = blockIdx.x / static_cast<unsigned>(args.head_blocks);
  const int first_head = static_cast<int>((blockIdx.x - slot * args.head_blocks) * kPrepareHeads);
  Chunk chunk;
  if (!find_chunk(args.sequences, slot, chunk)) return;
  const int heads = static_cast<int>(args.value_heads);
  const int group = static_cast<int>(args.group);
  const int last_head = first_head + kPrepareHeads < heads ? first_head + kPrepareHeads - 1 : heads - 1;
  const int first_key = first_head / group;
  const int keys = last_head / group - first_key + 1;
  const uint32_t barrier = shared_address(&shared.loaded);
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(barrier, keys * static_cast<int>(sizeof(typename Shared::Keys)));
    for (int i = 0; i < keys; ++i) {
      for (int j = 0; j < kKeyDim / 64; ++j) {
        tma_load(shared_address(&shared.key_heads[i].keys.tiles[j]), args.k,
                 {64 * j, first_key + i, static_cast<int>(chunk.token), static_cast<int>(chunk.batch)}, barrier);
      }
    }
  }
  const int warp = warp_id();
  const int lane = lane_id();
  const int head = first_head + warp;
  const bool active = head <= last_head;
  ChunkFactors& factors = shared.factors[warp];
  if (active) {
    const RawGates raw = load_gates(args.gates, chunk, head);
    make_factors(factors, raw, args.gates, chunk, head, args.scale);
  }
  sync_block();  // the barrier exists
  mbarrier_wait(barrier, 0);

  {
    Accumulators c[kKeyHeads][kBlocksPerWarp];
#pragma unroll
    for (int i = 0; i < kKeyHeads; ++i) {
      if (i < keys) multiply_keys<T, kKeyDim>(c[i], shared_address(&shared.key_heads[i].keys));
    }
    sync_block();
#pragma unroll
    for (int i = 0; i < kKeyHeads; ++i) {
#pragma unroll
      for (int j = 0; j < kBlocksPerWarp; ++j) {
        const int block = warp + kPrepareHeads * j;
        if (i < keys && block < kTriangleBlocks) {
          const int row = block_row(block);
          if (chunk.length < kRows) trim_block(c[i][j], row, block - triangle_block(row, 0), chunk.length);
          store_block(shared.key_heads[i].products[block], c[i][j]);
        }
      }
    }
    sync_block();
  }
  if (!active) return;

  const Block* products = shared.key_heads[head / group - first_key].products;
  {
    // Each step I - beta k k^T has the norm max(1, |1 - beta |k|^2|).
    float norm = 1.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = 2 * lane + r;
      const float square = products[triangle_block(row >> 4, row >> 4)].data[row & 15][row & 15];
      norm *= fmaxf(1.0f, fabsf(1.0f - factors.beta[row] * square));
    }
    const float log2_norm = warp_sum(log2f(norm));
    if (lane == 0) factors.log2_norm = log2_norm + (factors.chunk_decay == 0.0f ? -INFINITY : factors.gamma[kRows - 1]);
    sync_warp();
  }
  const uint4* source = reinterpret_cast<const uint4*>(&factors);
  uint4* target = reinterpret_cast<uint4*>(args.factors + slot * args.value_heads + head);
  constexpr int kPieces = sizeof(ChunkFactors) / 16;
#pragma unroll
  for (int i = 0; i < (kPieces + 31) / 32; ++i) {
    if (32 * i + lane < kPieces) target[32 * i + lane] = source[32 * i + lane];
  }

  RoundedTriangle<T> A;
  invert_triangle(A, products, {factors, factors.first[kRows - 1] != 0}, shared.scratch[warp].blocks);
  sync_warp();
  const uint32_t tile = shared_address(&shared.scratch[warp].A);
  store_rounded(tile, A);
  if (chunk.length == kRows) {
    fence_async_shared();
    sync_warp();
    if (lane == 0) {
      tma_store(args.A, {0, head, static_cast<int>(chunk.token), static_cast<int>(chunk.batch)}, tile);
      tma_store_commit();
      tma_store_wait_read();
    }
    return;
  }
  sync_warp();
  T* out = static_cast<T*>(args.A_rows.data) + args.A_rows.offset(chunk.batch, chunk.token, head);
  const int piece = lane & 7;
#pragma unroll 1
  for (int row = lane >> 3; row < chunk.length; row += 4) {
    *reinterpret_cast<uint4*>(out + row * args.A_rows.stride[1] + 8 * piece) =
        *reinterpret_cast<const uint4*>(shared.scratch[warp].A.data + swizzled(row, piece));
  }
}

}  // namespace cula::gdn::sm90
