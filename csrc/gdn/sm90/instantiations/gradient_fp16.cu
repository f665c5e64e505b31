#include "gdn/sm90/launch/backward.cuh"

namespace cula::gdn::sm90 {

template void launch_gradient<fp16>(const GradientArgs& args, int key_dim, int value_dim, device::Stream stream);

}  // namespace cula::gdn::sm90
