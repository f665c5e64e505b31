#include "gdn/sm90/launch/forward.cuh"

namespace cula::gdn::sm90 {

template void launch_checkpointed_forward<bf16>(const ForwardArgs& args, const KernelShape& shape,
                                                device::Stream stream);

}  // namespace cula::gdn::sm90
