// stmatrix: stores 8x8 tiles of 16-bit elements, the counterpart of ldmatrix (lane 4 g + t gives elements (g, 2t) and
// (g, 2t + 1) of each tile; lanes 8 i .. 8 i + 7 give the addresses of the rows of tile i).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace cula::device {

__device__ __forceinline__ void stmatrix_x4(uint32_t row, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(r0), "r"(r1), "r"(r2),
               "r"(r3)
               : "memory");
}
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t row, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3)
               : "memory");
}

}  // namespace cula::device
