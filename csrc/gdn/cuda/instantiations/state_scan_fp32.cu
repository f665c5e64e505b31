#include "gdn/cuda/launch/forward_scan.cuh"

namespace cula::gdn::cuda {

template void launch_state_scan<float>(const ForwardScanArgs&, device::Stream);

}  // namespace cula::gdn::cuda
