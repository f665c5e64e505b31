// Hand-overs through mbarriers by whole warps and warpgroups: those who wait see what any of their threads did before.
//
// A barrier expects warp_arrivals(warps) or group_arrivals(warpgroups), or a sum of these and of single threads. One
// thread arrives for its warp or warpgroup. compute-sanitizer's racecheck takes that for an order with this one thread
// alone; built with CULA_RACECHECK, every thread arrives for itself, which it follows.
#pragma once

#include "common/device/mbarrier.cuh"
#include "common/device/warp.cuh"
#include "common/device/warpgroup.cuh"

namespace cula::device {

#ifdef CULA_RACECHECK
inline constexpr bool kEveryThreadArrives = true;
#else
inline constexpr bool kEveryThreadArrives = false;
#endif

__host__ __device__ constexpr int warp_arrivals(int warps) { return kEveryThreadArrives ? 32 * warps : warps; }
__host__ __device__ constexpr int group_arrivals(int groups) {
  return kEveryThreadArrives ? kWarpgroupThreads * groups : groups;
}

struct WarpArrival {
  uint32_t barrier;
  int times;  // as so many warps
};

// By all lanes of a warp.
template <int kCount>
__device__ __forceinline__ void mbarrier_arrive_warp(const WarpArrival (&arrivals)[kCount]) {
  sync_warp();
  if (!kEveryThreadArrives && lane_id() != 0) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    for (int j = 0; j < arrivals[i].times; ++j) mbarrier_arrive(arrivals[i].barrier);
  }
}
__device__ __forceinline__ void mbarrier_arrive_warp(uint32_t barrier, int times = 1) {
  mbarrier_arrive_warp({{barrier, times}});
}
// By all threads of a warpgroup, behind a barrier at which they have met.
__device__ __forceinline__ void mbarrier_arrive_group(uint32_t barrier) {
  if (kEveryThreadArrives || warpgroup_thread() == 0) mbarrier_arrive(barrier);
}

}  // namespace cula::device
