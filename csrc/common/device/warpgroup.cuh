// Warpgroups: four warps that issue wgmma together.
#pragma once

#include "common/device/warp.cuh"

namespace cula::device {

inline constexpr int kWarpgroupThreads = 128;

// Uniform, and known to be so by the compiler, as the operands of wgmma must be.
__device__ __forceinline__ int warpgroup_id() {
  return __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / kWarpgroupThreads), 0);
}
__device__ __forceinline__ int warpgroup_thread() { return static_cast<int>(threadIdx.x) & (kWarpgroupThreads - 1); }

// Moves registers between warpgroups. Over the block, the sum may not exceed what it was launched with: asking for more
// waits for ever. Takes effect in kernels with a register cap and one if / else on the warpgroup.
template <int kRegisters>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void acquire_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace cula::device
