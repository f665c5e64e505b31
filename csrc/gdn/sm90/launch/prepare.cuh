#pragma once

#include "gdn/sm90/launch/kernels.h"

namespace cula::gdn::sm90 {

template <class T, int kKeyDim>
void launch_normalize_for(const NormalizeArgs& args, device::Stream stream) {
  constexpr int64_t kRowsPerBlock = kNormalizeThreads / (kKeyDim / 8);
  device::launch<normalize_kernel<T, kKeyDim>>(
      "normalize",
      {.blocks = (2 * args.rows + kRowsPerBlock - 1) / kRowsPerBlock, .threads = kNormalizeThreads, .stream = stream},
      args);
}

template <class T>
void launch_normalize(const NormalizeArgs& args, const KernelShape& shape, device::Stream stream) {
  if (shape.key_dim == 64) return launch_normalize_for<T, 64>(args, stream);
  return launch_normalize_for<T, 128>(args, stream);
}

template <class T, int kKeyDim, int kKeyHeads>
void launch_prepare_for(const PrepareArgs& args, device::Stream stream) {
  using Shared = PrepareShared<kKeyDim, kKeyHeads>;
  static_assert(prepare_occupancy(kKeyHeads) * (sizeof(Shared) + 1024) <= 228 * 1024);  // 1 KB a block is taken already
  device::launch<prepare_kernel<T, kKeyDim, kKeyHeads>>("prepare",
                                                        {.blocks = args.sequences.num_slots() * args.head_blocks,
                                                         .threads = kPrepareThreads,
                                                         .shared_bytes = sizeof(Shared),
                                                         .stream = stream},
                                                        args);
}

template <class T, int kKeyDim>
void launch_prepare_for_keys(const PrepareArgs& args, device::Stream stream) {
  if (args.group % kPrepareHeads == 0) return launch_prepare_for<T, kKeyDim, 1>(args, stream);
  if (args.group == 2) return launch_prepare_for<T, kKeyDim, 2>(args, stream);
  return launch_prepare_for<T, kKeyDim, kPrepareHeads>(args, stream);
}

template <class T>
void launch_prepare(PrepareArgs args, const KernelShape& shape, device::Stream stream) {
  args.head_blocks = (args.value_heads + kPrepareHeads - 1) / kPrepareHeads;
  if (shape.key_dim == 64) return launch_prepare_for_keys<T, 64>(args, stream);
  return launch_prepare_for_keys<T, 128>(args, stream);
}

}  // namespace cula::gdn::sm90
