// The state map of one whole sequence for context parallelism, (S_ext | M), or that of the state's gradient, (dS_ext |
// dM). The chunks are gone through from the last one that forgets what was before it; M is zero then. M has products of
// twice an operand's bits.
//
// Before it the factors of the chunks. They tell what is forgotten, and where gates forget, few of them are needed:
// those of the kNearChunks at the end that is asked for come first, and the others only for heads that still remember.
#pragma once

#include "gdn/sm90/collective/scan_transition.cuh"
#include "gdn/sm90/kernel/backward_scan.cuh"
#include "gdn/sm90/kernel/factors.cuh"

namespace cula::gdn::sm90 {

inline constexpr int kNearChunks = 64;

struct SequenceSummaryArgs {
  ScanArgs scan;       // of the only sequence of its table, whole; of the results none
  FactorArgs factors;  // of the same
  int batch;           // row of the sequence
  TensorArg summary;   // S_ext or dS_ext
  TensorArg map;       // M or dM
  TensorArg known;     // the adjoint's: M, whose transpose is dM; it may lack
};

// How far the state at the sequence's end looks back, or its gradient at the start looks ahead: kNearChunks at most, or
// without a limit. All lanes of the warp must call.
template <bool kAdjoint>
__device__ __forceinline__ LookBack look_from_end(const SequenceSummaryArgs& args, const Sequence& sequence, int head,
                                                  int limit) {
  const int64_t heads = args.scan.value_heads;
  const int64_t chunks = (sequence.length + kRows - 1) / kRows;
  const int64_t slot = sequence.first_slot + (kAdjoint ? 0 : chunks - 1);
  return look_back(args.scan.factors + slot * heads + head, kAdjoint ? -heads : heads, chunks, limit);
}

// One warp a (chunk, value head), chunks counted from the end that is asked for. kNear: the first kNearChunks;
// otherwise the ones behind those.
template <bool kAdjoint, bool kNear>
__global__ void __launch_bounds__(32 * kFactorWarps, 4)
    sequence_factors_kernel(const __grid_constant__ SequenceSummaryArgs args) {
  __shared__ ChunkFactors factors[kFactorWarps];
  launch_dependents();
  if constexpr (!kNear) wait_for_previous();
  const int64_t heads = args.scan.value_heads;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kFactorWarps + warp_id();
  const int64_t step = item / heads + (kNear ? 0 : kNearChunks);
  const int head = static_cast<int>(item % heads);
  const Sequence sequence = find_sequence(args.factors.sequences, 0);
  const int64_t chunks = (sequence.length + kRows - 1) / kRows;
  if (step >= chunks || (kNear && step >= kNearChunks)) return;
  if (!kNear && look_from_end<kAdjoint>(args, sequence, head, kNearChunks).forgets) return;
  Chunk chunk;
  chunk.sequence = 0;
  chunk.batch = sequence.batch;
  chunk.index = kAdjoint ? step : chunks - 1 - step;
  chunk.token = sequence.begin + chunk.index * kRows;
  const int64_t left = sequence.length - chunk.index * kRows;
  chunk.length = static_cast<int>(left < kRows ? left : kRows);
  store_factors(args.factors, chunk, sequence.first_slot + chunk.index, head, factors[warp_id()]);
}

// dM = M^T, 64 columns of it.
__device__ __forceinline__ void transpose_columns(const SequenceSummaryArgs& args, int key_dim, int head, int tile) {
  const TensorArg& from = args.known;
  const TensorArg& to = args.map;
  for (int i = static_cast<int>(threadIdx.x); i < kRows * key_dim; i += kScanThreads) {
    const int column = 64 * tile + i / key_dim;
    const int row = i % key_dim;
    to.store(head * to.stride[1] + row * to.stride[2] + column * to.stride[3],
             from.load(head * from.stride[1] + column * from.stride[2] + row * from.stride[3]));
  }
}

// Blocks: 64-wide slices of [M | S_ext], M first since its products are twice as many; value heads, these fastest.
template <class T, int kKeyDim, bool kAdjoint>
__global__ void __launch_bounds__(kScanThreads, 1)
    sequence_summary_kernel(const __grid_constant__ SequenceSummaryArgs args) {
  constexpr int kKeyTiles = kKeyDim / 64;
  unsigned char* sequence_shared = swizzled_shared_memory();
  ScanUnit& unit = reinterpret_cast<ScanMemory<kKeyDim>*>(sequence_shared)->unit;
  const int heads = static_cast<int>(args.scan.value_heads);
  const int slice = static_cast<int>(blockIdx.x) / heads;
  const int head = static_cast<int>(blockIdx.x) - slice * heads;
  const bool of_map = slice < kKeyTiles;
  launch_dependents();
  wait_for_previous();
  if (kAdjoint && of_map && args.known) return transpose_columns(args, kKeyDim, head, slice);

  Segment segment;
  if (!find_segment(args.scan.segments, 0, segment)) return;
  const Sequence sequence = find_sequence(args.scan.segments.sequences, 0);
  const LookBack back = look_from_end<kAdjoint>(args, sequence, head, segment.num_chunks);
  if (threadIdx.x == 0) {
    set_unit(unit, args.scan, segment, head, of_map ? slice : slice - kKeyTiles);
    unit.batch += args.batch;
    unit.leaves = of_map ? args.map : args.summary;
    if (of_map) {
      unit.is_transition = !back.forgets;
      if (back.forgets) unit.num_chunks = 0;
    } else if (!back.forgets) {
      unit.enters = kAdjoint ? args.scan.grad_final_state : args.scan.initial_state;
    } else if (kAdjoint) {
      if (back.chunks < unit.num_chunks) unit.tail_length = kRows;
      unit.num_chunks = back.chunks;
    } else {
      unit.token += (unit.num_chunks - back.chunks) * kRows;
      unit.slot += unit.num_chunks - back.chunks;
      unit.num_chunks = back.chunks;
    }
  }
  if (of_map) {
    run_pass<T, kKeyDim, false, TransitionConsumer<T, kKeyDim>>(args.scan, unit, shared_address(sequence_shared));
  } else {
    run_scan<T, kKeyDim, ScanKind::kSummary, kAdjoint>(args.scan, unit, shared_address(sequence_shared));
  }
}

}  // namespace cula::gdn::sm90
