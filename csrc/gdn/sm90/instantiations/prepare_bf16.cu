#include "gdn/sm90/launch/prepare.cuh"

namespace cula::gdn::sm90 {

template void launch_normalize<bf16>(const NormalizeArgs& args, const KernelShape& shape, device::Stream stream);
template void launch_prepare<bf16>(PrepareArgs args, const KernelShape& shape, device::Stream stream);

}  // namespace cula::gdn::sm90
