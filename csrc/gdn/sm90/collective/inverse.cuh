// (I + L)^-1 of a strictly lower triangular 64 x 64 matrix by one warp, in registers.
//
// Substitution in fp32 inside the 16 x 16 diagonal blocks, through a scratch in shared memory; then
// [X, 0; Y, Z]^-1 = [X', 0; -Z' Y X', Z'] for blocks of 16 and of 32. Operands of those products are split into two
// bf16 (high + low, three products), which keeps 16 bits of each: the result is rounded to 16-bit types once, at its
// end.
#pragma once

#include "gdn/cuda/collective/fragment.cuh"

namespace cula::gdn::sm90 {

using namespace cula::device;

// The blocks on and below the diagonal, as accumulators of 16 x 16: [block][n / 8][4].
inline constexpr int kTriangleBlocks = 10;
using Triangle = float[kTriangleBlocks][2][4];
__host__ __device__ constexpr int triangle_block(int row, int column) { return row * (row + 1) / 2 + column; }

inline constexpr int kDiagonalPitch = 20;  // rows stay aligned to 16 bytes and meet few banks twice
struct alignas(16) DiagonalScratch {
  float data[4][16][kDiagonalPitch];
};

struct SplitOperand {
  uint32_t high[4];
  uint32_t low[4];
};

// Four pairs, in the order of an operand A: (rows 0-7, columns 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15).
__device__ __forceinline__ SplitOperand split_rows(const float (&c)[2][4]) {
  SplitOperand a;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float x = c[i >> 1][2 * (i & 1)];
    const float y = c[i >> 1][2 * (i & 1) + 1];
    a.high[i] = pack2<bf16>(x, y);
    const float2 rounded = unpack2<bf16>(a.high[i]);
    a.low[i] = pack2<bf16>(x - rounded.x, y - rounded.y);
  }
  return a;
}

// The same block as an operand B: [n / 8][k / 8].
__device__ __forceinline__ SplitOperand split_columns(const float (&c)[2][4]) {
  SplitOperand b = split_rows(c);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    b.high[i] = movmatrix_trans(b.high[i]);
    b.low[i] = movmatrix_trans(b.low[i]);
  }
  return b;
}

__device__ __forceinline__ void multiply_split(float (&c)[2][4], const SplitOperand& a, const SplitOperand& b) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    mma_m16n8k16<bf16>(c[n], a.low, b.high[2 * n], b.high[2 * n + 1]);
    mma_m16n8k16<bf16>(c[n], a.high, b.low[2 * n], b.low[2 * n + 1]);
    mma_m16n8k16<bf16>(c[n], a.high, b.high[2 * n], b.high[2 * n + 1]);
  }
}

__device__ __forceinline__ void load_block(float (&c)[2][4], const float (&block)[16][kDiagonalPitch]) {
  const int lane = lane_id();
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 pair = *reinterpret_cast<const float2*>(&block[(lane >> 2) + 8 * half][8 * n + 2 * (lane & 3)]);
      c[n][2 * half] = pair.x;
      c[n][2 * half + 1] = pair.y;
    }
  }
}

__device__ __forceinline__ void store_block(float (&block)[16][kDiagonalPitch], const float (&c)[2][4]) {
  const int lane = lane_id();
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      *reinterpret_cast<float2*>(&block[(lane >> 2) + 8 * half][8 * n + 2 * (lane & 3)]) =
          make_float2(c[n][2 * half], c[n][2 * half + 1]);
    }
  }
}

// Replaces each diagonal block -L by (I + L)^-1.
__device__ __forceinline__ void invert_diagonal(Triangle& m, DiagonalScratch& scratch) {
#pragma unroll
  for (int b = 0; b < 4; ++b) store_block(scratch.data[b], m[triangle_block(b, b)]);
  sync_warp();
  // Each half of the warp takes blocks 0 or 1, and 2 or 3 beside it; a lane one of their columns.
  const int column = lane_id() & 15;
  float(&lower)[16][kDiagonalPitch] = scratch.data[lane_id() >> 4];
  float(&upper)[16][kDiagonalPitch] = scratch.data[2 + (lane_id() >> 4)];
  float x[16];
  float y[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    x[i] = y[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
    for (int k = 0; k < i; k += 4) {
      const float4 a = *reinterpret_cast<const float4*>(&lower[i][k]);
      const float4 b = *reinterpret_cast<const float4*>(&upper[i][k]);
      x[i] += a.x * x[k];
      y[i] += b.x * y[k];
      if (k + 1 < i) x[i] += a.y * x[k + 1], y[i] += b.y * y[k + 1];
      if (k + 2 < i) x[i] += a.z * x[k + 2], y[i] += b.z * y[k + 2];
      if (k + 3 < i) x[i] += a.w * x[k + 3], y[i] += b.w * y[k + 3];
    }
  }
  sync_warp();
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    lower[i][column] = x[i];
    upper[i][column] = y[i];
  }
  sync_warp();
#pragma unroll
  for (int b = 0; b < 4; ++b) load_block(m[triangle_block(b, b)], scratch.data[b]);
}

// c = a0 b0 (+ a1 b1)
__device__ __forceinline__ void product(float (&c)[2][4], const SplitOperand& a, const SplitOperand& b) {
  cuda::clear(c);
  multiply_split(c, a, b);
}

// `m`: -L in, (I + L)^-1 out. By one warp, with a scratch of its own.
__device__ __forceinline__ void invert_triangle(Triangle& m, DiagonalScratch& scratch) {
  invert_diagonal(m, scratch);
  float r[2][4];
  // Blocks of 16: Y10 and Y32.
#pragma unroll
  for (int b = 0; b < 4; b += 2) {
    float(&y)[2][4] = m[triangle_block(b + 1, b)];
    product(r, split_rows(m[triangle_block(b + 1, b + 1)]), split_columns(y));
    product(y, split_rows(r), split_columns(m[triangle_block(b, b)]));
  }
  // Blocks of 32: R = Z' (-L), row 3 of it first since row 2 is computed in place.
  float r3[2][2][4];
  float r2[2][2][4];
  {
    const SplitOperand z2 = split_rows(m[triangle_block(2, 2)]);
    const SplitOperand z32 = split_rows(m[triangle_block(3, 2)]);
    const SplitOperand z3 = split_rows(m[triangle_block(3, 3)]);
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const SplitOperand upper = split_columns(m[triangle_block(2, column)]);
      product(r3[column], z32, upper);
      multiply_split(r3[column], z3, split_columns(m[triangle_block(3, column)]));
      product(r2[column], z2, upper);
    }
  }
  const SplitOperand x0 = split_columns(m[triangle_block(0, 0)]);
  const SplitOperand x10 = split_columns(m[triangle_block(1, 0)]);
  const SplitOperand x1 = split_columns(m[triangle_block(1, 1)]);
#pragma unroll
  for (int row = 2; row < 4; ++row) {
    const SplitOperand left = split_rows(row == 2 ? r2[0] : r3[0]);
    const SplitOperand right = split_rows(row == 2 ? r2[1] : r3[1]);
    product(m[triangle_block(row, 0)], left, x0);
    multiply_split(m[triangle_block(row, 0)], right, x10);
    product(m[triangle_block(row, 1)], right, x1);
  }
}

}  // namespace cula::gdn::sm90
