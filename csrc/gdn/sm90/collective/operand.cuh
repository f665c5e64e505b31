// Accumulators as operands of 16-bit products.
#pragma once

#include "common/device/numeric.cuh"

namespace cula::gdn::sm90 {

using namespace cula::device;

// Two accumulators as an operand. fp16 saturates, since an infinity would turn zeros elsewhere into NaN.
template <class T>
__device__ __forceinline__ uint32_t pack_operand(float low, float high) {
  const uint32_t pair = pack2<T>(low, high);
  if constexpr (kDTypeOf<T> == DType::kFloat16) return clamp_fp16_pair(pair);
  return pair;
}

template <class T, int kCount>
__device__ __forceinline__ void pack_operands(uint32_t (&operands)[kCount], const float (&x)[2 * kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) operands[i] = pack_operand<T>(x[2 * i], x[2 * i + 1]);
}

// The same in two terms, the second of which is what the first rounds off: together they have twice the bits.
template <class T, int kCount>
__device__ __forceinline__ void split_operands(uint32_t (&first)[kCount], uint32_t (&rest)[kCount],
                                               const float (&x)[2 * kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    first[i] = pack_operand<T>(x[2 * i], x[2 * i + 1]);
    const float2 rounded = unpack2<T>(first[i]);
    rest[i] = pack_operand<T>(x[2 * i] - rounded.x, x[2 * i + 1] - rounded.y);
  }
}

}  // namespace cula::gdn::sm90
