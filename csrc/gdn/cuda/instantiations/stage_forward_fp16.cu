#include "gdn/cuda/launch/stage_forward.cuh"

namespace cula::gdn::cuda {

template void launch_state_stage<fp16>(const StateStageArgs&, device::Stream);
template void launch_output<fp16>(const OutputArgs&, device::Stream);

}  // namespace cula::gdn::cuda
