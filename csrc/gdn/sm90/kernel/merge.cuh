// The state behind each segment: S <- M S + S_ext along the segments of a sequence, in fp32. Nothing to do behind
// segments that forget what entered them, which is told apart on the device.
#pragma once

#include "common/device/dependent_launch.cuh"
#include "gdn/sm90/collective/pipeline.cuh"
#include "gdn/sm90/collective/transition.cuh"

namespace cula::gdn::sm90 {

// One thread a key; blocks: sequences, value heads, groups of value columns, these fastest.
template <int kKeyDim>
__global__ void __launch_bounds__(kKeyDim) merge_kernel(const ForwardArgs args) {
  launch_dependents();
  wait_for_previous();
  __shared__ float entering[kKeyDim][kMergeColumns];
  const int groups = args.value_dim / kMergeColumns;
  const int unit = static_cast<int>(blockIdx.x) / groups;
  const int value = (static_cast<int>(blockIdx.x) - unit * groups) * kMergeColumns;
  const int heads = static_cast<int>(args.value_heads);
  const int sequence_index = unit / heads;
  const int head = unit - sequence_index * heads;
  const Segmentation& table = args.segments;
  const Sequence sequence = find_sequence(table.sequences, sequence_index);
  const int64_t chunks = (sequence.length + kRows - 1) / kRows;
  const int64_t count = (chunks + table.chunks - 1) / table.chunks;
  const int64_t first =
      table.sequences.offsets == nullptr ? sequence_index * table.per_row() : table.first_place(sequence_index);
  const int key = static_cast<int>(threadIdx.x);

  const TensorArg& initial = args.initial_state;
  const int64_t slot = initial ? args.initial_slots.of(sequence_index) : -1;
  const auto load_initial = [&](int column) {
    return slot < 0 ? 0.0f
                    : initial.load(slot * initial.stride[0] + head * initial.stride[1] + key * initial.stride[2] +
                                   (value + column) * initial.stride[3]);
  };
  if (args.moves_initial_state) {
    const int64_t last = (first + (count == 0 ? 0 : count - 1)) * heads + head;
    float* target = args.states + last * args.value_dim * kKeyDim + value * kKeyDim + key;
#pragma unroll
    for (int i = 0; i < kMergeColumns; ++i) target[i * kKeyDim] = load_initial(i);
  }
  for (int64_t s = 0; s + 1 < count; ++s) {
    const int64_t index = (first + s) * heads + head;
    if (args.independent[index] != 0) continue;
    const float* previous = args.states + (index - heads) * args.value_dim * kKeyDim + value * kKeyDim + key;
    float* target = args.states + index * args.value_dim * kKeyDim + value * kKeyDim + key;
    sync_block();  // the columns of the segment before have been read
#pragma unroll
    for (int i = 0; i < kMergeColumns; ++i) {
      entering[key][i] = s > 0 ? previous[i * kKeyDim] : load_initial(i);
    }
    sync_block();
    add_transition(target, args.transitions + index * kKeyDim * kKeyDim + key, kKeyDim, entering);
  }
}

}  // namespace cula::gdn::sm90
