// cp.async on the emulator: nothing is copied before it is waited for.
#pragma once

#include <cstdlib>

#include "common/device/ldmatrix.cuh"

namespace cula::device {

template <int kBytes>
inline void cp_async(void* shared, const void* global, bool valid) {
  if (reinterpret_cast<uintptr_t>(shared) % kBytes != 0 || reinterpret_cast<uintptr_t>(global) % kBytes != 0) {
    std::abort();
  }
  emulator::current().copies.back().push_back([=] {
    if (valid) {
      std::memcpy(shared, global, kBytes);
    } else {
      std::memset(shared, 0, kBytes);
    }
  });
}

inline void cp_async_commit() { emulator::current().copies.emplace_back(); }

template <int kPending>
inline void cp_async_wait() {
  auto& groups = emulator::current().copies;
  while (static_cast<int>(groups.size()) - 1 > kPending) {
    for (const auto& copy : groups.front()) copy();
    groups.erase(groups.begin());
  }
}

}  // namespace cula::device
