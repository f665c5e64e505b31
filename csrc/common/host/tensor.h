// A checked, typed view of a DLPack tensor. Strides are in elements and never null.
#pragma once

#include <dlpack/dlpack.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "common/host/error.h"

namespace cula {

enum class DType : uint8_t { kFloat64, kFloat32, kBFloat16, kFloat16, kInt64, kInt32 };

const char* dtype_name(DType dtype);
size_t dtype_size(DType dtype);
bool is_float(DType dtype);
DLDataType to_dlpack(DType dtype);
// Throws TypeError naming the argument if the type is none of DType.
DType from_dlpack(DLDataType type, const char* name);

inline constexpr int kMaxDims = 6;

struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int ndim = 0;
  std::array<int64_t, kMaxDims> shape{};
  std::array<int64_t, kMaxDims> stride{};  // elements
  DLDevice device = {kDLCPU, 0};

  explicit operator bool() const { return ndim != 0 || data != nullptr; }
  int64_t numel() const;
  bool is_contiguous() const;
  std::string shape_string() const;  // "[2, 64, 4]"

  // A view of a DLPack tensor; a null tensor gives an empty view (false). Throws TypeError for an unknown dtype or
  // vector lanes, ValueError for more than kMaxDims dimensions or a null pointer with elements behind it.
  static TensorView from(const DLTensor* tensor, const char* name);
};

// The memory that a tensor's elements lie in; empty if it has none.
struct ByteRange {
  uintptr_t begin = 0;
  uintptr_t end = 0;

  bool meets(const ByteRange& other) const { return begin < other.end && other.begin < end; }
};
ByteRange byte_range(const TensorView& x);

// Whether two tensors may have memory in common. Exact for dense tensors, and for slices of one buffer that lie side by
// side in its rows; true where neither tells.
bool may_overlap(const TensorView& a, const TensorView& b);

// ValueError naming the argument, the expected and the actual shape. `letters` reads like "[B, T, HV, V]".
void check_shape(const TensorView& view, const char* name, const char* letters,
                 std::initializer_list<int64_t> expected);

// TypeError unless the dtype is float64, float32, bfloat16 or float16.
void check_float(const TensorView& view, const char* name);
// TypeError naming both arguments unless the dtypes agree.
void check_same_dtype(const TensorView& view, const char* name, DType expected, const char* why);

}  // namespace cula
