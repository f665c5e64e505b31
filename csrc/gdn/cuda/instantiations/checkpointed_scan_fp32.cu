#include "gdn/cuda/launch/scan.cuh"

namespace cula::gdn::cuda {

template void launch_checkpointed_scan<float>(const ForwardScanArgs&, bool, device::Stream);

}  // namespace cula::gdn::cuda
