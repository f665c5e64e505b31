// Conversions as they are, but for instructions that are not C++.
#pragma once

#define exp2_approx exp2_approx_instruction
#define clamp_fp16_pair clamp_fp16_pair_instruction
#include_next "common/device/numeric.cuh"
#undef exp2_approx
#undef clamp_fp16_pair

#include <cmath>

namespace cula::device {

inline float exp2_approx(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;
}

inline uint32_t clamp_fp16_pair(uint32_t pair) {
  for (int shift = 0; shift < 32; shift += 16) {
    if ((pair >> shift & 0x7fff) == 0x7c00) pair -= uint32_t{1} << shift;  // infinity
  }
  return pair;
}

}  // namespace cula::device
