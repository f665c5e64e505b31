// Accumulators as operands of 16-bit products.
#pragma once

#include "common/device/numeric.cuh"

namespace cula::gdn::sm90 {

using namespace cula::device;

// Two accumulators as an operand. fp16 saturates, since an infinity would turn zeros elsewhere into NaN.
template <class T>
__device__ __forceinline__ uint32_t pack_operand(float low, float high) {
  uint32_t pair = pack2<T>(low, high);
  if constexpr (kDTypeOf<T> == DType::kFloat16) {
    constexpr uint32_t kLargest = 0x7bff7bff;  // 65504, twice
    // The smaller magnitude, with the sign of the first operand (the second has none).
    asm("min.NaN.xorsign.abs.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(kLargest));
  }
  return pair;
}

}  // namespace cula::gdn::sm90
