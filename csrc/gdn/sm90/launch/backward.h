// Launches of the backward pass, compiled an element type at a time under instantiations/.
#pragma once

#include "gdn/sm90/kernel/backward_merge.cuh"
#include "gdn/sm90/kernel/backward_scan.cuh"
#include "gdn/sm90/kernel/factors.cuh"
#include "gdn/sm90/kernel/gradient.cuh"

namespace cula::gdn::sm90 {

void launch_factors(const FactorArgs& args, device::Stream stream);
// key_dim, value_dim: 64 or 128.
template <class T>
void launch_backward_scan(const ScanArgs& args, int key_dim, device::Stream stream);
// With segments, before the scans of any window, in this order, with all places.
template <class T>
void launch_backward_summary(const ScanArgs& args, int key_dim, device::Stream stream);
void launch_backward_merge(const ScanArgs& args, int key_dim, device::Stream stream);
template <class T>
void launch_gradient(const GradientArgs& args, int key_dim, int value_dim, device::Stream stream);

}  // namespace cula::gdn::sm90
