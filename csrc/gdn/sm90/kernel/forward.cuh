// The fused forward pass: one block a value head of a sequence and kValueTiles x 64 of its value columns.
//
//   consumer warpgroups (kValueTiles)   the recurrence, 64 value columns each, state in registers  collective/state.cuh
//   one more                            loads by TMA, scores P collective/scores.cuh
#pragma once

#include <type_traits>

#include "common/device/launch.cuh"
#include "gdn/sm90/collective/scores.cuh"
#include "gdn/sm90/collective/state.cuh"

namespace cula::gdn::sm90 {

template <int kValueTiles>
inline constexpr int kForwardThreads = (kValueTiles + 1) * kWarpgroupThreads;

// 384 threads start with 168 registers each: 2 x 216 + 72 of them. With one consumer all have enough from the start.
inline constexpr int kConsumerRegisters = 216;
inline constexpr int kFeederRegisters = 72;

template <class T, int kKeyDim, int kValueTiles>
__global__ void __launch_bounds__(kForwardThreads<kValueTiles>, 1)
    forward_kernel(const __grid_constant__ ForwardArgs args) {
  using Shared = ForwardShared<kKeyDim, kValueTiles>;
  extern __shared__ __align__(1024) unsigned char forward_shared[];
  const typename Shared::Map shared = {shared_address(forward_shared)};

  const int64_t blocks_per_head = gridDim.x / (args.sequences.num_sequences * args.value_heads);
  const int64_t head_unit = blockIdx.x / blocks_per_head;
  Unit unit;
  unit.index = head_unit / args.value_heads;
  unit.head = static_cast<int>(head_unit - unit.index * args.value_heads);
  unit.key_head = static_cast<int>(unit.head / args.group);
  unit.value = static_cast<int>(blockIdx.x - head_unit * blocks_per_head) * kValueTiles * 64;
  unit.sequence = find_sequence(args.sequences, unit.index);
  unit.num_chunks = static_cast<int>((unit.sequence.length + kRows - 1) / kRows);
  unit.tail_length = static_cast<int>(unit.sequence.length - static_cast<int64_t>(unit.num_chunks - 1) * kRows);

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(shared.full_barrier(s), 1);
      mbarrier_init(shared.empty_barrier(s), kValueTiles);
    }
    for (int b = 0; b < kScoreBuffers; ++b) mbarrier_init(shared.scored_barrier(b), 1);
    mbarrier_init(shared.trimmed_barrier(), 1);
    mbarrier_init_fence();
  }
  sync_block();
  const int group = warpgroup_id();
  if (group == kValueTiles) {
    if constexpr (kValueTiles == 2) release_registers<kFeederRegisters>();
    Feeder<T, kKeyDim, kValueTiles>{args, unit, shared}.run();
  } else {
    if constexpr (kValueTiles == 2) acquire_registers<kConsumerRegisters>();
    StateConsumer<T, kKeyDim, kValueTiles>{args, unit, shared, group}.run();
  }
}

}  // namespace cula::gdn::sm90
