// Which devices this backend runs on.
#include <atomic>

#include "common/device/launch.cuh"
#include "gdn/sm90/operator.h"

namespace cula::gdn::sm90 {

bool runs_on(int device_id) {
  static std::atomic<int> known[device::kMaxDevices];  // 0 not asked yet, 1 no, 2 yes
  if (device_id < 0 || device_id >= device::kMaxDevices) return false;
  int state = known[device_id].load(std::memory_order_relaxed);
  if (state == 0) {
    int major = 0;
    int minor = 0;
    const bool asked = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device_id) == cudaSuccess &&
                       cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device_id) == cudaSuccess;
    if (!asked) {
      cudaGetLastError();  // must not surface at the user's next call
      return false;
    }
    state = major == 9 && minor == 0 ? 2 : 1;
    known[device_id].store(state, std::memory_order_relaxed);
  }
  return state == 2;
}

}  // namespace cula::gdn::sm90
