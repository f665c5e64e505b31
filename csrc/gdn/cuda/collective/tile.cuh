// Tiles of 64 rows in shared memory: loads from and stores to token tensors.
#pragma once

#include "common/device/cp_async.cuh"
#include "gdn/cuda/collective/arguments.cuh"

namespace cula::gdn::cuda {

// Eight elements of padding a row: fragment loads of 16-bit tiles meet no bank twice.
template <int kCols>
inline constexpr int kPitch = kCols + 8;

template <class T, int kCols, int kTileRows = kRows>
struct Tile {
  T data[kTileRows * kPitch<kCols>];
};

// Which rows and columns of a token tensor a tile shows. Rows and columns beyond the valid ones are zero in the tile
// and are not stored.
struct Window {
  int64_t batch;
  int64_t token;
  int rows;  // valid
  int64_t head;
  int64_t column = 0;  // first
  int columns;         // valid, from `column` on
};

// Which piece of 16 (or 4) bytes of a row a thread moves, and which rows.
template <class T, int kCols, int kVectorBytes>
struct RowShare {
  static constexpr int kElements = kVectorBytes / static_cast<int>(sizeof(T));
  static constexpr int kPerRow = kCols / kElements;
  static_assert((kPerRow & (kPerRow - 1)) == 0);
};

template <class T, int kCols, int kVectorBytes>
__device__ __forceinline__ void load_tile_async(T* tile, const TensorArg& x, const Window& w) {
  using Share = RowShare<T, kCols, kVectorBytes>;
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  const T* base = static_cast<const T*>(x.data) + opaque(x.offset(opaque(w.batch), w.token, opaque(w.head))) + w.column;
  if (threads >= Share::kPerRow) {
    const int column = (thread & (Share::kPerRow - 1)) * Share::kElements;
    const int step = threads / Share::kPerRow;
    const bool column_valid = column < w.columns;
    int row = thread / Share::kPerRow;
    const T* source = base + row * x.stride[1] + column;
    T* target = tile + row * kPitch<kCols> + column;
#pragma unroll(kVectorBytes == 16 ? 2 : 1)
    for (; row < kRows; row += step) {
      const bool valid = column_valid && row < w.rows;
      // A masked copy still needs an address inside the tensor.
      cp_async<kVectorBytes>(target, valid ? source : static_cast<const T*>(x.data), valid);
      source += step * x.stride[1];
      target += step * kPitch<kCols>;
    }
  } else {
#pragma unroll 1
    for (int i = thread; i < kRows * Share::kPerRow; i += threads) {
      const int row = i / Share::kPerRow;
      const int column = (i & (Share::kPerRow - 1)) * Share::kElements;
      const bool valid = row < w.rows && column < w.columns;
      const T* source = valid ? base + row * x.stride[1] + column : static_cast<const T*>(x.data);
      cp_async<kVectorBytes>(tile + row * kPitch<kCols> + column, source, valid);
    }
  }
}

// The same by a team of kThreads threads, of which this is number `thread`.
template <class T, int kCols, int kVectorBytes, int kThreads, bool kLower = false>
__device__ __forceinline__ void load_tile_async_by(T* tile, const TensorArg& x, const Window& w, int thread) {
  using Share = RowShare<T, kCols, kVectorBytes>;
  const T* start = static_cast<const T*>(x.data);
  const T* base = start + opaque(x.offset(opaque(w.batch), w.token, opaque(w.head))) + w.column;
  if constexpr (kThreads >= Share::kPerRow) {
    constexpr int kStep = kThreads / Share::kPerRow;
    const int column = (thread & (Share::kPerRow - 1)) * Share::kElements;
    const int row = thread / Share::kPerRow;
    const int rows = column < w.columns ? w.rows - row : 0;  // that lie ahead and are valid
    const int64_t stride = opaque(x.stride[1]);
    const T* source = base + row * stride + column;
    const int64_t step = opaque(kStep * stride);
    T* target = tile + row * kPitch<kCols> + column;
#pragma unroll(kVectorBytes == 16 ? 8 : 1)
    for (int i = 0; i < kRows; i += kStep) {
      // The rows of one block of 16 lie in the same pass or passes: its last column bounds them all.
      static_assert(!kLower || kStep <= 16);
      if (!kLower || column < (i + kStep - 1) / 16 * 16 + 16) {
        cp_async<kVectorBytes>(target + i * kPitch<kCols>, source, i < rows);  // reads nothing if masked
      }
      source += step;
    }
  } else {
#pragma unroll 1
    for (int i = thread; i < kRows * Share::kPerRow; i += kThreads) {
      const int row = i / Share::kPerRow;
      const int column = (i & (Share::kPerRow - 1)) * Share::kElements;
      const bool valid = row < w.rows && column < w.columns;
      cp_async<kVectorBytes>(tile + row * kPitch<kCols> + column, valid ? base + row * x.stride[1] + column : start,
                             valid);
    }
  }
}

template <class T, int kCols, int kThreads>
__device__ __forceinline__ void load_tile_by(T* tile, const TensorArg& x, const Window& w, int thread) {
  if (x.vector_bytes == 16) {
    load_tile_async_by<T, kCols, 16, kThreads>(tile, x, w, thread);
  } else if (x.vector_bytes == 4) {
    load_tile_async_by<T, kCols, 4, kThreads>(tile, x, w, thread);
  } else {
    const int64_t base = opaque(x.offset(w.batch, w.token, w.head)) + w.column * x.stride[3];
#pragma unroll 1
    for (int i = thread; i < kRows * kCols; i += kThreads) {
      const int row = i / kCols;
      const int column = i - row * kCols;
      const bool valid = row < w.rows && column < w.columns;
      tile[row * kPitch<kCols> + column] =
          from_float<T>(valid ? x.load(base + row * x.stride[1] + column * x.stride[3]) : 0.0f);
    }
  }
}

// The blocks of 16 x 16 on and below the diagonal of a lower triangular tile; what lies above is left as it is.
template <class T, int kThreads>
__device__ __forceinline__ void load_lower_tile_by(T* tile, const TensorArg& x, const Window& w, int thread) {
  if (x.vector_bytes == 16) {
    load_tile_async_by<T, kRows, 16, kThreads, true>(tile, x, w, thread);
  } else {
    load_tile_by<T, kRows, kThreads>(tile, x, w, thread);
  }
}

// By all threads of the block. Visible after cp_async_commit, cp_async_wait and a barrier.
template <class T, int kCols>
__device__ __forceinline__ void load_tile(T* tile, const TensorArg& x, const Window& w) {
  if (x.vector_bytes == 16) {
    load_tile_async<T, kCols, 16>(tile, x, w);
  } else if (x.vector_bytes == 4) {
    load_tile_async<T, kCols, 4>(tile, x, w);
  } else {
    const int64_t base = opaque(x.offset(opaque(w.batch), w.token, opaque(w.head))) + w.column * x.stride[3];
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kCols; i += static_cast<int>(blockDim.x)) {
      const int row = i / kCols;
      const int column = i - row * kCols;
      const bool valid = row < w.rows && column < w.columns;
      tile[row * kPitch<kCols> + column] =
          from_float<T>(valid ? x.load(base + row * x.stride[1] + column * x.stride[3]) : 0.0f);
    }
  }
}

// By all threads of the block, behind a barrier.
template <class T, int kCols>
__device__ __forceinline__ void store_tile(const T* tile, const TensorArg& x, const Window& w) {
  const int64_t base = opaque(x.offset(opaque(w.batch), w.token, opaque(w.head))) + w.column * x.stride[3];
  if (x.vector_bytes == 16) {
    using Share = RowShare<T, kCols, 16>;
    T* target = static_cast<T*>(x.data) + base;
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x); i < kRows * Share::kPerRow; i += static_cast<int>(blockDim.x)) {
      const int row = i / Share::kPerRow;
      const int column = (i & (Share::kPerRow - 1)) * Share::kElements;
      if (row < w.rows && column < w.columns) {
        *reinterpret_cast<uint4*>(target + row * x.stride[1] + column) =
            *reinterpret_cast<const uint4*>(tile + row * kPitch<kCols> + column);
      }
    }
  } else {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kCols; i += static_cast<int>(blockDim.x)) {
      const int row = i / kCols;
      const int column = i - row * kCols;
      if (row < w.rows && column < w.columns) {
        x.store(base + row * x.stride[1] + column * x.stride[3], to_float(tile[row * kPitch<kCols> + column]));
      }
    }
  }
}

}  // namespace cula::gdn::cuda
