#include "gdn/cuda/launch/backward.cuh"

namespace cula::gdn::cuda {

template void launch_local_value_gradient<fp16>(const LocalValueGradientArgs&, device::Stream);
template void launch_operand_stage<fp16>(const OperandStageArgs&, device::Stream);
template void launch_wy_stage<fp16>(const WyStageArgs&, device::Stream);

}  // namespace cula::gdn::cuda
