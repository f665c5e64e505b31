// Single elements of the float types, read exactly into float64 and written with one rounding to nearest even.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "common/host/tensor.h"

namespace cula::gdn::reference {

// An IEEE-like 16-bit format: 1 sign bit, then the exponent, then `fraction_bits`.
struct Format16 {
  int fraction_bits;
  int bias;
  int infinity() const { return (2 * bias + 1) << fraction_bits; }  // also the mask of the exponent field
};
inline constexpr Format16 kFloat16Format = {10, 15};
inline constexpr Format16 kBFloat16Format = {7, 127};

inline double decode(Format16 format, uint16_t bits) {
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  const int magnitude = bits & 0x7fff;
  if (magnitude > format.infinity()) return std::numeric_limits<double>::quiet_NaN();
  if (magnitude == format.infinity()) return sign * std::numeric_limits<double>::infinity();
  // As a float64 with the same exponent field, which is off by the difference of the biases: a power of two.
  const double unbiased = std::bit_cast<double>(static_cast<uint64_t>(magnitude) << (52 - format.fraction_bits));
  const double correction = std::bit_cast<double>(static_cast<uint64_t>(2 * 1023 - format.bias) << 52);
  return sign * unbiased * correction;
}

inline uint16_t encode(Format16 format, double value) {
  const int sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(value);
  if (std::isnan(value)) return static_cast<uint16_t>(sign | format.infinity() | 1 << (format.fraction_bits - 1));
  if (magnitude == 0) return static_cast<uint16_t>(sign);
  if (std::isinf(value)) return static_cast<uint16_t>(sign | format.infinity());
  const int exponent = std::max(std::ilogb(magnitude), 1 - format.bias);
  if (exponent > format.bias) return static_cast<uint16_t>(sign | format.infinity());
  // In units of the last place. The hidden bit, where there is one, adds 1 to the exponent field below; so does a
  // carry out of the fraction, up to infinity.
  const int units = static_cast<int>(std::nearbyint(std::ldexp(magnitude, format.fraction_bits - exponent)));
  return static_cast<uint16_t>(sign | (((exponent + format.bias - 1) << format.fraction_bits) + units));
}

inline double load_scalar(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kFloat64:
      return static_cast<const double*>(data)[index];
    case DType::kFloat32:
      return static_cast<const float*>(data)[index];
    case DType::kBFloat16:
      return decode(kBFloat16Format, static_cast<const uint16_t*>(data)[index]);
    case DType::kFloat16:
      return decode(kFloat16Format, static_cast<const uint16_t*>(data)[index]);
    default:
      throw_type_error("expected a float type, got ", dtype_name(dtype));
  }
}

inline void store_scalar(void* data, DType dtype, int64_t index, double value) {
  switch (dtype) {
    case DType::kFloat64:
      static_cast<double*>(data)[index] = value;
      return;
    case DType::kFloat32:
      static_cast<float*>(data)[index] = static_cast<float>(value);
      return;
    case DType::kBFloat16:
      static_cast<uint16_t*>(data)[index] = encode(kBFloat16Format, value);
      return;
    case DType::kFloat16:
      static_cast<uint16_t*>(data)[index] = encode(kFloat16Format, value);
      return;
    default:
      throw_type_error("expected a float type, got ", dtype_name(dtype));
  }
}

}  // namespace cula::gdn::reference
