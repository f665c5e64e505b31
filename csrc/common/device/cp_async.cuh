// cp.async: copies from global to shared memory that a thread waits for by groups.
#pragma once

#include "common/device/ldmatrix.cuh"

namespace cula::device {

// Copies kBytes (4, 8 or 16, both addresses aligned to it); writes zeros instead, and reads nothing, if not `valid`.
template <int kBytes>
__device__ __forceinline__ void cp_async(void* shared, const void* global, bool valid) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  const int bytes = valid ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes),
                 "n"(kBytes)
                 : "memory");
  }
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's newest groups are under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace cula::device
