#include "gdn/cuda/launch/forward_scan.cuh"

namespace cula::gdn::cuda {

template void launch_forward_scan<fp16>(const ForwardScanArgs&, device::Stream);

}  // namespace cula::gdn::cuda
