// S <- M S + S_ext in fp32: a block keeps some columns of the state in registers, kColumns of one row a thread, and
// goes through M in tiles.
#pragma once

#include "gdn/cuda/collective/arguments.cuh"

namespace cula::gdn::cuda {

inline constexpr int kMapThreads = 256;
inline constexpr int kMapColumns = 16;  // of the state, a block
inline constexpr int kMapStep = 32;     // columns of the map at a time

template <int kKeyDim>
struct StateMapShared {
  float state[kKeyDim][kMapColumns];
  float map[kKeyDim][kMapStep + 1];  // rows of the result by terms of its sum
};

// kTransposed: with the transpose of M.
template <int kKeyDim, bool kTransposed>
struct StateMap {
  static constexpr int kGroups = kMapThreads / kKeyDim;  // threads that share a row
  static constexpr int kColumns = kMapColumns / kGroups;
  static constexpr int kLoads = kKeyDim * kMapStep / kMapThreads;

  StateMapShared<kKeyDim>& shared;
  int key_dim;
  int value_dim;
  int block_value;  // the block's first column

  __device__ __forceinline__ int row() const { return static_cast<int>(threadIdx.x) % kKeyDim; }
  __device__ __forceinline__ int first_column() const { return static_cast<int>(threadIdx.x) / kKeyDim * kColumns; }
  // Of this thread's elements.
  __device__ __forceinline__ bool valid(int i) const {
    return row() < key_dim && block_value + first_column() + i < value_dim;
  }
  __device__ __forceinline__ int64_t offset(const TensorArg& x, int64_t n, int64_t head, int i) const {
    return n * x.stride[0] + head * x.stride[1] + row() * x.stride[2] +
           (block_value + first_column() + i) * x.stride[3];
  }

  // map(r, t): element of M; addend(i): of S_ext, for this thread's elements. By all threads.
  template <class Map, class Addend>
  __device__ __forceinline__ void apply(float (&s)[kColumns], const Map& map, const Addend& addend) const {
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) shared.state[row()][first_column() + i] = s[i];
    // Element (r, t) of the tile: M[r][t] or its transpose's; consecutive threads read consecutive elements of M.
    float ahead[kLoads];
    const auto fetch = [&](int first) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int at = i * kMapThreads + thread;
        const int r = kTransposed ? at % kKeyDim : at / kMapStep;
        const int t = first + (kTransposed ? at / kKeyDim : at % kMapStep);
        ahead[i] = r < key_dim && t < key_dim ? map(kTransposed ? t : r, kTransposed ? r : t) : 0.0f;
      }
    };
    fetch(0);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) s[i] = valid(i) ? addend(i) : 0.0f;
    for (int first = 0; first < key_dim; first += kMapStep) {
      sync_block();
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int at = i * kMapThreads + thread;
        shared.map[kTransposed ? at % kKeyDim : at / kMapStep][kTransposed ? at / kKeyDim : at % kMapStep] = ahead[i];
      }
      sync_block();
      if (first + kMapStep < key_dim) fetch(first + kMapStep);
      const int terms = key_dim - first < kMapStep ? key_dim - first : kMapStep;
#pragma unroll 4
      for (int t = 0; t < terms; ++t) {
        const float m = shared.map[row()][t];
#pragma unroll
        for (int i = 0; i < kColumns; ++i) s[i] += m * shared.state[first + t][first_column() + i];
      }
    }
    sync_block();
  }
};

}  // namespace cula::gdn::cuda
