// Launches of the backward pass.
#pragma once

#include "gdn/cuda/kernel/gradient_args.h"
#include "gdn/cuda/kernel/stage_backward.cuh"
#include "gdn/cuda/kernel/stage_gradient.cuh"
#include "gdn/cuda/launch/kernels.h"

namespace cula::gdn::cuda {

template <class T>
void launch_gradient(const GradientArgs& args, device::Stream stream);

template <class T>
void launch_local_value_gradient(const LocalValueGradientArgs& args, device::Stream stream);
template <class T>
void launch_state_gradient(const StateGradientArgs& args, device::Stream stream);
template <class T>
void launch_operand_stage(const OperandStageArgs& args, device::Stream stream);
template <class T>
void launch_wy_stage(const WyStageArgs& args, device::Stream stream);

}  // namespace cula::gdn::cuda
