#include "gdn/sm90/launch/backward.cuh"

namespace cula::gdn::sm90 {

template void launch_backward_scan<bf16>(const ScanArgs& args, int key_dim, device::Stream stream);
template void launch_backward_summary<bf16>(const ScanArgs& args, int key_dim, device::Stream stream);

}  // namespace cula::gdn::sm90
