#include "gdn/cuda/launch/backward.cuh"

namespace cula::gdn::cuda {

template void launch_local_value_gradient<float>(const LocalValueGradientArgs&, device::Stream);
template void launch_operand_stage<float>(const OperandStageArgs&, device::Stream);
template void launch_wy_stage<float>(const WyStageArgs&, device::Stream);

}  // namespace cula::gdn::cuda
