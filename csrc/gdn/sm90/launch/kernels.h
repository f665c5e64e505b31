// Launches, compiled an element type at a time under instantiations/.
#pragma once

#include "gdn/sm90/kernel/forward.cuh"
#include "gdn/sm90/kernel/prepare.cuh"

namespace cula::gdn::sm90 {

// What the kernels are compiled for beside the element type.
struct KernelShape {
  int key_dim;      // 64 or 128
  int value_tiles;  // 64-wide blocks of value columns a block of the forward kernel advances: 1 or 2
};

template <class T>
void launch_prepare(PrepareArgs args, const KernelShape& shape, device::Stream stream);
// `blocks`: (sequence, value head, part of the value columns), parts fastest.
template <class T>
void launch_forward(const ForwardArgs& args, const KernelShape& shape, int64_t blocks, device::Stream stream);

}  // namespace cula::gdn::sm90
