// What depends on one chunk alone: A = (I + L)^-1 with L_ij = beta_i decay(i, j) (k_i . k_j) for i > j, and the factors
// of its rows.
//
// One warp a (chunk, value head), with the triangle in registers from K K^T to A, so that the inverse needs no barrier;
// four neighbouring value heads a block, which share the products of their key heads.
#pragma once

#include <algorithm>

#include "common/device/dependent_launch.cuh"
#include "common/device/stmatrix.cuh"
#include "gdn/cuda/collective/tile.cuh"
#include "gdn/sm90/collective/factors.cuh"
#include "gdn/sm90/collective/inverse.cuh"

namespace cula::gdn::sm90 {

inline constexpr int kPrepareHeads = 4;  // value heads a block
inline constexpr int kPrepareThreads = 32 * kPrepareHeads;

struct PrepareArgs {
  SequenceTable sequences;
  int64_t value_heads;
  int64_t group;        // value heads a key head
  int64_t head_blocks;  // ceil(value_heads / kPrepareHeads)
  float scale;
  TensorArg k;
  GateArgs gates;
  TensorArg A;            // [B, T, HV, C]
  ChunkFactors* factors;  // [slot, HV]
};

// One 16 x 16 block of a product, as the lanes hold it: read and written without bank conflicts.
struct alignas(16) LaneBlock {
  float4 lanes[2][32];
};

template <class T, int kKeyDim>
struct PrepareShared {
  struct Warp {
    float square[kRows];  // of the norms of the keys
    ChunkFactors factors;
  };
  union Scratch {  // of one warp; the diagonal blocks are dead when A is rounded
    DiagonalScratch diagonal;
    cuda::Tile<T, kRows> A;
  };

  Warp warps[kPrepareHeads];
  // One after the other, with barriers between: the keys of the key heads that the block's value heads have, the
  // products K K^T, what each warp needs for its inverse.
  union {
    cuda::Tile<T, kKeyDim> keys[kPrepareHeads];
    LaneBlock products[kPrepareHeads][kTriangleBlocks];
    Scratch scratch[kPrepareHeads];
  };

  static size_t bytes(int64_t group) {
    size_t tiles = kPrepareHeads;
    if (group % kPrepareHeads == 0) {
      tiles = 1;
    } else if (group == 2) {
      tiles = 2;
    }
    return sizeof(warps) + std::max({tiles * sizeof(keys[0]), tiles * sizeof(products[0]), sizeof(scratch)});
  }
};

// The blocks of K K^T on and below the diagonal that fall to this warp: numbers warp, warp + 4, warp + 8.
inline constexpr int kBlocksPerWarp = (kTriangleBlocks + kPrepareHeads - 1) / kPrepareHeads;

template <class T, int kKeyDim>
__device__ __forceinline__ void multiply_keys(float (&c)[kBlocksPerWarp][2][4], const T* keys) {
#pragma unroll
  for (int i = 0; i < kBlocksPerWarp; ++i) {
    cuda::clear(c[i]);
    const int block = warp_id() + kPrepareHeads * i;
    if (block >= kTriangleBlocks) continue;
    const int row = block >= 6 ? 3 : (block >= 3 ? 2 : (block >= 1 ? 1 : 0));
    const int column = block - triangle_block(row, 0);
#pragma unroll
    for (int k = 0; k < kKeyDim; k += 16) {
      cuda::mma(c[i][0], c[i][1], cuda::load_a<cuda::kPitch<kKeyDim>>(keys, 16 * row, k),
                cuda::load_b<cuda::kPitch<kKeyDim>>(keys, 16 * column, k));
    }
  }
}

// K K^T in, -L out.
__device__ __forceinline__ void apply_gates(Triangle& c, const ChunkFactors& f) {
  const int g = lane_id() >> 2;
  const int t = 2 * (lane_id() & 3);
  float gamma[8];
  float beta[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    gamma[i] = f.gamma[8 * i + g];
    beta[i] = -f.beta[8 * i + g];
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 other = *reinterpret_cast<const float2*>(&f.gamma[8 * j + t]);
#pragma unroll
    for (int i = j / 2 * 2; i < 8; ++i) {  // rows 8 i .., columns 8 j ..
      float* x = &c[triangle_block(i / 2, j / 2)][j % 2][2 * (i % 2)];
      x[0] *= beta[i] * exp2_approx(gamma[i] - other.x);
      x[1] *= beta[i] * exp2_approx(gamma[i] - other.y);
    }
  }
  // Selected, since what is dropped may be infinite.
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int j = i / 2 * 2; j < i / 2 * 2 + 2; ++j) {
      float* x = &c[triangle_block(i / 2, j / 2)][j % 2][2 * (i % 2)];
      if (8 * j + t >= 8 * i + g) x[0] = 0.0f;
      if (8 * j + t + 1 >= 8 * i + g) x[1] = 0.0f;
    }
  }
  if (f.first[kRows - 1] == 0) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int first = f.first[8 * i + g];
#pragma unroll
    for (int j = 0; j < i / 2 * 2 + 2; ++j) {
      float* x = &c[triangle_block(i / 2, j / 2)][j % 2][2 * (i % 2)];
      if (8 * j + t < first) x[0] = 0.0f;
      if (8 * j + t + 1 < first) x[1] = 0.0f;
    }
  }
}

template <class T, int kKeyDim>
__global__ void __launch_bounds__(kPrepareThreads, 3) prepare_kernel(const PrepareArgs args) {
  using Shared = PrepareShared<T, kKeyDim>;
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared_memory());
  launch_dependents();
  const int64_t slot = blockIdx.x / args.head_blocks;
  const int64_t first_head = (blockIdx.x - slot * args.head_blocks) * kPrepareHeads;
  Chunk chunk;
  if (!find_chunk(args.sequences, slot, chunk)) return;
  const int64_t last_head =
      first_head + kPrepareHeads < args.value_heads ? first_head + kPrepareHeads - 1 : args.value_heads - 1;
  const int64_t first_key = first_head / args.group;
  const int keys = static_cast<int>(last_head / args.group - first_key) + 1;
  for (int i = 0; i < keys; ++i) {
    cuda::load_tile<T, kKeyDim>(shared.keys[i].data, args.k,
                                {chunk.batch, chunk.token, chunk.length, first_key + i, 0, kKeyDim});
  }
  cp_async_commit();

  const int warp = warp_id();
  const int lane = lane_id();
  const int64_t head = first_head + warp;
  const bool active = head <= last_head;
  typename Shared::Warp& mine = shared.warps[warp];
  ChunkFactors& factors = mine.factors;
  if (active) make_factors(factors, args.gates, chunk, head, args.scale);
  cp_async_wait<0>();
  sync_block();

  {
    float c[kPrepareHeads][kBlocksPerWarp][2][4];
#pragma unroll
    for (int i = 0; i < kPrepareHeads; ++i) {
      if (i < keys) multiply_keys<T, kKeyDim>(c[i], shared.keys[i].data);
    }
    sync_block();
#pragma unroll
    for (int i = 0; i < kPrepareHeads; ++i) {
#pragma unroll
      for (int j = 0; j < kBlocksPerWarp; ++j) {
        const int block = warp + kPrepareHeads * j;
        if (i < keys && block < kTriangleBlocks) {
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            shared.products[i][block].lanes[n][lane] =
                make_float4(c[i][j][n][0], c[i][j][n][1], c[i][j][n][2], c[i][j][n][3]);
          }
        }
      }
    }
    sync_block();
  }
  Triangle m;
  if (active) {
    const LaneBlock* products = shared.products[head / args.group - first_key];
#pragma unroll
    for (int b = 0; b < kTriangleBlocks; ++b) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float4 x = products[b].lanes[n][lane];
        m[b][n][0] = x.x;
        m[b][n][1] = x.y;
        m[b][n][2] = x.z;
        m[b][n][3] = x.w;
      }
    }
  }
  sync_block();
  if (!active) return;

  const int g = lane >> 2;
#pragma unroll
  for (int b = 0; b < 4; ++b) {  // the diagonal lies with the lanes whose row and column agree
    const float(&block)[2][4] = m[triangle_block(b, b)];
    if (g >> 1 == (lane & 3)) {
      mine.square[16 * b + g] = (g & 1) != 0 ? block[0][1] : block[0][0];
      mine.square[16 * b + 8 + g] = (g & 1) != 0 ? block[1][3] : block[1][2];
    }
  }
  sync_warp();
  {
    // Each step I - beta k k^T has the norm max(1, |1 - beta |k|^2|).
    float log2_norm = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = 2 * lane + r;
      log2_norm += log2f(fmaxf(1.0f, fabsf(1.0f - factors.beta[row] * mine.square[row])));
    }
    log2_norm = warp_sum(log2_norm);
    if (lane == 0) factors.log2_norm = log2_norm + (factors.chunk_decay == 0.0f ? -INFINITY : factors.gamma[kRows - 1]);
    sync_warp();
  }
  apply_gates(m, factors);
  const uint4* source = reinterpret_cast<const uint4*>(&factors);
  uint4* target = reinterpret_cast<uint4*>(args.factors + slot * args.value_heads + head);
  constexpr int kPieces = sizeof(ChunkFactors) / 16;
#pragma unroll
  for (int i = 0; i < (kPieces + 31) / 32; ++i) {
    if (32 * i + lane < kPieces) target[32 * i + lane] = source[32 * i + lane];
  }

  typename Shared::Scratch& scratch = shared.scratch[warp];
  invert_triangle(m, scratch.diagonal);
  sync_warp();
  // Rounded through shared memory, so that rows leave whole.
  constexpr int kP = cuda::kPitch<kRows>;
  T* rounded = scratch.A.data;
  const uint32_t corner = shared_address(rounded + (lane & 15) * kP + (lane >> 4) * 8);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t at = corner + static_cast<uint32_t>(sizeof(T)) * (16 * i * kP + 16 * j);
      if (j <= i) {
        const float(&block)[2][4] = m[triangle_block(i, j <= i ? j : 0)];
        const cuda::FragmentA<T> a = cuda::to_a<T>(block[0], block[1]);
        stmatrix_x4(at, a.r[0], a.r[1], a.r[2], a.r[3]);
      } else {
        stmatrix_x4(at, 0, 0, 0, 0);
      }
    }
  }
  sync_warp();
  T* out = static_cast<T*>(args.A.data) + args.A.offset(chunk.batch, chunk.token, head);
  const int piece = (lane & 7) * 8;
#pragma unroll 4
  for (int row = lane >> 3; row < kRows; row += 4) {
    if (row < chunk.length) {
      *reinterpret_cast<uint4*>(out + row * args.A.stride[1] + piece) =
          *reinterpret_cast<const uint4*>(rounded + row * kP + piece);
    }
  }
}

}  // namespace cula::gdn::sm90
