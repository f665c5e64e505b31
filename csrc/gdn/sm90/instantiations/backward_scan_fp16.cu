#include "gdn/sm90/launch/backward.cuh"

namespace cula::gdn::sm90 {

template void launch_backward_scan<fp16>(const ScanArgs& args, int key_dim, device::Stream stream);
template void launch_backward_summary<fp16>(const ScanArgs& args, int key_dim, device::Stream stream);

}  // namespace cula::gdn::sm90
