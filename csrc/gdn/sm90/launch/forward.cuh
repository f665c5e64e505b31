#pragma once

#include "gdn/sm90/launch/kernels.h"

namespace cula::gdn::sm90 {

template <class T, int kKeyDim, int kValueTiles>
void launch_forward_for(const ForwardArgs& args, int64_t blocks, device::Stream stream) {
  using Shared = ForwardShared<kKeyDim, kValueTiles>;
  static_assert(sizeof(Shared) <= 227 * 1024);
  device::launch<forward_kernel<T, kKeyDim, kValueTiles>>(
      "forward",
      {.blocks = blocks, .threads = kForwardThreads<kValueTiles>, .shared_bytes = sizeof(Shared), .stream = stream},
      args);
}

template <class T>
void launch_forward(const ForwardArgs& args, const KernelShape& shape, int64_t blocks, device::Stream stream) {
  if (shape.key_dim == 64) {
    if (shape.value_tiles == 1) return launch_forward_for<T, 64, 1>(args, blocks, stream);
    return launch_forward_for<T, 64, 2>(args, blocks, stream);
  }
  if (shape.value_tiles == 1) return launch_forward_for<T, 128, 1>(args, blocks, stream);
  return launch_forward_for<T, 128, 2>(args, blocks, stream);
}

}  // namespace cula::gdn::sm90
