#include "gdn/cuda/launch/backward.cuh"

namespace cula::gdn::cuda {

template void launch_gradient<fp16>(const GradientArgs&, device::Stream);

}  // namespace cula::gdn::cuda
