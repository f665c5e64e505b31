#include "gdn/cuda/launch/stage_forward.cuh"

namespace cula::gdn::cuda {

template void launch_state_stage<float>(const StateStageArgs&, device::Stream);
template void launch_output<float>(const OutputArgs&, device::Stream);

}  // namespace cula::gdn::cuda
