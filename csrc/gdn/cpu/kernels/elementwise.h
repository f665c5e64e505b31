// Row-wise operations on whole tensors.
#pragma once

#include "common/host/thread_pool.h"
#include "gdn/cpu/kernels/operands.h"

namespace cula::gdn::cpu::CULA_ISA {

inline constexpr int64_t kRowsPerUnit = 256;

// Calls body(index) for each index in [0, count), in parallel by blocks of them.
template <class Body>
void parallel_blocks(int64_t count, int num_threads, Body&& body) {
  parallel_for((count + kRowsPerUnit - 1) / kRowsPerUnit, num_threads, [&](int64_t unit, int) {
    const int64_t end = std::min(count, (unit + 1) * kRowsPerUnit);
    for (int64_t index = unit * kRowsPerUnit; index < end; ++index) body(index);
  });
}

// The index-th row over all but the last dimension, as a 1 x D matrix.
inline MatrixView row_at(const TensorView& x, int64_t index) {
  return {element(x, offset_of(x, index, x.ndim - 1)), x.dtype, 0, x.stride[x.ndim - 1]};
}

// Rows up to this many columns are held on the stack; longer ones go in pieces.
inline constexpr int64_t kPiece = 256;

// y = x rstd, rstd = 1 / sqrt(sum x^2 + kL2NormEpsilon), over rows.
template <class T>
void normalize_rows(const TensorView& x, const TensorView& y, const TensorView& rstd, int num_threads) {
  const int64_t columns = x.shape[x.ndim - 1];
  parallel_blocks(rstd.numel(), num_threads, [&](int64_t index) {
    alignas(64) T piece[kPiece + kColumnPadding];
    const Tile<T> tile = {piece, kPiece};
    const MatrixView from = row_at(x, index), to = row_at(y, index);
    double sum = 0.0;
    for (int64_t j = 0; j < columns; j += kPiece) {
      const int64_t width = std::min(kPiece, columns - j);
      load_tile(from.columns_from(j), 1, width, tile);
      sum += squared_norm(piece, width);
    }
    const T factor = T(1.0 / std::sqrt(sum + kL2NormEpsilon));
    for (int64_t j = 0; j < columns; j += kPiece) {
      const int64_t width = std::min(kPiece, columns - j);
      load_tile(from.columns_from(j), 1, width, tile);
      for (int64_t i = 0; i < width; ++i) piece[i] *= factor;
      store_tile(tile, 1, width, to.columns_from(j));
    }
    store_scalar(rstd, index, factor);
  });
}

}  // namespace cula::gdn::cpu::CULA_ISA
