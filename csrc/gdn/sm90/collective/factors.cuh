// What the gates of a chunk do to its rows: made once a (chunk, value head) by the prepare kernel, read by the forward.
#pragma once

#include "common/device/tma.cuh"
#include "gdn/cuda/collective/gate.cuh"

namespace cula::gdn::sm90 {

using namespace cula::device;
using cuda::CheckpointArgs;
using cuda::Chunk;
using cuda::GateArgs;
using cuda::kRows;
using cuda::Sequence;
using cuda::SequenceTable;
using cuda::StateSlots;
using cuda::TensorArg;
using ChunkFinder = cuda::ChunkFinder<kRows>;

__device__ __forceinline__ Sequence find_sequence(const SequenceTable& table, int64_t n) {
  return cuda::find_sequence<kRows>(table, n);
}
__device__ __forceinline__ bool find_chunk(const SequenceTable& table, int64_t slot, Chunk& chunk) {
  return cuda::find_chunk<kRows>(table, slot, chunk);
}

// Rows past the chunk's length have beta, decays and to_end of 0, so that whatever finite numbers stand there count for
// nothing. A gate below kReset decays to 0 in fp32, as -inf does: the running sum restarts in its row.
struct alignas(16) ChunkFactors {
  float gamma[kRows];       // running sum of the gates, log2 units
  float beta[kRows];        //
  float beta_decay[kRows];  // beta x decay from the start of the chunk through this row
  float out_decay[kRows];   // scale x decay
  float to_end[kRows];      // decay from behind this row to the end of the chunk
  uint8_t first[kRows];     // the first row that still reaches this one: the last restart at or before it
  float chunk_decay;        // decay over the chunk
  float log2_norm;          // the chunk's transition of the state has at most the norm 2^log2_norm
  int first_restart;        // rows from this one on know nothing of the state that enters; 64: none
  float unused;
};
static_assert(sizeof(ChunkFactors) % 16 == 0);  // for bulk copies

inline constexpr double kReset = -150.0;  // 2^-150 rounds to 0

// The gates of rows 2 lane and 2 lane + 1 as they lie in memory.
struct RawGates {
  uint2 g[2];
  uint2 beta[2];
};

__device__ __forceinline__ RawGates load_gates(const GateArgs& args, const Chunk& chunk, int64_t head) {
  RawGates raw = {};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = 2 * lane_id() + r;
    if (row < chunk.length) {
      raw.g[r] = load_bits(args.g.data, args.g.dtype, args.g.offset(chunk.batch, chunk.token + row, head));
      raw.beta[r] = load_bits(args.beta.data, args.beta.dtype, args.beta.offset(chunk.batch, chunk.token + row, head));
    }
  }
  return raw;
}

// Brings the line of x that holds a row of a chunk to the L2 cache.
__device__ __forceinline__ void prefetch_gate(const TensorArg& x, const Chunk& chunk, int row, int64_t head) {
  if (row >= chunk.length) return;
  const int bytes = x.dtype == DType::kFloat64 ? 8 : (x.dtype == DType::kFloat32 ? 4 : 2);
  prefetch_line(static_cast<const unsigned char*>(x.data) + bytes * x.offset(chunk.batch, chunk.token + row, head));
}

// The gates of rows 2 lane and 2 lane + 1, summed up.
struct GateSums {
  double sum[2];  // from the start of the chunk or the last restart through this row, log2 units
  bool reset[2];  // the sum restarts in this row, at 0
  float beta[2];
};

// By one whole warp. Everything but log2_norm.
__device__ __forceinline__ void finish_factors(ChunkFactors& f, const GateSums& rows, const Chunk& chunk, float scale) {
  const int lane = lane_id();
  const unsigned even = ballot(rows.reset[0]);
  const unsigned odd = ballot(rows.reset[1]);
  int first[2];
  bool parted[2];  // from the state that enters the chunk
  {
    const int last_even = 2 * (31 - __clz(static_cast<int>(even & ((2u << lane) - 1))));
    const int last_odd = 2 * (31 - __clz(static_cast<int>(odd & ((1u << lane) - 1)))) + 1;
    parted[0] = last_even >= 0 || last_odd >= 0;
    parted[1] = parted[0] || rows.reset[1];
    first[0] = max(max(last_even, last_odd), 0);
    first[1] = rows.reset[1] ? 2 * lane + 1 : first[0];
  }
  const int last = chunk.length - 1;
  const double end_even = shuffle(rows.sum[0], last >> 1);
  const double end_odd = shuffle(rows.sum[1], last >> 1);
  const double end = (last & 1) != 0 ? end_odd : end_even;
  const int first_even = shuffle(first[0], last >> 1);
  const int first_odd = shuffle(first[1], last >> 1);
  const int end_first = (last & 1) != 0 ? first_odd : first_even;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = 2 * lane + r;
    const bool valid = row < chunk.length;
    const float decay = valid && !parted[r] ? exp2f(static_cast<float>(rows.sum[r])) : 0.0f;
    f.gamma[row] = static_cast<float>(valid ? rows.sum[r] : end);
    f.beta[row] = rows.beta[r];
    f.beta_decay[row] = rows.beta[r] * decay;
    f.out_decay[row] = scale * decay;
    f.to_end[row] = valid && row >= end_first ? exp2f(static_cast<float>(end - rows.sum[r])) : 0.0f;
    f.first[row] = static_cast<uint8_t>(valid ? first[r] : end_first);
  }
  const bool whole = (even | odd) == 0;
  if (lane == 0) {
    f.chunk_decay = whole ? exp2f(static_cast<float>(end)) : 0.0f;
    const int first_even_restart = even != 0 ? 2 * (__ffs(static_cast<int>(even)) - 1) : kRows;
    const int first_odd_restart = odd != 0 ? 2 * (__ffs(static_cast<int>(odd)) - 1) + 1 : kRows;
    f.first_restart = min(first_even_restart, first_odd_restart);
  }
}

// log2 of a bound on the norm of the chunk's transition: each step I - beta k k^T has the norm max(1, |1 - beta
// |k|^2|). squares: |k|^2 of rows 2 lane and 2 lane + 1. By one whole warp, which sees what make_factors wrote.
__device__ __forceinline__ float transition_log2_norm(const ChunkFactors& f, const float (&squares)[2]) {
  float norm = 1.0f;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float step = fabsf(1.0f - f.beta[2 * lane_id() + r] * squares[r]);
    norm *= step <= 1.0f ? 1.0f : step;  // NaN stays: such a chunk forgets nothing
  }
  return warp_sum(log2f(norm)) + (f.chunk_decay == 0.0f ? -INFINITY : f.gamma[kRows - 1]);
}

// By one whole warp. Everything but log2_norm.
__device__ __forceinline__ void make_factors(ChunkFactors& f, const RawGates& raw, const GateArgs& args,
                                             const Chunk& chunk, int64_t head, float scale) {
  const int lane = lane_id();
  GateSums rows;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = 2 * lane + r;
    double gate = 0.0;
    rows.beta[r] = 0.0f;
    if (row < chunk.length) {
      rows.beta[r] = static_cast<float>(bits_to_double(raw.beta[r], args.beta.dtype));
      if (args.beta_sigmoid) rows.beta[r] = args.beta_scale * cuda::sigmoid(rows.beta[r]);
      gate = bits_to_double(raw.g[r], args.g.dtype);
      if (args.A_log) {
        const double a_log = load_double(args.A_log.data, args.A_log.dtype, head * args.A_log.stride[0]);
        const double bias =
            args.dt_bias ? load_double(args.dt_bias.data, args.dt_bias.dtype, head * args.dt_bias.stride[0]) : 0.0;
        gate = cuda::gate_value(gate, a_log, bias);
      }
      gate *= cuda::kLog2E;
    }
    rows.reset[r] = gate <= kReset;
    rows.sum[r] = rows.reset[r] ? 0.0 : gate;
  }
  cuda::restart_sums(rows.sum, rows.reset);
  finish_factors(f, rows, chunk, scale);
}

// As the stages get their gates: g is the running sum itself, -inf in rows where it restarts; both are optional.
__device__ __forceinline__ void make_stage_factors(ChunkFactors& f, const GateArgs& args, const Chunk& chunk,
                                                   int64_t head, float scale) {
  GateSums rows;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = 2 * lane_id() + r;
    const bool valid = row < chunk.length;
    double sum = 0.0;
    rows.beta[r] = valid ? 1.0f : 0.0f;
    if (valid && args.g) {
      sum = load_double(args.g.data, args.g.dtype, args.g.offset(chunk.batch, chunk.token + row, head));
    }
    if (valid && args.beta) rows.beta[r] = args.beta.load(args.beta.offset(chunk.batch, chunk.token + row, head));
    rows.reset[r] = sum == -INFINITY;
    rows.sum[r] = rows.reset[r] ? 0.0 : sum;
  }
  finish_factors(f, rows, chunk, scale);
}

}  // namespace cula::gdn::sm90
