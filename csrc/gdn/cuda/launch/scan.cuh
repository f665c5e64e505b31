#pragma once

#include <algorithm>
#include <type_traits>

#include "gdn/cuda/launch/scan.h"

namespace cula::gdn::cuda {

// Blocks of 32 value columns, and of 64 where a multiprocessor has the registers. The latter need no pairs in the
// forward passes (but in fp16, whose conversions take a few registers more), nor in the adjoint's with 64 keys or
// fewer.
using NarrowTeam = ScanTeam<2, 2>;
template <class T, int kKeyDim>
using WideTeam =
    std::conditional_t<(kKeyDim > 64 && device::kDTypeOf<T> == DType::kFloat16), ScanTeam<2, 4>, ScanTeam<1, 4>>;
template <int kKeyDim>
using WideAdjointTeam = std::conditional_t<kKeyDim <= 64, ScanTeam<1, 4>, ScanTeam<2, 4>>;
template <class T, int kKeyDim>
inline constexpr bool kHasWideBlocks = kKeyDim <= 64 || (kKeyDim == 128 && sizeof(T) == 2);

// As many stages as fit beside the blocks that share the multiprocessor.
template <class Bytes>
ScanPipeline choose_pipeline(int most_stages, bool queries, int residency, const Bytes& bytes) {
  const device::DeviceLimits limits = device::device_limits();
  constexpr size_t kReserved = 1024;  // by the driver, a block
  for (; residency > 0; --residency) {
    const size_t share = limits.shared_bytes_per_multiprocessor / residency - kReserved;
    const size_t limit = std::min<size_t>(share, limits.shared_bytes_per_block);
    for (int stages = most_stages; stages > (residency > 1 ? 1 : 0); --stages) {
      if (bytes(ScanPipeline{stages, false}) <= limit) return {stages, false};
    }
  }
  return {1, queries};
}

template <class T, int kKeyDim, class Team, ScanResult kResult>
void launch_scan(ForwardScanArgs args, const char* name, device::Stream stream) {
  using Shared = ForwardScanShared<T, kKeyDim, Team, kResult>;
  constexpr int kValues = Team::kValues;
  args.pipeline = choose_pipeline(Shared::kQueries ? 2 : kMaxStages, Shared::kQueries,
                                  kForwardResidency<T, kKeyDim, Team, kResult>, Shared::bytes);
  args.value_blocks = args.map_only ? 0 : (args.value_dim + kValues - 1) / kValues;
  const int64_t map_blocks = kResult == ScanResult::kSummary ? (args.key_dim + kValues - 1) / kValues : 0;
  device::launch<forward_scan_kernel<T, kKeyDim, Team, kResult>>(
      name,
      {.blocks = args.sequences.num_segment_places() * args.value_heads * (args.value_blocks + map_blocks),
       .threads = Team::kThreads,
       .shared_bytes = Shared::bytes(args.pipeline),
       .stream = stream},
      args);
}

template <class T, int kKeyDim, class Team, bool kSummary>
void launch_adjoint(AdjointScanArgs args, const char* name, device::Stream stream) {
  using Shared = AdjointScanShared<T, kKeyDim, Team>;
  constexpr int kValues = Team::kValues;
  args.pipeline = choose_pipeline(2, true, kScanResidency<T, kKeyDim, Team>, Shared::bytes);
  args.value_blocks = (args.value_dim + kValues - 1) / kValues;
  device::launch<adjoint_scan_kernel<T, kKeyDim, Team, kSummary>>(
      name,
      {.blocks = args.sequences.num_segment_places() * args.value_heads * args.value_blocks,
       .threads = Team::kThreads,
       .shared_bytes = Shared::bytes(args.pipeline),
       .stream = stream},
      args);
}

template <class T, int kKeyDim, ScanResult kResult>
void launch_scan_for(const ForwardScanArgs& args, bool narrow, const char* name, device::Stream stream) {
  // With more than 64 keys, wide blocks have no registers for checkpoints.
  constexpr bool kFits = kKeyDim <= 64 || kResult != ScanResult::kCheckpoints;
  if constexpr (kHasWideBlocks<T, kKeyDim> && kFits) {
    if (!narrow) return launch_scan<T, kKeyDim, WideTeam<T, kKeyDim>, kResult>(args, name, stream);
  }
  launch_scan<T, kKeyDim, NarrowTeam, kResult>(args, name, stream);
}

template <class T, int kKeyDim, bool kSummary>
void launch_adjoint_for(const AdjointScanArgs& args, bool narrow, const char* name, device::Stream stream) {
  if constexpr (kHasWideBlocks<T, kKeyDim>) {
    if (!narrow) return launch_adjoint<T, kKeyDim, WideAdjointTeam<kKeyDim>, kSummary>(args, name, stream);
  }
  launch_adjoint<T, kKeyDim, NarrowTeam, kSummary>(args, name, stream);
}

// Calls f with the padded key dimension as a constant.
template <class F>
void with_key_dim(int key_dim, const F& f) {
  if (key_dim <= 64) return f(std::integral_constant<int, 64>{});
  if (key_dim <= 128) return f(std::integral_constant<int, 128>{});
  f(std::integral_constant<int, 256>{});
}

template <class T>
void launch_forward_scan(const ForwardScanArgs& args, bool narrow, device::Stream stream) {
  with_key_dim(args.key_dim, [&](auto keys) {
    launch_scan_for<T, keys(), ScanResult::kOutput>(args, narrow, "forward_scan", stream);
  });
}
template <class T>
void launch_checkpointed_scan(const ForwardScanArgs& args, bool narrow, device::Stream stream) {
  with_key_dim(args.key_dim, [&](auto keys) {
    launch_scan_for<T, keys(), ScanResult::kCheckpoints>(args, narrow, "checkpointed_scan", stream);
  });
}
template <class T>
void launch_state_scan(const ForwardScanArgs& args, bool narrow, device::Stream stream) {
  with_key_dim(args.key_dim,
               [&](auto keys) { launch_scan_for<T, keys(), ScanResult::kStates>(args, narrow, "state_scan", stream); });
}
template <class T>
void launch_state_summary(const ForwardScanArgs& args, bool narrow, device::Stream stream) {
  with_key_dim(args.key_dim, [&](auto keys) {
    launch_scan_for<T, keys(), ScanResult::kSummary>(args, narrow, "state_summary", stream);
  });
}
template <class T>
void launch_adjoint_scan(const AdjointScanArgs& args, bool narrow, device::Stream stream) {
  with_key_dim(args.key_dim,
               [&](auto keys) { launch_adjoint_for<T, keys(), false>(args, narrow, "adjoint_scan", stream); });
}
template <class T>
void launch_adjoint_summary(const AdjointScanArgs& args, bool narrow, device::Stream stream) {
  with_key_dim(args.key_dim,
               [&](auto keys) { launch_adjoint_for<T, keys(), true>(args, narrow, "adjoint_summary", stream); });
}

}  // namespace cula::gdn::cuda
