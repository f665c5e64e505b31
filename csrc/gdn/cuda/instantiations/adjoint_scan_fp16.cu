#include "gdn/cuda/launch/backward.cuh"

namespace cula::gdn::cuda {

template void launch_adjoint_scan<fp16>(const AdjointScanArgs&, device::Stream);

}  // namespace cula::gdn::cuda
