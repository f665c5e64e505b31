// wgmma on the emulator: done when the last thread of the warpgroup issues it.
#pragma once

#include "common/device/numeric.cuh"
#include "common/device/warpgroup.cuh"

namespace cula::device {

inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int kPending>
inline void wgmma_wait() {}
template <int kCount>
inline void wgmma_complete(float (&)[kCount]) {}

inline uint32_t wgmma_operand(uint32_t shared_address, int leading_bytes = 16) {
  return ((shared_address & 0x3ffff) >> 4) | static_cast<uint32_t>(leading_bytes >> 4) << 16;
}
inline uint64_t wgmma_descriptor(uint32_t operand, int offset_bytes) { return operand + offset_bytes / 16; }

template <class T>
struct EmulatedProduct {
  float* d;
  const uint32_t* a;  // registers, or null
  uint64_t a_tile;
  uint64_t b_tile;

  // Element (row, k) of a tile: its rows lie one behind the other, or `transposed` its k.
  static float element(uint64_t tile, int row, int k, bool transposed) {
    const auto start = static_cast<uint32_t>(tile & 0x3fff) << 4;
    const auto leading = static_cast<uint32_t>(tile >> 16 & 0x3fff) << 4;
    uint32_t at = start + (transposed ? row / 64 * leading + k * 128 + row % 64 * 2 : row * 128 + k * 2);
    at ^= (at >> 7 & 7) << 4;
    return to_float(*reinterpret_cast<const T*>(shared_pointer(at)));
  }
};

template <class T, int kColumns, bool kFirst, bool kTransposedA, bool kTransposedB>
inline void emulated_wgmma(EmulatedProduct<T> mine) {
  emulator::meet_warpgroup(&mine, [](void* const* threads) {
    using Product = EmulatedProduct<T>;
    const auto of = [&](int thread) -> const Product& { return *static_cast<const Product*>(threads[thread]); };
    static float a[64][16];
    static float b[kColumns][16];
    for (int k = 0; k < 16; ++k) {
      for (int row = 0; row < 64; ++row) {
        if (of(0).a == nullptr) {
          a[row][k] = Product::element(of(0).a_tile, row, k, kTransposedA);
        } else {
          const int thread = row / 16 * 32 + row % 8 * 4 + k % 8 / 2;
          const float2 pair = unpack2<T>(of(thread).a[k / 8 * 2 + row % 16 / 8]);
          a[row][k] = k % 2 == 0 ? pair.x : pair.y;
        }
      }
      for (int column = 0; column < kColumns; ++column) {
        b[column][k] = Product::element(of(0).b_tile, column, k, kTransposedB);
      }
    }
    for (int thread = 0; thread < kWarpgroupThreads; ++thread) {
      for (int i = 0; i < kColumns / 2; ++i) {
        const int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
        const int column = i / 4 * 8 + thread % 4 * 2 + i % 2;
        float sum = kFirst ? 0.0f : of(thread).d[i];
        for (int k = 0; k < 16; ++k) sum += a[row][k] * b[column][k];
        of(thread).d[i] = sum;
      }
    }
  });
}

template <class T>
inline void wgmma_rs_n32_first(float* d, const uint32_t* a, uint64_t b) {
  emulated_wgmma<T, 32, true, false, false>({d, a, 0, b});
}
template <class T>
inline void wgmma_rs_n32(float* d, const uint32_t* a, uint64_t b) {
  emulated_wgmma<T, 32, false, false, false>({d, a, 0, b});
}
template <class T>
inline void wgmma_rs_n64_first(float (&d)[32], const uint32_t* a, uint64_t b) {
  emulated_wgmma<T, 64, true, false, false>({d, a, 0, b});
}
template <class T>
inline void wgmma_rs_n64(float (&d)[32], const uint32_t* a, uint64_t b) {
  emulated_wgmma<T, 64, false, false, false>({d, a, 0, b});
}
template <class T>
inline void wgmma_rs_n64_transposed_first(float (&d)[32], const uint32_t* a, uint64_t b) {
  emulated_wgmma<T, 64, true, false, true>({d, a, 0, b});
}
template <class T>
inline void wgmma_rs_n64_transposed(float (&d)[32], const uint32_t* a, uint64_t b) {
  emulated_wgmma<T, 64, false, false, true>({d, a, 0, b});
}
template <class T>
inline void wgmma_rs_n128_transposed(float (&d)[64], const uint32_t* a, uint64_t b) {
  emulated_wgmma<T, 128, false, false, true>({d, a, 0, b});
}
template <class T>
inline void wgmma_ss_n64_first(float (&d)[32], uint64_t a, uint64_t b) {
  emulated_wgmma<T, 64, true, false, false>({d, nullptr, a, b});
}
template <class T>
inline void wgmma_ss_n64(float (&d)[32], uint64_t a, uint64_t b) {
  emulated_wgmma<T, 64, false, false, false>({d, nullptr, a, b});
}
template <class T>
inline void wgmma_ss_n64_transposed_first(float (&d)[32], uint64_t a, uint64_t b) {
  emulated_wgmma<T, 64, true, false, true>({d, nullptr, a, b});
}
template <class T>
inline void wgmma_ss_n64_transposed(float (&d)[32], uint64_t a, uint64_t b) {
  emulated_wgmma<T, 64, false, false, true>({d, nullptr, a, b});
}
template <class T>
inline void wgmma_ss_n64_both_transposed(float (&d)[32], uint64_t a, uint64_t b) {
  emulated_wgmma<T, 64, false, true, true>({d, nullptr, a, b});
}

}  // namespace cula::device
