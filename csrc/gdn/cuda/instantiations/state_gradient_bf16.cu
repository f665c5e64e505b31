#include "gdn/cuda/launch/backward.cuh"

namespace cula::gdn::cuda {

template void launch_state_gradient<bf16>(const StateGradientArgs&, device::Stream);

}  // namespace cula::gdn::cuda
