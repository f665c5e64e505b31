// Launches of single stages, compiled an element type at a time under instantiations/.
#pragma once

#include "common/device/launch.cuh"
#include "gdn/sm90/kernel/stage_intra.cuh"
#include "gdn/sm90/kernel/stage_operand_gradient.cuh"
#include "gdn/sm90/kernel/stage_output.cuh"
#include "gdn/sm90/kernel/stage_state.cuh"
#include "gdn/sm90/kernel/stage_wy_gradient.cuh"

namespace cula::gdn::sm90 {

// key_dim, value_dim: 64 or 128.
struct StageShape {
  int key_dim;
  int value_dim;
  bool value_first;  // states of chunks are [V, K]
};

template <class T>
void launch_intra(IntraArgs args, const StageShape& shape, device::Stream stream);
template <class T>
void launch_recompute_stage(const RecomputeStageArgs& args, const StageShape& shape, device::Stream stream);
template <class T>
void launch_output_stage(const OutputStageArgs& args, const StageShape& shape, device::Stream stream);
template <class T>
void launch_local_value_gradient(const OutputStageArgs& args, const StageShape& shape, device::Stream stream);
template <class T>
void launch_state_stage(const StateStageArgs& args, const StageShape& shape, device::Stream stream);
template <class T>
void launch_state_gradient_stage(const StateStageArgs& args, const StageShape& shape, device::Stream stream);
template <class T>
void launch_operand_gradient(const OperandGradientArgs& args, const StageShape& shape, device::Stream stream);
template <class T>
void launch_wy_gradient(const WyGradientArgs& args, const StageShape& shape, device::Stream stream);

}  // namespace cula::gdn::sm90
