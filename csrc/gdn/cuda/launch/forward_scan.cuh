#pragma once

#include "gdn/cuda/launch/kernels.h"

namespace cula::gdn::cuda {

template <class T, int kKeyDim, bool kOutput>
void launch_scan(ForwardScanArgs args, device::Stream stream) {
  constexpr int kSplit = kKeySplit<kKeyDim>;
  using Shape = ForwardScanShape<T, kKeyDim, kSplit, kOutput>;
  const auto bytes = [](const ScanShape& s) { return Shape::shared_bytes(s.depth, s.row_blocks * kSplit); };
  const int64_t units = args.sequences.num_sequences * args.value_heads;
  const ScanShape shape = choose_scan_shape(units, args.value_dim, device::device_limits(), bytes);
  args.depth = shape.depth;
  args.value_blocks = (args.value_dim + 16 * shape.row_blocks - 1) / (16 * shape.row_blocks);
  device::launch<forward_scan_kernel<T, kKeyDim, kSplit, kOutput>>(kOutput ? "forward_scan" : "state_scan",
                                                                   {.blocks = units * args.value_blocks,
                                                                    .threads = 32 * shape.row_blocks * kSplit,
                                                                    .shared_bytes = bytes(shape),
                                                                    .stream = stream},
                                                                   args);
}

template <class T, bool kOutput>
void launch_scan_for_keys(const ForwardScanArgs& args, device::Stream stream) {
  if (args.key_dim <= 64) return launch_scan<T, 64, kOutput>(args, stream);
  if (args.key_dim <= 128) return launch_scan<T, 128, kOutput>(args, stream);
  return launch_scan<T, 256, kOutput>(args, stream);
}

template <class T>
void launch_forward_scan(const ForwardScanArgs& args, device::Stream stream) {
  launch_scan_for_keys<T, true>(args, stream);
}
template <class T>
void launch_state_scan(const ForwardScanArgs& args, device::Stream stream) {
  launch_scan_for_keys<T, false>(args, stream);
}

}  // namespace cula::gdn::cuda
