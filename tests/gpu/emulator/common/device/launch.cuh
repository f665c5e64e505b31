// Launches on the emulator.
#pragma once

#include "common/host/error.h"
#include "emulator.h"

namespace cula::device {

using Stream = void*;

inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw_runtime_error(what, ": error ", static_cast<int>(status));
}

class DeviceGuard {
 public:
  explicit DeviceGuard(int) {}
  ~DeviceGuard() {}
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
};

struct DeviceLimits {
  int multiprocessors;
  int shared_bytes_per_block;
  int shared_bytes_per_multiprocessor;
};

// Small enough that both schedules of a scan are met by small tests.
DeviceLimits device_limits();

struct LaunchShape {
  int64_t blocks;
  int threads;
  size_t shared_bytes = 0;
  Stream stream = nullptr;
};

template <auto kKernel, class Params>
void launch(const char* name, const LaunchShape& shape, const Params& params) {
  if (shape.blocks == 0) return;
  if (shape.shared_bytes > static_cast<size_t>(device_limits().shared_bytes_per_block)) {
    throw_runtime_error(name, " needs ", shape.shared_bytes, " bytes of shared memory a block; this GPU has ",
                        device_limits().shared_bytes_per_block);
  }
  emulator::run_grid(shape.blocks, shape.threads, shape.shared_bytes, [&params] { kKernel(params); });
}

inline unsigned char* dynamic_shared_memory() { return emulator::shared_memory(); }
inline unsigned char* swizzled_shared_memory() { return emulator::shared_memory(); }

}  // namespace cula::device
