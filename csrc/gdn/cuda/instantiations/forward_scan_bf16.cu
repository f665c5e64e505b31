#include "gdn/cuda/launch/forward_scan.cuh"

namespace cula::gdn::cuda {

template void launch_forward_scan<bf16>(const ForwardScanArgs&, device::Stream);

}  // namespace cula::gdn::cuda
