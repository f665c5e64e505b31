#pragma once

#include <algorithm>

#include "gdn/sm90/launch/backward.h"

namespace cula::gdn::sm90 {

template <class T, int kKeyDim>
void launch_backward_scan_for(const ScanArgs& args, device::Stream stream) {
  const int64_t units = args.places * args.value_heads * args.value_tiles;
  static_assert(sizeof(ScanMemory<kKeyDim>) <= 227 * 1024);
  device::launch_dependent<backward_scan_kernel<T, kKeyDim>>(
      "backward_scan",
      {.blocks = 2 * units, .threads = kScanThreads, .shared_bytes = sizeof(ScanMemory<kKeyDim>), .stream = stream},
      args);
}

template <class T, int kKeyDim>
void launch_backward_summary_for(const ScanArgs& args, device::Stream stream) {
  device::launch_dependent<backward_summary_kernel<T, kKeyDim>>(
      "backward_summary",
      {.blocks = args.places * args.value_heads * (2 * args.value_tiles + kKeyDim / 64),
       .threads = kScanThreads,
       .shared_bytes = sizeof(ScanMemory<kKeyDim>),
       .stream = stream},
      args);
}

template <class T>
void launch_backward_summary(const ScanArgs& args, int key_dim, device::Stream stream) {
  if (key_dim == 64) return launch_backward_summary_for<T, 64>(args, stream);
  return launch_backward_summary_for<T, 128>(args, stream);
}

template <class T>
void launch_backward_scan(const ScanArgs& args, int key_dim, device::Stream stream) {
  if (key_dim == 64) return launch_backward_scan_for<T, 64>(args, stream);
  return launch_backward_scan_for<T, 128>(args, stream);
}

template <class T, int kKeyDim, int kValueDim>
void launch_gradient_for(const GradientArgs& args, device::Stream stream) {
  using Shared = GradientShared<kKeyDim, kValueDim>;
  static_assert(sizeof(Shared) <= 227 * 1024);
  const int64_t items = static_cast<int64_t>(args.window.slots()) * args.heads;
  device::launch_dependent<gradient_kernel<T, kKeyDim, kValueDim>>(
      "gradient",
      {.blocks = std::min<int64_t>(items, device::device_limits().multiprocessors),
       .threads = kGradientThreads,
       .shared_bytes = sizeof(Shared),
       .stream = stream},
      args);
}

template <class T>
void launch_gradient(const GradientArgs& args, int key_dim, int value_dim, device::Stream stream) {
  if (key_dim == 64) {
    if (value_dim == 64) return launch_gradient_for<T, 64, 64>(args, stream);
    return launch_gradient_for<T, 64, 128>(args, stream);
  }
  if (value_dim == 64) return launch_gradient_for<T, 128, 64>(args, stream);
  return launch_gradient_for<T, 128, 128>(args, stream);
}

}  // namespace cula::gdn::sm90
