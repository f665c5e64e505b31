// The token recurrence itself, in fp32. A warp owns kValues value columns of one head's state; lane l holds the keys
// l, l + 32, ... of each.
#pragma once

#include "common/device/launch.cuh"
#include "gdn/cuda/collective/gate.cuh"
#include "gdn/gdn.h"

namespace cula::gdn::cuda {

inline constexpr int kRecurrentThreads = 128;
inline constexpr int kRecurrentValues = 4;

struct RecurrentArgs {
  SequenceTable sequences;
  int64_t value_heads;
  int64_t group;
  int key_dim;
  int value_dim;
  int64_t value_blocks;
  float scale;
  bool l2norm;
  TensorArg q;
  TensorArg k;
  TensorArg v;
  GateArgs gates;
  TensorArg initial_state;
  TensorArg final_state;
  TensorArg o;
  StateSlots initial_slots;
  StateSlots final_slots;
  CheckpointArgs checkpoints;
};

template <int kKeyDim>
__global__ void __launch_bounds__(kRecurrentThreads, 3) recurrent_kernel(const RecurrentArgs args) {
  constexpr int kPerLane = kKeyDim / 32;
  const int lane = lane_id();
  const int64_t unit = blockIdx.x / args.value_blocks;
  const int64_t block = blockIdx.x - unit * args.value_blocks;
  const int64_t sequence_index = unit / args.value_heads;
  const int64_t head = unit - sequence_index * args.value_heads;
  const int64_t key_head = head / args.group;
  const Sequence sequence = find_sequence(args.sequences, sequence_index);
  const int first = static_cast<int>(block * (kRecurrentThreads / 32) + warp_id()) * kRecurrentValues;
  if (first >= args.value_dim) return;

  float s[kRecurrentValues][kPerLane];
  const TensorArg& h0 = args.initial_state;
  const int64_t slot = h0 ? args.initial_slots.of(sequence_index) : -1;
#pragma unroll
  for (int j = 0; j < kRecurrentValues; ++j) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int key = 32 * i + lane;
      const bool valid = slot >= 0 && key < args.key_dim && first + j < args.value_dim;
      s[j][i] =
          valid ? h0.load(slot * h0.stride[0] + head * h0.stride[1] + key * h0.stride[2] + (first + j) * h0.stride[3])
                : 0.0f;
    }
  }
  const auto store_state = [&](const TensorArg& x, int64_t row) {
    if (row < 0) return;
    const int64_t at = row * x.stride[0] + head * x.stride[1];
#pragma unroll
    for (int j = 0; j < kRecurrentValues; ++j) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int key = 32 * i + lane;
        if (key < args.key_dim && first + j < args.value_dim) {
          x.store(at + key * x.stride[2] + (first + j) * x.stride[3], s[j][i]);
        }
      }
    }
  };
  int64_t to_checkpoint = args.checkpoints.every;  // tokens
  const GateArgs& gates = args.gates;
  for (int64_t token = sequence.begin; token < sequence.begin + sequence.length; ++token) {
    float q[kPerLane];
    float k[kPerLane];
    float sums[3] = {0.0f, 0.0f, 0.0f};  // q q, k k, q k
    const int64_t q_at = args.q.offset(sequence.batch, token, key_head);
    const int64_t k_at = args.k.offset(sequence.batch, token, key_head);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int key = 32 * i + lane;
      const bool valid = key < args.key_dim;
      q[i] = valid ? args.q.load(q_at + key * args.q.stride[3]) : 0.0f;
      k[i] = valid ? args.k.load(k_at + key * args.k.stride[3]) : 0.0f;
      sums[0] += q[i] * q[i];
      sums[1] += k[i] * k[i];
    }
    if (args.l2norm) {
      const float q_rstd = 1.0f / sqrtf(warp_sum(sums[0]) + static_cast<float>(kL2NormEpsilon));
      const float k_rstd = 1.0f / sqrtf(warp_sum(sums[1]) + static_cast<float>(kL2NormEpsilon));
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        q[i] *= q_rstd;
        k[i] *= k_rstd;
      }
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) sums[2] += q[i] * k[i];
    const float qk = warp_sum(sums[2]);

    double gate = load_double(gates.g.data, gates.g.dtype, gates.g.offset(sequence.batch, token, head));
    if (gates.A_log) {
      const double a_log = load_double(gates.A_log.data, gates.A_log.dtype, head * gates.A_log.stride[0]);
      const double bias =
          gates.dt_bias ? load_double(gates.dt_bias.data, gates.dt_bias.dtype, head * gates.dt_bias.stride[0]) : 0.0;
      gate = gate_value(gate, a_log, bias);
    }
    // A reset clears the state whatever it holds.
    const bool reset = gate == -INFINITY;
    const float decay = reset ? 0.0f : expf(static_cast<float>(gate));
    float beta = gates.beta.load(gates.beta.offset(sequence.batch, token, head));
    if (gates.beta_sigmoid) beta = gates.beta_scale * sigmoid(beta);

#pragma unroll
    for (int j = 0; j < kRecurrentValues; ++j) {
      float sk = 0.0f;
      float sq = 0.0f;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        s[j][i] = reset ? 0.0f : s[j][i] * decay;
        sk += s[j][i] * k[i];
        sq += s[j][i] * q[i];
      }
      sk = warp_sum(sk);
      sq = warp_sum(sq);
      const bool valid = first + j < args.value_dim;
      const float v =
          valid ? args.v.load(args.v.offset(sequence.batch, token, head) + (first + j) * args.v.stride[3]) : 0.0f;
      const float r = beta * (v - sk);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) s[j][i] += k[i] * r;
      if (valid && lane == 0) {
        args.o.store(args.o.offset(sequence.batch, token, head) + (first + j) * args.o.stride[3],
                     args.scale * (sq + r * qk));
      }
    }
    if (--to_checkpoint == 0) {
      to_checkpoint = args.checkpoints.every;
      const CheckpointArgs& checkpoints = args.checkpoints;
      store_state(checkpoints.states, checkpoints.row(args.sequences, sequence_index, token + 1 - sequence.begin));
    }
  }
  if (args.final_state) store_state(args.final_state, args.final_slots.of(sequence_index));
}

}  // namespace cula::gdn::cuda
