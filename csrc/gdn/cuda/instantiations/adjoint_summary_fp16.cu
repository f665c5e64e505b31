#include "gdn/cuda/launch/scan.cuh"

namespace cula::gdn::cuda {

template void launch_adjoint_summary<fp16>(const AdjointScanArgs&, bool, device::Stream);

}  // namespace cula::gdn::cuda
