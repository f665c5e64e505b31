// stmatrix on the emulator.
#pragma once

#include "common/device/ldmatrix.cuh"
#include "emulator.h"

namespace cula::device {

struct EmulatedStore {
  uint32_t row;
  uint32_t r[4];
};

inline void emulated_stmatrix(EmulatedStore mine, bool transposed) {
  emulator::meet_warp(transposed ? "stmatrix.trans" : "stmatrix", &mine, [transposed](void* const* lanes) {
    for (int tile = 0; tile < 4; ++tile) {
      uint16_t m[8][8];
      for (int lane = 0; lane < 32; ++lane) {
        const uint32_t pair = static_cast<const EmulatedStore*>(lanes[lane])->r[tile];
        for (int i = 0; i < 2; ++i) {
          const int row = lane / 4;
          const int column = 2 * (lane % 4) + i;
          (transposed ? m[column][row] : m[row][column]) = static_cast<uint16_t>(pair >> 16 * i);
        }
      }
      for (int i = 0; i < 8; ++i) {
        const uint32_t row = static_cast<const EmulatedStore*>(lanes[8 * tile + i])->row;
        if (row % 16 != 0) emulator::fault("misaligned row", "stmatrix");
        std::memcpy(shared_pointer(row), m[i], 16);
      }
    }
  });
}
inline void stmatrix_x4(uint32_t row, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  emulated_stmatrix({row, {r0, r1, r2, r3}}, false);
}
inline void stmatrix_x4_trans(uint32_t row, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  emulated_stmatrix({row, {r0, r1, r2, r3}}, true);
}

}  // namespace cula::device
