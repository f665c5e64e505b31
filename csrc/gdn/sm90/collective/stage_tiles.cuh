// What the kernels of single stages share: tiles of a chunk on their way in and out, products of them, and matrices
// over pairs of rows in accumulators.
#pragma once

#include "common/device/hand_over.cuh"
#include "common/device/ldmatrix.cuh"
#include "common/device/mbarrier.cuh"
#include "common/device/shared.cuh"
#include "common/device/stmatrix.cuh"
#include "common/device/tma.cuh"
#include "common/device/warpgroup.cuh"
#include "common/device/wgmma.cuh"
#include "gdn/sm90/collective/operand.cuh"
#include "gdn/sm90/collective/tile.cuh"

namespace cula::gdn::sm90 {

// Blocks: slots of chunks, heads, these fastest.
struct StageGrid {
  SequenceTable sequences;
  int64_t heads;  // value heads, or key heads
  int64_t group;  // value heads a key head
  float scale;
  GateArgs gates;  // gamma and beta
};

// Named barriers of the warpgroups; 0 is the whole block's.
__device__ __forceinline__ void sync_warpgroup(int group) { sync_named(1 + group, kWarpgroupThreads); }

// Tiles side by side, 64 columns each, from the box at `at` on.
template <int kTiles>
__device__ __forceinline__ void load_tiles(uint32_t target, const CUtensorMap& map, BoxOrigin at, uint32_t barrier) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    tma_load(target + i * kTileBytes, map, at, barrier);
    at.column += 64;
  }
}

// A state of chunk number `chunk` over all rows of the batch, all of it: tile (i, j), 64 of its rows by 64 of its
// columns, lies at index i kColumnTiles + j.
template <int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void load_state_tiles(uint32_t target, const CUtensorMap& map, int head, int chunk,
                                                 uint32_t barrier) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
    load_tiles<kColumnTiles>(target + i * kColumnTiles * kTileBytes, map, {0, head, 64 * i, chunk}, barrier);
  }
}

// Zeroes the rows from `length` on, in which another sequence or nothing may stand. The threads that call it, numbered
// by `thread`, meet behind it before they multiply.
__device__ __forceinline__ void trim_tiles(uint32_t tiles, int count, int length, int thread, int threads) {
  const int pieces = (kRows - length) * 8;
#pragma unroll 1
  for (int tile = 0; tile < count; ++tile) {
#pragma unroll 1
    for (int i = thread; i < pieces; i += threads) {
      clear_shared_vector(tiles + tile * kTileBytes + length * 128 + 16 * i);
    }
  }
  fence_async_shared();
}

// Where a lane's row of a 16 x 16 block of this warp's 16 rows lies, for ldmatrix and stmatrix; the block further right
// by j lies in pieces 2 j and 2 j + 1.
__device__ __forceinline__ uint32_t block_piece(uint32_t tile, int j) {
  const int lane = lane_id();
  const int row = 16 * (warpgroup_thread() / 32) + (lane & 7) + ((lane >> 3) & 1) * 8;
  return tile + swizzled(row, 2 * j + (lane >> 4));
}

// An operand out of a tile whose rows are those of the product.
__device__ __forceinline__ void load_operand(uint32_t (&a)[16], uint32_t tile) {
#pragma unroll
  for (int j = 0; j < 4; ++j) ldmatrix_x4(reinterpret_cast<uint32_t(&)[4]>(a[4 * j]), block_piece(tile, j));
}
// Out of one whose columns are.
__device__ __forceinline__ void load_operand_transposed(uint32_t (&a)[16], uint32_t tile) {
  const int lane = lane_id();
  const uint32_t at =
      tile + swizzled((lane & 7) + ((lane >> 4) & 1) * 8, warpgroup_thread() / 32 * 2 + ((lane >> 3) & 1));
#pragma unroll
  for (int j = 0; j < 4; ++j) ldmatrix_x4_trans(reinterpret_cast<uint32_t(&)[4]>(a[4 * j]), at + j * 2048);
}
// Accumulators, packed in pairs, into a tile.
__device__ __forceinline__ void store_packed(uint32_t tile, const uint32_t (&x)[16]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    stmatrix_x4(block_piece(tile, j), x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]);
  }
}
template <class T>
__device__ __forceinline__ void pack_accumulators(uint32_t (&x)[16], const float (&c)[32]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = pack_operand<T>(c[2 * i], c[2 * i + 1]);
}
template <class T>
__device__ __forceinline__ void store_accumulators(uint32_t tile, const float (&c)[32]) {
  uint32_t x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = pack2<T>(c[2 * i], c[2 * i + 1]);
  store_packed(tile, x);
}

// A tile of 64 tokens to where they belong, by one warpgroup, behind a barrier that makes its writes known to the copy
// engine. Whole chunks go by that. at.column and at.token are the tile's first; `tensor` is what `map` describes.
template <class T>
__device__ __forceinline__ void store_tile(const CUtensorMap& map, const TensorArg& tensor, const BoxOrigin& at,
                                           uint32_t tile, int length) {
  if (length == kRows) {
    if (warpgroup_thread() == 0) tma_store(map, at, tile);
    return;
  }
  const int piece = warpgroup_thread() & 7;
  T* out = static_cast<T*>(tensor.data) + tensor.offset(at.batch, at.token, at.head) + at.column + 8 * piece;
#pragma unroll  // no loop: a product may be in flight
  for (int i = 0; i < kRows; i += kWarpgroupThreads / 8) {
    const int row = i + warpgroup_thread() / 8;
    if (row >= length) continue;
    *reinterpret_cast<uint4*>(out + row * tensor.stride[1]) = load_shared_vector(tile + swizzled(row, piece));
  }
}
// The same by a warpgroup that has just filled it.
template <class T>
__device__ __forceinline__ void send_tile(const CUtensorMap& map, const TensorArg& tensor, const BoxOrigin& at,
                                          uint32_t tile, int length, int group) {
  fence_async_shared();
  sync_warpgroup(group);
  store_tile<T>(map, tensor, at, tile, length);
  if (warpgroup_thread() == 0) tma_store_commit();
}
// Until what this thread sent has been read.
__device__ __forceinline__ void wait_sent() {
  if (warpgroup_thread() == 0) tma_store_wait_read();
}

// d = a b^T over kTiles x 64 columns of both. Issued, as the others here; the caller commits and waits.
template <class T, int kTiles>
__device__ __forceinline__ void rows_by_rows(float (&d)[32], uint32_t a, uint32_t b) {
#pragma unroll
  for (int k = 0; k < 4 * kTiles; ++k) {
    const int at = (k / 4) * kTileBytes + (k % 4) * 32;
    if (k == 0) {
      wgmma_ss_n64_first<T>(d, wgmma_descriptor(a, at), wgmma_descriptor(b, at));
    } else {
      wgmma_ss_n64<T>(d, wgmma_descriptor(a, at), wgmma_descriptor(b, at));
    }
  }
}
// d += a b^T
template <class T, int kTiles>
__device__ __forceinline__ void add_rows_by_rows(float (&d)[32], uint32_t a, uint32_t b) {
#pragma unroll
  for (int k = 0; k < 4 * kTiles; ++k) {
    const int at = (k / 4) * kTileBytes + (k % 4) * 32;
    wgmma_ss_n64<T>(d, wgmma_descriptor(a, at), wgmma_descriptor(b, at));
  }
}
// d = a b: rows of a are rows of d; 64-wide tiles of a's columns meet the tiles of b, `b_step` bytes apart, whose rows
// they are.
template <class T, int kTiles>
__device__ __forceinline__ void rows_by_columns(float (&d)[32], uint32_t a, uint32_t b, int b_step) {
#pragma unroll
  for (int k = 0; k < 4 * kTiles; ++k) {
    const uint64_t left = wgmma_descriptor(a, (k / 4) * kTileBytes + (k % 4) * 32);
    const uint64_t right = wgmma_descriptor(b, (k / 4) * b_step + (k % 4) * 2048);
    if (k == 0) {
      wgmma_ss_n64_transposed_first<T>(d, left, right);
    } else {
      wgmma_ss_n64_transposed<T>(d, left, right);
    }
  }
}
// d = a b and d += a b, a in registers and b one tile whose rows are a's columns.
template <class T>
__device__ __forceinline__ void operand_by_columns(float (&d)[32], const uint32_t (&a)[16], uint32_t b) {
#pragma unroll
  for (int k = 0; k < kRows / 16; ++k) {
    if (k == 0) {
      wgmma_rs_n64_transposed_first<T>(d, a, wgmma_descriptor(b, 0));
    } else {
      wgmma_rs_n64_transposed<T>(d, a + 4 * k, wgmma_descriptor(b, k * 2048));
    }
  }
}
// d = a b^T, b one tile of as many rows as d has columns
template <class T>
__device__ __forceinline__ void operand_by_rows(float (&d)[32], const uint32_t (&a)[16], uint32_t b) {
#pragma unroll
  for (int k = 0; k < kRows / 16; ++k) {
    if (k == 0) {
      wgmma_rs_n64_first<T>(d, a, wgmma_descriptor(b, 0));
    } else {
      wgmma_rs_n64<T>(d, a + 4 * k, wgmma_descriptor(b, k * 32));
    }
  }
}
template <class T>
__device__ __forceinline__ void add_operand_by_columns(float (&d)[32], const uint32_t (&a)[16], uint32_t b) {
#pragma unroll
  for (int k = 0; k < kRows / 16; ++k) wgmma_rs_n64_transposed<T>(d, a + 4 * k, wgmma_descriptor(b, k * 2048));
}

// c[4 i + 2 h + e] of a 64 x 64 product is in row accumulator_row() + 8 h and column accumulator_column() + 8 i + e.
__device__ __forceinline__ int accumulator_row() { return 16 * (warpgroup_thread() / 32) + lane_id() / 4; }
__device__ __forceinline__ int accumulator_column() { return 2 * (lane_id() & 3); }

// Factors of this thread's two rows of a product.
__device__ __forceinline__ float2 row_factors(uint32_t factors, size_t which) {
  const uint32_t at = factors + static_cast<uint32_t>(which) + 4 * accumulator_row();
  return make_float2(load_shared(at), load_shared(at + 32));
}
__device__ __forceinline__ void scale_rows(float (&c)[32], float2 f) {
#pragma unroll
  for (int i = 0; i < 32; ++i) c[i] *= (i & 2) == 0 ? f.x : f.y;
}

// Which index of a matrix over pairs of tokens is the later one: the decay runs from behind the earlier to the later.
enum class Later { kRow, kColumn };

// c <- c x factor x decay for pairs in their order (kStrict: of two different tokens) within the chunk, which no
// restart parts; 0 for the others. Selected, since what is dropped may be infinite.
template <Later kLater, bool kStrict>
__device__ __forceinline__ void gate_pairs(float (&c)[32], uint32_t factors, float factor, int length) {
  const uint32_t gammas = factors + static_cast<uint32_t>(offsetof(ChunkFactors, gamma));
  const uint32_t firsts = factors + static_cast<uint32_t>(offsetof(ChunkFactors, first));
  const int row = accumulator_row();
  const float row_gamma[2] = {load_shared(gammas + 4 * row), load_shared(gammas + 4 * row + 32)};
  int row_first[2] = {};
  if constexpr (kLater == Later::kRow) {
    row_first[0] = load_shared_byte(firsts + row);
    row_first[1] = load_shared_byte(firsts + row + 8);
  }
  // Without a restart all first tokens are 0.
  const bool restarts = load_shared_byte(firsts + kRows - 1) != 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int at = 8 * i + accumulator_column();
    const float2 gamma = load_shared_pair(gammas + 4 * at);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = at + e;
      const float column_gamma = e == 0 ? gamma.x : gamma.y;
      const int column_first = kLater == Later::kColumn && restarts ? load_shared_byte(firsts + column) : 0;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int later = kLater == Later::kRow ? row + 8 * h : column;
        const int earlier = kLater == Later::kRow ? column : row + 8 * h;
        const int first = kLater == Later::kRow ? row_first[h] : column_first;
        const float difference = kLater == Later::kRow ? row_gamma[h] - column_gamma : column_gamma - row_gamma[h];
        const bool kept = (kStrict ? earlier < later : earlier <= later) && earlier >= first && later < length;
        float& x = c[4 * i + 2 * h + e];
        x = kept ? x * factor * exp2_approx(difference) : 0.0f;
      }
    }
  }
}

}  // namespace cula::gdn::sm90
