// Launches, one a kernel; compiled a (kernel, element type) at a time under instantiations/.
#pragma once

#include "common/device/launch.cuh"
#include "gdn/cuda/kernel/prepare.cuh"
#include "gdn/cuda/kernel/stage_forward.cuh"

namespace cula::gdn::cuda {

template <class T, GateKind kKind>
void launch_prepare(const PrepareArgs& args, device::Stream stream);
template <class T>
void launch_recompute(const RecomputeArgs& args, device::Stream stream);
template <class T>
void launch_state_stage(const StateStageArgs& args, device::Stream stream);
template <class T>
void launch_output(const OutputArgs& args, device::Stream stream);

}  // namespace cula::gdn::cuda
