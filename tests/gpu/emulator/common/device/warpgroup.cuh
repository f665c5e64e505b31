// Warpgroups on the emulator.
#pragma once

#include "common/device/warp.cuh"

namespace cula::device {

inline constexpr int kWarpgroupThreads = 128;

inline int warpgroup_id() { return warp_id() / 4; }
inline int warpgroup_thread() { return static_cast<int>(threadIdx.x) & (kWarpgroupThreads - 1); }
template <int kRegisters>
inline void release_registers() {}
template <int kRegisters>
inline void acquire_registers() {}

}  // namespace cula::device
