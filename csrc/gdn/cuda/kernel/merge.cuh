// From the summaries of the segments of a sequence to the state that enters each: S <- M S + S_ext, in order and in
// fp32; or, for the adjoint, to the gradient of the state behind each: D <- M^T D + dS_ext, from the end.
#pragma once

#include "common/device/launch.cuh"
#include "gdn/cuda/collective/arguments.cuh"

namespace cula::gdn::cuda {

struct MergeArgs {
  SequenceTable sequences;
  int64_t value_heads;
  int key_dim;
  int value_dim;
  int64_t value_blocks;
  TensorArg entry;    // [N, HV, K, V]: the state at the start of the sequences, or its gradient at their ends; may lack
  StateSlots slots;   // of the former
  TensorArg summary;  // [places, HV, K, V] fp32: S_ext or dS_ext
  TensorArg map;      // [places, HV, K, K] fp32: M
  TensorArg seeds;    // [places, HV, K, V] fp32: results
};

inline constexpr int kMergeThreads = 256;
inline constexpr int kMergeColumns = 16;  // of the state, a block
inline constexpr int kMergeStep = 32;     // columns of the map at a time

template <int kKeyDim>
struct MergeShared {
  float state[kKeyDim][kMergeColumns];
  float map[kKeyDim][kMergeStep + 1];  // rows of the result by terms of its sum
};

template <int kKeyDim, bool kAdjoint>
__global__ void __launch_bounds__(kMergeThreads, 1) merge_kernel(const MergeArgs args) {
  auto& shared = *reinterpret_cast<MergeShared<kKeyDim>*>(dynamic_shared_memory());
  constexpr int kGroups = kMergeThreads / kKeyDim;  // threads that share a row
  constexpr int kColumns = kMergeColumns / kGroups;
  constexpr int kLoads = kKeyDim * kMergeStep / kMergeThreads;

  const int64_t unit = blockIdx.x / args.value_blocks;
  const int block_value = static_cast<int>(blockIdx.x - unit * args.value_blocks) * kMergeColumns;
  const int64_t sequence_index = unit / args.value_heads;
  const int64_t head = unit - sequence_index * args.value_heads;
  const Sequence sequence = find_sequence(args.sequences, sequence_index);
  const int64_t first_place = first_segment_place(args.sequences, sequence_index);
  const int64_t count = count_segments(args.sequences, sequence);

  const int thread = static_cast<int>(threadIdx.x);
  const int row = thread % kKeyDim;
  const int column = thread / kKeyDim * kColumns;
  const auto valid = [&](int i) { return row < args.key_dim && block_value + column + i < args.value_dim; };
  const auto offset = [&](const TensorArg& x, int64_t n, int i) {
    return n * x.stride[0] + head * x.stride[1] + row * x.stride[2] + (block_value + column + i) * x.stride[3];
  };

  const int64_t slot = args.entry ? args.slots.of(sequence_index) : -1;
  float s[kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    s[i] = slot >= 0 && valid(i) ? args.entry.load(offset(args.entry, slot, i)) : 0.0f;
  }
  for (int64_t step = 0; step < count; ++step) {
    const int64_t place = first_place + (kAdjoint ? count - 1 - step : step);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (valid(i)) static_cast<float*>(args.seeds.data)[offset(args.seeds, place, i)] = s[i];
      shared.state[row][column + i] = s[i];
    }
    if (step + 1 == count) break;
    const float* summary = static_cast<const float*>(args.summary.data);
    const float* map =
        static_cast<const float*>(args.map.data) + place * args.map.stride[0] + head * args.map.stride[1];
    // Element (r, t) of the tile: M[r][t] or, for the adjoint, M[t][r]; consecutive threads read consecutive elements.
    float ahead[kLoads];
    const auto fetch = [&](int first) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int at = i * kMergeThreads + thread;
        const int r = kAdjoint ? at % kKeyDim : at / kMergeStep;
        const int t = first + (kAdjoint ? at / kKeyDim : at % kMergeStep);
        const bool inside = r < args.key_dim && t < args.key_dim;
        ahead[i] = inside ? map[(kAdjoint ? t : r) * args.map.stride[2] + (kAdjoint ? r : t)] : 0.0f;
      }
    };
    fetch(0);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) s[i] = valid(i) ? summary[offset(args.summary, place, i)] : 0.0f;
    for (int first = 0; first < args.key_dim; first += kMergeStep) {
      sync_block();
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int at = i * kMergeThreads + thread;
        shared.map[kAdjoint ? at % kKeyDim : at / kMergeStep][kAdjoint ? at / kKeyDim : at % kMergeStep] = ahead[i];
      }
      sync_block();
      if (first + kMergeStep < args.key_dim) fetch(first + kMergeStep);
      const int terms = args.key_dim - first < kMergeStep ? args.key_dim - first : kMergeStep;
#pragma unroll 4
      for (int t = 0; t < terms; ++t) {
        const float m = shared.map[row][t];
#pragma unroll
        for (int i = 0; i < kColumns; ++i) s[i] += m * shared.state[first + t][column + i];
      }
    }
    sync_block();
  }
}

}  // namespace cula::gdn::cuda
