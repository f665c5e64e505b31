#include "gdn/cuda/launch/stage_forward.cuh"

namespace cula::gdn::cuda {

template void launch_prepare<bf16, GateKind::kLogDecay>(const PrepareArgs&, device::Stream);
template void launch_prepare<bf16, GateKind::kGamma>(const PrepareArgs&, device::Stream);
template void launch_recompute<bf16>(const RecomputeArgs&, device::Stream);

}  // namespace cula::gdn::cuda
