// (I + L)^-1 as a stage of its own.
#pragma once

#include "common/device/launch.cuh"
#include "gdn/cuda/collective/inverse.cuh"

namespace cula::gdn::cuda {

struct SolveArgs {
  SequenceTable sequences;
  int64_t value_heads;
  TensorArg L;
  TensorArg A;
};

static __global__ void __launch_bounds__(kInverseThreads) solve_kernel(const SolveArgs args) {
  float* m = reinterpret_cast<Tile<float, kRows>*>(dynamic_shared_memory())->data;
  const int64_t slot = blockIdx.x / args.value_heads;
  const int64_t head = blockIdx.x - slot * args.value_heads;
  Chunk chunk;
  if (!find_chunk(args.sequences, slot, chunk)) return;
  const int64_t base = args.L.offset(chunk.batch, chunk.token, head);
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kRows; i += kInverseThreads) {
    const int row = i / kRows;
    const int column = i - row * kRows;
    m[row * kPitch<kRows> + column] = row < chunk.length && column < row
                                          ? args.L.load(base + row * args.L.stride[1] + column * args.L.stride[3])
                                          : 0.0f;
  }
  sync_block();
  invert_triangle<3>(m);
  const Window window = {chunk.batch, chunk.token, chunk.length, head, 0, args.sequences.chunk_size};
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kRows; i += kInverseThreads) {
    const int row = i / kRows;
    const int column = i - row * kRows;
    if (row < window.rows && column < window.columns) {
      args.A.store(args.A.offset(chunk.batch, chunk.token + row, head) + column * args.A.stride[3],
                   m[row * kPitch<kRows> + column]);
    }
  }
}

}  // namespace cula::gdn::cuda
