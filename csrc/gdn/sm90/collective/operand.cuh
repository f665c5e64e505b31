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

}  // namespace cula::gdn::sm90
