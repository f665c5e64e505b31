// Completes what the summary left along the segments of a sequence, in fp32: S <- M S + S_ext forward in time, and
// D <- M^T D + D_ext backward. Nothing to do where the summary already knew the result, which is told apart on the
// device.
#pragma once

#include "common/device/dependent_launch.cuh"
#include "gdn/sm90/collective/scan_pipeline.cuh"
#include "gdn/sm90/collective/transition.cuh"

namespace cula::gdn::sm90 {

// One thread a key; blocks: directions, sequences, value heads, groups of value columns, these fastest.
template <int kKeyDim>
__global__ void __launch_bounds__(kKeyDim) backward_merge_kernel(const __grid_constant__ ScanArgs args) {
  launch_dependents();
  wait_for_previous();
  __shared__ float entering[kKeyDim][kMergeColumns];
  const int groups = args.value_dim() / kMergeColumns;
  const int heads = static_cast<int>(args.value_heads);
  const int units = static_cast<int>(args.segments.sequences.num_sequences) * heads * groups;
  const bool back_in_time = static_cast<int>(blockIdx.x) >= units;
  const int index = static_cast<int>(blockIdx.x) - (back_in_time ? units : 0);
  const int sequence_index = index / (heads * groups);
  const int head = (index - sequence_index * heads * groups) / groups;
  const int value = (index - (sequence_index * heads + head) * groups) * kMergeColumns;
  const Sequence sequence = find_sequence(args.segments.sequences, sequence_index);
  const int64_t chunks = (sequence.length + kRows - 1) / kRows;
  if (chunks == 0) return;
  const int64_t first = args.segments.first_place(sequence_index);
  const int64_t last = (sequence.first_slot + chunks - 1) / args.segments.chunks + sequence_index;
  const int key = static_cast<int>(threadIdx.x);
  float* results = back_in_time ? args.state_gradients : args.states;
  const int32_t* known = back_in_time ? args.gradient_known : args.state_known;
  const int64_t matrix = static_cast<int64_t>(args.value_dim()) * kKeyDim;
  const int64_t behind = back_in_time ? heads : -heads;  // the result that this one builds on

  // The outer segments know theirs: the sequence's end is within reach.
  for (int64_t step = 1; step < last - first; ++step) {
    const int64_t unit = (back_in_time ? last - step : first + step) * heads + head;
    if (known[unit] != 0) continue;
    const float* previous = results + (unit + behind) * matrix + value * kKeyDim + key;
    float* target = results + unit * matrix + value * kKeyDim + key;
    sync_block();  // the columns of the segment before have been read
#pragma unroll
    for (int i = 0; i < kMergeColumns; ++i) entering[key][i] = previous[i * kKeyDim];
    sync_block();
    // Transitions lie transposed: M[key][j] at j K + key.
    const float* transition = args.transitions + unit * kKeyDim * kKeyDim + key * (back_in_time ? kKeyDim : 1);
    add_transition(target, transition, back_in_time ? 1 : kKeyDim, entering);
  }
}

}  // namespace cula::gdn::sm90
