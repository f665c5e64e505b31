// Matrix products of tiles that fit the caches: C = alpha A B or C += alpha A B.
//
// An element of C is one chain of multiply-adds over ascending k, whatever the tile's size or the element's place in
// it. So a result does not depend on how a matrix was cut into tiles along m or n.
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/host/bf16_pairs.h"
#include "common/host/matrix_tiles.h"
#include "common/host/simd.h"

namespace cula::CULA_ISA {

// How the operands of a product are held: as the accumulator's own type ...
struct Float64 {
  using Scalar = double;
};
struct Float32 {
  using Scalar = float;
};
// ... or rounded to bfloat16 in pairs, for the processor's dot product of pairs with float32 accumulators.
struct Bf16Pairs {
  using Scalar = float;
};

// What is known to be zero in A (lower: a[i][p] for p > i; upper: for p < i), or not wanted of C (lower: c[i][j] for
// j > i is left unspecified). Such parts are skipped by blocks of rows, so zeros of A must be stored zeros.
enum class Triangle { kNone, kLowerA, kUpperA, kLowerC };

template <class T>
struct Product {
  int64_t m, n, k;
  const T* a;  // a[i * a_row + p * a_col]: either stride may be 1, so A may be a transposed view
  int64_t a_row, a_col;
  const T* b;  // b[p * b_row + j], readable up to padded(n) columns
  int64_t b_row;
  T* c;  // c[i * c_row + j], writable up to padded(n) columns, which may receive anything
  int64_t c_row;
  T alpha = T(1);
  bool accumulate = false;
  Triangle triangle = Triangle::kNone;
};

namespace matmul_detail {

#if defined(__AVX512F__)
inline constexpr int kRows = 8;  // 16 accumulators, 2 vectors of B and a broadcast in 32 registers
#else
inline constexpr int kRows = 4;  // 8 accumulators in 16 registers
#endif
inline constexpr int kColumnVectors = 2;

// Operands as plain scalars.
template <class T>
struct PlainDot {
  using Element = T;
  static constexpr int kDepth = 1;  // k steps an element holds
  static Vec<T> add(Vec<T> sum, T a, Vec<T> b) { return fma(broadcast(a), b, sum); }
};

#if defined(__AVX512BF16__)
struct PairDot {
  using Element = uint32_t;
  static constexpr int kDepth = 2;
  static Vec<float> add(Vec<float> sum, uint32_t a, Vec<uint32_t> b) {
    return Vec<float>(
        _mm512_dpbf16_ps(__m512(sum), __m512bh(_mm512_set1_epi32(static_cast<int>(a))), __m512bh(__m512i(b))));
  }
};
#endif

// The k range in which rows [row, row + rows) of A may be non-zero.
struct Depth {
  int64_t begin, end;
};
inline Depth depth_of(Triangle triangle, int64_t row, int64_t rows, int64_t k) {
  if (triangle == Triangle::kLowerA) return {0, std::min(k, row + rows)};
  if (triangle == Triangle::kUpperA) return {std::min(k, row), k};
  return {0, k};
}

template <class Dot, class T, int kTileRows, int kTileVectors>
inline void tile(Depth depth, const typename Dot::Element* a, int64_t a_row, int64_t a_col,
                 const typename Dot::Element* b, int64_t b_row, T* c, int64_t c_row, T alpha, bool accumulate) {
  Vec<T> sum[kTileRows][kTileVectors] = {};
  for (int64_t p = depth.begin; p < depth.end; ++p) {
    Vec<typename Dot::Element> b_vector[kTileVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kTileVectors; ++v) b_vector[v] = load(b + p * b_row + v * kLanes<T>);
#pragma GCC unroll 16
    for (int i = 0; i < kTileRows; ++i) {
      const typename Dot::Element a_value = a[i * a_row + p * a_col];
#pragma GCC unroll 8
      for (int v = 0; v < kTileVectors; ++v) sum[i][v] = Dot::add(sum[i][v], a_value, b_vector[v]);
    }
  }
  const Vec<T> factor = broadcast(alpha);
#pragma GCC unroll 16
  for (int i = 0; i < kTileRows; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kTileVectors; ++v) {
      T* to = c + i * c_row + v * kLanes<T>;
      const Vec<T> base = accumulate ? load(to) : Vec<T>{};
      store(to, fma(factor, sum[i][v], base));
    }
  }
}

// Operands in the form that Dot reads; sizes, strides and triangle from the product.
template <class Dot, class T>
struct Packed {
  const typename Dot::Element* a;
  int64_t a_row, a_col;
  const typename Dot::Element* b;
  int64_t b_row;
};

template <class Dot, class T, int kTileVectors, int kTileRows>
inline int64_t row_blocks(const Product<T>& product, const Packed<Dot, T>& packed, int64_t column, int64_t row) {
  for (; row + kTileRows <= product.m; row += kTileRows) {
    if (product.triangle == Triangle::kLowerC && column >= row + kTileRows) continue;
    Depth depth = depth_of(product.triangle, row, kTileRows, product.k);
    depth.begin /= Dot::kDepth;
    depth.end = (depth.end + Dot::kDepth - 1) / Dot::kDepth;
    tile<Dot, T, kTileRows, kTileVectors>(depth, packed.a + row * packed.a_row, packed.a_row, packed.a_col,
                                          packed.b + column, packed.b_row, product.c + row * product.c_row + column,
                                          product.c_row, product.alpha, product.accumulate);
  }
  return row;
}

template <class Dot, class T, int kTileVectors>
inline void column_panel(const Product<T>& product, const Packed<Dot, T>& packed, int64_t column) {
  int64_t row = row_blocks<Dot, T, kTileVectors, kRows>(product, packed, column, 0);
  if constexpr (kRows > 4) row = row_blocks<Dot, T, kTileVectors, 4>(product, packed, column, row);
  row = row_blocks<Dot, T, kTileVectors, 2>(product, packed, column, row);
  row_blocks<Dot, T, kTileVectors, 1>(product, packed, column, row);
}

template <class Dot, class T>
inline void run(const Product<T>& product, const Packed<Dot, T>& packed) {
  constexpr int64_t kPanel = kColumnVectors * kLanes<T>;
  int64_t column = 0;
  for (; column + kPanel <= padded(product.n); column += kPanel) {
    column_panel<Dot, T, kColumnVectors>(product, packed, column);
  }
  for (; column < product.n; column += kLanes<T>) column_panel<Dot, T, 1>(product, packed, column);
}

#if defined(__AVX512BF16__)

inline void multiply_pairs(const Product<float>& product, uint32_t* scratch) {
#if defined(CULA_MATRIX_TILES)
  // Everything in whole matrix tiles: the k steps that pad them are zero in both operands.
  const int64_t pairs = (product.k + 1) / 2, depth = padded(pairs);
  uint32_t* b_pairs = scratch;
  uint32_t* a_pairs = scratch + depth * padded(product.n);
  pack_pair_rows(product.b, product.b_row, product.k, padded(product.n), b_pairs, padded(product.n));
  std::memset(b_pairs + pairs * padded(product.n), 0,
              static_cast<size_t>((depth - pairs) * padded(product.n)) * sizeof(uint32_t));
  if (product.a_col == 1) {
    pack_pair_columns(product.a, product.a_row, product.m, product.k, a_pairs, depth);
  } else {
    pack_pair_columns_transposed(product.a, product.a_col, product.m, product.k, a_pairs, depth);
  }
  const MatrixTiles tiles;
  for (int64_t row = 0; row < product.m; row += 2 * MatrixTiles::kSize) {
    Depth range = depth_of(product.triangle, row, 2 * MatrixTiles::kSize, product.k);
    range.begin = range.begin / 2 / MatrixTiles::kSize * MatrixTiles::kSize;
    range.end = padded((range.end + 1) / 2);
    const int64_t rows = std::min<int64_t>(2 * MatrixTiles::kSize, product.m - row);
    for (int64_t column = 0; column < padded(product.n); column += 2 * MatrixTiles::kSize) {
      if (product.triangle == Triangle::kLowerC && column >= row + rows) break;
      const int64_t columns = std::min<int64_t>(2 * MatrixTiles::kSize, padded(product.n) - column);
      alignas(64) float sum[2 * MatrixTiles::kSize][2 * MatrixTiles::kSize];
      tiles.multiply(a_pairs + row * depth, depth, rows > MatrixTiles::kSize, b_pairs + column, padded(product.n),
                     columns > MatrixTiles::kSize, range.begin, range.end, sum);
      const Vec<float> factor = broadcast(product.alpha);
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < columns; j += kLanes<float>) {
          float* to = product.c + (row + i) * product.c_row + column + j;
          const Vec<float> base = product.accumulate ? load(to) : Vec<float>{};
          store(to, fma(factor, load(&sum[i][j]), base));
        }
      }
    }
  }
#else
  const int64_t pairs = (product.k + 1) / 2;
  Packed<PairDot, float> packed;
  packed.b = scratch;
  packed.b_row = padded(product.n);
  pack_pair_rows(product.b, product.b_row, product.k, padded(product.n), scratch, packed.b_row);
  uint32_t* a_pairs = scratch + pairs * packed.b_row;
  packed.a = a_pairs;
  if (product.a_col == 1) {
    packed.a_row = pairs + 1;  // off powers of two: 8 rows are read side by side
    packed.a_col = 1;
    pack_pair_columns(product.a, product.a_row, product.m, product.k, a_pairs, packed.a_row);
  } else {
    packed.a_row = 1;
    packed.a_col = padded(product.m);
    pack_pair_rows(product.a, product.a_col, product.k, padded(product.m), a_pairs, packed.a_col);
  }
  run<PairDot, float>(product, packed);
#endif
}

#endif

}  // namespace matmul_detail

// Scratch elements (uint32_t) that a product of Bf16Pairs operands needs beside its own tiles, at most.
constexpr int64_t pair_scratch_elements(int64_t m, int64_t n, int64_t k) {
  const int64_t rows = padded(m) + kColumnPadding;  // matrix tiles are read two at a time
  return padded((k + 1) / 2) * (padded(n) + rows) + padded(m);
}

template <class Policy>
inline void matmul(const Product<typename Policy::Scalar>& product, [[maybe_unused]] uint32_t* pair_scratch) {
  using T = typename Policy::Scalar;
  if constexpr (std::is_same_v<Policy, Bf16Pairs>) {
#if defined(__AVX512BF16__)
    matmul_detail::multiply_pairs(product, pair_scratch);
#else
    static_assert(!std::is_same_v<Policy, Bf16Pairs>, "needs AVX-512 BF16");
#endif
  } else {
    matmul_detail::run<matmul_detail::PlainDot<T>, T>(
        product, {product.a, product.a_row, product.a_col, product.b, product.b_row});
  }
}

}  // namespace cula::CULA_ISA
