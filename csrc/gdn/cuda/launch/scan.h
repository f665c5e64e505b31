// Launches of the passes over the chunks; narrow as the schedule says (gdn/segments.h).
#pragma once

#include "common/device/launch.cuh"
#include "gdn/cuda/kernel/adjoint_scan.cuh"
#include "gdn/cuda/kernel/forward_scan.cuh"
#include "gdn/cuda/kernel/merge.cuh"

namespace cula::gdn::cuda {

template <class T>
void launch_forward_scan(const ForwardScanArgs& args, bool narrow, device::Stream stream);
// The same, with the states on the way (ForwardScanArgs::checkpoints).
template <class T>
void launch_checkpointed_scan(const ForwardScanArgs& args, bool narrow, device::Stream stream);
template <class T>
void launch_state_scan(const ForwardScanArgs& args, bool narrow, device::Stream stream);
template <class T>
void launch_state_summary(const ForwardScanArgs& args, bool narrow, device::Stream stream);
template <class T>
void launch_adjoint_scan(const AdjointScanArgs& args, bool narrow, device::Stream stream);
template <class T>
void launch_adjoint_summary(const AdjointScanArgs& args, bool narrow, device::Stream stream);
// The merge behind a summary of the same arguments: S_ext, M and the initial state in, the seeds out.
MergeArgs segment_merge(const ForwardScanArgs& args);
// The same for the adjoint, with M of the forward summary.
MergeArgs segment_merge(const AdjointScanArgs& args, const ForwardScanArgs& forward);
void launch_merge(const MergeArgs& args, bool adjoint, device::Stream stream);
void launch_chain(const ChainArgs& args, device::Stream stream);

}  // namespace cula::gdn::cuda
