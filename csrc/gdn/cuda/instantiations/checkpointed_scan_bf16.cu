#include "gdn/cuda/launch/scan.cuh"

namespace cula::gdn::cuda {

template void launch_checkpointed_scan<bf16>(const ForwardScanArgs&, bool, device::Stream);

}  // namespace cula::gdn::cuda
