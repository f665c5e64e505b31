#include "gdn/sm90/launch/forward.cuh"

namespace cula::gdn::sm90 {

template void launch_forward<bf16>(const ForwardArgs& args, const KernelShape& shape, int64_t blocks,
                                   device::Stream stream);

}  // namespace cula::gdn::sm90
