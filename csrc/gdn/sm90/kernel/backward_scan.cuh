// Both scans in one launch: half of the blocks recompute states, the others carry gradients back. Neither waits for the
// other, and the gradient kernel needs both.
#pragma once

#include "common/device/dependent_launch.cuh"
#include "gdn/sm90/collective/backward_scan.cuh"

namespace cula::gdn::sm90 {

template <class T, int kKeyDim, bool kAdjoint>
__device__ __forceinline__ void run_scan(const ScanArgs& args, const ScanUnit& unit,
                                         typename ScanShared<kKeyDim>::Map shared) {
  if (warpgroup_id() == 1) {
    ScanFeeder<T, kKeyDim, kAdjoint>{args, unit, shared}.run();
  } else if constexpr (kAdjoint) {
    AdjointConsumer<T, kKeyDim>{{args, unit, shared}}.run();
  } else {
    RecomputeConsumer<T, kKeyDim>{{args, unit, shared}}.run();
  }
}

// Blocks: passes, sequences, value heads, 64-wide parts of the value columns, these fastest. The adjoint, which takes
// longer, comes first.
template <class T, int kKeyDim>
__global__ void __launch_bounds__(kScanThreads, 1) backward_scan_kernel(const __grid_constant__ ScanArgs args) {
  using Shared = ScanShared<kKeyDim>;
  unsigned char* scan_shared = swizzled_shared_memory();
  Shared& memory = *reinterpret_cast<Shared*>(scan_shared);
  const int heads = static_cast<int>(args.value_heads);
  const int units = static_cast<int>(args.sequences.num_sequences) * heads * args.value_tiles;
  const bool adjoint = static_cast<int>(blockIdx.x) < units;
  const int index = static_cast<int>(blockIdx.x) - (adjoint ? 0 : units);
  const int sequence_index = index / (heads * args.value_tiles);
  const int part = index - sequence_index * heads * args.value_tiles;
  launch_dependents();
  const Sequence sequence = find_sequence(args.sequences, sequence_index);

  const typename Shared::Map shared = {shared_address(scan_shared)};
  // The chunks of the sequence that this pass goes through.
  const SlotWindow& window = args.window;
  const int first_slot = static_cast<int>(sequence.first_slot);
  const int chunks = static_cast<int>((sequence.length + kRows - 1) / kRows);
  const bool is_empty =
      chunks == 0 && first_slot >= window.begin && (first_slot < window.end || window.end == window.total);
  if (!is_empty && (first_slot >= window.end || first_slot + chunks <= window.begin)) {
    wait_for_previous();
    return;
  }
  const bool has_last = first_slot + chunks <= window.end;  // chunk of the sequence
  const bool has_first = first_slot >= window.begin;
  const int begin = has_first ? 0 : window.begin - first_slot;
  const int end = has_last ? chunks : window.end - first_slot;
  if (threadIdx.x == 0) {
    ScanUnit& unit = memory.unit;
    const bool from_start = !adjoint && (has_first || has_last);
    const int first = from_start ? 0 : begin;
    unit.sequence = sequence_index;
    unit.batch = static_cast<int>(sequence.batch);
    unit.token = static_cast<int>(sequence.begin) + first * kRows;
    unit.slot = first_slot + first;
    unit.head = part / args.value_tiles;
    unit.key_head = unit.head / static_cast<int>(args.group);
    unit.value_tile = part - unit.head * args.value_tiles;
    unit.num_chunks = end - first;
    unit.tail_length = has_last ? static_cast<int>(sequence.length) - (chunks - 1) * kRows : kRows;
    unit.first_stored = begin - first;
    unit.enters = args.initial_state;
    unit.leaves = {};
    if (adjoint) {
      unit.enters = has_last ? args.grad_final_state : carried_state(args, window.end, kKeyDim);
      unit.leaves = has_first ? args.dh0 : carried_state(args, window.begin, kKeyDim);
    } else if (!from_start) {
      unit.enters = kept_state(args, window.number(window.begin), kKeyDim);
    }
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(shared.full_barrier(s), 1);
      mbarrier_init(shared.empty_barrier(s), 1);
    }
    for (int b = 0; b < kScoreBuffers; ++b) mbarrier_init(shared.scored_barrier(b), 1);
    mbarrier_init(shared.trimmed_barrier(), 1);
    mbarrier_init_fence();
  }
  sync_block();
  wait_for_previous();
  if (adjoint) {
    run_scan<T, kKeyDim, true>(args, memory.unit, shared);
  } else {
    run_scan<T, kKeyDim, false>(args, memory.unit, shared);
  }
}

}  // namespace cula::gdn::sm90
