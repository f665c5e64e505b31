// The state behind each segment: S <- M S + S_ext along the segments of a sequence, in fp32. Nothing to do behind
// segments that forget what entered them, which is told apart on the device.
#pragma once

#include "common/device/dependent_launch.cuh"
#include "gdn/sm90/collective/chain.cuh"
#include "gdn/sm90/collective/pipeline.cuh"

namespace cula::gdn::sm90 {

// Blocks: sequences, value heads, groups of value columns, these fastest.
template <int kKeyDim>
__global__ void __launch_bounds__(cuda::kMapThreads, 1) merge_kernel(const __grid_constant__ ForwardArgs args) {
  using Chain = SegmentChain<kKeyDim, true>;
  launch_dependents();
  wait_for_previous();
  const int groups = args.value_dim / cuda::kMapColumns;
  const int unit = static_cast<int>(blockIdx.x) / groups;
  const int value = (static_cast<int>(blockIdx.x) - unit * groups) * cuda::kMapColumns;
  const int heads = static_cast<int>(args.value_heads);
  const int sequence_index = unit / heads;
  const int head = unit - sequence_index * heads;
  const Segmentation& table = args.segments;
  const Sequence sequence = find_sequence(table.sequences, sequence_index);
  const int64_t chunks = (sequence.length + kRows - 1) / kRows;
  const int64_t count = (chunks + table.chunks - 1) / table.chunks;
  const int64_t first =
      table.sequences.offsets == nullptr ? sequence_index * table.per_row() : table.first_place(sequence_index);
  const Chain chain = {Chain::columns_of(dynamic_shared_memory(), args.value_dim, value),
                       Chain::states_of(args.states, heads, args.value_dim), Chain::maps_of(args.transitions, heads),
                       head};

  const int64_t slot = args.initial_state ? args.initial_slots.of(sequence_index) : -1;
  const auto load_initial = [&](typename Chain::Patch& s) {
    Chain::Columns::clear(s);
    if (slot >= 0) chain.columns.load(s, args.initial_state, slot, head);
  };
  typename Chain::Patch s;
  if (args.moves_initial_state) {
    load_initial(s);
    chain.columns.store(s, chain.states, first + (count == 0 ? 0 : count - 1), head);
  }
  const auto known = [&](int64_t segment) { return args.independent[(first + segment) * heads + head] != 0; };
  for (int64_t segment = 0; segment + 1 < count;) {
    if (known(segment)) {
      ++segment;
      continue;
    }
    if (segment > 0) {
      chain.columns.load(s, chain.states, first + segment - 1, head);
    } else {
      load_initial(s);
    }
    int64_t end = segment + 1;
    while (end + 1 < count && !known(end)) ++end;
    chain.run(s, end - segment, first + segment, 1);
    segment = end;
  }
}

}  // namespace cula::gdn::sm90
