// Products of 64 x 64 tiles by four warps, 16 rows each, and tiles of stored states.
#pragma once

#include "gdn/cuda/collective/fragment.cuh"

namespace cula::gdn::cuda {

inline constexpr int kProductThreads = 128;

// Steps of a product that are unrolled: the split operands of fp32 take too many registers for more than one.
template <class T>
inline constexpr int kUnrolledSteps = sizeof(T) == 2 ? 4 : 1;

// c (rows m0 .., 64 columns) += a b with a [m][k] and b [k][n].
template <class T>
__device__ __forceinline__ void multiply_tiles(float (&c)[8][4], const T* a, const T* b, int m0) {
#pragma unroll(kUnrolledSteps <T>)
  for (int k = 0; k < kRows; k += 16) {
    const FragmentA<T> rows = load_a<kPitch<kRows>>(a, m0, k);
#pragma unroll
    for (int n = 0; n < kRows; n += 16) {
      mma(c[n / 8], c[n / 8 + 1], rows, load_b_transposed<kPitch<kRows>>(b, n, k));
    }
  }
}

// The same with b given as [n][k].
template <class T>
__device__ __forceinline__ void multiply_tiles_by_rows(float (&c)[8][4], const T* a, const T* b, int m0) {
#pragma unroll(kUnrolledSteps <T>)
  for (int k = 0; k < kRows; k += 16) {
    const FragmentA<T> rows = load_a<kPitch<kRows>>(a, m0, k);
#pragma unroll
    for (int n = 0; n < kRows; n += 16) mma(c[n / 8], c[n / 8 + 1], rows, load_b<kPitch<kRows>>(b, n, k));
  }
}

// c += a^T b with a [k][m] and b [k][n].
template <class T>
__device__ __forceinline__ void multiply_transposed_tiles(float (&c)[8][4], const T* a, const T* b, int m0) {
#pragma unroll(kUnrolledSteps <T>)
  for (int k = 0; k < kRows; k += 16) {
    const FragmentA<T> rows = load_a_transposed<kPitch<kRows>>(a, m0, k);
#pragma unroll
    for (int n = 0; n < kRows; n += 16) {
      mma(c[n / 8], c[n / 8 + 1], rows, load_b_transposed<kPitch<kRows>>(b, n, k));
    }
  }
}

// c0 += a0 b, c1 += a1 b with a [m][k] and b [k][n].
template <class T>
__device__ __forceinline__ void multiply_pair(float (&c0)[8][4], float (&c1)[8][4], const T* a0, const T* a1,
                                              const T* b, int m0) {
#pragma unroll(kUnrolledSteps <T>)
  for (int k = 0; k < kRows; k += 16) {
    const FragmentA<T> rows0 = load_a<kPitch<kRows>>(a0, m0, k);
    const FragmentA<T> rows1 = load_a<kPitch<kRows>>(a1, m0, k);
#pragma unroll
    for (int n = 0; n < kRows; n += 16) {
      const FragmentB<T> columns = load_b_transposed<kPitch<kRows>>(b, n, k);
      mma(c0[n / 8], c0[n / 8 + 1], rows0, columns);
      mma(c1[n / 8], c1[n / 8 + 1], rows1, columns);
    }
  }
}

// c0 += a0 b^T, c1 += a1 b^T with b [n][k], in the blocks on and below the diagonal.
template <class T>
__device__ __forceinline__ void multiply_lower_pair(float (&c0)[8][4], float (&c1)[8][4], const T* a0, const T* a1,
                                                    const T* b, int m0) {
#pragma unroll(kUnrolledSteps <T>)
  for (int k = 0; k < kRows; k += 16) {
    const FragmentA<T> rows0 = load_a<kPitch<kRows>>(a0, m0, k);
    const FragmentA<T> rows1 = load_a<kPitch<kRows>>(a1, m0, k);
#pragma unroll
    for (int n = 0; n < kRows; n += 16) {
      if (n > m0) continue;
      const FragmentB<T> columns = load_b<kPitch<kRows>>(b, n, k);
      mma(c0[n / 8], c0[n / 8 + 1], rows0, columns);
      mma(c1[n / 8], c1[n / 8 + 1], rows1, columns);
    }
  }
}

// Stores rows m0 .. of a product through a tile; by all threads, with barriers around the tile's use.
template <class T>
__device__ __forceinline__ void store_product(T* tile, const float (&c)[8][4], const TensorArg& x, const Window& w,
                                              int m0) {
  if (x.dtype == kDTypeOf<T>) {
    store_fragment<kPitch<kRows>>(tile, m0, 0, c);
    sync_block();
    store_tile<T, kRows>(tile, x, w);
    sync_block();
    return;
  }
  // Another type: straight from the accumulators, so that it is rounded once.
  const int64_t base = x.offset(w.batch, w.token, w.head) + w.column * x.stride[3];
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = m0 + fragment_row(j);
      const int column = fragment_column(n, j);
      if (row < w.rows && column < w.columns) x.store(base + row * x.stride[1] + column * x.stride[3], c[n][j]);
    }
  }
}

// Where 64 keys of a state lie that store_state_blocks wrote.
struct StateBlocks {
  int64_t offset;
  int padded_key_dim;
  int value_dim;
  int key;
};

// 64 values from `value` on, by 64 keys: tile [values][keys].
template <class T>
__device__ __forceinline__ void load_state_blocks(T* tile, const T* states, const StateBlocks& blocks, int value) {
  constexpr int kElements = 16 / static_cast<int>(sizeof(T));
  constexpr int kPerRow = 8 / kElements;  // 16-byte pieces in a row of a block
  const int rows = (blocks.value_dim + 15) / 16 * 16;
  // Consecutive threads read consecutive pieces of a block of 8 x 8.
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kRows / kElements; i += static_cast<int>(blockDim.x)) {
    const int piece = i % kPerRow;
    const int row = i / kPerRow % 8;
    const int block = i / (8 * kPerRow);
    const int key_block = block % 8;
    const int value_block = block / 8;
    const bool valid = value + 8 * value_block < rows;
    const T* source =
        states + blocks.offset +
        (static_cast<int64_t>(value / 8 + value_block) * (blocks.padded_key_dim / 8) + blocks.key / 8 + key_block) *
            64 +
        row * 8 + piece * kElements;
    cp_async<16>(tile + (8 * value_block + row) * kPitch<kRows> + 8 * key_block + piece * kElements,
                 valid ? source : states, valid);
  }
}

}  // namespace cula::gdn::cuda
