// Operands of one warp's matrix products, the same for all element types: m16 n16 k16 steps, fp32 accumulators.
//
// Lane = 4 g + t. An accumulator c of 16 x 8 holds (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1). 16-bit types use
// mma.m16n8k16. float uses two m16n8k8 in TF32, each as three products of the high and low parts of its operands; the
// order of the contraction is ours to choose there, so the hardware's k = t and k = t + 4 stand for columns 2t and
// 2t + 1. With that, an accumulator turns into an operand without moving between lanes, for every type.
#pragma once

#include "common/device/ldmatrix.cuh"
#include "common/device/mma_sync.cuh"
#include "gdn/cuda/collective/tile.cuh"

namespace cula::gdn::cuda {

// 16 (m) x 16 (k).
template <class T>
struct FragmentA {
  uint32_t r[4];
};
template <>
struct FragmentA<float> {
  float r[8];  // [k / 8]: (g, 2t), (g + 8, 2t), (g, 2t + 1), (g + 8, 2t + 1)
};

// 16 (k) x 16 (n).
template <class T>
struct FragmentB {
  uint32_t r[4];  // [n / 8][k / 8]
};
template <>
struct FragmentB<float> {
  float r[8];  // [n / 8][k / 8]: (2t, g), (2t + 1, g)
};

// Addresses below are what depends on the lane, plus what does not: nvcc otherwise keeps one register a position.

// A[m][k] = tile[m0 + m][k0 + k]
template <int kTilePitch, class T>
__device__ __forceinline__ FragmentA<T> load_a(const T* tile, int m0, int k0) {
  const int lane = lane_id();
  FragmentA<T> a;
  if constexpr (sizeof(T) == 2) {
    ldmatrix_x4(a.r, tile + ((lane & 15) * kTilePitch + (lane >> 4) * 8) + (m0 * kTilePitch + k0));
  } else {
    const T* p = tile + ((lane >> 2) * kTilePitch + 2 * (lane & 3)) + (m0 * kTilePitch + k0);
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const float2 upper = *reinterpret_cast<const float2*>(p + 8 * s);
      const float2 lower = *reinterpret_cast<const float2*>(p + 8 * kTilePitch + 8 * s);
      a.r[4 * s] = upper.x;
      a.r[4 * s + 1] = lower.x;
      a.r[4 * s + 2] = upper.y;
      a.r[4 * s + 3] = lower.y;
    }
  }
  return a;
}

// A[m][k] = tile[k0 + k][m0 + m]
template <int kTilePitch, class T>
__device__ __forceinline__ FragmentA<T> load_a_transposed(const T* tile, int m0, int k0) {
  const int lane = lane_id();
  FragmentA<T> a;
  if constexpr (sizeof(T) == 2) {
    // Matrices in register order: (m 0, k 0), (m 8, k 0), (m 0, k 8), (m 8, k 8).
    ldmatrix_x4_trans(
        a.r, tile + (((lane & 7) + (lane >> 4) * 8) * kTilePitch + ((lane >> 3) & 1) * 8) + (k0 * kTilePitch + m0));
  } else {
    const T* p = tile + (2 * (lane & 3) * kTilePitch + (lane >> 2)) + (k0 * kTilePitch + m0);
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a.r[4 * s + i] = p[(8 * s + (i >> 1)) * kTilePitch + (i & 1) * 8];
    }
  }
  return a;
}

// B[k][n] = tile[n0 + n][k0 + k]
template <int kTilePitch, class T>
__device__ __forceinline__ FragmentB<T> load_b(const T* tile, int n0, int k0) {
  const int lane = lane_id();
  FragmentB<T> b;
  if constexpr (sizeof(T) == 2) {
    // Matrices in register order: (n 0, k 0), (n 0, k 8), (n 8, k 0), (n 8, k 8).
    ldmatrix_x4(b.r,
                tile + (((lane & 7) + (lane >> 4) * 8) * kTilePitch + ((lane >> 3) & 1) * 8) + (n0 * kTilePitch + k0));
  } else {
    const T* p = tile + ((lane >> 2) * kTilePitch + 2 * (lane & 3)) + (n0 * kTilePitch + k0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = *reinterpret_cast<const float2*>(p + (i >> 1) * 8 * kTilePitch + (i & 1) * 8);
      b.r[2 * i] = pair.x;
      b.r[2 * i + 1] = pair.y;
    }
  }
  return b;
}

// B[k][n] = tile[k0 + k][n0 + n]
template <int kTilePitch, class T>
__device__ __forceinline__ FragmentB<T> load_b_transposed(const T* tile, int n0, int k0) {
  const int lane = lane_id();
  FragmentB<T> b;
  if constexpr (sizeof(T) == 2) {
    ldmatrix_x4_trans(b.r, tile + ((lane & 15) * kTilePitch + (lane >> 4) * 8) + (k0 * kTilePitch + n0));
  } else {
    const T* p = tile + (2 * (lane & 3) * kTilePitch + (lane >> 2)) + (k0 * kTilePitch + n0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      b.r[2 * i] = p[((i & 1) * 8) * kTilePitch + (i >> 1) * 8];
      b.r[2 * i + 1] = p[((i & 1) * 8 + 1) * kTilePitch + (i >> 1) * 8];
    }
  }
  return b;
}

__device__ __forceinline__ void split_tf32(float x, uint32_t& high, uint32_t& low) {
  high = to_tf32(x);
  low = to_tf32(x - __uint_as_float(high));
}

__device__ __forceinline__ void mma_tf32x3(float (&c)[4], const float* a, float b0, float b1) {
  uint32_t a_high[4];
  uint32_t a_low[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) split_tf32(a[i], a_high[i], a_low[i]);
  uint32_t b_high[2];
  uint32_t b_low[2];
  split_tf32(b0, b_high[0], b_low[0]);
  split_tf32(b1, b_high[1], b_low[1]);
  mma_m16n8k8_tf32(c, a_low, b_high[0], b_high[1]);
  mma_m16n8k8_tf32(c, a_high, b_low[0], b_low[1]);
  mma_m16n8k8_tf32(c, a_high, b_high[0], b_high[1]);
}

// The same in one product of TF32 numbers.
__device__ __forceinline__ void mma_tf32(float (&c)[4], const float* a, float b0, float b1) {
  uint32_t rounded[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) rounded[i] = to_tf32(a[i]);
  mma_m16n8k8_tf32(c, rounded, to_tf32(b0), to_tf32(b1));
}

// c0 (n 0 to 7) and c1 (n 8 to 15) += a b with fp32 operands, in one or three products.
template <int kProducts>
__device__ __forceinline__ void mma_fp32(float (&c0)[4], float (&c1)[4], const FragmentA<float>& a,
                                         const FragmentB<float>& b) {
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    if constexpr (kProducts == 3) {
      mma_tf32x3(c0, a.r + 4 * s, b.r[2 * s], b.r[2 * s + 1]);
      mma_tf32x3(c1, a.r + 4 * s, b.r[4 + 2 * s], b.r[4 + 2 * s + 1]);
    } else {
      mma_tf32(c0, a.r + 4 * s, b.r[2 * s], b.r[2 * s + 1]);
      mma_tf32(c1, a.r + 4 * s, b.r[4 + 2 * s], b.r[4 + 2 * s + 1]);
    }
  }
}

// c0 (n 0 to 7) and c1 (n 8 to 15) += a b
template <class T>
__device__ __forceinline__ void mma(float (&c0)[4], float (&c1)[4], const FragmentA<T>& a, const FragmentB<T>& b) {
  if constexpr (sizeof(T) == 2) {
    mma_m16n8k16<T>(c0, a.r, b.r[0], b.r[1]);
    mma_m16n8k16<T>(c1, a.r, b.r[2], b.r[3]);
  } else {
    mma_fp32<3>(c0, c1, a, b);
  }
}

// What an operand can hold: fp16 saturates, since an infinity in the state would turn zeros elsewhere into NaN.
template <class T>
__device__ __forceinline__ float to_range(float x) {
  if constexpr (kDTypeOf<T> == DType::kFloat16) {
    constexpr float kLargest = 65504.0f;
    return x > kLargest ? kLargest : (x < -kLargest ? -kLargest : x);
  } else {
    return x;
  }
}

// The accumulators of columns 0 to 7 and 8 to 15 as an operand, rounded to T.
template <class T>
__device__ __forceinline__ FragmentA<T> to_a(const float (&c0)[4], const float (&c1)[4]) {
  FragmentA<T> a;
  if constexpr (sizeof(T) == 2) {
    a.r[0] = pack2<T>(to_range<T>(c0[0]), to_range<T>(c0[1]));
    a.r[1] = pack2<T>(to_range<T>(c0[2]), to_range<T>(c0[3]));
    a.r[2] = pack2<T>(to_range<T>(c1[0]), to_range<T>(c1[1]));
    a.r[3] = pack2<T>(to_range<T>(c1[2]), to_range<T>(c1[3]));
  } else {
    a.r[0] = c0[0];
    a.r[1] = c0[2];
    a.r[2] = c0[1];
    a.r[3] = c0[3];
    a.r[4] = c1[0];
    a.r[5] = c1[2];
    a.r[6] = c1[1];
    a.r[7] = c1[3];
  }
  return a;
}

// The inverse of to_a: an operand as accumulators.
template <class T>
__device__ __forceinline__ void from_a(const FragmentA<T>& a, float (&c0)[4], float (&c1)[4]) {
  if constexpr (sizeof(T) == 2) {
    float2 x = unpack2<T>(a.r[0]);
    c0[0] = x.x, c0[1] = x.y;
    x = unpack2<T>(a.r[1]);
    c0[2] = x.x, c0[3] = x.y;
    x = unpack2<T>(a.r[2]);
    c1[0] = x.x, c1[1] = x.y;
    x = unpack2<T>(a.r[3]);
    c1[2] = x.x, c1[3] = x.y;
  } else {
    c0[0] = a.r[0];
    c0[2] = a.r[1];
    c0[1] = a.r[2];
    c0[3] = a.r[3];
    c1[0] = a.r[4];
    c1[2] = a.r[5];
    c1[1] = a.r[6];
    c1[3] = a.r[7];
  }
}

// What to_a rounds off, as a second operand of the same type: the two together have twice the bits.
template <class T>
__device__ __forceinline__ FragmentA<T> rest_of(const FragmentA<T>& a, const float (&c0)[4], const float (&c1)[4]) {
  float x0[4];
  float x1[4];
  from_a<T>(a, x0, x1);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    x0[j] = c0[j] - x0[j];
    x1[j] = c1[j] - x1[j];
  }
  return to_a<T>(x0, x1);
}

template <int kTiles>
__device__ __forceinline__ void clear(float (&c)[kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) c[i][j] = 0.0f;
  }
}

// Row and column of element j of tile i of a warp's accumulators, relative to its first.
__device__ __forceinline__ int fragment_row(int j) { return (lane_id() >> 2) + (j >> 1) * 8; }
__device__ __forceinline__ int fragment_column(int i, int j) { return 8 * i + 2 * (lane_id() & 3) + (j & 1); }

// Elements (row, column) and (row, column + 1) of a tile.
template <class T, int kTilePitch = kPitch<kRows>>
__device__ __forceinline__ float2 load_pair(const T* tile, int row, int column) {
  const T* p = tile + row * kTilePitch + column;
  if constexpr (sizeof(T) == 2) return unpack2<T>(*reinterpret_cast<const uint32_t*>(p));
  return *reinterpret_cast<const float2*>(p);
}

// Stores accumulators (rows m0 .., columns n0 ..) into a tile, rounded to T.
template <int kTilePitch, class T, int kTiles>
__device__ __forceinline__ void store_fragment(T* tile, int m0, int n0, const float (&c)[kTiles][4]) {
  T* p = tile + (m0 + (lane_id() >> 2)) * kTilePitch + n0 + 2 * (lane_id() & 3);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      T* q = p + half * 8 * kTilePitch + 8 * i;
      if constexpr (sizeof(T) == 2) {
        *reinterpret_cast<uint32_t*>(q) = pack2<T>(c[i][2 * half], c[i][2 * half + 1]);
      } else {
        *reinterpret_cast<float2*>(q) = make_float2(c[i][2 * half], c[i][2 * half + 1]);
      }
    }
  }
}

}  // namespace cula::gdn::cuda
