// (I + L)^-1 of a strictly lower triangular 64 x 64 matrix in shared memory, in place, by four warps, in fp32.
//
// Substitution inside the 16 x 16 diagonal blocks, then [X, 0; Y, Z] -> Y := -Z Y X for blocks of 16 and of 32.
#pragma once

#include "gdn/cuda/collective/fragment.cuh"

namespace cula::gdn::cuda {

inline constexpr int kInverseThreads = 128;

// Rows m0 .. m0 + 15 of -Z Y X, with Z, Y and X of kSize rows; columns n0 .. n0 + 8 kTiles - 1 of the result.
template <int kProducts, int kSize, int kTiles>
__device__ __forceinline__ void triangle_corner(float (&c)[kTiles][4], const float* z, const float* y, const float* x,
                                                int m0, int n0) {
  constexpr int kP = kPitch<kRows>;
  float zy[kSize / 8][4];
  clear(zy);
#pragma unroll
  for (int k = 0; k < kSize; k += 16) {
    const FragmentA<float> a = load_a<kP>(z, m0, k);
#pragma unroll
    for (int n = 0; n < kSize; n += 16)
      mma_fp32<kProducts>(zy[n / 8], zy[n / 8 + 1], a, load_b_transposed<kP>(y, n, k));
  }
  clear(c);
#pragma unroll
  for (int k = 0; k < kSize; k += 16) {
    const FragmentA<float> a = to_a<float>(zy[k / 8], zy[k / 8 + 1]);
#pragma unroll
    for (int n = 0; n < 8 * kTiles; n += 16) {
      mma_fp32<kProducts>(c[n / 8], c[n / 8 + 1], a, load_b_transposed<kP>(x, n0 + n, k));
    }
  }
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) c[i][j] = -c[i][j];
  }
}

// The result's blocks below the diagonal are as good as kProducts TF32 products make them: fp32 with three, and with
// one still four times closer than bf16 can hold.
//
// `m` [64][kPitch<64>]: L with zeros on and above the diagonal in, the inverse out. All threads of a block of
// kInverseThreads call it between barriers; it ends with one.
template <int kProducts>
__device__ __forceinline__ void invert_triangle(float* m) {
  constexpr int kP = kPitch<kRows>;
  const int warp = warp_id();
  const int lane = lane_id();
  float* diagonal = m + warp * 16 * (kP + 1);
  {
    // Lane j solves for column j of the block; the upper half of the warp repeats the lower.
    const int column = lane & 15;
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      alignas(16) float row[16];
#pragma unroll
      for (int k = 0; k < i; k += 4) {
        *reinterpret_cast<float4*>(row + k) = *reinterpret_cast<const float4*>(diagonal + i * kP + k);
      }
      float sum = i == column ? 1.0f : 0.0f;
#pragma unroll
      for (int k = 0; k < i; ++k) sum -= row[k] * x[k];
      x[i] = sum;
    }
    sync_warp();
    if (lane < 16) {
#pragma unroll
      for (int i = 0; i < 16; ++i) diagonal[i * kP + column] = x[i];
    }
  }
  sync_block();
  if (warp < 2) {
    float* x = m + warp * 32 * (kP + 1);
    float* y = x + 16 * kP;
    float c[2][4];
    triangle_corner<kProducts, 16>(c, y + 16, y, x, 0, 0);
    sync_warp();
    store_fragment<kP>(y, 0, 0, c);
  }
  sync_block();
  {
    float* y = m + 32 * kP;
    float c[2][4];
    const int m0 = (warp >> 1) * 16;
    const int n0 = (warp & 1) * 16;
    triangle_corner<kProducts, 32>(c, y + 32, y, m, m0, n0);
    sync_block();
    store_fragment<kP>(y, m0, n0, c);
  }
  sync_block();
}

}  // namespace cula::gdn::cuda
