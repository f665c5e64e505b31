#include "gdn/cuda/launch/stage_forward.cuh"

namespace cula::gdn::cuda {

template void launch_prepare<float, GateKind::kLogDecay>(const PrepareArgs&, device::Stream);
template void launch_prepare<float, GateKind::kGamma>(const PrepareArgs&, device::Stream);
template void launch_recompute<float>(const RecomputeArgs&, device::Stream);

}  // namespace cula::gdn::cuda
