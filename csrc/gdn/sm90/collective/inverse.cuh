// (I + L)^-1 of the strictly lower triangular L_ij = beta_i decay(i, j) (k_i . k_j), 64 x 64, by one warp.
//
// Substitution in fp32 inside 8 x 8 diagonal blocks; then [X, 0; Y, Z]^-1 = [X', 0; -Z' Y X', Z'] for blocks of 8, 16
// and 32, as products in TF32 (operands rounded to nearest) with fp32 sums. For beta of 2 without decay their error is
// a third of that of rounding the result to bf16, and twice that of rounding it to fp16.
//
// Below the diagonal blocks L is never made: the decay from a column to a row is that from the column to the last row
// above Y, times that from there to the row, neither of which exceeds 1 (gates are not positive), so that -Z' Y X' is
// (Z' rows) (K K^T) (columns X') with two factors a row, and K K^T serves all value heads of a key head as it is.
#pragma once

#include "common/device/ldmatrix.cuh"
#include "common/device/mma_sync.cuh"
#include "common/device/stmatrix.cuh"
#include "gdn/sm90/collective/operand.cuh"
#include "gdn/sm90/collective/tile.cuh"

namespace cula::gdn::sm90 {

// Accumulators of 16 x 16, [column / 8]. Of operands the hardware's k = t and k = t + 4 stand for columns 2t and 2t +
// 1, so that accumulators turn into left operands in place.
using Accumulators = float[2][4];
struct LeftOperand {
  uint32_t r[8];
};
struct RightOperand {
  uint32_t r[8];  // r[4 n + 2 s + e]: row 8 s + 2 t + e and column 8 n + g
};

// To the nearest TF32 number, ties away from zero, for an operand of mma, which drops the bits below. One instruction,
// where cvt.rna.tf32 takes four.
__device__ __forceinline__ uint32_t round_tf32(float x) { return __float_as_uint(x) + 0x1000u; }

// K K^T, its blocks of 16 x 16 as they are needed, the registers of a lane side by side. Below the diagonal they are
// right operands: what a lane needs of block (row, column) is what it holds of the accumulators of (column, row). Of a
// diagonal block the octets on its diagonal lie in fp32, elements (g, 2t) and (g, 2t + 1) of both, and the lower left
// one as right operand.
struct Products {
  float4 below[6][2][32];
  float4 diagonal[4][32];
  uint2 corner[4][32];

  __device__ static constexpr int below_index(int row, int column) { return row * (row - 1) / 2 + column; }

  // From the accumulators of (column, row).
  __device__ __forceinline__ void store_below(int row, int column, const Accumulators& c) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      *reinterpret_cast<uint4*>(&below[below_index(row, column)][n][lane_id()]) = make_uint4(
          round_tf32(c[0][2 * n]), round_tf32(c[0][2 * n + 1]), round_tf32(c[1][2 * n]), round_tf32(c[1][2 * n + 1]));
    }
  }
  __device__ __forceinline__ void store_diagonal(int block, const Accumulators& c) {
    diagonal[block][lane_id()] = make_float4(c[0][0], c[0][1], c[1][2], c[1][3]);
    corner[block][lane_id()] = make_uint2(round_tf32(c[1][0]), round_tf32(c[1][1]));
  }
  __device__ __forceinline__ RightOperand right_operand(int row, int column) const {
    RightOperand b;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      *reinterpret_cast<uint4*>(&b.r[4 * n]) =
          *reinterpret_cast<const uint4*>(&below[below_index(row, column)][n][lane_id()]);
    }
    return b;
  }
  // |k|^2 of a row.
  __device__ __forceinline__ float square(int row) const {
    const int g = row & 7;
    return reinterpret_cast<const float*>(&diagonal[row >> 4][4 * g + (g >> 1)])[2 * (row >> 3 & 1) + (g & 1)];
  }
};

// Stores the products that a warp of four has in the accumulators of its 16 rows. Rows and columns past the chunk's
// length become zero: keys of the next sequence stand there.
__device__ __forceinline__ void store_products(Products& products, float (&c)[32], int length) {
  const int warp = warp_id();
  const int row = 16 * warp + (lane_id() >> 2);
  const int column = 2 * (lane_id() & 3);
  if (length < kRows) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if (row + 8 * (i / 2 % 2) >= length || column + 8 * (i / 4) + i % 2 >= length) c[i] = 0.0f;
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < warp) continue;
    const auto& block = reinterpret_cast<const Accumulators&>(c[8 * i]);
    if (i == warp) {
      products.store_diagonal(warp, block);
    } else {
      products.store_below(i, warp, block);
    }
  }
}

// What a warp keeps for itself. Octets of 8 x 8 are padded, so that those that are read at once lie in different banks.
struct alignas(16) InverseScratch {
  static constexpr int kOctetPitch = 68;

  float factors[3][kRows];  // of blocks of 8, 16 and 32: of rows below, with -beta, and of columns before
  float diagonal[8][kOctetPitch];
  float corner[3][kOctetPitch];    // (1, 0) of the first three diagonal blocks of 16
  float below[2][2][kOctetPitch];  // block (1, 0) of 16

  __device__ __forceinline__ float2 factor(int level, int row) const {
    return *reinterpret_cast<const float2*>(&factors[level][row + 2 * (lane_id() & 3)]);
  }
};

// Lines of an octet that is read across them: even ones first, which spreads 2t over the banks.
__device__ __forceinline__ int octet_line(int i) { return 8 * (i >> 1 | (i & 1) << 2); }

// From accumulators: elements (g, 2t) and (g, 2t + 1).
__device__ __forceinline__ void store_octet(float* octet, float even, float odd) {
  *reinterpret_cast<float2*>(octet + octet_line(lane_id() >> 2) + 2 * (lane_id() & 3)) = make_float2(even, odd);
}
// As right operand: elements (2t, g) and (2t + 1, g).
__device__ __forceinline__ void load_octet(uint32_t (&b)[2], const float* octet) {
#pragma unroll
  for (int e = 0; e < 2; ++e) b[e] = round_tf32(octet[octet_line(2 * (lane_id() & 3) + e) + (lane_id() >> 2)]);
}

// The inverse of a diagonal block of 16: elements (g, 2t) and (g, 2t + 1) of its octets (0, 0), (1, 0) and (1, 1).
struct InvertedBlock {
  float upper[2];
  float corner[2];
  float lower[2];
};
struct InvertedRight {
  uint32_t upper[2];
  uint32_t corner[2];
  uint32_t lower[2];
};

// Columns times the factors of rows `block`.
__device__ __forceinline__ LeftOperand scaled_left(const Accumulators& c, const InverseScratch& scratch, int level,
                                                   int block) {
  LeftOperand a;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const float2 f = scratch.factor(level, 16 * block + 8 * s);
    a.r[4 * s] = round_tf32(c[s][0] * f.x);
    a.r[4 * s + 1] = round_tf32(c[s][2] * f.x);
    a.r[4 * s + 2] = round_tf32(c[s][1] * f.y);
    a.r[4 * s + 3] = round_tf32(c[s][3] * f.y);
  }
  return a;
}
__device__ __forceinline__ LeftOperand scaled_left(const InvertedBlock& z, const InverseScratch& scratch, int level,
                                                   int block) {
  const float2 f = scratch.factor(level, 16 * block);
  const float2 h = scratch.factor(level, 16 * block + 8);
  return {round_tf32(z.upper[0] * f.x),
          round_tf32(z.corner[0] * f.x),
          round_tf32(z.upper[1] * f.y),
          round_tf32(z.corner[1] * f.y),
          0,
          round_tf32(z.lower[0] * h.x),
          0,
          round_tf32(z.lower[1] * h.y)};
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
__device__ __forceinline__ void multiply(Accumulators& c, const LeftOperand& a, const InvertedRight& b) {
  const uint32_t(&first)[4] = reinterpret_cast<const uint32_t(&)[4]>(a.r[0]);
  const uint32_t(&second)[4] = reinterpret_cast<const uint32_t(&)[4]>(a.r[4]);
  mma_m16n8k8_tf32(c[0], first, b.upper[0], b.upper[1]);
  mma_m16n8k8_tf32(c[1], second, b.lower[0], b.lower[1]);
  mma_m16n8k8_tf32(c[0], second, b.corner[0], b.corner[1]);
}

// A block of 16 x 16, rounded to T, as an operand of m16n8k16 (and for stmatrix).
using RoundedBlock = uint32_t[4];
template <class T>
__device__ __forceinline__ void round_block(RoundedBlock& r, const Accumulators& c) {
#pragma unroll
  for (int i = 0; i < 4; ++i) r[i] = pack_operand<T>(c[i >> 1][2 * (i & 1)], c[i >> 1][2 * (i & 1) + 1]);
}
template <class T>
__device__ __forceinline__ void round_block(RoundedBlock& r, const InvertedBlock& z) {
  r[0] = pack_operand<T>(z.upper[0], z.upper[1]);
  r[1] = pack_operand<T>(z.corner[0], z.corner[1]);
  r[2] = 0;
  r[3] = pack_operand<T>(z.lower[0], z.lower[1]);
}

// Decays of rows from the last row before their half of a block, and of columns to it.
__device__ __forceinline__ void make_block_factors(InverseScratch& scratch, const ChunkFactors& f, bool restarts) {
  const int row = 2 * lane_id();
  const float2 gamma = *reinterpret_cast<const float2*>(&f.gamma[row]);
  const float2 beta = *reinterpret_cast<const float2*>(&f.beta[row]);
#pragma unroll
  for (int level = 0; level < 3; ++level) {
    const int half = 8 << level;
    const int middle = (row | (2 * half - 1)) - half;
    const bool below = (row & half) != 0;
    const float at = f.gamma[middle];
    float2 x;
    x.x = exp2_approx(below ? gamma.x - at : at - gamma.x) * (below ? -beta.x : 1.0f);
    x.y = exp2_approx(below ? gamma.y - at : at - gamma.y) * (below ? -beta.y : 1.0f);
    if (restarts) {  // selected, since what is dropped may be infinite
      const int first = f.first[middle];
      if (below ? f.first[row] > middle : row < first) x.x = 0.0f;
      if (below ? f.first[row + 1] > middle : row + 1 < first) x.y = 0.0f;
    }
    *reinterpret_cast<float2*>(&scratch.factors[level][row]) = x;
  }
}

// The diagonal octets of L.
__device__ __forceinline__ void make_diagonal(InverseScratch& scratch, const Products& products, const ChunkFactors& f,
                                              bool restarts) {
  const int g = lane_id() >> 2;
  const int t = 2 * (lane_id() & 3);
  float2 x[8];
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    const float4 p = products.diagonal[block][lane_id()];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int octet = 2 * block + half;
      const float gamma = f.gamma[8 * octet + g];
      const float beta = f.beta[8 * octet + g];
      const float2 other = *reinterpret_cast<const float2*>(&f.gamma[8 * octet + t]);
      x[octet].x = (half == 0 ? p.x : p.z) * (beta * exp2_approx(gamma - other.x));
      x[octet].y = (half == 0 ? p.y : p.w) * (beta * exp2_approx(gamma - other.y));
      if (t >= g) x[octet].x = 0.0f;  // selected, since what is dropped may be infinite
      if (t + 1 >= g) x[octet].y = 0.0f;
    }
  }
  if (restarts) {
#pragma unroll
    for (int octet = 0; octet < 8; ++octet) {
      const int first = f.first[8 * octet + g] - 8 * octet;
      if (t < first) x[octet].x = 0.0f;
      if (t + 1 < first) x[octet].y = 0.0f;
    }
  }
#pragma unroll
  for (int octet = 0; octet < 8; ++octet) {
    *reinterpret_cast<float2*>(&scratch.diagonal[octet][8 * g + t]) = x[octet];
  }
}

// Replaces the octets of L by (I + L)^-1, by columns, the halves of every other one exchanged. A quarter of the warp
// takes two octets, a lane a column of each.
__device__ __forceinline__ void invert_octets(InverseScratch& scratch) {
  const int octet = lane_id() >> 3;
  const int column = lane_id() & 7;
  float x[2][8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[0][i] = x[1][i] = i == column ? 1.0f : 0.0f;
#pragma unroll
    for (int k = 0; k < i; k += 4) {
#pragma unroll
      for (int o = 0; o < 2; ++o) {
        const float4 row = *reinterpret_cast<const float4*>(&scratch.diagonal[octet + 4 * o][8 * i + k]);
        x[o][i] -= row.x * x[o][k];
        if (k + 1 < i) x[o][i] -= row.y * x[o][k + 1];
        if (k + 2 < i) x[o][i] -= row.z * x[o][k + 2];
        if (k + 3 < i) x[o][i] -= row.w * x[o][k + 3];
      }
    }
  }
  sync_warp();
  const int line = octet_line(column);
  const int exchanged = 4 * (column & 1);
#pragma unroll
  for (int o = 0; o < 2; ++o) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      *reinterpret_cast<float4*>(&scratch.diagonal[octet + 4 * o][line + (4 * half ^ exchanged)]) =
          make_float4(x[o][4 * half], x[o][4 * half + 1], x[o][4 * half + 2], x[o][4 * half + 3]);
    }
  }
  sync_warp();
}

// Elements (g, 2t) and (g, 2t + 1) of what invert_octets leaves, and as right operand.
__device__ __forceinline__ void load_inverted(float (&x)[2], const float* octet) {
  const int row = lane_id() >> 2;
#pragma unroll
  for (int e = 0; e < 2; ++e) x[e] = octet[octet_line(2 * (lane_id() & 3) + e) + (row ^ 4 * e)];
}
__device__ __forceinline__ void load_inverted_right(uint32_t (&b)[2], const float* octet) {
  const int column = lane_id() >> 2;
  const float2 x =
      *reinterpret_cast<const float2*>(octet + octet_line(column) + (2 * (lane_id() & 3) ^ 4 * (column & 1)));
  b[0] = round_tf32(x.x);
  b[1] = round_tf32(x.y);
}

// By one warp, with a scratch of its own. Gives the blocks of 16 rows, on and left of the diagonal and rounded, to
// sink(index, blocks) as soon as they are done; it may use scratch.diagonal.
template <class T, class Sink>
__device__ __forceinline__ void invert_triangle(const Products& products, const ChunkFactors& f,
                                                InverseScratch& scratch, Sink&& sink) {
  const bool restarts = f.first[kRows - 1] != 0;
  make_block_factors(scratch, f, restarts);
  make_diagonal(scratch, products, f, restarts);
  sync_warp();
  invert_octets(scratch);

  // Blocks of 8.
  InvertedBlock z[4];
  InvertedRight x[4];
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    load_inverted(z[b].upper, scratch.diagonal[2 * b]);
    load_inverted(z[b].lower, scratch.diagonal[2 * b + 1]);
    load_inverted_right(x[b].upper, scratch.diagonal[2 * b]);
    if (b < 3) load_inverted_right(x[b].lower, scratch.diagonal[2 * b + 1]);
  }
#pragma unroll
  for (int b = 0; b < 4; b += 2) {  // two at once, as rows 0 .. 7 and 8 .. 15 of the left operand
    const float2 r0 = scratch.factor(0, 16 * b + 8);
    const float2 r1 = scratch.factor(0, 16 * b + 24);
    const uint32_t left[4] = {round_tf32(z[b].lower[0] * r0.x), round_tf32(z[b + 1].lower[0] * r1.x),
                              round_tf32(z[b].lower[1] * r0.y), round_tf32(z[b + 1].lower[1] * r1.y)};
    float c[2][4] = {};
    float y[2][4] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint2 p = products.corner[b + i][lane_id()];
      mma_m16n8k8_tf32(c[i], left, p.x, p.y);
    }
    const float2 c0 = scratch.factor(0, 16 * b);
    const float2 c1 = scratch.factor(0, 16 * b + 16);
    const uint32_t right[4] = {round_tf32(c[0][0] * c0.x), round_tf32(c[1][2] * c1.x), round_tf32(c[0][1] * c0.y),
                               round_tf32(c[1][3] * c1.y)};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      mma_m16n8k8_tf32(y[i], right, x[b + i].upper[0], x[b + i].upper[1]);
#pragma unroll
      for (int e = 0; e < 2; ++e) z[b + i].corner[e] = y[i][2 * i + e];
      if (b + i < 3) store_octet(scratch.corner[b + i], z[b + i].corner[0], z[b + i].corner[1]);
    }
  }
  RoundedBlock rows[4];
  round_block<T>(rows[0], z[0]);
  sync_warp();
  sink(0, rows);
#pragma unroll
  for (int b = 0; b < 3; ++b) load_octet(x[b].corner, scratch.corner[b]);

  // Blocks of 16.
  const auto join = [&](Accumulators& y, int b) {
    Accumulators c = {};
    multiply(c, scaled_left(z[b + 1], scratch, 1, b + 1), products.right_operand(b + 1, b));
    multiply(y, scaled_left(c, scratch, 1, b), x[b]);
  };
  {
    Accumulators y = {};
    join(y, 0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      store_octet(scratch.below[i & 1][i >> 1], y[i >> 1][2 * (i & 1)], y[i >> 1][2 * (i & 1) + 1]);
    }
    round_block<T>(rows[0], y);
    round_block<T>(rows[1], z[1]);
  }
  sync_warp();
  sink(1, rows);
  Accumulators y32 = {};
  join(y32, 2);

  // Blocks of 32, 16 rows at once.
  RightOperand x10;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    load_octet(reinterpret_cast<uint32_t(&)[2]>(x10.r[4 * (i >> 1) + 2 * (i & 1)]), scratch.below[i & 1][i >> 1]);
  }
  const auto join_rows = [&](const LeftOperand(&r)[2]) {
    Accumulators c = {};
    Accumulators d = {};
    multiply(c, r[0], x[0]);
    multiply(d, r[1], x[1]);
    multiply(c, r[1], x10);
    round_block<T>(rows[0], c);
    round_block<T>(rows[1], d);
  };
  {
    const LeftOperand z22 = scaled_left(z[2], scratch, 2, 2);
    LeftOperand r[2];
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      Accumulators c = {};
      multiply(c, z22, products.right_operand(2, column));
      r[column] = scaled_left(c, scratch, 2, column);
    }
    join_rows(r);
    round_block<T>(rows[2], z[2]);
    sink(2, rows);
  }
  {
    const LeftOperand z32 = scaled_left(y32, scratch, 2, 2);
    const LeftOperand z33 = scaled_left(z[3], scratch, 2, 3);
    LeftOperand r[2];
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      Accumulators c = {};
      multiply(c, z32, products.right_operand(2, column));
      multiply(c, z33, products.right_operand(3, column));
      r[column] = scaled_left(c, scratch, 2, column);
    }
    join_rows(r);
    round_block<T>(rows[2], y32);
    round_block<T>(rows[3], z[3]);
    sink(3, rows);
  }
}

// Rows of A to global memory, 16 by 16 in their order, zeros above the diagonal too. For lengths below 64, those of the
// chunk alone. Not `whole`: without the zeros right of the 32nd column in the first 32 rows.
template <class T>
class TriangleStore {
 public:
  __device__ __forceinline__ TriangleStore(T* out, int64_t stride, int length, bool whole, InverseScratch& scratch)
      : next_(out + (lane_id() >> 3) * stride + 8 * (lane_id() & 7)),
        step_(4 * stride),
        rows_left_(length - (lane_id() >> 3)),
        first_row_(whole || (lane_id() & 7) < 4 ? 0 : kRows / 2),
        buffer_(reinterpret_cast<unsigned char*>(&scratch.diagonal)) {
    static_assert(sizeof(scratch.diagonal) >= 16 * 128);
  }

  // Pieces of 16 bytes trade places as in the 128-byte swizzle.
  __device__ __forceinline__ void operator()(int index, const RoundedBlock (&rows)[4]) {
    const int lane = lane_id();
    const int piece = lane & 7;
    const uint32_t target = shared_address(buffer_) + (lane & 15) * 128;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j > index) continue;
      stmatrix_x4(target + (((2 * j + (lane >> 4)) ^ piece) << 4), rows[j][0], rows[j][1], rows[j][2], rows[j][3]);
    }
    sync_warp();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      uint4 x = make_uint4(0, 0, 0, 0);
      if (piece < 2 * (index + 1)) x = *reinterpret_cast<const uint4*>(buffer_ + swizzled(4 * k + (lane >> 3), piece));
      if (16 * index >= first_row_ && rows_left_ > 16 * index + 4 * k) *reinterpret_cast<uint4*>(next_) = x;
      next_ += step_;
    }
    sync_warp();
  }

 private:
  T* next_;
  int64_t step_;
  int rows_left_;
  int first_row_;  // that this lane stores
  unsigned char* buffer_;
};

}  // namespace cula::gdn::sm90
