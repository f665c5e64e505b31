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
  const Columns columns = {*reinterpret_cast<StateMapShared<kKeyDim>*>(dynamic_shared_memory()), args.key_dim,
                           args.value_dim, block_value};
  const int64_t sequence_index = unit / args.value_heads;
  const int64_t head = unit - sequence_index * args.value_heads;
  const Sequence sequence = find_sequence(args.sequences, sequence_index);
  const int64_t first_place = first_segment_place(args.sequences, sequence_index);
  const int64_t count = count_segments(args.sequences, sequence);

  const int64_t slot = args.entry ? args.slots.of(sequence_index) : -1;
  float s[Columns::kColumns];
#pragma unroll
  for (int i = 0; i < Columns::kColumns; ++i) {
    s[i] = slot >= 0 && columns.valid(i) ? args.entry.load(columns.offset(args.entry, slot, head, i)) : 0.0f;
  }
  for (int64_t step = 0; step < count; ++step) {
    const int64_t place = first_place + (kAdjoint ? count - 1 - step : step);
#pragma unroll
    for (int i = 0; i < Columns::kColumns; ++i) {
      if (columns.valid(i)) static_cast<float*>(args.seeds.data)[columns.offset(args.seeds, place, head, i)] = s[i];
    }
    if (step + 1 == count) break;
    const float* summary = static_cast<const float*>(args.summary.data);
    const float* map =
        static_cast<const float*>(args.map.data) + place * args.map.stride[0] + head * args.map.stride[1];
    columns.apply(
        s, [&](int r, int t) { return map[r * args.map.stride[2] + t]; },
        [&](int i) { return summary[columns.offset(args.summary, place, head, i)]; });
  }
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
  const Columns columns = {*reinterpret_cast<StateMapShared<kKeyDim>*>(dynamic_shared_memory()), args.key_dim,
                           args.value_dim, block_value};
  float s[Columns::kColumns];
#pragma unroll
  for (int i = 0; i < Columns::kColumns; ++i) {
    s[i] = args.entry && columns.valid(i) ? args.entry.load(columns.offset(args.entry, 0, head, i)) : 0.0f;
  }
  for (int step = 0; step < args.count; ++step) {
    const int64_t n = args.order[step];
    const auto addend = [&](int i) { return args.summary.load(columns.offset(args.summary, n, head, i)); };
    if (step == 0 && !args.entry) {  // there is no state yet: M may be anything, as 0 times infinity would show
#pragma unroll
      for (int i = 0; i < Columns::kColumns; ++i) s[i] = columns.valid(i) ? addend(i) : 0.0f;
      continue;
    }
    const int64_t map = n * args.map.stride[0] + head * args.map.stride[1];
    columns.apply(
        s, [&](int r, int t) { return args.map.load(map + r * args.map.stride[2] + t * args.map.stride[3]); }, addend);
  }
#pragma unroll
  for (int i = 0; i < Columns::kColumns; ++i) {
    if (columns.valid(i)) args.state.store(columns.offset(args.state, 0, head, i), s[i]);
  }
}

}  // namespace cula::gdn::cuda
