// Kernels over tokens, rows and single elements.
#pragma once

#include "common/device/launch.cuh"
#include "gdn/cuda/collective/gate.cuh"
#include "gdn/gdn.h"

namespace cula::gdn::cuda {

inline constexpr int kElementThreads = 256;

struct L2NormArgs {
  RowsArg x;     // forward: input; backward: dy
  RowsArg y;     // forward: output; backward: the normalised input
  RowsArg rstd;  // rows of one element
  RowsArg dx;
  int64_t rows;
  int columns;
  // Packed: rows of tokens behind the last sequence have no gradient yet, and get zeros later; `heads` rows a token.
  SequenceTable sequences;
  int64_t heads;
};

// One warp a row; a lane keeps up to kMaxPerLane elements, so that the row is read once.
inline constexpr int kMaxPerLane = 8;

template <bool kBackward>
__global__ void __launch_bounds__(kElementThreads) l2norm_kernel(const L2NormArgs args) {
  const int64_t row = blockIdx.x * static_cast<int64_t>(kElementThreads / 32) + warp_id();
  if (row >= args.rows) return;
  if (kBackward && args.sequences.offsets != nullptr &&
      row >= args.sequences.boundary(args.sequences.num_sequences) * args.heads) {
    return;
  }
  const int64_t x_at = args.x.offset(row);
  const int64_t y_at = args.y.offset(row);
  const int64_t rstd_at = args.rstd.offset(row);
  float x[kMaxPerLane];
  [[maybe_unused]] float y[kMaxPerLane];
  // Of squares in double: they may pass fp32's range where their root does not.
  std::conditional_t<kBackward, float, double> sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kMaxPerLane; ++i) {
    const int column = i * 32 + lane_id();
    const bool valid = column < args.columns;
    x[i] = valid ? load_float(args.x.data, args.x.dtype, x_at + column * args.x.last_stride) : 0.0f;
    if constexpr (kBackward) {
      y[i] = valid ? load_float(args.y.data, args.y.dtype, y_at + column * args.y.last_stride) : 0.0f;
      sum += x[i] * y[i];
    } else {
      sum += static_cast<double>(x[i]) * x[i];
    }
  }
  // Rows longer than the kept part.
  for (int column = kMaxPerLane * 32 + lane_id(); column < args.columns; column += 32) {
    const float value = load_float(args.x.data, args.x.dtype, x_at + column * args.x.last_stride);
    if constexpr (kBackward) {
      sum += value * load_float(args.y.data, args.y.dtype, y_at + column * args.y.last_stride);
    } else {
      sum += static_cast<double>(value) * value;
    }
  }
  sum = warp_sum(sum);
  const float rstd = kBackward ? load_float(args.rstd.data, args.rstd.dtype, rstd_at)
                               : static_cast<float>(1.0 / sqrt(sum + kL2NormEpsilon));
  if (!kBackward && lane_id() == 0 && args.rstd.data != nullptr) {
    store_float(args.rstd.data, args.rstd.dtype, rstd_at, rstd);
  }
  const int64_t out_at = kBackward ? args.dx.offset(row) : y_at;
  const RowsArg& out = kBackward ? args.dx : args.y;
#pragma unroll
  for (int i = 0; i < kMaxPerLane; ++i) {
    const int column = i * 32 + lane_id();
    if (column < args.columns) {
      float value = x[i] * rstd;
      if constexpr (kBackward) value = rstd * (x[i] - y[i] * sum);
      store_float(out.data, out.dtype, out_at + column * out.last_stride, value);
    }
  }
  for (int column = kMaxPerLane * 32 + lane_id(); column < args.columns; column += 32) {
    const float value = load_float(args.x.data, args.x.dtype, x_at + column * args.x.last_stride);
    float result = value * rstd;
    if constexpr (kBackward) {
      result = rstd * (value - load_float(args.y.data, args.y.dtype, y_at + column * args.y.last_stride) * sum);
    }
    store_float(out.data, out.dtype, out_at + column * out.last_stride, result);
  }
}

struct SigmoidArgs {
  RowsArg x;
  RowsArg dy;
  RowsArg out;
  int64_t elements;
  int64_t columns;
  float scale;
};

template <bool kBackward>
__global__ void __launch_bounds__(kElementThreads) sigmoid_kernel(const SigmoidArgs args) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(kElementThreads) + threadIdx.x;
  if (i >= args.elements) return;
  const int64_t row = i / args.columns;
  const int64_t column = i - row * args.columns;
  const float s = sigmoid(load_float(args.x.data, args.x.dtype, args.x.offset(row) + column * args.x.last_stride));
  float value = args.scale * s;
  if constexpr (kBackward) {
    value *= (1.0f - s) * load_float(args.dy.data, args.dy.dtype, args.dy.offset(row) + column * args.dy.last_stride);
  }
  store_float(args.out.data, args.out.dtype, args.out.offset(row) + column * args.out.last_stride, value);
}

struct GateTokenArgs {
  GateArgs gates;
  TensorArg out;
  int64_t batch;
  int64_t tokens;
  int64_t heads;
};

// The log decay of each token.
static __global__ void __launch_bounds__(kElementThreads) gate_kernel(const GateTokenArgs args) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(kElementThreads) + threadIdx.x;
  if (i >= args.batch * args.tokens * args.heads) return;
  const int64_t token = i / args.heads;
  const int64_t head = i - token * args.heads;
  const int64_t b = token / args.tokens;
  const int64_t t = token - b * args.tokens;
  const GateArgs& gates = args.gates;
  const double raw = load_double(gates.g.data, gates.g.dtype, gates.g.offset(b, t, head));
  const double a_log = load_double(gates.A_log.data, gates.A_log.dtype, head * gates.A_log.stride[0]);
  const double bias =
      gates.dt_bias ? load_double(gates.dt_bias.data, gates.dt_bias.dtype, head * gates.dt_bias.stride[0]) : 0.0;
  args.out.store(args.out.offset(b, t, head), static_cast<float>(gate_value(raw, a_log, bias)));
}

struct CumsumArgs {
  SequenceTable sequences;
  GateArgs gates;
  TensorArg out;
  int64_t heads;
  double scale;
  bool reverse;
};

// One warp a (chunk, head). A term of -inf stands alone and the sum restarts behind it.
static __global__ void __launch_bounds__(kElementThreads) cumsum_kernel(const CumsumArgs args) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(kElementThreads / 32) + warp_id();
  const int64_t slot = i / args.heads;
  const int64_t head = i - slot * args.heads;
  if (slot >= args.sequences.num_slots()) return;
  Chunk chunk;
  if (!find_chunk(args.sequences, slot, chunk)) return;
  const GateArgs& gates = args.gates;
  const int lane = lane_id();
  double sum[2];
  bool reset[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = 2 * lane + r;
    double gate = 0.0;
    if (row < chunk.length) {
      gate = load_double(gates.g.data, gates.g.dtype, gates.g.offset(chunk.batch, chunk.token + row, head));
      if (gates.A_log) {
        const double a_log = load_double(gates.A_log.data, gates.A_log.dtype, head * gates.A_log.stride[0]);
        const double bias =
            gates.dt_bias ? load_double(gates.dt_bias.data, gates.dt_bias.dtype, head * gates.dt_bias.stride[0]) : 0.0;
        gate = gate_value(gate, a_log, bias);
      }
    }
    reset[r] = gate == -INFINITY && !args.reverse;
    sum[r] = reset[r] ? 0.0 : gate;
  }
  if (args.reverse) {
    const double pair = sum[0] + sum[1];
    const double after = warp_reverse_inclusive_scan(pair) - pair;
    sum[1] += after;
    sum[0] += sum[1];
  } else {
    restart_sums(sum, reset);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = 2 * lane + r;
    if (row >= chunk.length) continue;
    const float value = reset[r] ? -INFINITY : static_cast<float>(sum[r] * args.scale);
    args.out.store(args.out.offset(chunk.batch, chunk.token + row, head), value);
  }
}

struct GateBackwardArgs {
  GateArgs gates;
  TensorArg dyg;
  TensorArg dg;
  TensorArg dA_log;
  TensorArg ddt_bias;
  int64_t batch;
  int64_t tokens;
  int64_t heads;
  int64_t parts = 1;       // of the tokens, a block each
  double* sums = nullptr;  // [parts, heads, 2]: by A_log and by dt_bias, if there are several parts
};

// One block a head and part, so that both sums over the tokens have a fixed order. Heads come first.
static __global__ void __launch_bounds__(kElementThreads) gate_backward_kernel(const GateBackwardArgs args) {
  const int64_t part = blockIdx.x / args.heads;
  const int64_t head = blockIdx.x - part * args.heads;
  const GateArgs& gates = args.gates;
  const double a_log = load_double(gates.A_log.data, gates.A_log.dtype, head * gates.A_log.stride[0]);
  const double bias =
      gates.dt_bias ? load_double(gates.dt_bias.data, gates.dt_bias.dtype, head * gates.dt_bias.stride[0]) : 0.0;
  const double rate = exp(a_log);
  double sum_a = 0.0;
  double sum_bias = 0.0;
  const int64_t count = args.batch * args.tokens;
  const int64_t begin = part * count / args.parts;
  const int64_t end = (part + 1) * count / args.parts;
  for (int64_t i = begin + threadIdx.x; i < end; i += kElementThreads) {
    const int64_t b = i / args.tokens;
    const int64_t t = i - b * args.tokens;
    const double dy = load_double(args.dyg.data, args.dyg.dtype, args.dyg.offset(b, t, head));
    const double z = load_double(gates.g.data, gates.g.dtype, gates.g.offset(b, t, head)) + bias;
    // Selected, not multiplied: rows of no consequence may hold anything.
    const double dz = dy == 0.0 ? 0.0 : -rate * sigmoid(z) * dy;
    sum_a += dy == 0.0 ? 0.0 : -rate * softplus(z) * dy;
    sum_bias += dz;
    if (args.dg) args.dg.store(args.dg.offset(b, t, head), static_cast<float>(dz));
  }
  double* sums = reinterpret_cast<double*>(dynamic_shared_memory());
  sum_a = warp_sum(sum_a);
  sum_bias = warp_sum(sum_bias);
  const int warp = warp_id();
  if (lane_id() == 0) {
    sums[2 * warp] = sum_a;
    sums[2 * warp + 1] = sum_bias;
  }
  sync_block();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kElementThreads / 32; ++w) {
      sums[0] += sums[2 * w];
      sums[1] += sums[2 * w + 1];
    }
    if (args.parts > 1) {
      args.sums[2 * blockIdx.x] = sums[0];
      args.sums[2 * blockIdx.x + 1] = sums[1];
      return;
    }
    if (args.dA_log) args.dA_log.store(head * args.dA_log.stride[0], static_cast<float>(sums[0]));
    if (args.ddt_bias) args.ddt_bias.store(head * args.ddt_bias.stride[0], static_cast<float>(sums[1]));
  }
}

// Adds the parts up; one warp a head.
static __global__ void __launch_bounds__(32) gate_sums_kernel(const GateBackwardArgs args) {
  const int64_t head = blockIdx.x;
  double sum_a = 0.0;
  double sum_bias = 0.0;
  for (int64_t part = lane_id(); part < args.parts; part += 32) {
    sum_a += args.sums[2 * (part * args.heads + head)];
    sum_bias += args.sums[2 * (part * args.heads + head) + 1];
  }
  sum_a = warp_sum(sum_a);
  sum_bias = warp_sum(sum_bias);
  if (lane_id() != 0) return;
  if (args.dA_log) args.dA_log.store(head * args.dA_log.stride[0], static_cast<float>(sum_a));
  if (args.ddt_bias) args.ddt_bias.store(head * args.ddt_bias.stride[0], static_cast<float>(sum_bias));
}

struct ZeroArgs {
  SequenceTable sequences;
  TensorArg x;  // [1, T, heads, columns]
  int64_t heads;
  int64_t columns;
};

// Rows behind the last sequence.
static __global__ void __launch_bounds__(kElementThreads) zero_padding_kernel(const ZeroArgs args) {
  const int64_t first = args.sequences.boundary(args.sequences.num_sequences);
  const int64_t count = (args.sequences.tokens - first) * args.heads * args.columns;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kElementThreads) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kElementThreads) {
    const int64_t row = i / args.columns;
    const int64_t token = row / args.heads;
    args.x.store(
        args.x.offset(0, first + token, row - token * args.heads) + (i - row * args.columns) * args.x.stride[3], 0.0f);
  }
}

}  // namespace cula::gdn::cuda
