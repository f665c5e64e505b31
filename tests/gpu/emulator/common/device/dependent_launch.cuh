// Dependent launches on the emulator, where nothing overlaps.
#pragma once

#include "common/device/launch.cuh"

namespace cula::device {

inline void wait_for_previous() {}
inline void launch_dependents() {}

template <auto kKernel, class Params>
void launch_dependent(const char* name, const LaunchShape& shape, const Params& params) {
  launch<kKernel>(name, shape, params);
}

}  // namespace cula::device
