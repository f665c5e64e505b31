// Shared memory by addresses, on the emulator: offsets from its start.
#pragma once

#include "common/device/ldmatrix.cuh"
#include "emulator.h"

namespace cula::device {

template <class T>
inline T emulated_load(uint32_t address) {
  if (address % sizeof(T) != 0) std::abort();
  T x;
  std::memcpy(&x, shared_pointer(address), sizeof(T));
  return x;
}
inline float load_shared(uint32_t address) { return emulated_load<float>(address); }
inline float2 load_shared_pair(uint32_t address) { return emulated_load<float2>(address); }
inline uint4 load_shared_vector(uint32_t address) { return emulated_load<uint4>(address); }
inline uint32_t load_shared_word(uint32_t address) { return emulated_load<uint32_t>(address); }
inline int load_shared_byte(uint32_t address) { return emulated_load<uint8_t>(address); }
inline void store_shared(uint32_t address, float x) { std::memcpy(shared_pointer(address), &x, 4); }
inline void clear_shared_vector(uint32_t address) { std::memset(shared_pointer(address), 0, 16); }

}  // namespace cula::device
