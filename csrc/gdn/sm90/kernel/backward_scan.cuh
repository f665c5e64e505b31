// Both scans in one launch: half of the blocks recompute states, the others carry gradients back. Neither waits for the
// other, and the gradient kernel needs both.
//
// With segments, a pass needs the state behind the segment before, or the gradient of the state in front of the next.
// If the chunks on the way there forget what lies beyond them, or all lie within reach of the sequence's end, it goes
// through these chunks first (they may reach into further segments). For the others, two kernels run before: the
// summary finds what each segment adds to either, and its transition M of the state, whose transpose is that of the
// gradient; the merge (backward_merge.cuh) makes states and gradients of that.
#pragma once

#include <type_traits>

#include "common/device/dependent_launch.cuh"
#include "gdn/sm90/collective/scan_adjoint.cuh"
#include "gdn/sm90/collective/scan_feeder.cuh"
#include "gdn/sm90/collective/scan_recompute.cuh"

namespace cula::gdn::sm90 {

// One pass by the block; `unit` has been set by its first thread, and no barrier has been passed since.
template <class T, int kKeyDim, bool kAdjoint, class Consumer>
__device__ __forceinline__ void run_pass(const ScanArgs& args, const ScanUnit& unit, uint32_t memory) {
  using Shared = ScanShared<kKeyDim, kAdjoint>;
  const typename Shared::Map shared = {memory};
  if (threadIdx.x == 0) Shared::init(shared);
  sync_block();
  wait_for_previous();
  if (warpgroup_id() == 1) {
    ScanFeeder<T, kKeyDim, kAdjoint>{args, unit, shared}.run();
  } else {
    Consumer{{args, unit, shared}}.run();
  }
}

template <class T, int kKeyDim, ScanKind kKind, bool kAdjoint>
__device__ __forceinline__ void run_scan(const ScanArgs& args, const ScanUnit& unit, uint32_t memory) {
  using Consumer =
      std::conditional_t<kAdjoint, AdjointConsumer<T, kKeyDim, kKind>, RecomputeConsumer<T, kKeyDim, kKind>>;
  run_pass<T, kKeyDim, kAdjoint, Consumer>(args, unit, memory);
}

// Shared memory of a block that runs one pass, either.
template <int kKeyDim>
struct ScanMemory {
  union {
    ScanShared<kKeyDim, true> adjoint;
    ScanShared<kKeyDim, false> recompute;
  };
  ScanUnit unit;
};

// All chunks of a segment; by one thread. What enters and leaves is the caller's.
__device__ __forceinline__ void set_unit(ScanUnit& unit, const ScanArgs& args, const Segment& segment, int head,
                                         int value_tile) {
  unit.batch = static_cast<int>(segment.batch);
  unit.token = static_cast<int>(segment.token);
  unit.slot = static_cast<int>(segment.slot);
  unit.head = head;
  unit.key_head = head / static_cast<int>(args.group);
  unit.value_tile = value_tile;
  unit.num_chunks = segment.num_chunks;
  unit.skipped = 0;
  unit.tail_length = segment.tail_length;
  unit.sequence = segment.sequence;
  unit.enters = {};
  unit.leaves = {};
  unit.is_transition = false;
}

__device__ __forceinline__ bool is_known(const LookBack& back) { return back.forgets || back.from_start; }
__device__ __forceinline__ int look_back_limit(const ScanArgs& args) {
  return args.segments.chunks < kLookBack ? kLookBack : static_cast<int>(args.segments.chunks);
}
// Which chunks make the state that leaves the segment, or the gradient of the one that enters it. All lanes must call.
__device__ __forceinline__ LookBack look_back_from_end(const ScanArgs& args, const Segment& segment, int head) {
  const int64_t end = segment.slot + segment.num_chunks;
  return look_back(args.factors + (end - 1) * args.value_heads + head, args.value_heads,
                   segment.first_chunk + segment.num_chunks, look_back_limit(args));
}
__device__ __forceinline__ LookBack look_ahead_from_start(const ScanArgs& args, const Segment& segment, int head) {
  const int64_t length = find_sequence(args.segments.sequences, segment.sequence).length;
  return look_back(args.factors + segment.slot * args.value_heads + head, -args.value_heads,
                   (length + kRows - 1) / kRows - segment.first_chunk, look_back_limit(args));
}
// The unit goes through these chunks, which come before the state that leaves the segment.
__device__ __forceinline__ void reach_back(ScanUnit& unit, const ScanArgs& args, const Segment& segment,
                                           const LookBack& back) {
  const int skipped = segment.num_chunks - back.chunks;  // negative: it starts in a segment before
  unit.token += skipped * kRows;
  unit.slot += skipped;
  unit.num_chunks = back.chunks;
  if (back.from_start) unit.enters = args.initial_state;
}
// Through these, which come after the state that enters the segment.
__device__ __forceinline__ void reach_ahead(ScanUnit& unit, const ScanArgs& args, const Segment& segment,
                                            const LookBack& ahead) {
  const int64_t length = find_sequence(args.segments.sequences, segment.sequence).length;
  const int64_t chunks = (length + kRows - 1) / kRows;
  const bool to_end = segment.first_chunk + ahead.chunks == chunks;
  unit.num_chunks = ahead.chunks;
  unit.tail_length = to_end ? static_cast<int>(length - (chunks - 1) * kRows) : kRows;
  if (ahead.from_start) unit.enters = args.grad_final_state;  // from the sequence's end, here
}

// Blocks: passes, places, value heads, 64-wide parts of the value columns, these fastest. The adjoint, which takes
// longer, comes first.
template <class T, int kKeyDim>
__global__ void __launch_bounds__(kScanThreads, 1) backward_scan_kernel(const __grid_constant__ ScanArgs args) {
  unsigned char* scan_shared = swizzled_shared_memory();
  ScanUnit& unit = reinterpret_cast<ScanMemory<kKeyDim>*>(scan_shared)->unit;
  const int heads = static_cast<int>(args.value_heads);
  const int units = args.places * heads * args.value_tiles;
  const bool adjoint = static_cast<int>(blockIdx.x) < units;
  const int index = static_cast<int>(blockIdx.x) - (adjoint ? 0 : units);
  const int place_index = index / (heads * args.value_tiles);
  const int part = index - place_index * heads * args.value_tiles;
  launch_dependents();
  const int64_t place = args.first_place + place_index;
  Segment segment;
  if (!find_segment(args.segments, place, segment) || !args.window.holds(segment.slot)) {
    wait_for_previous();
    return;
  }
  const int head = part / args.value_tiles;
  const bool has_neighbour = adjoint ? !segment.is_last : !segment.is_first;
  Segment neighbour = {};
  LookBack back = {};
  if (has_neighbour) {
    wait_for_previous();
    find_segment(args.segments, place + (adjoint ? 1 : -1), neighbour);
    back = adjoint ? look_ahead_from_start(args, neighbour, head) : look_back_from_end(args, neighbour, head);
  }
  if (threadIdx.x == 0) {
    set_unit(unit, args, segment, head, part - head * args.value_tiles);
    if (adjoint && segment.is_first) unit.leaves = args.dh0;
    if (!has_neighbour) {
      unit.enters = adjoint ? args.grad_final_state : args.initial_state;
    } else if (!is_known(back)) {
      const int64_t index = (place + (adjoint ? 1 : -1)) * heads + head;
      unit.enters = dense_state_arg(adjoint ? args.state_gradients : args.states, index, args.value_dim(), kKeyDim);
    } else {
      unit.skipped = back.chunks;
      if (adjoint) {
        reach_ahead(unit, args, neighbour, back);
      } else {
        unit.token = static_cast<int>(neighbour.token);
        unit.slot = static_cast<int>(neighbour.slot);
        reach_back(unit, args, neighbour, back);
      }
      unit.num_chunks += segment.num_chunks;
    }
  }
  if (adjoint) {
    run_scan<T, kKeyDim, ScanKind::kImages, true>(args, unit, shared_address(scan_shared));
  } else {
    run_scan<T, kKeyDim, ScanKind::kImages, false>(args, unit, shared_address(scan_shared));
  }
}

enum class SummaryPart { kGradient, kState, kTransition };

// Blocks: the parts above, and of each its 64-wide slices; places, value heads, these fastest. Transitions come last,
// since there often is nothing to do.
template <class T, int kKeyDim>
__global__ void __launch_bounds__(kScanThreads, 1) backward_summary_kernel(const __grid_constant__ ScanArgs args) {
  unsigned char* summary_shared = swizzled_shared_memory();
  ScanUnit& unit = reinterpret_cast<ScanMemory<kKeyDim>*>(summary_shared)->unit;
  const int heads = static_cast<int>(args.value_heads);
  const int units = args.places * heads;
  const int slice = static_cast<int>(blockIdx.x) / units;
  const int place_index = (static_cast<int>(blockIdx.x) - slice * units) / heads;
  const int head = static_cast<int>(blockIdx.x) - (slice * units + place_index * heads);
  const SummaryPart part = slice < args.value_tiles       ? SummaryPart::kGradient
                           : slice < 2 * args.value_tiles ? SummaryPart::kState
                                                          : SummaryPart::kTransition;
  launch_dependents();
  wait_for_previous();
  Segment segment;
  if (!find_segment(args.segments, place_index, segment)) return;
  const int64_t unit_index = static_cast<int64_t>(place_index) * heads + head;
  const bool wants_state = !segment.is_last;
  const bool wants_gradient = !segment.is_first;
  LookBack behind = {};
  LookBack ahead = {};
  if (wants_state && part != SummaryPart::kGradient) behind = look_back_from_end(args, segment, head);
  if (wants_gradient && part != SummaryPart::kState) ahead = look_ahead_from_start(args, segment, head);
  const bool state_known = is_known(behind);
  const bool gradient_known = is_known(ahead);
  // What is known the scans find for themselves; the merge needs it if what it makes of it is not known.
  Segment next;
  switch (part) {
    case SummaryPart::kGradient:
      if (!wants_gradient) return;
      if (slice == 0 && threadIdx.x == 0) args.gradient_known[unit_index] = gradient_known ? 1 : 0;
      if (!gradient_known) break;
      find_segment(args.segments, place_index - 1, next);
      if (next.is_first || is_known(look_ahead_from_start(args, next, head))) return;
      break;
    case SummaryPart::kState:
      if (!wants_state) return;
      if (slice == args.value_tiles && threadIdx.x == 0) args.state_known[unit_index] = state_known ? 1 : 0;
      if (!state_known) break;
      find_segment(args.segments, place_index + 1, next);
      if (next.is_last || is_known(look_back_from_end(args, next, head))) return;
      break;
    default:
      if (!wants_state || !wants_gradient || (state_known && gradient_known)) return;
  }
  if (threadIdx.x == 0) {
    const int tile = slice - static_cast<int>(part) * args.value_tiles;
    set_unit(unit, args, segment, head, tile);
    if (part == SummaryPart::kTransition) {
      unit.is_transition = true;
      unit.leaves = dense_state_arg(args.transitions, unit_index, kKeyDim, kKeyDim);
    } else if (part == SummaryPart::kState) {
      unit.leaves = dense_state_arg(args.states, unit_index, args.value_dim(), kKeyDim);
      if (state_known) reach_back(unit, args, segment, behind);
    } else {
      unit.leaves = dense_state_arg(args.state_gradients, unit_index, args.value_dim(), kKeyDim);
      if (gradient_known) reach_ahead(unit, args, segment, ahead);
    }
  }
  if (part == SummaryPart::kGradient) {
    run_scan<T, kKeyDim, ScanKind::kSummary, true>(args, unit, shared_address(summary_shared));
  } else {
    run_scan<T, kKeyDim, ScanKind::kSummary, false>(args, unit, shared_address(summary_shared));
  }
}

}  // namespace cula::gdn::sm90
