// Vectors of the instruction set that this file is compiled for (GCC vector extensions), and the few operations that
// the language has no operator for.
//
// The kernels of a CPU backend are compiled once for each instruction set, with CULA_ISA naming it. All that they
// define lives in a namespace of that name: two bodies of one function must never meet at link time.
#pragma once

#ifndef CULA_ISA
#define CULA_ISA generic
#endif

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace cula::CULA_ISA {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif

// Every scratch row starts at a multiple of this many elements, so that whole vectors can be used on all of it.
inline constexpr int64_t kColumnPadding = 16;
constexpr int64_t padded(int64_t columns) { return (columns + kColumnPadding - 1) / kColumnPadding * kColumnPadding; }

template <class T>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kVectorBytes)));
};
template <class T>
using Vec = typename VectorOf<T>::Type;
template <class T>
inline constexpr int kLanes = kVectorBytes / int(sizeof(T));

template <class T>
inline Vec<T> load(const T* from) {
  Vec<T> value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

template <class T>
inline void store(T* to, Vec<T> value) {
  std::memcpy(to, &value, sizeof(value));
}

template <class T>
inline Vec<T> broadcast(T value) {
  return value - Vec<T>{};  // the language's scalar-to-vector conversion; x - 0 keeps -0 and NaN
}

// a * b + c, fused where the instruction set has it.
inline Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) {
#if defined(__AVX512F__)
  return Vec<float>(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c)));
#elif defined(__AVX2__)
  return Vec<float>(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c)));
#else
  return a * b + c;
#endif
}

inline Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) {
#if defined(__AVX512F__)
  return Vec<double>(_mm512_fmadd_pd(__m512d(a), __m512d(b), __m512d(c)));
#elif defined(__AVX2__)
  return Vec<double>(_mm256_fmadd_pd(__m256d(a), __m256d(b), __m256d(c)));
#else
  return a * b + c;
#endif
}

// Sum of the lanes, in a fixed order.
template <class T>
inline T horizontal_sum(Vec<T> value) {
  T lanes[kLanes<T>];
  store(lanes, value);
  for (int width = kLanes<T> / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

// The square of kLanes<T> vectors, transposed in place.
template <class T>
inline void transpose_square(Vec<T> (&rows)[kLanes<T>]) {
  constexpr int kSize = kLanes<T>;
  using Index = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
  typedef Index IndexVec __attribute__((vector_size(kVectorBytes)));
  // Swaps the off-diagonal quarters of ever smaller squares.
#pragma GCC unroll 4
  for (int half = kSize / 2; half > 0; half /= 2) {
    IndexVec upper, lower;
    for (int lane = 0; lane < kSize; ++lane) {
      upper[lane] = (lane & half) == 0 ? lane : kSize + lane - half;
      lower[lane] = (lane & half) == 0 ? lane + half : kSize + lane;
    }
#pragma GCC unroll 16
    for (int i = 0; i < kSize; ++i) {
      if ((i & half) != 0) continue;
      const Vec<T> first = rows[i], second = rows[i + half];
      rows[i] = __builtin_shuffle(first, second, upper);
      rows[i + half] = __builtin_shuffle(first, second, lower);
    }
  }
}

// 2^x. At most 2 ulp for results in the normal range below 2^127.5 (2^1023.5 in double); 0 below that range, infinity
// above, NaN for NaN. The polynomial is the
// Taylor series of 2^f on |f| <= 1/2, whose remainder is below half an ulp at these degrees.
template <class T>
inline Vec<T> exp2(Vec<T> x) {
  constexpr bool kSingle = sizeof(T) == 4;
  using Bits = std::conditional_t<kSingle, int32_t, int64_t>;
  constexpr int kDegree = kSingle ? 7 : 13;
  constexpr T kSmallest = kSingle ? T(-126) : T(-1022);
  constexpr T kLargest = kSingle ? T(128) : T(1024);
  constexpr T kRounder = kSingle ? T(12582912.0) : T(6755399441055744.0);  // 1.5 * 2^(mantissa bits)
  constexpr int kMantissaBits = kSingle ? 23 : 52;
  constexpr Bits kExponentBias = kSingle ? 127 : 1023;

  const Vec<T> largest = broadcast(kLargest), smallest = broadcast(kSmallest - 1);
  const Vec<T> clamped = x > largest ? largest : (x < smallest ? smallest : x);
  const Vec<T> shifted = clamped + broadcast(kRounder);
  const Vec<T> fraction = clamped - (shifted - broadcast(kRounder));

  constexpr double kLn2 = 0.693147180559945309417232121458;
  double coefficient[kDegree + 1] = {1.0};
  for (int i = 1; i <= kDegree; ++i) coefficient[i] = coefficient[i - 1] * kLn2 / i;
  Vec<T> power = broadcast(T(coefficient[kDegree]));
  for (int i = kDegree - 1; i >= 0; --i) power = fma(power, fraction, broadcast(T(coefficient[i])));

  typedef Bits BitVec __attribute__((vector_size(kVectorBytes)));
  BitVec exponent;
  std::memcpy(&exponent, &shifted, sizeof(exponent));
  Bits rounder_bits;
  constexpr T rounder = kRounder;
  std::memcpy(&rounder_bits, &rounder, sizeof(rounder_bits));
  exponent = (exponent - rounder_bits + kExponentBias) << kMantissaBits;
  Vec<T> factor;
  std::memcpy(&factor, &exponent, sizeof(factor));
  const Vec<T> zero = {};
  return x < broadcast(kSmallest) ? zero : power * factor;
}

}  // namespace cula::CULA_ISA
