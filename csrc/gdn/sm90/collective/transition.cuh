// One segment's share of a chain of states: target += M x entering, in fp32, by one thread a key.
#pragma once

#include <cstdint>

namespace cula::gdn::sm90 {

inline constexpr int kMergeColumns = 8;  // value columns a block

// transition: this thread's row of M, its elements `stride` apart; target: this key in each column. entering: the state
// before the segment, which all threads have written.
template <int kKeyDim>
__device__ __forceinline__ void add_transition(float* target, const float* transition, int stride,
                                               const float (&entering)[kKeyDim][kMergeColumns]) {
  float sum[kMergeColumns];
#pragma unroll
  for (int i = 0; i < kMergeColumns; ++i) sum[i] = target[i * kKeyDim];
#pragma unroll 32
  for (int j = 0; j < kKeyDim; ++j) {
    const float m = transition[j * stride];
#pragma unroll
    for (int i = 0; i < kMergeColumns; i += 4) {
      const float4 x = *reinterpret_cast<const float4*>(&entering[j][i]);
      sum[i] += m * x.x;
      sum[i + 1] += m * x.y;
      sum[i + 2] += m * x.z;
      sum[i + 3] += m * x.w;
    }
  }
#pragma unroll
  for (int i = 0; i < kMergeColumns; ++i) target[i * kKeyDim] = sum[i];
}

}  // namespace cula::gdn::sm90
