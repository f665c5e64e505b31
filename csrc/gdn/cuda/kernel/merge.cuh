// From the summaries of the segments of a sequence to the state that enters each: S <- M S + S_ext, in order and in
// fp32; or, for the adjoint, to the gradient of the state behind each: D <- M^T D + dS_ext, from the end. And from the
// summaries that ranks of context parallelism exchange to a state.
#pragma once

#include "common/device/launch.cuh"
#include "gdn/cuda/collective/state_map.cuh"

namespace cula::gdn::cuda {

struct MergeArgs {
  SequenceTable sequences;
  int64_t value_heads;
  int key_dim;
  int value_dim;
  int64_t value_blocks;
  TensorArg entry;    // [N, HV, K, V]: the state at the start of the sequences, or its gradient at their ends; may lack
  StateSlots slots;   // of the former
  TensorArg summary;  // [places, HV, K, V] fp32: S_ext or dS_ext
  TensorArg map;      // [places, HV, K, K] fp32: M
  TensorArg seeds;    // [places, HV, K, V] fp32: results
};

template <int kKeyDim, bool kAdjoint>
__global__ void __launch_bounds__(kMapThreads, 1) merge_kernel(const MergeArgs args) {
  using Columns = StateMap<kKeyDim, kAdjoint>;
  const int64_t unit = blockIdx.x / args.value_blocks;
  const int block_value = static_cast<int>(blockIdx.x - unit * args.value_blocks) * kMapColumns;
  const Columns columns = {*reinterpret_cast<typename Columns::Shared*>(dynamic_shared_memory()), args.key_dim,
                           args.value_dim, block_value};
  const int64_t sequence_index = unit / args.value_heads;
  const int64_t head = unit - sequence_index * args.value_heads;
  const Sequence sequence = find_sequence(args.sequences, sequence_index);
  const int64_t first_place = first_segment_place(args.sequences, sequence_index);
  const int64_t count = count_segments(args.sequences, sequence);
  const auto place = [&](int64_t step) { return first_place + (kAdjoint ? count - 1 - step : step); };

  const int64_t slot = args.entry ? args.slots.of(sequence_index) : -1;
  typename Columns::Patch s;
  Columns::clear(s);
  if (slot >= 0) columns.load(s, args.entry, slot, head);
  columns.run(
      s, count - 1, args.map,
      [&](int64_t step) { return place(step) * args.map.stride[0] + head * args.map.stride[1]; },
      [&](auto& x, int64_t step) { columns.load(x, args.summary, place(step), head); },
      [&](const auto& x, int64_t step) { columns.store(x, args.seeds, place(step), head); });
  columns.store(s, args.seeds, place(count - 1), head);
}

// The state that summaries of other ranks make, entry by entry from zero. Of the first one only S_ext is read.
inline constexpr int kChainLength = 512;  // entries a launch: they travel with its arguments

struct ChainArgs {
  int64_t value_heads;
  int key_dim;
  int value_dim;
  int64_t value_blocks;
  TensorArg summary;  // [P, HV, K, V] of any float type
  TensorArg map;      // [P, HV, K, K]
  TensorArg entry;    // [1, HV, K, V]: what the entries before made; absent for the first
  TensorArg state;    // [1, HV, K, V] of any float type: result
  int count;
  int32_t order[kChainLength];
};

template <int kKeyDim>
__global__ void __launch_bounds__(kMapThreads, 1) chain_kernel(const __grid_constant__ ChainArgs args) {
  using Columns = StateMap<kKeyDim, false>;
  const int64_t head = blockIdx.x / args.value_blocks;
  const int block_value = static_cast<int>(blockIdx.x - head * args.value_blocks) * kMapColumns;
  const Columns columns = {*reinterpret_cast<typename Columns::Shared*>(dynamic_shared_memory()), args.key_dim,
                           args.value_dim, block_value};
  typename Columns::Patch s;
  Columns::clear(s);
  // Without a state yet M may be anything, as 0 times infinity would show.
  const bool starts = !args.entry && args.count > 0;
  if (starts) {
    columns.load(s, args.summary, args.order[0], head);
  } else if (args.entry) {
    columns.load(s, args.entry, 0, head);
  }
  const int32_t* order = args.order + (starts ? 1 : 0);
  columns.run(
      s, args.count - (starts ? 1 : 0), args.map,
      [&](int64_t step) { return order[step] * args.map.stride[0] + head * args.map.stride[1]; },
      [&](auto& x, int64_t step) { columns.load(x, args.summary, order[step], head); }, [](const auto&, int64_t) {});
  columns.store(s, args.state, 0, head);
}

}  // namespace cula::gdn::cuda
