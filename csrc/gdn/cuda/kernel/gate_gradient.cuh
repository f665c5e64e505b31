// dg and dbeta of one chunk and value head, out of the row sums of the other gradient kernels.
#pragma once

#include "common/device/launch.cuh"
#include "gdn/cuda/kernel/gradient_args.h"

namespace cula::gdn::cuda {

// One warp a (chunk, value head).
inline constexpr int kGateGradientThreads = 128;

template <int kWarps>
struct GateGradientShared {
  GateRows gates[kWarps];
};

// dg_t is the sum over s >= t of the gradients by the running sum at s, within what no reset parts.
static __global__ void __launch_bounds__(kGateGradientThreads) gate_gradient_kernel(const GradientArgs args) {
  auto& shared = *reinterpret_cast<GateGradientShared<kGateGradientThreads / 32>*>(dynamic_shared_memory());
  const int64_t value_heads = args.heads * args.group;
  const int64_t item = blockIdx.x * static_cast<int64_t>(kGateGradientThreads / 32) + warp_id();
  const int64_t slot = item / value_heads;
  const int64_t head = item - slot * value_heads;
  if (slot >= args.sequences.num_slots()) return;
  Chunk chunk;
  if (!find_chunk(args.sequences, slot, chunk)) return;
  GateRows& gates = shared.gates[warp_id()];
  load_gates<GateKind::kLogDecay>(gates, args.gates, chunk.batch, chunk.token, chunk.length, head);
  sync_warp();
  const int lane = lane_id();
  const int64_t at = head * args.sums.head_stride + chunk.batch * args.sequences.tokens + chunk.token;

  double by_sum[2];  // gradient by the running sum at rows 2 lane, 2 lane + 1
  double to_end = 0.0;
  float dbeta[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = 2 * lane + r;
    by_sum[r] = 0.0;
    dbeta[r] = 0.0f;
    if (row >= chunk.length) continue;
    by_sum[r] = args.sums.scores[at + row];
    dbeta[r] = args.sums.beta[at + row];
    double row_to_end = 0.0;
    for (int64_t b = 0; b < args.key_blocks; ++b) {
      by_sum[r] += args.sums.decay[at + row + b * args.sums.stride];
      row_to_end += args.sums.to_end[at + row + b * args.sums.stride];
      dbeta[r] -= args.sums.beta_state[at + row + b * args.sums.stride];
    }
    // The last row's own share cancels.
    if (row + 1 < chunk.length) {
      by_sum[r] -= row_to_end;
      to_end += row_to_end;
    }
  }
  to_end = warp_sum(to_end);
  double state = 0.0;
  for (int64_t b = 0; b < args.key_blocks; ++b) {
    state += args.sums.state[b * args.sums.state_stride + slot * value_heads + head];
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // A decay of zero ends what the state in front can do, whatever it holds.
    if (2 * lane + r == chunk.length - 1) {
      by_sum[r] += to_end + (gates.chunk_decay == 0.0f ? 0.0 : gates.chunk_decay * state);
    }
  }
  const double pair = by_sum[0] + by_sum[1];
  double sum[2];
  sum[1] = warp_reverse_inclusive_scan(pair) - pair + by_sum[1];
  sum[0] = sum[1] + by_sum[0];
  // Drop what lies behind the next reset: the sum at the first row of the next segment.
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = 2 * lane + r;
    const int segment = gates.segment[row];
    int next = row + 1;
    while (next < chunk.length && gates.segment[next] == segment) ++next;
    if (gates.last_segment == 0) next = chunk.length;
    const double even = shuffle(sum[0], next >> 1);
    const double odd = shuffle(sum[1], next >> 1);
    const double behind = next < chunk.length ? ((next & 1) != 0 ? odd : even) : 0.0;
    if (row >= chunk.length) continue;
    const bool reset = row == 0 ? segment != 0 : segment != gates.segment[row - 1];
    if (args.dg) {
      args.dg.store(args.dg.offset(chunk.batch, chunk.token + row, head),
                    reset ? 0.0f : static_cast<float>(sum[r] - behind));
    }
    if (args.dbeta) {
      float value = dbeta[r];
      if (args.gates.beta_sigmoid) {
        const float s = gates.beta[row] / args.gates.beta_scale;
        value *= gates.beta[row] * (1.0f - s);
      }
      args.dbeta.store(args.dbeta.offset(chunk.batch, chunk.token + row, head), value);
    }
  }
}

}  // namespace cula::gdn::cuda
