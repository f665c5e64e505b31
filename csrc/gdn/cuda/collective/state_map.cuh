// S <- M S + S_ext in fp32, for one M and S_ext after the other. A block has some columns of the state, a thread a
// patch of it in registers. M comes in tiles of some terms of the sum, through a ring in shared memory that runs ahead
// of the products, from one M into the next.
//
// Reading operands from shared memory is what limits it: a warp has all rows of a few columns, so that it reads a row
// of the state in one piece.
#pragma once

#include "common/device/cp_async.cuh"
#include "gdn/cuda/collective/arguments.cuh"

namespace cula::gdn::cuda {

inline constexpr int kMapThreads = 256;
inline constexpr int kMapPatchColumns = 4;  // of the state, a warp
inline constexpr int kMapColumns = kMapThreads / 32 * kMapPatchColumns;
// Terms of the sum that a tile holds, and tiles of the ring: what a block may have on any GPU, 99 KB.
template <int kKeyDim>
inline constexpr int kMapStep = kKeyDim == 256 ? 16 : 32;
template <int kKeyDim>
inline constexpr int kMapTiles = kKeyDim == 256 ? 3 : 4;

// kTransposed: with the transpose of M. A tile lies as M does: rows of the result by terms, or transposed.
template <int kKeyDim, bool kTransposed>
struct StateMapShared {
  static constexpr int kRowCount = kTransposed ? kMapStep<kKeyDim> : kKeyDim;
  static constexpr int kColumnCount = kTransposed ? kKeyDim : kMapStep<kKeyDim>;
  static constexpr int kTilePitch = kColumnCount + 4;  // no bank conflicts between rows
  alignas(16) float tiles[kMapTiles<kKeyDim>][kRowCount * kTilePitch];
  alignas(16) float state[kKeyDim][kMapColumns + 4];  // a vector more than needed: rows in different banks
};

template <int kKeyDim, bool kTransposed>
struct StateMap {
  using Shared = StateMapShared<kKeyDim, kTransposed>;
  static_assert(sizeof(Shared) <= 99 * 1024);
  static constexpr int kTiles = kMapTiles<kKeyDim>;
  static constexpr int kStep = kMapStep<kKeyDim>;
  static constexpr int kRowCount = kKeyDim / 32;  // of a patch
  static constexpr int kColumnCount = kMapPatchColumns;
  using Patch = float[kRowCount][kColumnCount];

  Shared& shared;
  int key_dim;
  int value_dim;
  int block_value;  // the block's first column

  // Of this thread's patch. Its rows are neighbours where it reads them in one piece, and 32 apart where it reads terms
  // in one piece.
  __device__ __forceinline__ int row(int i) const {
    return kTransposed ? kRowCount * lane_id() + i : lane_id() + 32 * i;
  }
  __device__ __forceinline__ int column(int j) const { return static_cast<int>(threadIdx.x) / 32 * kColumnCount + j; }
  // Whether a tensor of matrices can be read in vectors of four of the last dimension.
  __device__ __forceinline__ static bool has_vectors(const TensorArg& x) {
    return x.dtype == DType::kFloat32 && x.stride[3] == 1 && ((x.stride[0] | x.stride[1] | x.stride[2]) & 3) == 0 &&
           (reinterpret_cast<uintptr_t>(x.data) & 15) == 0;
  }
  // A type for all elements of a patch at once: code for each would not stay in the instruction cache.
  // visit(elements, i, j) for those that exist; visit_row(elements, i) for whole rows of fp32 in one piece.
  template <class VisitRow, class Visit>
  __device__ __forceinline__ void visit_patch(const TensorArg& x, int64_t n, int64_t head, const VisitRow& visit_row,
                                              const Visit& visit) const {
    static_assert(kColumnCount == 4);
    const int first_column = block_value + column(0);
    const int64_t at = n * x.stride[0] + head * x.stride[1] + first_column * x.stride[3];
    if (has_vectors(x) && first_column + kColumnCount <= value_dim) {
#pragma unroll
      for (int i = 0; i < kRowCount; ++i) {
        if (row(i) < key_dim) {
          visit_row(reinterpret_cast<float4*>(static_cast<float*>(x.data) + at + row(i) * x.stride[2]), i);
        }
      }
      return;
    }
    with_elements(x.data, x.dtype, [&](auto* data) {
#pragma unroll
      for (int i = 0; i < kRowCount; ++i) {
#pragma unroll
        for (int j = 0; j < kColumnCount; ++j) {
          if (row(i) < key_dim && first_column + j < value_dim) {
            visit(data + at + row(i) * x.stride[2] + j * x.stride[3], i, j);
          }
        }
      }
    });
  }
  __device__ __forceinline__ static void clear(Patch& x) {
#pragma unroll
    for (int i = 0; i < kRowCount; ++i) {
#pragma unroll
      for (int j = 0; j < kColumnCount; ++j) x[i][j] = 0.0f;
    }
  }
  __device__ __forceinline__ void load(Patch& x, const TensorArg& from, int64_t n, int64_t head) const {
    clear(x);
    visit_patch(
        from, n, head, [&](const float4* row_of, int i) { load_vectors(x[i], reinterpret_cast<const float*>(row_of)); },
        [&](auto* element, int i, int j) { x[i][j] = to_float(*element); });
  }
  __device__ __forceinline__ void store(const Patch& x, const TensorArg& to, int64_t n, int64_t head) const {
    visit_patch(
        to, n, head, [&](float4* row_of, int i) { *row_of = make_float4(x[i][0], x[i][1], x[i][2], x[i][3]); },
        [&](auto* element, int i, int j) { assign(*element, x[i][j]); });
  }

  // Starts to bring the terms from `first` on of the M at element `at`. Zeros where there are none.
  __device__ __forceinline__ void bring(float* tile, const TensorArg& map, int64_t at, int first, bool vectors) const {
    constexpr int kVectors = Shared::kColumnCount / 4;
    const int first_row = kTransposed ? first : 0;
    const int first_column = kTransposed ? 0 : first;
#pragma unroll 4
    for (int item = static_cast<int>(threadIdx.x); item < Shared::kRowCount * kVectors; item += kMapThreads) {
      const int r = item / kVectors;
      const int c = item % kVectors * 4;
      float* target = tile + r * Shared::kTilePitch + c;
      const int64_t source = at + (first_row + r) * map.stride[2] + (first_column + c) * map.stride[3];
      const auto exists = [&](int i) { return first_row + r < key_dim && first_column + c + i < key_dim; };
      if (vectors) {
        cp_async<16>(target, static_cast<const float*>(map.data) + (exists(0) ? source : 0), exists(0));
        continue;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) target[i] = exists(i) ? map.load(source + i * map.stride[3]) : 0.0f;
    }
  }
  // Two or more elements, aligned to 16 bytes or all of them.
  template <int kCount>
  __device__ __forceinline__ static void load_vectors(float (&x)[kCount], const float* from) {
    if constexpr (kCount == 2) {
      const float2 y = *reinterpret_cast<const float2*>(from);
      x[0] = y.x;
      x[1] = y.y;
    } else {
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
        const float4 y = *reinterpret_cast<const float4*>(from + i);
        x[i] = y.x;
        x[i + 1] = y.y;
        x[i + 2] = y.z;
        x[i + 3] = y.w;
      }
    }
  }

  // sum += the share of a tile's terms, the first of them being `first`.
  __device__ __forceinline__ void multiply(Patch& sum, const float* tile, int first) const {
    const int terms = key_dim - first < kStep ? key_dim - first : kStep;
#pragma unroll 4
    for (int t = 0; t < terms; t += 4) {
      float m[4][kRowCount];  // terms by rows
      float x[4][kColumnCount];
#pragma unroll
      for (int term = 0; term < 4; ++term) {
        load_vectors(x[term], &shared.state[first + t + term][column(0)]);
        if constexpr (kTransposed) load_vectors(m[term], tile + (t + term) * Shared::kTilePitch + row(0));
      }
      if constexpr (!kTransposed) {
#pragma unroll
        for (int i = 0; i < kRowCount; ++i) {
          float terms_of_row[4];
          load_vectors(terms_of_row, tile + row(i) * Shared::kTilePitch + t);
#pragma unroll
          for (int term = 0; term < 4; ++term) m[term][i] = terms_of_row[term];
        }
      }
#pragma unroll
      for (int term = 0; term < 4; ++term) {
#pragma unroll
        for (int i = 0; i < kRowCount; ++i) {
#pragma unroll
          for (int j = 0; j < kColumnCount; ++j) sum[i][j] += m[term][i] * x[term][j];
        }
      }
    }
  }

  // s <- M s + X for `count` steps: step n has M at element map_at(n) of `map`; add(x, n) puts X; before(s, n) sees the
  // state first. By all threads.
  template <class MapAt, class Add, class Before>
  __device__ __forceinline__ void run(Patch& s, int64_t count, const TensorArg& map, const MapAt& map_at,
                                      const Add& add, const Before& before) const {
    const bool vectors = has_vectors(map) && key_dim % 4 == 0;
    const int tiles = (key_dim + kStep - 1) / kStep;  // of an M
    int64_t ahead = 0;                                // the step that is brought next, and its terms
    int ahead_first = 0;
    int ahead_slot = 0;
    const auto bring_next = [&] {
      if (ahead < count) {
        bring(shared.tiles[ahead_slot], map, map_at(ahead), ahead_first, vectors);
        if ((ahead_first += kStep) >= key_dim) {
          ahead_first = 0;
          ++ahead;
        }
        if (++ahead_slot == kTiles) ahead_slot = 0;
      }
      cp_async_commit();
    };
#pragma unroll 1
    for (int i = 0; i < kTiles - 1; ++i) bring_next();
    int slot = 0;
#pragma unroll 1
    for (int64_t n = 0; n < count; ++n) {
      before(s, n);
      sync_block();  // all have left the state before
#pragma unroll
      for (int i = 0; i < kRowCount; ++i) {
#pragma unroll
        for (int j = 0; j < kColumnCount; j += 4) {
          *reinterpret_cast<float4*>(&shared.state[row(i)][column(j)]) =
              make_float4(s[i][j], s[i][j + 1], s[i][j + 2], s[i][j + 3]);
        }
      }
      Patch x;
      add(x, n);
      Patch sum;
      clear(sum);
#pragma unroll 1
      for (int tile = 0; tile < tiles; ++tile) {
        cp_async_wait<kTiles - 2>();
        sync_block();  // the tile has come, the state lies there, and all have left the tile before
        bring_next();
        multiply(sum, shared.tiles[slot], tile * kStep);
        if (++slot == kTiles) slot = 0;
      }
#pragma unroll
      for (int i = 0; i < kRowCount; ++i) {
#pragma unroll
        for (int j = 0; j < kColumnCount; ++j) s[i][j] = sum[i][j] + x[i][j];
      }
    }
  }
};

}  // namespace cula::gdn::cuda
