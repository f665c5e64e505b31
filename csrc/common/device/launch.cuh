// Host side of a launch: error checks, the device of the call, shared memory limits.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "common/host/error.h"

namespace cula::device {

using Stream = cudaStream_t;

inline void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // a sticky error stays; any other must not surface at the user's next call
  throw_runtime_error(what, ": ", cudaGetErrorString(status), " (", cudaGetErrorName(status), ")");
}

// Makes `device` current for its lifetime. It is set even if it is so already: a thread that has not used CUDA yet,
// such as one of autograd's, has no context until then, and the driver's own functions need one.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : device_(device) {
    check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
    check_cuda(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceGuard() {
    if (previous_ != device_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int device_;
  int previous_ = 0;
};

struct DeviceLimits {
  int multiprocessors;
  int shared_bytes_per_block;  // with opt-in
  int shared_bytes_per_multiprocessor;
};

inline constexpr int kMaxDevices = 64;

// Of the current device; asked for once a device.
inline DeviceLimits device_limits() {
  static std::atomic<int> cache[kMaxDevices][3];
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  if (device >= kMaxDevices) throw_runtime_error("device ", device, " is beyond the ", kMaxDevices, " supported");
  static constexpr cudaDeviceAttr kAttributes[3] = {cudaDevAttrMultiProcessorCount,
                                                    cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                                    cudaDevAttrMaxSharedMemoryPerMultiprocessor};
  int values[3];
  for (int i = 0; i < 3; ++i) {
    values[i] = cache[device][i].load(std::memory_order_relaxed);
    if (values[i] == 0) {
      check_cuda(cudaDeviceGetAttribute(&values[i], kAttributes[i], device), "cudaDeviceGetAttribute");
      cache[device][i].store(values[i], std::memory_order_relaxed);
    }
  }
  return {values[0], values[1], values[2]};
}

struct LaunchShape {
  int64_t blocks;  // grid.x
  int threads;
  size_t shared_bytes = 0;
  Stream stream = nullptr;
};

// Checks a launch and raises the kernel's limit of shared memory. False: no blocks, nothing to do.
template <auto kKernel>
bool prepare_launch(const char* name, const LaunchShape& shape) {
  if (shape.blocks == 0) return false;
  if (shape.blocks > 0x7fffffff)
    throw_runtime_error(name, ": ", shape.blocks, " blocks exceed the grid limit 2^31 - 1");
  if (shape.shared_bytes > 48 * 1024) {
    // Raised once a kernel and device: the attribute only grows, so a race between two threads is harmless.
    static std::atomic<size_t> raised[kMaxDevices];
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    if (device >= kMaxDevices) throw_runtime_error("device ", device, " is beyond the ", kMaxDevices, " supported");
    if (raised[device].load(std::memory_order_acquire) < shape.shared_bytes) {
      const size_t limit = device_limits().shared_bytes_per_block;
      if (shape.shared_bytes > limit) {
        throw_runtime_error(name, " needs ", shape.shared_bytes, " bytes of shared memory a block; this GPU has ",
                            limit);
      }
      check_cuda(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(limit)),
                 name);
      raised[device].store(limit, std::memory_order_release);
    }
  }
  return true;
}

// Runs kKernel(params); throws RuntimeError naming it if the launch is refused. No blocks: nothing to do.
template <auto kKernel, class Params>
void launch(const char* name, const LaunchShape& shape, const Params& params) {
  if (!prepare_launch<kKernel>(name, shape)) return;
  kKernel<<<static_cast<unsigned>(shape.blocks), shape.threads, shape.shared_bytes, shape.stream>>>(params);
  check_cuda(cudaGetLastError(), name);
}

#ifdef __CUDACC__
// The block's dynamic shared memory.
__device__ __forceinline__ unsigned char* dynamic_shared_memory() {
  extern __shared__ __align__(128) unsigned char cula_dynamic_shared[];
  return cula_dynamic_shared;
}
// The same, aligned for tiles in the 128-byte swizzle.
__device__ __forceinline__ unsigned char* swizzled_shared_memory() {
  extern __shared__ __align__(1024) unsigned char cula_swizzled_shared[];
  return cula_swizzled_shared;
}
#endif

}  // namespace cula::device
