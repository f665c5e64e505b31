#include "gdn/cuda/launch/stage_forward.cuh"

namespace cula::gdn::cuda {

template void launch_prepare<fp16, GateKind::kLogDecay>(const PrepareArgs&, device::Stream);
template void launch_prepare<fp16, GateKind::kGamma>(const PrepareArgs&, device::Stream);
template void launch_recompute<fp16>(const RecomputeArgs&, device::Stream);

}  // namespace cula::gdn::cuda
