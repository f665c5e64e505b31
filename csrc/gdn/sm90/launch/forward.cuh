#pragma once

#include "gdn/sm90/launch/kernels.h"

namespace cula::gdn::sm90 {

template <class T, int kKeyDim, int kValueTiles, bool kCheckpoints>
void launch_forward_for(const ForwardArgs& args, device::Stream stream) {
  using Shared = ForwardShared<kKeyDim, kValueTiles, true>;
  static_assert(sizeof(Shared) <= 227 * 1024);
  device::launch_dependent<forward_kernel<T, kKeyDim, kValueTiles, kCheckpoints>>(
      "forward",
      {.blocks = args.segments.num_places() * args.value_heads * (args.value_dim / (64 * kValueTiles)),
       .threads = kForwardThreads<kValueTiles>,
       .shared_bytes = sizeof(Shared),
       .stream = stream},
      args);
}

template <class T, bool kCheckpoints>
void launch_forward_in(const ForwardArgs& args, const KernelShape& shape, device::Stream stream) {
  if (shape.key_dim == 64) {
    if (shape.value_tiles == 1) return launch_forward_for<T, 64, 1, kCheckpoints>(args, stream);
    return launch_forward_for<T, 64, 2, kCheckpoints>(args, stream);
  }
  if (shape.value_tiles == 1) return launch_forward_for<T, 128, 1, kCheckpoints>(args, stream);
  return launch_forward_for<T, 128, 2, kCheckpoints>(args, stream);
}

template <class T>
void launch_forward(const ForwardArgs& args, const KernelShape& shape, device::Stream stream) {
  launch_forward_in<T, false>(args, shape, stream);
}

template <class T>
void launch_checkpointed_forward(const ForwardArgs& args, const KernelShape& shape, device::Stream stream) {
  launch_forward_in<T, true>(args, shape, stream);
}

template <class T, int kKeyDim>
void launch_summary_for(const ForwardArgs& args, device::Stream stream) {
  using Shared = ForwardShared<kKeyDim, kSummaryTiles, false>;
  device::launch_dependent<summary_kernel<T, kKeyDim>>(
      "summary",
      {.blocks = args.segments.num_places() * args.value_heads * ((args.value_dim + kKeyDim) / (64 * kSummaryTiles)),
       .threads = kForwardThreads<kSummaryTiles>,
       .shared_bytes = sizeof(Shared),
       .stream = stream},
      args);
}

template <class T>
void launch_summary(const ForwardArgs& args, const KernelShape& shape, device::Stream stream) {
  if (shape.key_dim == 64) return launch_summary_for<T, 64>(args, stream);
  return launch_summary_for<T, 128>(args, stream);
}

}  // namespace cula::gdn::sm90
