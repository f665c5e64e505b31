// Matrix products of tiles that fit the caches: C = alpha A B or C += alpha A B.
//
// An element of C is one chain of multiply-adds over ascending k, whatever the tile's size or the element's place in
// it. So a result does not depend on how a matrix was cut into tiles along m or n.
#pragma once

#include <algorithm>
#include <type_traits>

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

inline uint32_t bf16_pair(float low, float high) {
  const __m128bh pair = _mm_cvtneps_pbh(_mm_set_ps(0, 0, high, low));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(__m128i(pair)));
}

// 16 columns of two consecutive k rows as 16 pairs.
inline Vec<uint32_t> bf16_pairs(__m512 low_row, __m512 high_row) {
  typedef uint16_t Halves __attribute__((vector_size(32)));
  const auto low = __builtin_convertvector(Halves(_mm512_cvtneps_pbh(low_row)), Vec<uint32_t>);
  const auto high = __builtin_convertvector(Halves(_mm512_cvtneps_pbh(high_row)), Vec<uint32_t>);
  return low | (high << 16);
}

// to[p / 2][j] = (from[p][j], from[p + 1][j]) for p even; `from` has unit stride along j. An odd last row is paired
// with zero.
inline void pack_pair_rows(const float* from, int64_t row_stride, int64_t rows, int64_t columns, uint32_t* to,
                           int64_t to_row) {
  for (int64_t p = 0; p < rows; p += 2) {
    const float* low = from + p * row_stride;
    for (int64_t j = 0; j < columns; j += 16) {
      const __m512 high = p + 1 < rows ? _mm512_loadu_ps(low + row_stride + j) : _mm512_setzero_ps();
      store(to + p / 2 * to_row + j, bf16_pairs(_mm512_loadu_ps(low + j), high));
    }
  }
}

// to[i][p / 2] = (from[i][p], from[i][p + 1]); `from` has unit stride along p.
inline void pack_pair_columns(const float* from, int64_t row_stride, int64_t rows, int64_t columns, uint32_t* to,
                              int64_t to_row) {
  for (int64_t i = 0; i < rows; ++i) {
    const float* row = from + i * row_stride;
    int64_t p = 0;
    for (; p + 32 <= columns; p += 32) {
      const __m512bh pairs = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(row + p + 16), _mm512_loadu_ps(row + p));
      _mm512_storeu_si512(to + i * to_row + p / 2, __m512i(pairs));
    }
    for (; p < columns; p += 2) to[i * to_row + p / 2] = bf16_pair(row[p], p + 1 < columns ? row[p + 1] : 0.0f);
  }
}

#endif

}  // namespace matmul_detail

// Scratch elements (uint32_t) that a product of Bf16Pairs operands needs beside its own tiles, at most.
constexpr int64_t pair_scratch_elements(int64_t m, int64_t n, int64_t k) {
  return (k + 1) / 2 * (padded(m) + padded(n)) + padded(m) * kColumnPadding + padded(k);
}

template <class Policy>
inline void matmul(const Product<typename Policy::Scalar>& product, [[maybe_unused]] uint32_t* pair_scratch) {
  using T = typename Policy::Scalar;
  using namespace matmul_detail;
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<Policy, Bf16Pairs>) {
    const int64_t pairs = (product.k + 1) / 2;
    Packed<PairDot, float> packed;
    packed.b = pair_scratch;
    packed.b_row = padded(product.n);
    pack_pair_rows(product.b, product.b_row, product.k, padded(product.n), pair_scratch, packed.b_row);
    uint32_t* a_pairs = pair_scratch + pairs * packed.b_row;
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
    return;
  }
#else
  static_assert(!std::is_same_v<Policy, Bf16Pairs>, "needs AVX-512 BF16");
#endif
  run<PlainDot<T>, T>(product, {product.a, product.a_row, product.a_col, product.b, product.b_row});
}

}  // namespace cula::CULA_ISA
