// Before the summary of a sequence: the factors of its rows, and how many of its chunks the summary needs. Where gates
// forget, what lies far enough from the end that is asked for counts for nothing in fp32.
#pragma once

#include "common/device/launch.cuh"
#include "gdn/cuda/collective/gate.cuh"

namespace cula::gdn::cuda {

// A state whose share in a later one is below 2^kForgottenShare of its norm counts for nothing there: unless its
// norm exceeds 4, fp32 has no normal number for that.
inline constexpr float kForgottenShare = -128.0f;

struct ReachArgs {
  SequenceTable sequences;  // one
  int64_t value_heads;
  int64_t group;
  int key_dim;
  TensorArg k;  // normalised, if the problem says so
  GateArgs gates;
  float* factors;         // [3][HV][T]
  int64_t factor_stride;  // HV T
  float* log2_norms;      // [slots, HV]: a chunk's transition of the state has at most the norm 2^log2_norm
  // Results, [HV] each: chunks that matter from the end (of the state) and from the start (of its gradient); 0: all of
  // them, and the state or gradient on their other side.
  int* from_end;
  int* from_start;
};

inline constexpr int kReachWarps = 4;

// One warp a (chunk, value head).
static __global__ void __launch_bounds__(32 * kReachWarps) summary_factors_kernel(const ReachArgs args) {
  __shared__ GateRows gate_rows[kReachWarps];
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kReachWarps + warp_id();
  const int64_t slot = item / args.value_heads;
  const int64_t head = item - slot * args.value_heads;
  if (slot >= args.sequences.num_slots()) return;
  Chunk chunk;
  if (!find_chunk(args.sequences, slot, chunk)) return;
  GateRows& gates = gate_rows[warp_id()];
  load_gates<GateKind::kLogDecay>(gates, args.gates, chunk.batch, chunk.token, chunk.length, head);
  sync_warp();
  store_factors(gates, args.factors + head * (args.factor_stride / args.value_heads) + chunk.token, args.factor_stride,
                chunk.length);

  // Each step I - beta k k^T has the norm max(1, |1 - beta |k|^2|), which is 1 unless beta |k|^2 exceeds 2.
  const int64_t keys = args.k.offset(chunk.batch, chunk.token, head / args.group);
  float log2_norm = 0.0f;
  with_elements(args.k.data, args.k.dtype, [&](auto* data) {
#pragma unroll 4
    for (int row = 0; row < chunk.length; ++row) {
      float square = 0.0f;
      for (int i = lane_id(); i < args.key_dim; i += 32) {
        const float x = to_float(data[keys + row * args.k.stride[1] + i * args.k.stride[3]]);
        square += x * x;
      }
      const float step = fabsf(1.0f - gates.beta[row] * warp_sum(square));
      if (!(step <= 1.0f)) log2_norm += log2f(step);
    }
  });
  const int last = chunk.length - 1;
  const float decay = gates.last_segment == 0 ? gates.high[last] + gates.low[last] : -INFINITY;
  if (lane_id() == 0) args.log2_norms[item] = log2_norm + decay;
}

// Chunks until the product of their norms, in the order at(0), at(1), .., is negligible; 0 if it never is.
template <class At>
__device__ __forceinline__ int find_reach(int count, const At& at) {
  float before = 0.0f;
  for (int done = 0; done < count; done += 32) {
    const int i = done + lane_id();
    const float sum = before + warp_inclusive_scan(i < count ? at(i) : 0.0f);
    const unsigned forgotten = ballot(i < count && sum <= kForgottenShare);
    if (forgotten != 0) return done + __ffs(static_cast<int>(forgotten));
    before = shuffle(sum, 31);
  }
  return 0;
}

// One warp a value head and direction.
static __global__ void __launch_bounds__(32) reach_kernel(const ReachArgs args) {
  const int64_t head = blockIdx.x >> 1;
  const Sequence sequence = find_sequence(args.sequences, 0);
  const int count = static_cast<int>((sequence.length + args.sequences.chunk_size - 1) / args.sequences.chunk_size);
  const float* norms = args.log2_norms + sequence.first_slot * args.value_heads + head;
  const bool from_end = (blockIdx.x & 1) == 0;
  const int reach = find_reach(count, [&](int i) { return norms[(from_end ? count - 1 - i : i) * args.value_heads]; });
  if (lane_id() == 0) (from_end ? args.from_end : args.from_start)[head] = reach;
}

// dM = M^T, elements of any float type to fp32.
struct TransposeArgs {
  int64_t value_heads;
  int key_dim;
  TensorArg from;  // [1, HV, K, K]
  TensorArg to;
};

inline constexpr int kTransposeThreads = 256;

static __global__ void __launch_bounds__(kTransposeThreads) transpose_kernel(const TransposeArgs args) {
  const int64_t elements = static_cast<int64_t>(args.key_dim) * args.key_dim;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kTransposeThreads + threadIdx.x;
  const int64_t head = item / elements;
  if (head >= args.value_heads) return;
  const auto at = static_cast<int>(item - head * elements);
  const int row = at / args.key_dim;  // of the result, whose rows are written in one piece
  const int column = at - row * args.key_dim;
  args.to.store(head * args.to.stride[1] + row * args.to.stride[2] + column * args.to.stride[3],
                args.from.load(head * args.from.stride[1] + column * args.from.stride[2] + row * args.from.stride[3]));
}

}  // namespace cula::gdn::cuda
