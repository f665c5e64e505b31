#include "gdn/sm90/launch/stages.cuh"

namespace cula::gdn::sm90 {

template void launch_operand_gradient<fp16>(const OperandGradientArgs& args, const StageShape& shape,
                                            device::Stream stream);
template void launch_wy_gradient<fp16>(const WyGradientArgs& args, const StageShape& shape, device::Stream stream);

}  // namespace cula::gdn::sm90
