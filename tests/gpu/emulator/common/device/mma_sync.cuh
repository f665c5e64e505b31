// mma.sync on the emulator.
#pragma once

#include "common/device/numeric.cuh"
#include "emulator.h"

namespace cula::device {

struct EmulatedMma {
  float* c;
  const uint32_t* a;
  uint32_t b[2];
};

template <class T>
inline float emulated_half(uint32_t bits, int which) {
  const float2 pair = unpack2<T>(bits);
  return which == 0 ? pair.x : pair.y;
}

template <class T>
inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  EmulatedMma mine = {c, a, {b0, b1}};
  emulator::meet_warp("mma.m16n8k16", &mine, [](void* const* lanes) {
    float A[16][16];
    float B[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const auto& m = *static_cast<const EmulatedMma*>(lanes[lane]);
      const int g = lane / 4;
      const int t = lane % 4;
      for (int h = 0; h < 2; ++h) {
        A[g][2 * t + h] = emulated_half<T>(m.a[0], h);
        A[g + 8][2 * t + h] = emulated_half<T>(m.a[1], h);
        A[g][2 * t + 8 + h] = emulated_half<T>(m.a[2], h);
        A[g + 8][2 * t + 8 + h] = emulated_half<T>(m.a[3], h);
        B[2 * t + h][g] = emulated_half<T>(m.b[0], h);
        B[2 * t + 8 + h][g] = emulated_half<T>(m.b[1], h);
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      const auto& m = *static_cast<const EmulatedMma*>(lanes[lane]);
      for (int j = 0; j < 4; ++j) {
        const int row = lane / 4 + (j / 2) * 8;
        const int column = 2 * (lane % 4) + j % 2;
        float sum = m.c[j];
        for (int k = 0; k < 16; ++k) sum += A[row][k] * B[k][column];
        m.c[j] = sum;
      }
    }
  });
}

inline void mma_m16n8k8_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  EmulatedMma mine = {c, a, {b0, b1}};
  emulator::meet_warp("mma.m16n8k8", &mine, [](void* const* lanes) {
    const auto value = [](uint32_t bits) { return emulator::uint_as_float(bits & 0xffffe000u); };
    float A[16][8];
    float B[8][8];
    for (int lane = 0; lane < 32; ++lane) {
      const auto& m = *static_cast<const EmulatedMma*>(lanes[lane]);
      const int g = lane / 4;
      const int t = lane % 4;
      A[g][t] = value(m.a[0]);
      A[g + 8][t] = value(m.a[1]);
      A[g][t + 4] = value(m.a[2]);
      A[g + 8][t + 4] = value(m.a[3]);
      B[t][g] = value(m.b[0]);
      B[t + 4][g] = value(m.b[1]);
    }
    for (int lane = 0; lane < 32; ++lane) {
      const auto& m = *static_cast<const EmulatedMma*>(lanes[lane]);
      for (int j = 0; j < 4; ++j) {
        const int row = lane / 4 + (j / 2) * 8;
        const int column = 2 * (lane % 4) + j % 2;
        float sum = m.c[j];
        for (int k = 0; k < 8; ++k) sum += A[row][k] * B[k][column];
        m.c[j] = sum;
      }
    }
  });
}

inline uint32_t to_tf32(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7f800000u) == 0x7f800000u) return bits;
  return (bits + 0x1000u) & 0xffffe000u;
}

}  // namespace cula::device
