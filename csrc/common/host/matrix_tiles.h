// The processor's matrix tiles (AMX): eight registers of 16 rows of 64 bytes, and products of bfloat16 pairs on them.
//
// With CULA_EMULATE_MATRIX_TILES the same code runs on plain arrays, so that the layouts are tested on any machine.
#pragma once

#include "common/host/simd.h"

#if defined(__AMX_BF16__) || defined(CULA_EMULATE_MATRIX_TILES)
#define CULA_MATRIX_TILES

namespace cula::CULA_ISA {

#if defined(CULA_EMULATE_MATRIX_TILES)

namespace emulated_tiles {

struct Register {
  uint32_t rows[16][16];
};
inline thread_local Register registers[8];

inline void zero(int tile) { registers[tile] = {}; }
inline void load(int tile, const void* from, int64_t stride_bytes) {
  for (int i = 0; i < 16; ++i) {
    std::memcpy(registers[tile].rows[i], static_cast<const char*>(from) + i * stride_bytes, 64);
  }
}
inline void store(int tile, void* to, int64_t stride_bytes) {
  for (int i = 0; i < 16; ++i) std::memcpy(static_cast<char*>(to) + i * stride_bytes, registers[tile].rows[i], 64);
}
inline float half_of(uint32_t pair, bool high) {
  const uint32_t bits = high ? pair & 0xffff0000u : pair << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
inline void dot(int c, int a, int b) {
  for (int i = 0; i < 16; ++i) {
    for (int p = 0; p < 16; ++p) {
      const uint32_t a_pair = registers[a].rows[i][p];
      for (int j = 0; j < 16; ++j) {
        const uint32_t b_pair = registers[b].rows[p][j];
        float sum;
        std::memcpy(&sum, &registers[c].rows[i][j], sizeof(sum));
        sum += half_of(a_pair, false) * half_of(b_pair, false);
        sum += half_of(a_pair, true) * half_of(b_pair, true);
        std::memcpy(&registers[c].rows[i][j], &sum, sizeof(sum));
      }
    }
  }
}

}  // namespace emulated_tiles

#define CULA_TILE_ZERO(tile) emulated_tiles::zero(tile)
#define CULA_TILE_LOAD(tile, from, stride) emulated_tiles::load(tile, from, stride)
#define CULA_TILE_STORE(tile, to, stride) emulated_tiles::store(tile, to, stride)
#define CULA_TILE_DOT(c, a, b) emulated_tiles::dot(c, a, b)

#else

// The intrinsics name registers by literal numbers.
#define CULA_TILE_ZERO(tile) _tile_zero(tile)
#define CULA_TILE_LOAD(tile, from, stride) _tile_loadd(tile, from, stride)
#define CULA_TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define CULA_TILE_DOT(c, a, b) _tile_dpbf16ps(c, a, b)

#endif

// Holds the tile registers of this thread, all of them whole, while it lives.
class MatrixTiles {
 public:
  static constexpr int64_t kSize = 16;  // rows, and 32-bit columns

  MatrixTiles() {
#if !defined(CULA_EMULATE_MATRIX_TILES)
    struct alignas(64) Configuration {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } configuration;
    _tile_loadconfig(&configuration);
#endif
  }
  ~MatrixTiles() {
#if !defined(CULA_EMULATE_MATRIX_TILES)
    _tile_release();
#endif
  }
  MatrixTiles(const MatrixTiles&) = delete;
  MatrixTiles& operator=(const MatrixTiles&) = delete;

  // sum = A B for up to 2 x 2 tiles of the result: a[i * a_row + p], b[p * b_row + j] are pairs, p in [begin, end),
  // both multiples of kSize. Rows past 16 of `sum` are only right if second_rows, columns past 16 if second_columns.
  void multiply(const uint32_t* a, int64_t a_row, bool second_rows, const uint32_t* b, int64_t b_row,
                bool second_columns, int64_t begin, int64_t end, float (&sum)[2 * kSize][2 * kSize]) const {
    const int64_t a_bytes = a_row * 4, b_bytes = b_row * 4;
    const uint32_t* a_second = second_rows ? a + kSize * a_row : a;
    const uint32_t* b_second = second_columns ? b + kSize : b;
    CULA_TILE_ZERO(0);
    CULA_TILE_ZERO(1);
    CULA_TILE_ZERO(2);
    CULA_TILE_ZERO(3);
    for (int64_t p = begin; p < end; p += kSize) {
      CULA_TILE_LOAD(4, a + p, a_bytes);
      CULA_TILE_LOAD(5, a_second + p, a_bytes);
      CULA_TILE_LOAD(6, b + p * b_row, b_bytes);
      CULA_TILE_LOAD(7, b_second + p * b_row, b_bytes);
      CULA_TILE_DOT(0, 4, 6);
      CULA_TILE_DOT(1, 4, 7);
      CULA_TILE_DOT(2, 5, 6);
      CULA_TILE_DOT(3, 5, 7);
    }
    constexpr int64_t kSumBytes = sizeof(sum[0]);
    CULA_TILE_STORE(0, &sum[0][0], kSumBytes);
    CULA_TILE_STORE(1, &sum[0][kSize], kSumBytes);
    CULA_TILE_STORE(2, &sum[kSize][0], kSumBytes);
    CULA_TILE_STORE(3, &sum[kSize][kSize], kSumBytes);
  }
};

#undef CULA_TILE_ZERO
#undef CULA_TILE_LOAD
#undef CULA_TILE_STORE
#undef CULA_TILE_DOT

}  // namespace cula::CULA_ISA

#endif
