#pragma once

#include <algorithm>

#include "gdn/sm90/launch/context_parallel.h"

namespace cula::gdn::sm90 {

template <class T, int kKeyDim, bool kAdjoint>
void launch_summary_of_sequence(const SequenceSummaryArgs& args, device::Stream stream) {
  static_assert(sizeof(ScanMemory<kKeyDim>) <= 227 * 1024);
  const int64_t slots = args.factors.sequences.num_slots();
  const auto factor_shape = [&](int64_t chunks) {
    const int64_t items = chunks * args.scan.value_heads;
    return device::LaunchShape{
        .blocks = (items + kFactorWarps - 1) / kFactorWarps, .threads = 32 * kFactorWarps, .stream = stream};
  };
  device::launch<sequence_factors_kernel<kAdjoint, true>>("sequence_factors",
                                                          factor_shape(std::min<int64_t>(slots, kNearChunks)), args);
  if (slots > kNearChunks) {
    device::launch_dependent<sequence_factors_kernel<kAdjoint, false>>("sequence_factors",
                                                                       factor_shape(slots - kNearChunks), args);
  }
  device::launch_dependent<sequence_summary_kernel<T, kKeyDim, kAdjoint>>(
      kAdjoint ? "sequence_adjoint_summary" : "sequence_summary",
      {.blocks = args.scan.value_heads * (args.scan.value_tiles + kKeyDim / 64),
       .threads = kScanThreads,
       .shared_bytes = sizeof(ScanMemory<kKeyDim>),
       .stream = stream},
      args);
}

template <class T>
void launch_sequence_summary(const SequenceSummaryArgs& args, int key_dim, device::Stream stream) {
  if (key_dim == 64) return launch_summary_of_sequence<T, 64, false>(args, stream);
  return launch_summary_of_sequence<T, 128, false>(args, stream);
}

template <class T>
void launch_sequence_adjoint_summary(const SequenceSummaryArgs& args, int key_dim, device::Stream stream) {
  if (key_dim == 64) return launch_summary_of_sequence<T, 64, true>(args, stream);
  return launch_summary_of_sequence<T, 128, true>(args, stream);
}

}  // namespace cula::gdn::sm90
