// The recurrent state in registers, transposed: a warp holds 16 value rows of S^T and kKeys of its key columns. Nothing
// of a chunk contracts over V, so warps share loaded tiles only. With the keys split over two warps, products with
// the state are sums of two halves, which the pair exchanges through shared memory.
#pragma once

#include <type_traits>

#include "gdn/cuda/collective/fragment.cuh"

namespace cula::gdn::cuda {

template <int kKeys>
using StateRows = float[kKeys / 8][4];
using TokenColumns = float[kRows / 8][4];  // 16 value rows x 64 tokens

// Which part of the state a warp holds.
struct StatePart {
  int64_t sequence;
  int64_t head;
  int key;    // first column
  int value;  // first row
  int key_dim;
  int value_dim;
};

// Visits the elements of a warp's part that exist: visit(offset in the state, element). kAtOnce: elements of a row
// between two branches, which bound how many loads are under way.
template <int kKeys, int kAtOnce, class Visit>
__device__ __forceinline__ void visit_state(float (&s)[kKeys / 8][4], int64_t key_stride, int64_t value_stride,
                                            const StatePart& part, const Visit& visit) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int value = part.value + fragment_row(2 * half);
    // Keys that lie ahead, none if the value does not exist.
    const int keys = value < part.value_dim ? part.key_dim - part.key - fragment_column(0, 0) : 0;
    const int64_t step = opaque(key_stride);
    int64_t at = value * value_stride + (part.key + fragment_column(0, 0)) * step;
#pragma unroll
    for (int first = 0; first < kKeys / 8; first += kAtOnce) {
      if (kAtOnce < kKeys / 8 && 8 * first >= opaque(keys)) continue;
#pragma unroll
      for (int i = first; i < first + kAtOnce; ++i) {
        if (8 * i < keys) visit(at, s[i][2 * half]);
        if (8 * i + 1 < keys) visit(at + step, s[i][2 * half + 1]);
        at += 8 * step;
      }
    }
  }
}

// From and to [sequence, head, key, value] of any float type. Without a tensor, or with a part of sequence -1, the
// state is zero and goes nowhere.
template <int kKeys, int kAtOnce = kKeys / 8>
__device__ __forceinline__ void load_state(float (&s)[kKeys / 8][4], const TensorArg& x, const StatePart& part) {
#pragma unroll
  for (int i = 0; i < kKeys / 8; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) s[i][j] = 0.0f;
  }
  if (!x || part.sequence < 0) return;
  with_elements(x.data, x.dtype, [&](auto* data) {
    data += part.sequence * x.stride[0] + part.head * x.stride[1];
    visit_state<kKeys, kAtOnce>(s, x.stride[2], x.stride[3], part,
                                [&](int64_t at, float& element) { element = to_float(data[at]); });
  });
}

template <class Element, int kKeys>
__device__ __forceinline__ void store_state_as(float (&s)[kKeys / 8][4], const TensorArg& x, const StatePart& part) {
  if (part.sequence < 0) return;
  Element* data = static_cast<Element*>(x.data) + part.sequence * x.stride[0] + part.head * x.stride[1];
  visit_state<kKeys, kKeys / 8>(s, x.stride[2], x.stride[3], part,
                                [&](int64_t at, float element) { assign(data[at], element); });
}

template <int kKeys>
__device__ __forceinline__ void store_state(float (&s)[kKeys / 8][4], const TensorArg& x, const StatePart& part) {
  with_elements(x.data, x.dtype,
                [&](auto* data) { store_state_as<std::remove_pointer_t<decltype(data)>, kKeys>(s, x, part); });
}

// To [batch, chunk, head, key, value] of T, at a chunk and head.
template <class T, int kKeys>
__device__ __forceinline__ void store_chunk_state(float (&s)[kKeys / 8][4], const TensorArg& x, int64_t offset,
                                                  const StatePart& part) {
  T* target = static_cast<T*>(x.data) + offset;
  visit_state<kKeys, kKeys / 8>(s, x.stride[3], x.stride[4], part,
                                [&](int64_t at, float element) { target[at] = from_float<T>(element); });
}

// The state as an operand of other kernels: rounded to T, in blocks of 8 values x 8 keys, so that a warp's stores are
// contiguous. kKeyDim and the value rows are padded; what lies past the real dimensions is zero.
template <class T, int kKeyDim, int kKeys>
__device__ __forceinline__ void store_state_blocks(const float (&s)[kKeys / 8][4], T* blocks, const StatePart& part) {
#pragma unroll
  for (int i = 0; i < kKeys / 8; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      T* p = blocks + ((part.value / 8 + half) * (kKeyDim / 8) + part.key / 8 + i) * 64 + 2 * lane_id();
      if constexpr (sizeof(T) == 2) {
        *reinterpret_cast<uint32_t*>(p) = pack2<T>(s[i][2 * half], s[i][2 * half + 1]);
      } else {
        *reinterpret_cast<float2*>(p) = make_float2(s[i][2 * half], s[i][2 * half + 1]);
      }
    }
  }
}

// How much of an accumulator goes into a product: what T keeps of it, or twice as many bits (in two products; fp32
// operands are whole in one).
enum class Precision { kRounded, kDouble };

template <class T, Precision kPrecision>
inline constexpr bool kTwoTerms = kPrecision == Precision::kDouble && sizeof(T) == 2;

// Two accumulators as an operand of that precision.
template <class T, Precision kPrecision>
struct Terms {
  FragmentA<T> first;
  FragmentA<T> rest;

  __device__ __forceinline__ Terms(const float (&c0)[4], const float (&c1)[4]) : first(to_a<T>(c0, c1)) {
    if constexpr (kTwoTerms<T, kPrecision>) rest = rest_of<T>(first, c0, c1);
  }
  __device__ __forceinline__ void multiply(float (&c0)[4], float (&c1)[4], const FragmentB<T>& b) const {
    mma(c0, c1, first, b);
    if constexpr (kTwoTerms<T, kPrecision>) mma(c0, c1, rest, b);
  }
};

// c += S^T x^T: columns are the rows of the tile x [64][K], from `first` on.
template <class T, int kTilePitch, int kKeys, Precision kPrecision = Precision::kRounded, int kTiles = 8>
__device__ __forceinline__ void multiply_state(float (&c)[kTiles][4], const float (&s)[kKeys / 8][4], const T* x,
                                               int key, int first = 0) {
#pragma unroll
  for (int k = 0; k < kKeys; k += 16) {
    const Terms<T, kPrecision> a(s[k / 8], s[k / 8 + 1]);
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) a.multiply(c[n], c[n + 1], load_b<kTilePitch>(x, first + 8 * n, key + k));
  }
}

// S^T += w x: w holds the tokens' columns, x [64][K] their rows.
template <class T, int kTilePitch, int kKeys, Precision kPrecision = Precision::kRounded>
__device__ __forceinline__ void update_state(float (&s)[kKeys / 8][4], const TokenColumns& w, const T* x, int key) {
#pragma unroll
  for (int k = 0; k < kRows; k += 16) {
    const Terms<T, kPrecision> a(w[k / 8], w[k / 8 + 1]);
#pragma unroll
    for (int n = 0; n < kKeys; n += 16) {
      a.multiply(s[n / 8], s[n / 8 + 1], load_b_transposed<kTilePitch>(x, key + n, k));
    }
  }
}

// S^T += factor a x, with the factor applied to the product: a [16 values][64 tokens], x [64][K].
template <class T, int kTilePitch, int kKeys>
__device__ __forceinline__ void add_scaled(float (&s)[kKeys / 8][4], const FragmentA<T> (&a)[4], const T* x, int key,
                                           float factor) {
#pragma unroll
  for (int n = 0; n < kKeys; n += 16) {
    float c[2][4];
    clear(c);
#pragma unroll
    for (int k = 0; k < kRows; k += 16) mma(c[0], c[1], a[k / 16], load_b_transposed<kTilePitch>(x, key + n, k));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      s[n / 8][j] += factor * c[0][j];
      s[n / 8 + 1][j] += factor * c[1][j];
    }
  }
}

template <class T>
__device__ __forceinline__ void to_fragments(FragmentA<T> (&a)[4], const TokenColumns& c) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = to_a<T>(c[2 * i], c[2 * i + 1]);
}

// c += w m^T for a lower triangular m [64][64]: c_i gathers columns j <= i. With fewer tiles than 8, c holds the
// columns from `first` on.
template <class T, Precision kPrecision = Precision::kRounded, int kTiles = 8>
__device__ __forceinline__ void multiply_lower(float (&c)[kTiles][4], const TokenColumns& w, const T* m,
                                               int first = 0) {
#pragma unroll
  for (int k = 0; k < kRows; k += 16) {
    const Terms<T, kPrecision> a(w[k / 8], w[k / 8 + 1]);
#pragma unroll
    for (int n = 0; n < 8 * kTiles; n += 16) {
      if (first + n >= k) a.multiply(c[n / 8], c[n / 8 + 1], load_b<kPitch<kRows>>(m, first + n, k));
    }
  }
}

// c += w m for a lower triangular m [64][64]: c_j gathers columns i >= j.
template <class T>
__device__ __forceinline__ void multiply_lower_transposed(TokenColumns& c, const FragmentA<T> (&w)[4], const T* m) {
#pragma unroll
  for (int k = 0; k < kRows; k += 16) {
#pragma unroll
    for (int n = 0; n <= k; n += 16) mma(c[n / 8], c[n / 8 + 1], w[k / 16], load_b_transposed<kPitch<kRows>>(m, n, k));
  }
}

// Multiplies each token's column by its entry of `factors`.
template <int kTiles>
__device__ __forceinline__ void scale_columns(float (&c)[kTiles][4], const float* factors) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const float2 f = *reinterpret_cast<const float2*>(factors + 8 * n + 2 * (lane_id() & 3));
    c[n][0] *= f.x;
    c[n][1] *= f.y;
    c[n][2] *= f.x;
    c[n][3] *= f.y;
  }
}

// Columns of 16 values out of a tile of tokens.
template <class T, int kTilePitch = kPitch<kRows>>
__device__ __forceinline__ void load_columns(TokenColumns& c, const T* tile, int value) {
#pragma unroll
  for (int n = 0; n < 8; n += 2) {
    from_a<T>(load_a_transposed<kTilePitch>(tile, value, 8 * n), c[n], c[n + 1]);
  }
}

// The same as operands.
template <class T, int kTilePitch>
__device__ __forceinline__ void load_column_fragments(FragmentA<T> (&a)[4], const T* tile, int value) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = load_a_transposed<kTilePitch>(tile, value, 16 * i);
}

// Multiplies each token's column by its entry of `factors` [64].
template <class T>
__device__ __forceinline__ void scale_fragments(FragmentA<T> (&a)[4], const float* factors) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float c[2][4];
    from_a<T>(a[i], c[0], c[1]);
    scale_columns(c, factors + 16 * i);
    a[i] = to_a<T>(c[0], c[1]);
  }
}

// c <- beta (columns of 16 values out of a tile of tokens - decay c), with the factors of the tokens [64].
template <class T, int kTilePitch>
__device__ __forceinline__ void take_residual(TokenColumns& c, const T* tile, int value, const float* decay,
                                              const float* beta) {
#pragma unroll
  for (int n = 0; n < 8; n += 2) {
    float x[2][4];
    from_a<T>(load_a_transposed<kTilePitch>(tile, value, 8 * n), x[0], x[1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 d = *reinterpret_cast<const float2*>(decay + 8 * (n + i) + 2 * (lane_id() & 3));
      const float2 b = *reinterpret_cast<const float2*>(beta + 8 * (n + i) + 2 * (lane_id() & 3));
      c[n + i][0] = b.x * (x[i][0] - d.x * c[n + i][0]);
      c[n + i][1] = b.y * (x[i][1] - d.y * c[n + i][1]);
      c[n + i][2] = b.x * (x[i][2] - d.x * c[n + i][2]);
      c[n + i][3] = b.y * (x[i][3] - d.y * c[n + i][3]);
    }
  }
}

// c <- factor c + columns of 16 values out of a tile of tokens.
template <class T>
__device__ __forceinline__ void add_columns(TokenColumns& c, const T* tile, int value, float factor) {
#pragma unroll
  for (int n = 0; n < 8; n += 2) {
    float x[2][4];
    from_a<T>(load_a_transposed<kPitch<kRows>>(tile, value, 8 * n), x[0], x[1]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      c[n][j] = x[0][j] + factor * c[n][j];
      c[n + 1][j] = x[1][j] + factor * c[n + 1][j];
    }
  }
}

template <int kTiles>
__device__ __forceinline__ void scale(float (&c)[kTiles][4], float factor) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) c[i][j] *= factor;
  }
}

// Stores columns of 8 kTiles tokens by 16 values at an aligned address of 16-bit elements: `rows` tokens and `columns`
// values of them exist.
template <class T, int kTiles>
__device__ __forceinline__ void store_columns_at(const float (&c)[kTiles][4], T* target, int64_t stride, int rows,
                                                 int columns) {
  const int lane = lane_id();
  const int column = 2 * (lane & 3);
  rows -= lane >> 2;  // that lie ahead
  T* p = target + (lane >> 2) * stride + column;
  const int64_t step = opaque(8 * stride);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const uint32_t upper = movmatrix_trans(pack2<T>(c[i][0], c[i][1]));
    const uint32_t lower = movmatrix_trans(pack2<T>(c[i][2], c[i][3]));
    if (8 * i < rows && column < columns) *reinterpret_cast<uint32_t*>(p) = upper;
    if (8 * i < rows && column + 8 < columns) *reinterpret_cast<uint32_t*>(p + 8) = lower;
    p += step;
  }
}

// Stores columns (8 kTiles tokens by 16 values, from element `base` on) to a token tensor.
template <class T, int kTiles>
__device__ __forceinline__ void store_columns(const float (&c)[kTiles][4], const TensorArg& x, int64_t base, int rows,
                                              int columns) {
  if constexpr (sizeof(T) == 2) {
    if (x.vector_bytes != 0) {
      store_columns_at<T>(c, static_cast<T*>(x.data) + base, x.stride[1], rows, columns);
      return;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int column = fragment_row(2 * half);
    int row = fragment_column(0, 0);
    const int64_t step = opaque(x.stride[1]);
    int64_t at = base + row * step + column * x.stride[3];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (row < rows && column < columns) x.store(at, c[i][2 * half]);
      if (row + 1 < rows && column < columns) x.store(at + step, c[i][2 * half + 1]);
      at += 8 * step;
      row += 8;
    }
  }
}

template <class T, int kTiles>
__device__ __forceinline__ void store_columns(const float (&c)[kTiles][4], const TensorArg& x, const Window& w) {
  store_columns<T>(c, x, x.offset(w.batch, w.token, w.head) + w.column * x.stride[3], w.rows, w.columns);
}

// Adds the partial sums of a pair of warps; both get the same bits. `buffer`: 2 x 32 x 8 kTiles ... floats of the pair.
template <int kTiles>
__device__ __forceinline__ void write_partial(float* buffer, const float (&c)[kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    *reinterpret_cast<float4*>(buffer + (i * 32 + lane_id()) * 4) = make_float4(c[i][0], c[i][1], c[i][2], c[i][3]);
  }
}
template <int kTiles>
__device__ __forceinline__ void add_partial(float (&c)[kTiles][4], const float* buffer) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const float4 other = *reinterpret_cast<const float4*>(buffer + (i * 32 + lane_id()) * 4);
    c[i][0] += other.x;
    c[i][1] += other.y;
    c[i][2] += other.z;
    c[i][3] += other.w;
  }
}

}  // namespace cula::gdn::cuda
