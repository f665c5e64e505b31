// The gradients of the chunks, given what the scans left: one item a (chunk, key head), its value heads one after the
// other, so that dq and dk are summed in registers. Blocks stay and take items in turn.
//
//   warpgroups 0, 1   products                                        collective/gradient_consumer.cuh
//   warpgroup 2       loads; <S, D>; <dW, v> and dv; dg and dbeta     collective/gradient_helpers.cuh
//
// And the factors that both scans and this kernel need.
#pragma once

#include "common/device/dependent_launch.cuh"
#include "gdn/sm90/collective/gradient_consumer.cuh"
#include "gdn/sm90/collective/gradient_helpers.cuh"

namespace cula::gdn::sm90 {

template <class T, int kKeyDim, int kValueDim>
__global__ void __launch_bounds__(kGradientThreads, 1) gradient_kernel(const __grid_constant__ GradientArgs args) {
  using Shared = GradientShared<kKeyDim, kValueDim>;
  unsigned char* gradient_shared = swizzled_shared_memory();
  Shared& memory = *reinterpret_cast<Shared*>(gradient_shared);
  const typename Shared::Map shared = {shared_address(gradient_shared)};
  launch_dependents();
  if (threadIdx.x == 0) Shared::init(shared);
  sync_block();
  const int group = warpgroup_id();
  wait_for_previous();
  if (group == kGradientConsumers) {
    release_registers<kGradientHelperRegisters>();
    GradientHelpers<T, kKeyDim, kValueDim>{args, memory, shared}.run();
  } else {
    acquire_registers<kGradientConsumerRegisters>();
    GradientConsumer<T, kKeyDim, kValueDim>{args, shared, group}.run();
  }
}

struct FactorArgs {
  SequenceTable sequences;
  int64_t value_heads;
  float scale;
  GateArgs gates;
  ChunkFactors* factors;  // [slot, HV]
};

inline constexpr int kFactorWarps = 4;

// One warp a (chunk, value head).
static __global__ void __launch_bounds__(32 * kFactorWarps, 4) factors_kernel(const FactorArgs args) {
  __shared__ ChunkFactors factors[kFactorWarps];
  launch_dependents();
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kFactorWarps + warp_id();
  const int64_t slot = item / args.value_heads;
  if (slot >= args.sequences.num_slots()) return;
  Chunk chunk;
  if (!find_chunk(args.sequences, slot, chunk)) return;
  ChunkFactors& mine = factors[warp_id()];
  const int64_t head = item - slot * args.value_heads;
  make_factors(mine, load_gates(args.gates, chunk, head), args.gates, chunk, head, args.scale);
  sync_warp();
  const uint4* source = reinterpret_cast<const uint4*>(&mine);
  uint4* target = reinterpret_cast<uint4*>(args.factors + item);
  for (int i = lane_id(); i < static_cast<int>(sizeof(ChunkFactors) / 16); i += 32) target[i] = source[i];
}

}  // namespace cula::gdn::sm90
