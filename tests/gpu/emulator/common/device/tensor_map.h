// Tensor maps of the emulator: the description itself, and the rows of a box.
#pragma once

#include <cuda.h>

#define make_tensor_map make_driver_tensor_map
#include_next "common/device/tensor_map.h"
#undef make_tensor_map

namespace cula::device {

struct EmulatedMap {
  TokenTensor tensor;
  int rows;
};

inline CUtensorMap make_tensor_map(const TokenTensor& x, const char*, int rows = kBoxRows) {
  static_assert(sizeof(EmulatedMap) <= sizeof(CUtensorMap));
  const EmulatedMap emulated = {x, rows};
  CUtensorMap map = {};
  std::memcpy(&map, &emulated, sizeof(emulated));
  return map;
}

}  // namespace cula::device
