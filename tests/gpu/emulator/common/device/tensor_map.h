// Tensor maps of the emulator: the description itself.
#pragma once

#include <cuda.h>

#define make_tensor_map make_driver_tensor_map
#include_next "common/device/tensor_map.h"
#undef make_tensor_map

namespace cula::device {

inline CUtensorMap make_tensor_map(const TokenTensor& x, const char*) {
  static_assert(sizeof(TokenTensor) <= sizeof(CUtensorMap));
  CUtensorMap map = {};
  std::memcpy(&map, &x, sizeof(x));
  return map;
}

}  // namespace cula::device
