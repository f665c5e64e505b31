#include "gdn/cuda/launch/backward.cuh"

namespace cula::gdn::cuda {

template void launch_adjoint_scan<float>(const AdjointScanArgs&, device::Stream);

}  // namespace cula::gdn::cuda
