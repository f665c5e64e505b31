// The fused forward pass: one block a value head of a segment and kValueTiles x 64 of its value columns.
//
//   consumer warpgroups (kValueTiles)   the recurrence, 64 value columns each, state in registers  collective/state.cuh
//   one more                            loads by TMA, scores P collective/scores.cuh
//
// With segments, the summary kernel runs before it: the same recurrence without output, over V columns from a state of
// zero (S_ext) and over K columns from the identity, with v = 0 (M: the transition obeys the recurrence of the state).
#pragma once

#include <type_traits>

#include "common/device/dependent_launch.cuh"
#include "gdn/sm90/collective/scores.cuh"
#include "gdn/sm90/collective/state.cuh"

namespace cula::gdn::sm90 {

template <int kValueTiles>
inline constexpr int kForwardThreads = (kValueTiles + 1) * kWarpgroupThreads;

// 384 threads start with 168 registers each: what two consumers and the feeder may have together. With one consumer all
// have enough from the start.
template <int kKeyDim>
inline constexpr int kConsumerRegisters = kKeyDim == 128 ? 208 : 184;
template <int kKeyDim>
inline constexpr int kFeederRegisters = kKeyDim == 128 ? 88 : 128;
static_assert(2 * kConsumerRegisters<128> + kFeederRegisters<128> <= 3 * 168);
static_assert(2 * kConsumerRegisters<64> + kFeederRegisters<64> <= 3 * 168);

inline constexpr int kSummaryTiles = 1;

// State number `index` of a tensor of dense [rows][keys] matrices, rows being value columns.
__device__ __forceinline__ int64_t dense_state(int64_t index, int rows, int key_dim) {
  return index * static_cast<int64_t>(rows) * key_dim;
}

__device__ __forceinline__ Unit make_unit(const ForwardArgs& args, const Segment& segment, int head, int value) {
  Unit unit;
  unit.batch = static_cast<int>(segment.batch);
  unit.token = static_cast<int>(segment.token);
  unit.slot = static_cast<int>(segment.slot);
  unit.head = head;
  unit.key_head = static_cast<int>(head / args.group);
  unit.value = value;
  unit.num_chunks = segment.num_chunks;
  unit.tail_length = segment.tail_length;
  unit.has_values = true;
  unit.enters = {};
  unit.leaves = {};
  unit.sequence = static_cast<int>(segment.sequence);
  unit.first_chunk = static_cast<int>(segment.first_chunk);
  unit.checkpoint = 0;
  return unit;
}

__device__ __forceinline__ StateSource initial_state(const ForwardArgs& args, int64_t sequence, int head) {
  const TensorArg& x = args.initial_state;
  const int64_t slot = x ? args.initial_slots.of(sequence) : -1;
  if (slot < 0) return {};
  const int64_t offset = slot * x.stride[0] + head * x.stride[1];
  return {static_cast<const unsigned char*>(x.data) + offset * args.initial_state_bytes, x.dtype, x.stride[2],
          x.stride[3], false};
}

__device__ __forceinline__ StateTarget final_state(const ForwardArgs& args, int64_t sequence, int head) {
  const TensorArg& x = args.final_state;
  const int64_t slot = x ? args.final_slots.of(sequence) : -1;
  if (slot < 0) return {};
  const int64_t offset = slot * x.stride[0] + head * x.stride[1];
  return {static_cast<unsigned char*>(x.data) + offset * args.final_state_bytes, x.dtype, x.stride[2], x.stride[3]};
}

// leaving: the arrivals of those who leave a stage.
template <class Shared>
__device__ __forceinline__ typename Shared::Map init_shared(void* memory, int leaving) {
  const typename Shared::Map shared = {shared_address(memory)};
  if (threadIdx.x == 0) {
    for (int s = 0; s < Shared::kStages; ++s) {
      mbarrier_init(shared.full_barrier(s), 1);
      mbarrier_init(shared.empty_barrier(s), leaving);
    }
    for (int b = 0; b < kScoreBuffers; ++b) {
      mbarrier_init(shared.scored_barrier(b), warp_arrivals(kWarpgroupThreads / 32));
    }
    mbarrier_init(shared.trimmed_barrier(), group_arrivals(1));
    mbarrier_init_fence();
  }
  sync_block();
  return shared;
}

template <class T, int kKeyDim, int kValueTiles, bool kCheckpoints>
__global__ void __launch_bounds__(kForwardThreads<kValueTiles>, 1)
    forward_kernel(const __grid_constant__ ForwardArgs args) {
  using Shared = ForwardShared<kKeyDim, kValueTiles, true>;

  // Blocks: places, value heads, parts of the value columns, these fastest.
  const int parts = args.value_dim / (64 * kValueTiles);
  const int unit_index = static_cast<int>(blockIdx.x) / parts;
  const int value = (static_cast<int>(blockIdx.x) - unit_index * parts) * 64 * kValueTiles;
  int place = unit_index / static_cast<int>(args.value_heads);
  const int head = unit_index - place * static_cast<int>(args.value_heads);
  launch_dependents();
  if (args.order != nullptr) {
    wait_for_previous();
    place = args.order[place];
  }
  Segment segment;
  if (!find_segment(args.segments, place, segment)) {
    wait_for_previous();
    return;
  }
  Unit unit = make_unit(args, segment, head, value);
  // find_segment has read cu_seqlens before any wait, and so may the slots be: prepare starts only when whoever wrote
  // them has ended, and this kernel after prepare. Where prepare has no blocks, the kernel before this one is the
  // caller's and may be writing the slots: such a call alone needs this wait.
  if (args.initial_slots.indices != nullptr || args.final_slots.indices != nullptr) wait_for_previous();
  if (!segment.is_first || args.moves_initial_state) {
    const int64_t from = segment.is_first ? last_place(args.segments, segment.sequence) : place - 1;
    unit.enters = {args.states + dense_state(from * args.value_heads + head, args.value_dim, kKeyDim), DType::kFloat32,
                   1, kKeyDim, false};
  } else {
    unit.enters = initial_state(args, segment.sequence, head);
  }
  if constexpr (kCheckpoints) {
    const int every = static_cast<int>(args.checkpoints.every) / kRows;
    unit.checkpoint = every - 1 - unit.first_chunk % every;
  }
  if (segment.is_last) unit.leaves = final_state(args, segment.sequence, head);

  const auto shared = init_shared<Shared>(swizzled_shared_memory(), group_arrivals(kValueTiles));
  const int group = warpgroup_id();
  wait_for_previous();
  if (group == kValueTiles) {
    if constexpr (kValueTiles == 2) release_registers<kFeederRegisters<kKeyDim>>();
    Feeder<T, kKeyDim, kValueTiles>{args, unit, shared}.run();
  } else {
    if constexpr (kValueTiles == 2) acquire_registers<kConsumerRegisters<kKeyDim>>();
    StateConsumer<T, kKeyDim, kValueTiles, true, kCheckpoints>{args, unit, shared, group}.run();
  }
}

// The state behind a segment, or what makes it: if the chunks before its end forget what was before them, or all begin
// at the sequence's start, those chunks alone (they may reach into segments before); otherwise S_ext and M of the
// segment. Blocks: 64-wide slices of [S_ext | M], places, value heads, these fastest; the slices of S_ext come first,
// since those of M often have nothing to do.
template <class T, int kKeyDim>
__global__ void __launch_bounds__(kForwardThreads<kSummaryTiles>, 1)
    summary_kernel(const __grid_constant__ ForwardArgs args) {
  using Shared = ForwardShared<kKeyDim, kSummaryTiles, false>;

  const int heads = static_cast<int>(args.value_heads);
  const int units = static_cast<int>(args.segments.num_places()) * heads;
  const int slice = static_cast<int>(blockIdx.x) / units;
  const int unit_index = static_cast<int>(blockIdx.x) - slice * units;
  const int place = unit_index / heads;
  const int head = unit_index - place * heads;
  launch_dependents();
  wait_for_previous();
  Segment segment;
  if (!find_segment(args.segments, place, segment) || segment.is_last) return;
  const bool transition = 64 * slice >= args.value_dim;
  const int last = segment.num_chunks - 1;
  const int64_t available = segment.first_chunk + segment.num_chunks;
  const int limit = args.segments.chunks < kLookBack ? kLookBack : static_cast<int>(args.segments.chunks);
  const LookBack back =
      look_back(args.factors + (segment.slot + last) * args.value_heads + head, args.value_heads, available, limit);
  const bool independent = back.forgets || back.from_start;  // of the state that enters the segment
  if (transition) {
    if (64 * slice == args.value_dim && threadIdx.x == 0) args.independent[unit_index] = independent ? 1 : 0;
    if (independent) return;
  }
  Unit unit = make_unit(args, segment, head, transition ? 64 * slice - args.value_dim : 64 * slice);
  if (independent) {
    const int skipped = segment.num_chunks - back.chunks;  // negative: it starts in a segment before
    unit.token += skipped * kRows;
    unit.slot += skipped;
    if (back.from_start) unit.enters = initial_state(args, segment.sequence, head);
  }
  if (independent) unit.num_chunks = back.chunks;
  unit.has_values = !transition;
  unit.enters.identity = transition;
  float* target = transition ? args.transitions + dense_state(unit_index, kKeyDim, kKeyDim)
                             : args.states + dense_state(unit_index, args.value_dim, kKeyDim);
  unit.leaves = {target, DType::kFloat32, 1, kKeyDim};

  const auto shared =
      init_shared<Shared>(swizzled_shared_memory(), warp_arrivals(kSummaryTiles * kWarpgroupThreads / 32));
  const int group = warpgroup_id();
  if (group == kSummaryTiles) {
    SummaryFeeder<kKeyDim, kSummaryTiles>{args, unit, shared}.run();
  } else {
    StateConsumer<T, kKeyDim, kSummaryTiles, false, false>{args, unit, shared, group}.run();
  }
}

}  // namespace cula::gdn::sm90
