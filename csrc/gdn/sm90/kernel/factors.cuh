// What the gates do to the rows of a chunk, for both scans and the gradients; and, for segments, a bound on the norm of
// the chunk's transition.
#pragma once

#include "common/device/launch.cuh"
#include "gdn/sm90/collective/factors.cuh"

namespace cula::gdn::sm90 {

struct FactorArgs {
  SequenceTable sequences;
  int64_t value_heads;
  float scale;
  GateArgs gates;
  // For a bound of the transition's norm, if it is wanted: k in the problem's type, or none if its rows have been
  // normalised.
  bool wants_norm = false;
  TensorArg k;
  int64_t group;  // value heads a key head
  int key_dim;
  ChunkFactors* factors;  // [slot, HV]
};

inline constexpr int kFactorWarps = 4;

// |k|^2 of rows 2 lane and 2 lane + 1. By one whole warp, four rows at a time; many loads are under way at once.
template <class T>
__device__ __forceinline__ void load_squares(float (&squares)[2], const FactorArgs& args, const Chunk& chunk,
                                             int64_t key_head) {
  constexpr int kRowsAtOnce = 4;
  constexpr int kSteps = 8;
  const int lane = lane_id();
  const int column = 8 * (lane & 7);
#pragma unroll 1
  for (int first = 0; first < kRows; first += kRowsAtOnce * kSteps) {
    uint4 x[kSteps][2];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int row = first + kRowsAtOnce * i + lane / 8;
      const T* k = static_cast<const T*>(args.k.data) + args.k.offset(chunk.batch, chunk.token + row, key_head);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        x[i][half] = {};
        if (row < chunk.length && column + 64 * half < args.key_dim) {
          x[i][half] = *reinterpret_cast<const uint4*>(k + column + 64 * half);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      float sum = 0.0f;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        for (const uint32_t pair : {x[i][half].x, x[i][half].y, x[i][half].z, x[i][half].w}) {
          const float2 y = unpack2<T>(pair);
          sum += y.x * y.x + y.y * y.y;
        }
      }
      sum = group_sum<8>(sum);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float square = shuffle(sum, 8 * ((2 * lane + r) & 3));
        if ((2 * lane + r) / 4 == first / 4 + i) squares[r] = square;
      }
    }
  }
}

// Of one chunk and value head, by one warp: made in shared memory, then stored.
__device__ __forceinline__ void store_factors(const FactorArgs& args, const Chunk& chunk, int64_t slot, int64_t head,
                                              ChunkFactors& mine) {
  make_factors(mine, load_gates(args.gates, chunk, head), args.gates, chunk, head, args.scale);
  sync_warp();
  if (args.wants_norm) {
    // Rounded to 16 bits, a normalised row's square stays below this.
    float squares[2] = {1.01f, 1.01f};
    if (args.k) {
      if (args.k.dtype == DType::kBFloat16) {
        load_squares<bf16>(squares, args, chunk, head / args.group);
      } else {
        load_squares<fp16>(squares, args, chunk, head / args.group);
      }
    }
    const float log2_norm = transition_log2_norm(mine, squares);
    if (lane_id() == 0) mine.log2_norm = log2_norm;
    sync_warp();
  }
  const uint4* source = reinterpret_cast<const uint4*>(&mine);
  uint4* target = reinterpret_cast<uint4*>(args.factors + slot * args.value_heads + head);
  for (int i = lane_id(); i < static_cast<int>(sizeof(ChunkFactors) / 16); i += 32) target[i] = source[i];
}

// One warp a (chunk, value head).
static __global__ void __launch_bounds__(32 * kFactorWarps, 4) factors_kernel(const FactorArgs args) {
  __shared__ ChunkFactors factors[kFactorWarps];
  launch_dependents();
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kFactorWarps + warp_id();
  const int64_t slot = item / args.value_heads;
  if (slot >= args.sequences.num_slots()) return;
  Chunk chunk;
  if (!find_chunk(args.sequences, slot, chunk)) return;
  store_factors(args, chunk, slot, item - slot * args.value_heads, factors[warp_id()]);
}

}  // namespace cula::gdn::sm90
