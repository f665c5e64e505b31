#include "gdn/sm90/launch/stages.cuh"

namespace cula::gdn::sm90 {

template void launch_intra<bf16>(IntraArgs args, const StageShape& shape, device::Stream stream);
template void launch_recompute_stage<bf16>(const RecomputeStageArgs& args, const StageShape& shape,
                                           device::Stream stream);

}  // namespace cula::gdn::sm90
