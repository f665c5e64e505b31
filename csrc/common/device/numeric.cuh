// Element types of device code: conversions, packing, and access by a type known only at run time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "common/host/tensor.h"

namespace cula::device {

using bf16 = __nv_bfloat16;
using fp16 = __half;

template <class T>
inline constexpr DType kDTypeOf = DType::kFloat32;
template <>
inline constexpr DType kDTypeOf<bf16> = DType::kBFloat16;
template <>
inline constexpr DType kDTypeOf<fp16> = DType::kFloat16;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(fp16 x) { return __half2float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else if constexpr (kDTypeOf<T> == DType::kBFloat16) {
    return __float2bfloat16_rn(x);
  } else {
    return __float2half_rn(x);
  }
}

// Two 16-bit elements in one register, `low` in the low half.
template <class T>
__device__ __forceinline__ uint32_t pack2(float low, float high) {
  static_assert(sizeof(T) == 2);
  uint32_t bits;
  if constexpr (kDTypeOf<T> == DType::kBFloat16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    __builtin_memcpy(&bits, &pair, 4);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    __builtin_memcpy(&bits, &pair, 4);
  }
  return bits;
}

template <class T>
__device__ __forceinline__ float2 unpack2(uint32_t bits) {
  static_assert(sizeof(T) == 2);
  if constexpr (kDTypeOf<T> == DType::kBFloat16) {
    __nv_bfloat162 pair;
    __builtin_memcpy(&pair, &bits, 4);
    return __bfloat1622float2(pair);
  } else {
    __half2 pair;
    __builtin_memcpy(&pair, &bits, 4);
    return __half22float2(pair);
  }
}

// Calls f(pointer) with `data` as a pointer to its element type, so that a loop inside decides once.
template <class F>
__device__ __forceinline__ void with_elements(void* data, DType dtype, const F& f) {
  switch (dtype) {
    case DType::kBFloat16:
      return f(static_cast<bf16*>(data));
    case DType::kFloat16:
      return f(static_cast<fp16*>(data));
    case DType::kFloat64:
      return f(static_cast<double*>(data));
    default:
      return f(static_cast<float*>(data));
  }
}

__device__ __forceinline__ void assign(double& target, float value) { target = value; }
__device__ __forceinline__ void assign(float& target, float value) { target = value; }
__device__ __forceinline__ void assign(bf16& target, float value) { target = __float2bfloat16_rn(value); }
__device__ __forceinline__ void assign(fp16& target, float value) { target = __float2half_rn(value); }
__device__ __forceinline__ float to_float(double x) { return static_cast<float>(x); }

// 2^x in one instruction: 2 units in the last place, results below 2^-126 are 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Infinities of a pair of fp16 become the largest finite number of their sign; NaN stays.
__device__ __forceinline__ uint32_t clamp_fp16_pair(uint32_t pair) {
  constexpr uint32_t kLargest = 0x7bff7bff;  // 65504, twice
  // The smaller magnitude, with the sign of the first operand (the second has none).
  asm("min.NaN.xorsign.abs.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(kLargest));
  return pair;
}

__device__ __forceinline__ float load_float(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kBFloat16:
      return to_float(static_cast<const bf16*>(data)[index]);
    case DType::kFloat16:
      return to_float(static_cast<const fp16*>(data)[index]);
    case DType::kFloat64:
      return static_cast<float>(static_cast<const double*>(data)[index]);
    default:
      return static_cast<const float*>(data)[index];
  }
}

__device__ __forceinline__ double load_double(const void* data, DType dtype, int64_t index) {
  if (dtype == DType::kFloat64) return static_cast<const double*>(data)[index];
  return load_float(data, dtype, index);
}

// An element as its bits: several can be on their way at once, whatever their type, since nothing is done to them yet.
__device__ __forceinline__ uint2 load_bits(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kBFloat16:
    case DType::kFloat16:
      return {static_cast<const uint16_t*>(data)[index], 0};
    case DType::kFloat64:
      return static_cast<const uint2*>(data)[index];
    default:
      return {static_cast<const uint32_t*>(data)[index], 0};
  }
}

__device__ __forceinline__ double bits_to_double(uint2 bits, DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return __uint_as_float(bits.x << 16);
    case DType::kFloat16:
      return __half2float(__ushort_as_half(static_cast<unsigned short>(bits.x)));
    case DType::kFloat64:
      return __hiloint2double(static_cast<int>(bits.y), static_cast<int>(bits.x));
    default:
      return __uint_as_float(bits.x);
  }
}

__device__ __forceinline__ void store_float(void* data, DType dtype, int64_t index, float value) {
  switch (dtype) {
    case DType::kBFloat16:
      static_cast<bf16*>(data)[index] = from_float<bf16>(value);
      break;
    case DType::kFloat16:
      static_cast<fp16*>(data)[index] = from_float<fp16>(value);
      break;
    case DType::kFloat64:
      static_cast<double*>(data)[index] = value;
      break;
    default:
      static_cast<float*>(data)[index] = value;
      break;
  }
}

// The same value, of which the compiler knows nothing: keeps it from computing dozens of addresses ahead of a loop and
// spilling them (nvcc 13.0).
__device__ __forceinline__ int64_t opaque(int64_t value) {
  asm volatile("" : "+l"(value));
  return value;
}
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

}  // namespace cula::device
