// (I + L)^-1 of a strictly lower triangular 64 x 64 matrix by one warp.
//
// Substitution in fp32 inside 8 x 8 diagonal blocks; then [X, 0; Y, Z]^-1 = [X', 0; -Z' Y X', Z'] for blocks of 8, 16
// and 32, as products in TF32 (operands rounded to nearest) with fp32 sums: their error lies below that of rounding the
// result to 16 bits. L itself never exists as a whole: its blocks are made from K K^T when they are multiplied.
#pragma once

#include "gdn/cuda/collective/fragment.cuh"
#include "gdn/sm90/collective/operand.cuh"
#include "gdn/sm90/collective/tile.cuh"

namespace cula::gdn::sm90 {

// 16 x 16 blocks in shared memory, two side by side: rows of four octets, which trade places from row to row so that
// accumulators are stored and read, and columns of operands read, without bank conflicts.
__host__ __device__ constexpr int octet_swizzle(int row) { return (row & 3) ^ ((row >> 2) & 1); }

template <int kBlocks>
struct alignas(16) BlockStore {
  float data[(kBlocks + 1) / 2][16][32];

  __device__ static int offset(int block, int row, int column) {
    return (block >> 1) * 512 + row * 32 + (((2 * (block & 1) + (column >> 3)) ^ octet_swizzle(row)) << 3) +
           (column & 7);
  }
  __device__ float* at(int block, int row, int column) { return &data[0][0][0] + offset(block, row, column); }
  __device__ const float* at(int block, int row, int column) const {
    return &data[0][0][0] + offset(block, row, column);
  }
};
using Products = BlockStore<kTriangleBlocks>;
inline constexpr int kInverseBlocks = 5;  // of scratch: the diagonal, and one more
using InverseScratch = BlockStore<kInverseBlocks>;

// Accumulators of 16 x 16, [n / 8]; operands are in the order of contraction of cuda::FragmentA<float> and B.
using Accumulators = float[2][4];
struct LeftOperand {
  uint32_t r[8];
};
struct RightOperand {
  uint32_t r[8];
};

// To the nearest TF32 number, ties away from zero, for an operand of mma, which drops the bits below. One instruction,
// where cvt.rna.tf32 takes four.
__device__ __forceinline__ uint32_t round_tf32(float x) { return __float_as_uint(x) + 0x1000u; }

template <class Store>
__device__ __forceinline__ void load_block(Accumulators& c, const Store& store, int block) {
  const int lane = lane_id();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair =
        *reinterpret_cast<const float2*>(store.at(block, (lane >> 2) + 8 * (i & 1), 8 * (i >> 1) + 2 * (lane & 3)));
    c[i >> 1][2 * (i & 1)] = pair.x;
    c[i >> 1][2 * (i & 1) + 1] = pair.y;
  }
}

template <class Store>
__device__ __forceinline__ void store_block(Store& store, int block, const Accumulators& c) {
  const int lane = lane_id();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    *reinterpret_cast<float2*>(store.at(block, (lane >> 2) + 8 * (i & 1), 8 * (i >> 1) + 2 * (lane & 3))) =
        make_float2(c[i >> 1][2 * (i & 1)], c[i >> 1][2 * (i & 1) + 1]);
  }
}

__device__ __forceinline__ LeftOperand left_operand(const Accumulators& c) {
  LeftOperand a;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    a.r[4 * s] = round_tf32(c[s][0]);
    a.r[4 * s + 1] = round_tf32(c[s][2]);
    a.r[4 * s + 2] = round_tf32(c[s][1]);
    a.r[4 * s + 3] = round_tf32(c[s][3]);
  }
  return a;
}
__device__ __forceinline__ LeftOperand left_operand(const InverseScratch& store, int block) {
  Accumulators c;
  load_block(c, store, block);
  return left_operand(c);
}

// r[4 n + 2 s + e] is the element in row 8 s + 2 t + e and column 8 n + g.
__device__ __forceinline__ RightOperand right_operand(const InverseScratch& store, int block) {
  const int g = lane_id() >> 2;
  const int t = 2 * (lane_id() & 3);
  RightOperand b;
#pragma unroll
  for (int i = 0; i < 8; ++i) b.r[i] = round_tf32(*store.at(block, 8 * (i / 2 % 2) + t + i % 2, 8 * (i / 4) + g));
  return b;
}

// c += a b
__device__ __forceinline__ void multiply(Accumulators& c, const LeftOperand& a, const RightOperand& b) {
#pragma unroll
  for (int s = 0; s < 2; ++s) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t(&step)[4] = reinterpret_cast<const uint32_t(&)[4]>(a.r[4 * s]);
      mma_m16n8k8_tf32(c[n], step, b.r[4 * n + 2 * s], b.r[4 * n + 2 * s + 1]);
    }
  }
}

// What turns K K^T into -L. Off the diagonal blocks every column precedes every row.
struct Gates {
  const ChunkFactors& f;
  bool restarts;  // in the chunk

  // Block (row, column) of -L, as right operand.
  __device__ __forceinline__ RightOperand right_operand(const Products& products, int row, int column) const {
    const int g = lane_id() >> 2;
    const int t = 2 * (lane_id() & 3);
    float x[8];
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int i = 16 * row + 8 * s + t;
      const float2 gamma = *reinterpret_cast<const float2*>(&f.gamma[i]);
      const float2 beta = *reinterpret_cast<const float2*>(&f.beta[i]);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int j = 16 * column + 8 * n + g;
        const float other = f.gamma[j];
        float* y = x + 4 * n + 2 * s;
        y[0] =
            *products.at(triangle_block(row, column), 8 * s + t, 8 * n + g) * (-beta.x * exp2_approx(gamma.x - other));
        y[1] = *products.at(triangle_block(row, column), 8 * s + t + 1, 8 * n + g) *
               (-beta.y * exp2_approx(gamma.y - other));
        if (restarts) {
          if (j < f.first[i]) y[0] = 0.0f;
          if (j < f.first[i + 1]) y[1] = 0.0f;
        }
      }
    }
    RightOperand b;
#pragma unroll
    for (int i = 0; i < 8; ++i) b.r[i] = round_tf32(x[i]);
    return b;
  }

  // Diagonal block of -L. Selected, since what is dropped may be infinite.
  __device__ __forceinline__ void diagonal(InverseScratch& result, const Products& products, int block) const {
    const int g = lane_id() >> 2;
    const int t = 2 * (lane_id() & 3);
    Accumulators c;
    load_block(c, products, triangle_block(block, block));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = 16 * block + 8 * half + g;
      const float gamma = f.gamma[i];
      const float beta = -f.beta[i];
      const int first = restarts ? f.first[i] : 0;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int j = 16 * block + 8 * n + t;
        const float2 other = *reinterpret_cast<const float2*>(&f.gamma[j]);
        float* x = &c[n][2 * half];
        x[0] *= beta * exp2_approx(gamma - other.x);
        x[1] *= beta * exp2_approx(gamma - other.y);
        if (j >= i || j < first) x[0] = 0.0f;
        if (j + 1 >= i || j + 1 < first) x[1] = 0.0f;
      }
    }
    store_block(result, block, c);
  }
};

// Replaces the four diagonal blocks -L by (I + L)^-1.
__device__ __forceinline__ void invert_diagonal(InverseScratch& blocks) {
  const int lane = lane_id();
  // Substitution in blocks of 8. A quarter of the warp takes one of blocks 0 and 1, and one of blocks 2 and 3; a lane a
  // column of it.
  {
    const int block = lane >> 4;
    const int start = (lane >> 3 & 1) * 8;
    const int column = lane & 7;
    float x[8];
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[i] = y[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
      for (int k = 0; k < i; k += 4) {
        const float4 a = *reinterpret_cast<const float4*>(blocks.at(block, start + i, start + k));
        const float4 b = *reinterpret_cast<const float4*>(blocks.at(block + 2, start + i, start + k));
        x[i] += a.x * x[k];
        y[i] += b.x * y[k];
        if (k + 1 < i) x[i] += a.y * x[k + 1], y[i] += b.y * y[k + 1];
        if (k + 2 < i) x[i] += a.z * x[k + 2], y[i] += b.z * y[k + 2];
        if (k + 3 < i) x[i] += a.w * x[k + 3], y[i] += b.w * y[k + 3];
      }
    }
    sync_warp();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      *blocks.at(block, start + i, start + column) = x[i];
      *blocks.at(block + 2, start + i, start + column) = y[i];
    }
    sync_warp();
  }
  // Then Z' (-L) X' below. Two blocks side by side, as rows 0 .. 7 and 8 .. 15 of the products.
  const int g = lane >> 2;
  const int t = 2 * (lane & 3);
#pragma unroll
  for (int block = 0; block < 4; block += 2) {
    const auto product = [&](float(&c)[4], const float2(&left)[2], int row) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t first = round_tf32(left[i].x);
        const uint32_t second = round_tf32(left[i].y);
        const uint32_t a[4] = {i == 0 ? first : 0, i == 0 ? 0 : first, i == 0 ? second : 0, i == 0 ? 0 : second};
        mma_m16n8k8_tf32(c, a, round_tf32(*blocks.at(block + i, row + t, g)),
                         round_tf32(*blocks.at(block + i, row + t + 1, g)));
      }
    };
    float2 left[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) left[i] = *reinterpret_cast<const float2*>(blocks.at(block + i, 8 + g, 8 + t));
    float c[4] = {};
    product(c, left, 8);
    left[0] = make_float2(c[0], c[1]);
    left[1] = make_float2(c[2], c[3]);
    float y[4] = {};
    product(y, left, 0);
    sync_warp();
    *reinterpret_cast<float2*>(blocks.at(block, 8 + g, t)) = make_float2(y[0], y[1]);
    *reinterpret_cast<float2*>(blocks.at(block + 1, 8 + g, t)) = make_float2(y[2], y[3]);
  }
  sync_warp();
}

// The inverse, rounded to T: four registers a block, as an operand of m16n8k16 (and for stmatrix).
template <class T>
struct RoundedTriangle {
  uint32_t r[kTriangleBlocks][4];

  __device__ __forceinline__ void set(int row, int column, const Accumulators& c) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = &c[i >> 1][2 * (i & 1)];
      r[triangle_block(row, column)][i] = pack_operand<T>(pair[0], pair[1]);
    }
  }
};

// products: K K^T. By one warp, with a scratch of its own.
template <class T>
__device__ __forceinline__ void invert_triangle(RoundedTriangle<T>& result, const Products& products,
                                                const Gates& gates, InverseScratch& scratch) {
#pragma unroll
  for (int b = 0; b < 4; ++b) gates.diagonal(scratch, products, b);
  sync_warp();
  invert_diagonal(scratch);
  // Blocks of 16: Y10 and Y32. Y10 is a right operand later, so it goes through the scratch.
  LeftOperand y32;
#pragma unroll
  for (int b = 0; b < 4; b += 2) {
    Accumulators c = {};
    Accumulators y = {};
    multiply(c, left_operand(scratch, b + 1), gates.right_operand(products, b + 1, b));
    multiply(y, left_operand(c), right_operand(scratch, b));
    result.set(b + 1, b, y);
    if (b == 0) {
      store_block(scratch, 4, y);
    } else {
      y32 = left_operand(y);
    }
  }
  // Blocks of 32: R = Z' (-L), then R X'.
  LeftOperand r2[2];
  LeftOperand r3[2];
#pragma unroll
  for (int column = 0; column < 2; ++column) {
    const RightOperand l2 = gates.right_operand(products, 2, column);
    Accumulators c = {};
    multiply(c, left_operand(scratch, 2), l2);
    r2[column] = left_operand(c);
    Accumulators d = {};
    multiply(d, y32, l2);
    multiply(d, left_operand(scratch, 3), gates.right_operand(products, 3, column));
    r3[column] = left_operand(d);
  }
  sync_warp();
  Accumulators c = {};
  Accumulators d = {};
  {
    const RightOperand x = right_operand(scratch, 0);
    multiply(c, r2[0], x);
    multiply(d, r3[0], x);
  }
  {
    const RightOperand x = right_operand(scratch, 4);
    multiply(c, r2[1], x);
    multiply(d, r3[1], x);
  }
  result.set(2, 0, c);
  result.set(3, 0, d);
  cuda::clear(c);
  cuda::clear(d);
  const RightOperand x = right_operand(scratch, 1);
  multiply(c, r2[1], x);
  multiply(d, r3[1], x);
  result.set(2, 1, c);
  result.set(3, 1, d);
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    Accumulators c;
    load_block(c, scratch, b);
    result.set(b, b, c);
  }
}

}  // namespace cula::gdn::sm90
