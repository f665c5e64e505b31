// Warp and block co-operation: shuffles, votes, reductions, barriers. Every lane of the warp must take part.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace cula::device {

inline constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x & 31); }
// threadIdx.x, read anew: addresses made of one that is known are made ahead of loops, kept for all of them, and
// spilled where registers are short (nvcc 13.0).
__device__ __forceinline__ int thread_index_anew() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}
// Uniform over the warp, and known to be so by the compiler. A shuffle: every lane must take part, as in all of this
// file, so never inside a branch on the lane.
__device__ __forceinline__ int warp_id() { return __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x >> 5), 0); }

template <class T>
__device__ __forceinline__ T shuffle(T value, int lane) {
  return __shfl_sync(kAllLanes, value, lane);
}
template <class T>
__device__ __forceinline__ T shuffle_up(T value, int delta) {
  return __shfl_up_sync(kAllLanes, value, delta);
}
template <class T>
__device__ __forceinline__ T shuffle_down(T value, int delta) {
  return __shfl_down_sync(kAllLanes, value, delta);
}
template <class T>
__device__ __forceinline__ T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(kAllLanes, value, mask);
}
__device__ __forceinline__ unsigned ballot(bool predicate) { return __ballot_sync(kAllLanes, predicate); }

__device__ __forceinline__ void sync_warp() { __syncwarp(); }
__device__ __forceinline__ void sync_block() { __syncthreads(); }
// Barrier `id` (1 to 15) among `threads` threads of the block, whole warps.
__device__ __forceinline__ void sync_named(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Counts this warp in without waiting for the barrier; what it wrote before is visible behind it to those who wait.
__device__ __forceinline__ void arrive_named(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same order of additions in every lane, so that all hold the same bits.
template <class T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask >>= 1) value += shuffle_xor(value, mask);
  return value;
}

// Known to the compiler as uniform.
__device__ __forceinline__ unsigned warp_max(unsigned value) { return __reduce_max_sync(kAllLanes, value); }

// Sum over the lanes that differ from this one in the bits below `width` alone.
template <int kWidth, class T>
__device__ __forceinline__ T group_sum(T value) {
#pragma unroll
  for (int mask = kWidth / 2; mask > 0; mask >>= 1) value += shuffle_xor(value, mask);
  return value;
}

template <class T>
__device__ __forceinline__ T warp_inclusive_scan(T value) {
#pragma unroll
  for (int delta = 1; delta < 32; delta <<= 1) {
    const T below = shuffle_up(value, delta);
    if (lane_id() >= delta) value += below;
  }
  return value;
}

// Sum over lanes >= this one.
template <class T>
__device__ __forceinline__ T warp_reverse_inclusive_scan(T value) {
#pragma unroll
  for (int delta = 1; delta < 32; delta <<= 1) {
    const T above = shuffle_down(value, delta);
    if (lane_id() + delta < 32) value += above;
  }
  return value;
}

}  // namespace cula::device
