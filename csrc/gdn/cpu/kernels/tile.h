// Scratch tiles, and their exchange with tensors of any float type and any strides.
#pragma once

#include <cmath>
#include <utility>

#include "common/host/matmul.h"
#include "common/host/tensor.h"

namespace cula::gdn::cpu::CULA_ISA {

using namespace cula::CULA_ISA;  // NOLINT: the namespace of this instruction set

// Hands out aligned areas of a block, one behind the other. With no block it only counts: the code that lays out a
// workspace and the code that tells its size are the same.
class Arena {
 public:
  explicit Arena(void* base = nullptr) : base_(static_cast<char*>(base)) {}

  template <class T>
  T* take(int64_t count) {
    char* area = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (static_cast<size_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<T*>(area);
  }

  size_t used() const { return used_; }

 private:
  static constexpr size_t kAlignment = 64;
  char* base_;
  size_t used_ = 0;
};

// Rows of unit stride. A row is longer than its columns: whole vectors may be read and written up to padded(columns),
// and the extra padding keeps rows off the same cache sets when columns are a power of two.
template <class T>
struct Tile {
  T* data = nullptr;
  int64_t stride = 0;

  T* row(int64_t i) const { return data + i * stride; }
};

template <class T>
Tile<T> take_tile(Arena& arena, int64_t rows, int64_t columns) {
  const int64_t stride = padded(columns) + kColumnPadding;
  return {arena.take<T>(rows * stride), stride};
}

// A matrix in a tensor.
struct MatrixView {
  char* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t row_stride = 0;     // elements
  int64_t column_stride = 1;  // elements

  MatrixView columns_from(int64_t column) const {
    MatrixView view = *this;
    view.data += column * column_stride * static_cast<int64_t>(dtype_size(dtype));
    return view;
  }
  MatrixView transposed() const { return {data, dtype, column_stride, row_stride}; }
};

// Element types in memory --------------------------------------------------------------------------------------------

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline float to_float(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}
inline float to_float(Float16 value) {
  _Float16 half;
  std::memcpy(&half, &value.bits, sizeof(half));
  return static_cast<float>(half);
}
inline float to_float(float value) { return value; }
inline double to_float(double value) { return value; }

template <class Stored>
inline Stored from_float(double value);
template <>
inline double from_float<double>(double value) {
  return value;
}
template <>
inline float from_float<float>(double value) {
  return static_cast<float>(value);
}
// To float32 with the last bit set if anything was lost: what is rounded to 16 bits after that is rounded once.
inline float to_odd(double value) {
  float single = static_cast<float>(value);
  const double back = single;
  if (back == value || std::isnan(value) || std::isinf(single)) return single;
  uint32_t bits;
  std::memcpy(&bits, &single, sizeof(bits));
  if (std::fabs(back) > std::fabs(value)) --bits;
  bits |= 1u;
  std::memcpy(&single, &bits, sizeof(single));
  return single;
}
template <>
inline BFloat16 from_float<BFloat16>(double value) {
  const float single = to_odd(value);
  uint32_t bits;
  std::memcpy(&bits, &single, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // nearest even
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return {static_cast<uint16_t>(is_nan ? ((bits >> 16) | 0x0040u) : rounded)};
}
template <>
inline Float16 from_float<Float16>(double value) {
  const _Float16 half = static_cast<_Float16>(to_odd(value));
  Float16 result;
  std::memcpy(&result.bits, &half, sizeof(half));
  return result;
}

// Calls body with a value of the C++ type behind a dtype.
template <class Body>
inline void with_stored_type(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kFloat64:
      return body(double{});
    case DType::kFloat32:
      return body(float{});
    case DType::kBFloat16:
      return body(BFloat16{});
    default:
      return body(Float16{});
  }
}

// Conversion of dense rows. The loops are plain so that the compiler vectorises them; half precision needs intrinsics.
template <class T, class Stored>
inline void convert_row(const Stored* from, int64_t count, T* to) {
  for (int64_t j = 0; j < count; ++j) to[j] = static_cast<T>(to_float(from[j]));
}
template <class Stored, class T>
inline void convert_row_back(const T* from, int64_t count, Stored* to) {
  for (int64_t j = 0; j < count; ++j) to[j] = from_float<Stored>(from[j]);
}
#if defined(__F16C__)
inline void convert_row(const Float16* from, int64_t count, float* to) {
  int64_t j = 0;
  for (; j + 8 <= count; j += 8) {
    _mm256_storeu_ps(to + j, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + j))));
  }
  for (; j < count; ++j) to[j] = to_float(from[j]);
}
inline void convert_row_back(const float* from, int64_t count, Float16* to) {
  int64_t j = 0;
  for (; j + 8 <= count; j += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + j),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + j), _MM_FROUND_TO_NEAREST_INT));
  }
  for (; j < count; ++j) to[j] = from_float<Float16>(from[j]);
}
#endif
inline void convert_row_back(const float* from, int64_t count, BFloat16* to) {
  for (int64_t j = 0; j < count; ++j) {
    uint32_t bits;
    std::memcpy(&bits, from + j, sizeof(bits));
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quieted = (bits >> 16) | 0x0040u;
    to[j].bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quieted : rounded);
  }
}

// Tensor to tile. Columns up to padded(columns) become zero.
template <class T>
inline void load_tile(const MatrixView& from, int64_t rows, int64_t columns, Tile<T> to) {
  with_stored_type(from.dtype, [&](auto stored) {
    using Stored = decltype(stored);
    const auto* data = reinterpret_cast<const Stored*>(from.data);
    for (int64_t i = 0; i < rows; ++i) {
      const Stored* row = data + i * from.row_stride;
      if (from.column_stride == 1) {
        convert_row(row, columns, to.row(i));
      } else {
        for (int64_t j = 0; j < columns; ++j) to.row(i)[j] = static_cast<T>(to_float(row[j * from.column_stride]));
      }
      for (int64_t j = columns; j < padded(columns); ++j) to.row(i)[j] = T(0);
    }
  });
}

// Tile to tensor, rounded once.
template <class T>
inline void store_tile(Tile<T> from, int64_t rows, int64_t columns, const MatrixView& to) {
  with_stored_type(to.dtype, [&](auto stored) {
    using Stored = decltype(stored);
    auto* data = reinterpret_cast<Stored*>(to.data);
    for (int64_t i = 0; i < rows; ++i) {
      Stored* row = data + i * to.row_stride;
      if (to.column_stride == 1) {
        convert_row_back(from.row(i), columns, row);
      } else {
        for (int64_t j = 0; j < columns; ++j) row[j * to.column_stride] = from_float<Stored>(from.row(i)[j]);
      }
    }
  });
}

// One value a row.
template <class T>
inline void load_column(const MatrixView& from, int64_t rows, T* to) {
  with_stored_type(from.dtype, [&](auto stored) {
    const auto* data = reinterpret_cast<const decltype(stored)*>(from.data);
    for (int64_t i = 0; i < rows; ++i) to[i] = static_cast<T>(to_float(data[i * from.row_stride]));
  });
}

template <class T>
inline void store_column(const T* from, int64_t rows, const MatrixView& to) {
  with_stored_type(to.dtype, [&](auto stored) {
    using Stored = decltype(stored);
    auto* data = reinterpret_cast<Stored*>(to.data);
    for (int64_t i = 0; i < rows; ++i) data[i * to.row_stride] = from_float<Stored>(from[i]);
  });
}

template <class T>
inline void fill_zero(Tile<T> tile, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; ++i) std::memset(tile.row(i), 0, static_cast<size_t>(padded(columns)) * sizeof(T));
}

// to = from^T. Columns of `to` up to padded(rows) become zero.
template <class T>
inline void transpose(Tile<T> from, int64_t rows, int64_t columns, Tile<T> to) {
  constexpr int kBlock = kLanes<T>;
  for (int64_t row = 0; row < rows; row += kBlock) {
    for (int64_t column = 0; column < columns; column += kBlock) {
      Vec<T> block[kBlock];
#pragma GCC unroll 16
      for (int i = 0; i < kBlock; ++i) block[i] = row + i < rows ? load(from.row(row + i) + column) : Vec<T>{};
      transpose_square<T>(block);
      const int64_t live = std::min<int64_t>(kBlock, columns - column);
#pragma GCC unroll 16
      for (int i = 0; i < kBlock; ++i) {
        if (i < live) store(to.row(column + i) + row, block[i]);
      }
    }
  }
  // A block covers kBlock columns of `to`, which may end before padded(rows).
  const int64_t covered = (rows + kBlock - 1) / kBlock * kBlock;
  for (int64_t j = 0; covered < padded(rows) && j < columns; ++j) {
    for (int64_t i = covered; i < padded(rows); ++i) to.row(j)[i] = T(0);
  }
}

// Row operations ------------------------------------------------------------------------------------------------------

template <class T>
inline T dot_row(const T* a, const T* b, int64_t count) {
  Vec<T> sum = {};
  int64_t j = 0;
  for (; j + kLanes<T> <= count; j += kLanes<T>) sum = fma(load(a + j), load(b + j), sum);
  T total = horizontal_sum<T>(sum);
  for (; j < count; ++j) total += a[j] * b[j];
  return total;
}

// Sum of squares, also where one of them passes the range of T.
template <class T>
inline double squared_norm(const T* a, int64_t count) {
  const T sum = dot_row(a, a, count);
  if (std::isfinite(sum)) return sum;
  double total = 0.0;
  for (int64_t j = 0; j < count; ++j) total += static_cast<double>(a[j]) * static_cast<double>(a[j]);
  return total;
}

// to += factor * from
template <class T>
inline void add_row(T factor, const T* from, int64_t columns, T* to) {
  const Vec<T> scale = broadcast(factor);
  for (int64_t j = 0; j < columns; j += kLanes<T>) store(to + j, fma(scale, load(from + j), load(to + j)));
}

// row *= factor, where a factor of zero means "gone": it clears infinities and NaN too.
template <class T>
inline void scale_row(T factor, int64_t columns, T* row) {
  const Vec<T> scale = broadcast(factor);
  const Vec<T> zero = {};
  for (int64_t j = 0; j < columns; j += kLanes<T>) store(row + j, factor == T(0) ? zero : scale * load(row + j));
}

}  // namespace cula::gdn::cpu::CULA_ISA
