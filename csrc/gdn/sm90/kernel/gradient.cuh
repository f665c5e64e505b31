// The gradients of the chunks, given what the scans left: one item a (chunk, key head), its value heads one after the
// other, so that dq and dk are summed in registers. Blocks stay and take items in turn.
//
//   warpgroups 0, 1   products                         collective/gradient_consumer.cuh
//   warpgroup 2       loads; <dv, v>; dg and dbeta     collective/gradient_helpers.cuh
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

}  // namespace cula::gdn::sm90
