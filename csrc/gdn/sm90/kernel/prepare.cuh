// What depends on one chunk alone: A = (I + L)^-1 with L_ij = beta_i decay(i, j) (k_i . k_j) for i > j, and the factors
// of its rows.
//
// One warp a (chunk, value head), from the product K K^T to A in registers, so that warps never wait for each other;
// four neighbouring value heads a block, which share the tiles of their key heads.
#pragma once

#include "common/device/launch.cuh"
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

template <class T>
struct PrepareWarp {
  // The scratch is dead when A is rounded.
  union {
    DiagonalScratch diagonal;
    cuda::Tile<T, kRows> A;
  };
  float square[kRows];  // of the norms of the keys
  ChunkFactors factors;
};

template <class T, int kKeyDim>
struct PrepareShared {
  PrepareWarp<T> warps[kPrepareHeads];
  // Of the key heads that the value heads of a block have: as many as the group's size makes necessary.
  cuda::Tile<T, kKeyDim> keys[kPrepareHeads];

  static size_t bytes(int64_t group) {
    int64_t tiles = kPrepareHeads;
    if (group % kPrepareHeads == 0) {
      tiles = 1;
    } else if (group == 2) {
      tiles = 2;
    }
    return offsetof(PrepareShared, keys) + static_cast<size_t>(tiles) * sizeof(cuda::Tile<T, kKeyDim>);
  }
};

// The blocks of K K^T on and below the diagonal.
template <class T, int kKeyDim>
__device__ __forceinline__ void multiply_keys(Triangle& c, const T* keys) {
#pragma unroll
  for (int b = 0; b < kTriangleBlocks; ++b) cuda::clear(c[b]);
#pragma unroll
  for (int k = 0; k < kKeyDim; k += 16) {
    cuda::FragmentA<T> rows[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) rows[b] = cuda::load_a<cuda::kPitch<kKeyDim>>(keys, 16 * b, k);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j <= i; ++j) {
        // The same registers as columns: tiles (rows 0-7, k 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15).
        float(&block)[2][4] = c[triangle_block(i, j)];
        mma_m16n8k16<T>(block[0], rows[i].r, rows[j].r[0], rows[j].r[2]);
        mma_m16n8k16<T>(block[1], rows[i].r, rows[j].r[1], rows[j].r[3]);
      }
    }
  }
}

// K K^T in, -L out.
__device__ __forceinline__ void apply_gates(Triangle& c, const ChunkFactors& f) {
  const bool restarts = f.first[kRows - 1] != 0;
  const int g = lane_id() >> 2;
  const int t = 2 * (lane_id() & 3);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * i + 8 * half + g;
      const float gamma = f.gamma[row];
      const float beta = -f.beta[row];
      const int first = restarts ? f.first[row] : 0;
#pragma unroll
      for (int j = 0; j <= i; ++j) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int column = 16 * j + 8 * n + t;
          const float2 other = *reinterpret_cast<const float2*>(&f.gamma[column]);
          float* x = &c[triangle_block(i, j)][n][2 * half];
          x[0] *= beta * exp2_approx(gamma - other.x);
          x[1] *= beta * exp2_approx(gamma - other.y);
          if (i == j || restarts) {  // selected, since what is dropped may be infinite
            if (column >= row || column < first) x[0] = 0.0f;
            if (column + 1 >= row || column + 1 < first) x[1] = 0.0f;
          }
        }
      }
    }
  }
}

template <class T, int kKeyDim>
__global__ void __launch_bounds__(kPrepareThreads, 3) prepare_kernel(const PrepareArgs args) {
  auto& shared = *reinterpret_cast<PrepareShared<T, kKeyDim>*>(dynamic_shared_memory());
  const int64_t slot = blockIdx.x / args.head_blocks;
  const int64_t first_head = (blockIdx.x - slot * args.head_blocks) * kPrepareHeads;
  Chunk chunk;
  if (!find_chunk(args.sequences, slot, chunk)) return;
  const int64_t last_head =
      first_head + kPrepareHeads < args.value_heads ? first_head + kPrepareHeads - 1 : args.value_heads - 1;
  const int64_t first_key = first_head / args.group;
  const int64_t last_key = last_head / args.group;
  for (int64_t key = first_key; key <= last_key; ++key) {
    cuda::load_tile<T, kKeyDim>(shared.keys[key - first_key].data, args.k,
                                {chunk.batch, chunk.token, chunk.length, key, 0, kKeyDim});
  }
  cp_async_commit();

  const int64_t head = first_head + warp_id();
  PrepareWarp<T>& mine = shared.warps[warp_id()];
  ChunkFactors& factors = mine.factors;
  if (head <= last_head) make_factors(factors, args.gates, chunk, head, args.scale);
  cp_async_wait<0>();
  sync_block();
  if (head > last_head) return;

  Triangle m;
  multiply_keys<T, kKeyDim>(m, shared.keys[head / args.group - first_key].data);
  const int lane = lane_id();
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

  invert_triangle(m, mine.diagonal);
  sync_warp();
  // Rounded through shared memory, so that rows leave whole.
  constexpr int kP = cuda::kPitch<kRows>;
  const uint32_t corner = shared_address(mine.A.data + ((lane & 7) + ((lane >> 3) & 1) * 8) * kP + (lane >> 4) * 8);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t at = corner + static_cast<uint32_t>(sizeof(T)) * (16 * i * kP + 16 * j);
      if (j <= i) {
        const cuda::FragmentA<T> a =
            cuda::to_a<T>(m[triangle_block(i, j <= i ? j : 0)][0], m[triangle_block(i, j <= i ? j : 0)][1]);
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
          *reinterpret_cast<const uint4*>(mine.A.data + row * kP + piece);
    }
  }
}

}  // namespace cula::gdn::sm90
