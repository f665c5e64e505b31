// Programmatic dependent launch: a kernel's blocks may start while the kernel before it in the stream drains.
//
// A kernel launched so must call wait_for_previous() in every block before it touches what earlier kernels wrote (of
// the whole chain: each kernel waits, so its end means that all before it have ended).
#pragma once

#include "common/device/launch.cuh"

namespace cula::device {

#ifdef __CUDACC__
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The next kernel may start its blocks once every block of this one has called this or ended.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }
#endif

// As launch(), but the kernel may start before its predecessor has ended.
template <auto kKernel, class Params>
void launch_dependent(const char* name, const LaunchShape& shape, const Params& params) {
  if (!prepare_launch<kKernel>(name, shape)) return;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = shape.stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check_cuda(cudaLaunchKernelEx(&config, kKernel, params), name);
}

}  // namespace cula::device
