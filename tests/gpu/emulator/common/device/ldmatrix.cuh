// ldmatrix and movmatrix on the emulator.
#pragma once

#include "emulator.h"

namespace cula::device {

// Addresses of the shared window are offsets from the start of the block's shared memory.
inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - emulator::shared_memory());
}
inline unsigned char* shared_pointer(uint32_t address) { return emulator::shared_memory() + address; }

struct EmulatedLoad {
  uint32_t* r;
  const void* row;
};

inline void emulated_ldmatrix(uint32_t (&r)[4], const void* row, bool transposed) {
  EmulatedLoad mine = {r, row};
  emulator::meet_warp(transposed ? "ldmatrix.trans" : "ldmatrix", &mine, [transposed](void* const* lanes) {
    for (int tile = 0; tile < 4; ++tile) {
      uint16_t m[8][8];
      for (int i = 0; i < 8; ++i) {
        const auto* source = static_cast<const EmulatedLoad*>(lanes[8 * tile + i])->row;
        if (reinterpret_cast<uintptr_t>(source) % 16 != 0) std::abort();
        std::memcpy(m[i], source, 16);
      }
      for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4;
        const int t = lane % 4;
        const uint32_t low = transposed ? m[2 * t][g] : m[g][2 * t];
        const uint32_t high = transposed ? m[2 * t + 1][g] : m[g][2 * t + 1];
        static_cast<const EmulatedLoad*>(lanes[lane])->r[tile] = low | high << 16;
      }
    }
  });
}

inline void ldmatrix_x4(uint32_t (&r)[4], const void* row) { emulated_ldmatrix(r, row, false); }
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t row) { ldmatrix_x4(r, shared_pointer(row)); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) { emulated_ldmatrix(r, row, true); }

inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row) { ldmatrix_x4_trans(r, shared_pointer(row)); }

inline uint32_t movmatrix_trans(uint32_t x) {
  emulator::meet_warp("movmatrix", &x, [](void* const* lanes) {
    uint16_t m[8][8];
    for (int lane = 0; lane < 32; ++lane) std::memcpy(&m[lane / 4][2 * (lane % 4)], lanes[lane], 4);
    for (int lane = 0; lane < 32; ++lane) {
      const int t = lane % 4;
      *static_cast<uint32_t*>(lanes[lane]) = m[2 * t][lane / 4] | static_cast<uint32_t>(m[2 * t + 1][lane / 4]) << 16;
    }
  });
  return x;
}

}  // namespace cula::device
