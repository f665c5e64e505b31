#include "gdn/sm90/launch/stages.cuh"

namespace cula::gdn::sm90 {

template void launch_output_stage<fp16>(const OutputStageArgs& args, const StageShape& shape, device::Stream stream);
template void launch_local_value_gradient<fp16>(const OutputStageArgs& args, const StageShape& shape,
                                                device::Stream stream);

}  // namespace cula::gdn::sm90
