// Completes what the summary left along the segments of a sequence, in fp32: S <- M S + S_ext forward in time, and
// D <- M^T D + D_ext backward. Nothing to do where the scans find the result themselves, which is told apart on the
// device.
#pragma once

#include "common/device/dependent_launch.cuh"
#include "gdn/sm90/collective/chain.cuh"
#include "gdn/sm90/collective/scan_pipeline.cuh"

namespace cula::gdn::sm90 {

struct MergeUnit {
  int64_t first;  // place of the sequence's first segment
  int64_t last;
  int head;
  int value;
};

// The outer segments know theirs: the sequence's end is within reach.
template <int kKeyDim, bool kForward>
__device__ __forceinline__ void merge_segments(const ScanArgs& args, const MergeUnit& unit) {
  using Chain = SegmentChain<kKeyDim, kForward>;
  const int64_t heads = args.value_heads;
  const Chain chain = {Chain::columns_of(dynamic_shared_memory(), args.value_dim(), unit.value),
                       Chain::states_of(kForward ? args.states : args.state_gradients, heads, args.value_dim()),
                       Chain::maps_of(args.transitions, heads), unit.head};
  const int32_t* known = kForward ? args.state_known : args.gradient_known;
  const int64_t inner = unit.last - unit.first - 1;
  const int64_t step = kForward ? 1 : -1;
  const int64_t outer = kForward ? unit.first : unit.last;
  const auto is_known = [&](int64_t n) { return known[(outer + n * step) * heads + unit.head] != 0; };
  typename Chain::Patch s;
  for (int64_t n = 1; n <= inner;) {
    if (is_known(n)) {
      ++n;
      continue;
    }
    int64_t end = n + 1;
    while (end <= inner && !is_known(end)) ++end;
    chain.columns.load(s, chain.states, outer + (n - 1) * step, unit.head);
    chain.run(s, end - n, outer + n * step, step);
    n = end;
  }
}

// Blocks: directions, sequences, value heads, groups of value columns, these fastest.
template <int kKeyDim>
__global__ void __launch_bounds__(cuda::kMapThreads, 1) backward_merge_kernel(const __grid_constant__ ScanArgs args) {
  launch_dependents();
  wait_for_previous();
  const int groups = args.value_dim() / cuda::kMapColumns;
  const int heads = static_cast<int>(args.value_heads);
  const int units = static_cast<int>(args.segments.sequences.num_sequences) * heads * groups;
  const bool back_in_time = static_cast<int>(blockIdx.x) >= units;
  const int index = static_cast<int>(blockIdx.x) - (back_in_time ? units : 0);
  const int sequence_index = index / (heads * groups);
  const Sequence sequence = find_sequence(args.segments.sequences, sequence_index);
  const int64_t chunks = (sequence.length + kRows - 1) / kRows;
  if (chunks == 0) return;
  MergeUnit unit;
  unit.first = args.segments.first_place(sequence_index);
  unit.last = args.segments.last_place(sequence_index, sequence, chunks);
  unit.head = (index - sequence_index * heads * groups) / groups;
  unit.value = (index - (sequence_index * heads + unit.head) * groups) * cuda::kMapColumns;
  if (back_in_time) {
    merge_segments<kKeyDim, false>(args, unit);
  } else {
    merge_segments<kKeyDim, true>(args, unit);
  }
}

}  // namespace cula::gdn::sm90
