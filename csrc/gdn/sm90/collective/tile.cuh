// Tiles in shared memory as TMA brings and wgmma reads them.
#pragma once

#include "gdn/sm90/collective/factors.cuh"

namespace cula::gdn::sm90 {

inline constexpr int kTileBytes = kRows * 64 * 2;  // 64 rows of 64 16-bit elements, in the 128-byte swizzle

struct alignas(1024) SwizzledTile {
  unsigned char data[kTileBytes];
};

// A lower triangle of 64 x 64 in blocks of 16 x 16: those on and below the diagonal.
inline constexpr int kTriangleBlocks = 10;
__host__ __device__ constexpr int triangle_block(int row, int column) { return row * (row + 1) / 2 + column; }

// Byte offset of a 16-byte piece of a row.
__device__ __forceinline__ int swizzled(int row, int piece) { return row * 128 + ((piece ^ (row & 7)) * 16); }

}  // namespace cula::gdn::sm90
