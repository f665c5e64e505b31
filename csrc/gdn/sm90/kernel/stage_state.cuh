// The stages that go through a sequence: chunk_gated_delta_rule_fwd_h, and with kAdjoint
// chunk_gated_delta_rule_bwd_dhu.
#pragma once

#include "gdn/sm90/collective/stage_state.cuh"

namespace cula::gdn::sm90 {

// Blocks: sequences, value heads, 64-wide parts of the value columns, these fastest.
template <class T, int kKeyDim, bool kAdjoint>
__global__ void __launch_bounds__(kStateStageThreads, 1)
    state_stage_kernel(const __grid_constant__ StateStageArgs args) {
  using Shared = StateStageShared<kKeyDim, kAdjoint>;
  Shared& memory = *reinterpret_cast<Shared*>(swizzled_shared_memory());
  const typename Shared::Map shared = {shared_address(&memory)};
  if (warp_id() == 0) {
    const int heads = static_cast<int>(args.grid.heads);
    const int sequence_index = static_cast<int>(blockIdx.x) / (heads * args.value_tiles);
    const int part = static_cast<int>(blockIdx.x) - sequence_index * heads * args.value_tiles;
    const Sequence sequence = find_sequence(args.grid.sequences, sequence_index);
    const int64_t index = dense_chunk_index(args.grid.sequences, sequence_index, 0);
    if (lane_id() == 0) {
      StateStageUnit& unit = memory.unit;
      unit.batch = static_cast<int>(sequence.batch);
      unit.token = static_cast<int>(sequence.begin);
      unit.head = part / args.value_tiles;
      unit.key_head = unit.head / static_cast<int>(args.grid.group);
      unit.value_tile = part - unit.head * args.value_tiles;
      unit.num_chunks = static_cast<int>((sequence.length + kRows - 1) / kRows);
      unit.tail_length = static_cast<int>(sequence.length) - (unit.num_chunks - 1) * kRows;
      unit.first_index = sequence.batch * args.num_chunks + index;
      unit.sequence = sequence_index;
      for (int s = 0; s < kStateStages; ++s) {
        mbarrier_init(shared.full_barrier(s), 1 + warp_arrivals(1));  // the loader and a maker of factors
        mbarrier_init(shared.empty_barrier(s), group_arrivals(1));
      }
      mbarrier_init_fence();
    }
  }
  sync_block();
  if (warpgroup_id() == 1) {
    StateStageFeeder<kKeyDim, kAdjoint>{args, memory.unit, memory, shared}.run();
  } else {
    StateStageConsumer<T, kKeyDim, kAdjoint>{args, memory.unit, shared}.run();
  }
}

}  // namespace cula::gdn::sm90
