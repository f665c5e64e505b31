// The gates of one chunk and value head: what decays by how much, and beta.
#pragma once

#include "gdn/cuda/collective/arguments.cuh"

namespace cula::gdn::cuda {

inline constexpr double kLog2E = 1.4426950408889634;

// softplus without loss at either end.
__device__ __forceinline__ double softplus(double z) { return (z > 0 ? z : 0.0) + log1p(exp(z > 0 ? -z : z)); }
__device__ __forceinline__ double sigmoid(double z) {
  const double e = exp(z > 0 ? -z : z);
  return (z > 0 ? 1.0 : e) / (1.0 + e);
}
__device__ __forceinline__ float sigmoid(float z) {
  const float e = expf(z > 0 ? -z : z);
  return (z > 0 ? 1.0f : e) / (1.0f + e);
}

// Natural-log decay of one token. In double: exp(A_log) may pass fp32's range while softplus underflows.
__device__ __forceinline__ double gate_value(double raw, double a_log, double bias) {
  return -exp(a_log) * softplus(raw + bias);
}

// exp(gate) is zero even in double. Such a gate may be anything down to the lowest number of its type, as masks are
// written: added to a running sum it would swallow the gates behind it.
__device__ __forceinline__ bool decays_to_nothing(double log_gate) { return log_gate < -746.0; }

struct GateArgs {
  TensorArg g;        // [B, T, HV]: gamma (log2 units), the log decay, or with A_log the raw gate; null: none
  TensorArg A_log;    // [HV]
  TensorArg dt_bias;  // [HV]
  TensorArg beta;     // [B, T, HV]; null: ones
  bool beta_sigmoid = false;
  float beta_scale = 1.0f;
};

// The running sum at one row, and how many resets lie at or before it.
struct GateRow {
  float high;
  float low;
  int segment;

  // The decay from behind an earlier row through this one. Whatever a later row gives is not to be used.
  __device__ float since(const GateRow& earlier) const {
    const float decay = exp2_approx((high - earlier.high) + (low - earlier.low));
    return segment == earlier.segment ? decay : 0.0f;
  }
};

struct alignas(16) GateRows {
  // The running sum in log2 units as high + low: differences of large sums stay exact. It restarts, at 0, in a row
  // whose gate leaves nothing; `segment` counts those rows. Rows past the chunk have segment -1 and factors of 0.
  float high[kRows];
  float low[kRows];
  int segment[kRows];
  float decay[kRows];   // from the start of the chunk through this row
  float to_end[kRows];  // from behind this row to the end of the chunk
  float beta[kRows];
  float chunk_decay;
  int last_segment;

  __device__ GateRow row(int i) const { return {high[i], low[i], segment[i]}; }
  // From behind row j through row i >= j.
  __device__ float between(int i, int j) const { return row(i).since(row(j)); }
};

// Lane l brings the terms of rows 2 l and 2 l + 1 and gets their running sums, which restart at 0 in rows with `reset`.
__device__ __forceinline__ void restart_sums(double (&sum)[2], const bool (&reset)[2]) {
  const int lane = lane_id();
  const double pair = sum[0] + sum[1];
  const double before = warp_inclusive_scan(pair) - pair;
  sum[0] += before;
  sum[1] += sum[0];
  const unsigned even = ballot(reset[0]);
  const unsigned odd = ballot(reset[1]);
  if ((even | odd) == 0) return;
  double base[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const unsigned through_even = (2u << lane) - 1;
    const unsigned through_odd = r == 0 ? (1u << lane) - 1 : through_even;
    const int last_even = 31 - __clz(static_cast<int>(even & through_even));
    const int last_odd = 31 - __clz(static_cast<int>(odd & through_odd));
    const double at_even = shuffle(sum[0], last_even < 0 ? 0 : last_even);
    const double at_odd = shuffle(sum[1], last_odd < 0 ? 0 : last_odd);
    const bool even_is_last = 2 * last_even > 2 * last_odd + 1;
    base[r] = last_even < 0 && last_odd < 0 ? 0.0 : (even_is_last ? at_even : at_odd);
  }
  sum[0] -= base[0];
  sum[1] -= base[1];
}

// What `g` of the gates is: the operator's gate (log decay, or raw with A_log), or the stages' gamma.
enum class GateKind { kLogDecay, kGamma };

// By one whole warp; the caller puts a barrier behind it.
template <GateKind kKind>
__device__ __forceinline__ void load_gates(GateRows& rows, const GateArgs& args, int64_t batch, int64_t token,
                                           int length, int64_t head) {
  const int lane = lane_id();
  double sum[2] = {0.0, 0.0};
  bool reset[2] = {false, false};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = 2 * lane + r;
    const bool valid = row < length;
    float beta = 0.0f;
    double gate = 0.0;
    if (valid) {
      beta = 1.0f;
      if (args.beta) {
        beta = args.beta.load(args.beta.offset(batch, token + row, head));
        if (args.beta_sigmoid) beta = args.beta_scale * sigmoid(beta);
      }
      if (args.g) {
        gate = load_double(args.g.data, args.g.dtype, args.g.offset(batch, token + row, head));
        if constexpr (kKind == GateKind::kLogDecay) {
          if (args.A_log) {
            const double a_log = load_double(args.A_log.data, args.A_log.dtype, head * args.A_log.stride[0]);
            const double bias =
                args.dt_bias ? load_double(args.dt_bias.data, args.dt_bias.dtype, head * args.dt_bias.stride[0]) : 0.0;
            gate = gate_value(gate, a_log, bias);
          }
        }
      }
    }
    rows.beta[row] = beta;
    reset[r] = kKind == GateKind::kLogDecay ? decays_to_nothing(gate) : gate == -INFINITY;
    if (reset[r]) gate = 0.0;
    if constexpr (kKind == GateKind::kLogDecay) gate *= kLog2E;
    sum[r] = gate;
  }
  const unsigned even = ballot(reset[0]);
  const unsigned odd = ballot(reset[1]);
  if constexpr (kKind == GateKind::kLogDecay) restart_sums(sum, reset);
  int segment[2];
  segment[0] = __popc(even & ((2u << lane) - 1)) + __popc(odd & ((1u << lane) - 1));
  segment[1] = segment[0] + (reset[1] ? 1 : 0);
  const int last = length - 1;
  const double last_even = shuffle(sum[0], last >> 1);
  const double last_odd = shuffle(sum[1], last >> 1);
  const double end = (last & 1) != 0 ? last_odd : last_even;
  const int segment_even = shuffle(segment[0], last >> 1);
  const int segment_odd = shuffle(segment[1], last >> 1);
  const int end_segment = (last & 1) != 0 ? segment_odd : segment_even;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = 2 * lane + r;
    const bool valid = row < length;
    const float high = static_cast<float>(sum[r]);
    rows.high[row] = valid ? high : 0.0f;
    rows.low[row] = valid ? static_cast<float>(sum[r] - high) : 0.0f;
    rows.segment[row] = valid ? segment[r] : -1;
    rows.decay[row] = valid && segment[r] == 0 ? exp2f(high) * exp2f(static_cast<float>(sum[r] - high)) : 0.0f;
    rows.to_end[row] = valid && segment[r] == end_segment ? exp2f(static_cast<float>(end - sum[r])) : 0.0f;
  }
  if (lane == 0) {
    const float high = static_cast<float>(end);
    rows.chunk_decay = end_segment == 0 ? exp2f(high) * exp2f(static_cast<float>(end - high)) : 0.0f;
    rows.last_segment = end_segment;
  }
}

// Factors of a chunk's rows for the passes over the chunks: decay, to_end and beta at target, `stride` apart. By one
// whole warp, behind a barrier.
__device__ __forceinline__ void store_factors(const GateRows& gates, float* target, int64_t stride, int length) {
  for (int row = lane_id(); row < length; row += 32) {
    target[row] = gates.decay[row];
    target[stride + row] = gates.to_end[row];
    target[2 * stride + row] = gates.beta[row];
  }
}

}  // namespace cula::gdn::cuda
