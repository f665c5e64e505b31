// What the kernels of the chunk-parallel backward stages share: blocks that stay and go through items, each a (chunk,
// key head), and in each through the value heads of the group, one step a value head, so that what is summed over the
// group stays in registers. A warp of the feeding warpgroup makes the factors of each step, two steps ahead.
//
//   made[b]      step and factors of buffer b are there   maker -> consumers
//   finished[b]  the consumers need them no more          consumers -> maker
#pragma once

#include "gdn/sm90/collective/stage_tiles.cuh"

namespace cula::gdn::sm90 {

struct GradientStep {
  int batch;
  int token;     // first of the chunk
  int length;    // of the chunk; 0: no more steps
  int key_head;  //
  int head;
  int is_first;  // of its group
  int is_last;
};

struct StepStore {
  ChunkFactors factors[2];
  GradientStep steps[2];
  uint64_t made[2];
  uint64_t finished[2];

  // By one thread. consumers: warps.
  __device__ static void init(StepStore& store, int consumers) {
    for (int b = 0; b < 2; ++b) {
      mbarrier_init(shared_address(&store.made[b]), warp_arrivals(1));
      mbarrier_init(shared_address(&store.finished[b]), warp_arrivals(consumers));
    }
  }
  // By one warp: its lanes have read factors and step for the last time.
  __device__ static void finish(StepStore& store, int step) {
    mbarrier_arrive_warp(shared_address(&store.finished[step & 1]));
  }
};

// Calls f(chunk, key head) for the items of this block in order. All lanes of the warp must call.
template <class F>
__device__ __forceinline__ void for_each_item(const StageGrid& grid, F&& f) {
  const int heads = static_cast<int>(grid.heads);
  const int64_t items = grid.sequences.num_slots() * heads;
  const ChunkFinder chunks(grid.sequences);
#pragma unroll 1
  for (int64_t i = blockIdx.x; i < items; i += gridDim.x) {
    const int64_t slot = i / heads;
    Chunk chunk;
    if (chunks.find(slot, chunk)) f(chunk, static_cast<int>(i - slot * heads));
  }
}

// By one whole warp.
__device__ __forceinline__ void make_steps(const StageGrid& grid, StepStore& store) {
  const int group = static_cast<int>(grid.group);
  int number = 0;
  const auto begin = [&] {
    if (number >= 2) mbarrier_wait(shared_address(&store.finished[number & 1]), (number / 2 - 1) & 1);
  };
  const auto put = [&](const GradientStep& step) {
    if (lane_id() == 0) store.steps[number & 1] = step;
    mbarrier_arrive_warp(shared_address(&store.made[number & 1]));
    ++number;
  };
  for_each_item(grid, [&](const Chunk& chunk, int key_head) {
#pragma unroll 1
    for (int j = 0; j < group; ++j) {
      const int head = key_head * group + j;
      begin();
      make_stage_factors(store.factors[number & 1], grid.gates, chunk, head, grid.scale);
      put({static_cast<int>(chunk.batch), static_cast<int>(chunk.token), chunk.length, key_head, head, j == 0,
           j == group - 1});
    }
  });
  begin();
  put({});
}

// This thread's two rows of c, each times the same row of a tile, added up: sums of whole rows, in all four lanes of a
// quad.
template <class T>
__device__ __forceinline__ float2 row_products(const float (&c)[32], uint32_t tile) {
  float sum[2] = {0.0f, 0.0f};
  const int row = accumulator_row();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 x = unpack2<T>(load_shared_word(tile + swizzled(row + 8 * h, i) + 2 * accumulator_column()));
      sum[h] += c[4 * i + 2 * h] * x.x + c[4 * i + 2 * h + 1] * x.y;
    }
  }
  return make_float2(group_sum<4>(sum[0]), group_sum<4>(sum[1]));
}
// Puts them where the rows of all warps lie side by side.
__device__ __forceinline__ void store_row_sums(float* rows, float2 sums) {
  if ((lane_id() & 3) != 0) return;
  rows[accumulator_row()] = sums.x;
  rows[accumulator_row() + 8] = sums.y;
}

// Sums over a matrix of pairs, element(i) being what stands where accumulator i does: over rows, and over the rows of
// this warp, each times its weight, of every column. columns: of this warp.
template <class F>
__device__ __forceinline__ void store_pair_sums(F&& element, float2 weights, float* rows, float* columns) {
  float row_sums[2] = {0.0f, 0.0f};
  float column_sums[16];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float upper = element(4 * i + e);
      const float lower = element(4 * i + 2 + e);
      row_sums[0] += upper;
      row_sums[1] += lower;
      float sum = weights.x * upper + weights.y * lower;
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) sum += shuffle_xor(sum, mask);
      column_sums[2 * i + e] = sum;
    }
  }
  store_row_sums(rows, make_float2(group_sum<4>(row_sums[0]), group_sum<4>(row_sums[1])));
  if (lane_id() >= 4) return;
#pragma unroll
  for (int i = 0; i < 16; ++i) columns[8 * (i / 2) + accumulator_column() + i % 2] = column_sums[i];
}

}  // namespace cula::gdn::sm90
