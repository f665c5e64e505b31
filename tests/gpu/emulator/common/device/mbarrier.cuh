// mbarriers on the emulator, kept in their own eight bytes.
#pragma once

#include "common/device/ldmatrix.cuh"
#include "emulator.h"

namespace cula::device {

struct EmulatedBarrier {
  uint16_t expected;
  uint16_t pending;
  uint32_t bytes : 31;
  uint32_t phase : 1;

  void settle() {
    if (pending != 0 || bytes != 0) return;
    pending = expected;
    phase ^= 1;
  }
};
static_assert(sizeof(EmulatedBarrier) == 8);

inline EmulatedBarrier& emulated_barrier(uint32_t address) {
  return *reinterpret_cast<EmulatedBarrier*>(shared_pointer(address));
}
inline void mbarrier_init(uint32_t barrier, int arrivals) {
  const auto count = static_cast<uint16_t>(arrivals);
  emulated_barrier(barrier) = {count, count, 0, 0};
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(uint32_t barrier) {
  EmulatedBarrier& b = emulated_barrier(barrier);
  if (b.pending == 0) emulator::fault("more arrivals than expected", "mbarrier");
  --b.pending;
  b.settle();
}
inline void mbarrier_arrive_expect(uint32_t barrier, int bytes) {
  emulated_barrier(barrier).bytes += static_cast<uint32_t>(bytes);
  mbarrier_arrive(barrier);
}
inline void emulated_complete(uint32_t barrier, int bytes) {
  EmulatedBarrier& b = emulated_barrier(barrier);
  if (b.bytes < static_cast<uint32_t>(bytes)) emulator::fault("more bytes than announced", "mbarrier");
  b.bytes -= static_cast<uint32_t>(bytes);
  b.settle();
}
inline void mbarrier_wait(uint32_t barrier, int parity) {
  while (emulated_barrier(barrier).phase == static_cast<uint32_t>(parity)) emulator::yield();
}

}  // namespace cula::device
