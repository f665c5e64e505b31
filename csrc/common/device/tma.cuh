// The bulk copy engine (TMA): tiles of tensors described by a tensor map, and plain runs of bytes.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace cula::device {

// Where a box starts in a tensor of four dimensions, fastest first.
struct BoxOrigin {
  int column;
  int head;
  int token;
  int batch;
};

// Global to shared memory; `barrier` receives the bytes of the whole box, also where it lies outside the tensor (there
// the tile is zero).
__device__ __forceinline__ void tma_load(uint32_t target, const CUtensorMap& map, const BoxOrigin& at,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(target),
      "l"(&map), "r"(at.column), "r"(at.head), "r"(at.token), "r"(at.batch), "r"(barrier)
      : "memory");
}
// Global memory to the L2 cache.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap& map, const BoxOrigin& at) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(&map), "r"(at.column),
               "r"(at.head), "r"(at.token), "r"(at.batch)
               : "memory");
}
// The line at an address to the L2 cache.
__device__ __forceinline__ void prefetch_line(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}
// Shared to global memory; nothing is written outside the tensor.
__device__ __forceinline__ void tma_store(const CUtensorMap& map, const BoxOrigin& at, uint32_t source) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(&map),
               "r"(at.column), "r"(at.head), "r"(at.token), "r"(at.batch), "r"(source)
               : "memory");
}
// A run of bytes, a multiple of 16 at addresses aligned to 16.
__device__ __forceinline__ void bulk_load(uint32_t target, const void* source, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void bulk_store(void* target, uint32_t source, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(source), "r"(bytes)
               : "memory");
}

// Groups of this thread's stores.
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until all have read their source, which may then be written again; they reach global memory before the kernel ends.
__device__ __forceinline__ void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Orders this thread's ordinary accesses to shared memory before those of the copy engine and of wgmma that a later
// barrier lets start.
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

}  // namespace cula::device
