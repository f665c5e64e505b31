#include "gdn/sm90/launch/stages.cuh"

namespace cula::gdn::sm90 {

template void launch_state_stage<bf16>(const StateStageArgs& args, const StageShape& shape, device::Stream stream);
template void launch_state_gradient_stage<bf16>(const StateStageArgs& args, const StageShape& shape,
                                                device::Stream stream);

}  // namespace cula::gdn::sm90
