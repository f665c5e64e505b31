// Packing of float32 rows into pairs of bfloat16 along k, the operands of the processor's dot products.
#pragma once

#include "common/host/simd.h"

#if defined(__AVX512BF16__)

namespace cula::CULA_ISA {

// Two values as a pair, the first in the low half.
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

// to[i][p / 2] = (from[i][p], from[i][p + 1]); `from` has unit stride along p. What is left of a row of `to` is zero.
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
    for (int64_t pair = (columns + 1) / 2; pair < to_row; ++pair) to[i * to_row + pair] = 0;
  }
}

// The same result as pack_pair_columns from a matrix that is stored transposed: from[p * column_stride + i].
inline void pack_pair_columns_transposed(const float* from, int64_t column_stride, int64_t rows, int64_t columns,
                                         uint32_t* to, int64_t to_row) {
  constexpr int64_t kSquare = kLanes<float>;
  const auto source_row = [&](int64_t p, int64_t i) {
    return p < columns ? _mm512_loadu_ps(from + p * column_stride + i) : _mm512_setzero_ps();
  };
  for (int64_t i = 0; i < rows; i += kSquare) {
    for (int64_t pair = 0; 2 * pair < columns; pair += kSquare) {
      Vec<uint32_t> square[kSquare];
      for (int64_t j = 0; j < kSquare; ++j) {
        square[j] = bf16_pairs(source_row(2 * (pair + j), i), source_row(2 * (pair + j) + 1, i));
      }
      transpose_square<uint32_t>(square);
      for (int64_t j = 0; j < kSquare; ++j) store(to + (i + j) * to_row + pair, square[j]);
    }
  }
}

}  // namespace cula::CULA_ISA

#endif
