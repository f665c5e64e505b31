// The copy engine on the emulator: copies are done when they are issued.
#pragma once

#include "common/device/mbarrier.cuh"
#include "common/device/tensor_map.h"

namespace cula::device {

struct BoxOrigin {
  int column;
  int head;
  int token;
  int batch;
};

// f(element in the tensor or null, element in the tile); gives the bytes of the box.
template <class F>
inline int for_each_in_box(uint32_t tile, const CUtensorMap& map, const BoxOrigin& at, F&& f) {
  if (tile % 1024 != 0) emulator::fault("misaligned tile", "tma");
  EmulatedMap emulated;
  std::memcpy(&emulated, &map, sizeof(emulated));
  const TokenTensor& x = emulated.tensor;
  for (int row = 0; row < emulated.rows; ++row) {
    for (int column = 0; column < kBoxColumns; ++column) {
      const int64_t index[4] = {at.batch, at.token + row, at.head, at.column + column};
      bool inside = true;
      int64_t offset = 0;
      for (int i = 0; i < 4; ++i) {
        inside = inside && index[i] >= 0 && index[i] < x.shape[i];
        offset += index[i] * x.stride[i];
      }
      const uint32_t shared = tile + row * 128 + (((column / 8) ^ (row & 7)) * 16) + column % 8 * 2;
      f(inside ? static_cast<const uint16_t*>(x.data) + offset : nullptr,
        reinterpret_cast<uint16_t*>(shared_pointer(shared)));
    }
  }
  return emulated.rows * kBoxColumns * 2;
}
inline void tma_load(uint32_t target, const CUtensorMap& map, const BoxOrigin& at, uint32_t barrier) {
  emulated_complete(barrier, for_each_in_box(target, map, at, [](const uint16_t* global, uint16_t* shared) {
                      *shared = global ? *global : 0;
                    }));
}
inline void tma_prefetch(const CUtensorMap&, const BoxOrigin&) {}
inline void prefetch_line(const void*) {}
inline void tma_store(const CUtensorMap& map, const BoxOrigin& at, uint32_t source) {
  for_each_in_box(source, map, at, [](const uint16_t* global, uint16_t* shared) {
    if (global) *const_cast<uint16_t*>(global) = *shared;
  });
}
inline void emulated_bulk_check(const void* global, uint32_t shared, int bytes) {
  if (reinterpret_cast<uintptr_t>(global) % 16 != 0 || shared % 16 != 0 || bytes % 16 != 0) {
    emulator::fault("misaligned copy", "cp.async.bulk");
  }
}
inline void bulk_load(uint32_t target, const void* source, int bytes, uint32_t barrier) {
  emulated_bulk_check(source, target, bytes);
  std::memcpy(shared_pointer(target), source, bytes);
  emulated_complete(barrier, bytes);
}
inline void bulk_store(void* target, uint32_t source, int bytes) {
  emulated_bulk_check(target, source, bytes);
  std::memcpy(target, shared_pointer(source), bytes);
}
inline void tma_store_commit() {}
inline void tma_store_wait_read() {}
inline void fence_async_shared() {}

}  // namespace cula::device
