// Launches, compiled an element type at a time under instantiations/.
#pragma once

#include "common/device/dependent_launch.cuh"
#include "gdn/sm90/kernel/forward.cuh"
#include "gdn/sm90/kernel/merge.cuh"
#include "gdn/sm90/kernel/normalize.cuh"
#include "gdn/sm90/kernel/prepare.cuh"

namespace cula::gdn::sm90 {

// What the kernels are compiled for beside the element type.
struct KernelShape {
  int key_dim;      // 64 or 128
  int value_tiles;  // 64-wide blocks of value columns a block of the forward kernel advances: 1 or 2
};

template <class T>
void launch_normalize(const NormalizeArgs& args, const KernelShape& shape, device::Stream stream);
template <class T>
void launch_prepare(PrepareArgs args, const KernelShape& shape, device::Stream stream);
template <class T>
void launch_forward(const ForwardArgs& args, const KernelShape& shape, device::Stream stream);

// The same with the states on the way (ForwardArgs::checkpoints); a kernel of its own, since it costs registers.
template <class T>
void launch_checkpointed_forward(const ForwardArgs& args, const KernelShape& shape, device::Stream stream);

// With segments, before the forward kernel, in this order.
template <class T>
void launch_summary(const ForwardArgs& args, const KernelShape& shape, device::Stream stream);
void launch_merge(const ForwardArgs& args, const KernelShape& shape, device::Stream stream);

}  // namespace cula::gdn::sm90
