#include "common/host/tensor.h"

#include <algorithm>
#include <cstdlib>

namespace cula {

namespace {

struct DTypeInfo {
  const char* name;
  DLDataType type;
};

constexpr DTypeInfo kDTypes[] = {
    {"float64", {kDLFloat, 64, 1}}, {"float32", {kDLFloat, 32, 1}}, {"bfloat16", {kDLBfloat, 16, 1}},
    {"float16", {kDLFloat, 16, 1}}, {"int64", {kDLInt, 64, 1}},     {"int32", {kDLInt, 32, 1}},
};

const DTypeInfo& info(DType dtype) { return kDTypes[static_cast<int>(dtype)]; }

std::string list_string(const int64_t* begin, const int64_t* end) {
  std::string text = "[";
  for (const int64_t* value = begin; value != end; ++value) {
    if (value != begin) text += ", ";
    text += std::to_string(*value);
  }
  return text + "]";
}

}  // namespace

const char* dtype_name(DType dtype) { return info(dtype).name; }
size_t dtype_size(DType dtype) { return info(dtype).type.bits / 8; }
bool is_float(DType dtype) { return info(dtype).type.code != kDLInt; }
DLDataType to_dlpack(DType dtype) { return info(dtype).type; }

DType from_dlpack(DLDataType type, const char* name) {
  for (int i = 0; i < static_cast<int>(std::size(kDTypes)); ++i) {
    const DLDataType& known = kDTypes[i].type;
    if (known.code == type.code && known.bits == type.bits && type.lanes == 1) return static_cast<DType>(i);
  }
  throw_type_error(name, ": expected float64, float32, bfloat16, float16, int64 or int32, got DLPack type code ",
                   int(type.code), " with ", int(type.bits), " bits and ", type.lanes, " lanes");
}

int64_t TensorView::numel() const {
  int64_t count = 1;
  for (int i = 0; i < ndim; ++i) count *= shape[i];
  return count;
}

bool TensorView::is_contiguous() const {
  int64_t expected = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    if (shape[i] != 1 && stride[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

std::string TensorView::shape_string() const { return list_string(shape.data(), shape.data() + ndim); }

TensorView TensorView::from(const DLTensor* tensor, const char* name) {
  TensorView view;
  if (tensor == nullptr) return view;
  view.dtype = from_dlpack(tensor->dtype, name);
  if (tensor->ndim < 0 || tensor->ndim > kMaxDims) {
    throw_value_error(name, ": expected at most ", kMaxDims, " dimensions, got ", tensor->ndim);
  }
  if (tensor->ndim > 0 && tensor->shape == nullptr) {
    throw_value_error(name, ": expected a shape of ", tensor->ndim, " dimensions, got a null pointer");
  }
  view.ndim = tensor->ndim;
  view.device = tensor->device;
  int64_t dense_stride = 1;
  for (int i = view.ndim - 1; i >= 0; --i) {
    view.shape[i] = tensor->shape[i];
    view.stride[i] = tensor->strides != nullptr ? tensor->strides[i] : dense_stride;
    dense_stride *= std::max<int64_t>(view.shape[i], 1);
  }
  if (std::any_of(view.shape.begin(), view.shape.begin() + view.ndim, [](int64_t size) { return size < 0; })) {
    throw_value_error(name, ": expected no negative size, got shape ", view.shape_string());
  }
  if (tensor->data != nullptr) {
    view.data = static_cast<char*>(tensor->data) + tensor->byte_offset;
  } else if (view.numel() != 0) {
    throw_value_error(name, ": expected data for shape ", view.shape_string(), ", got a null pointer");
  }
  return view;
}

namespace {

// The bytes of a tensor, seen as rows that repeat every `period` bytes: the first one, and how much of a period is
// used.
struct Footprint {
  uintptr_t begin;
  uint64_t bytes;
  bool periodic;  // strides of a period or more are whole periods
};

Footprint footprint(const TensorView& x, uint64_t period) {
  const uint64_t size = dtype_size(x.dtype);
  Footprint result = {reinterpret_cast<uintptr_t>(x.data), size, true};
  for (int i = 0; i < x.ndim; ++i) {
    const uint64_t stride = static_cast<uint64_t>(std::abs(x.stride[i])) * size;
    const uint64_t reach = static_cast<uint64_t>(x.shape[i] - 1) * stride;
    if (x.stride[i] < 0) result.begin -= reach;
    if (stride < period) {
      result.bytes += reach;
    } else if (x.shape[i] > 1) {
      result.periodic = result.periodic && stride % period == 0;
    }
  }
  return result;
}

}  // namespace

ByteRange byte_range(const TensorView& x) {
  if (!x || x.numel() == 0) return {};
  const Footprint all = footprint(x, UINT64_MAX);
  return {all.begin, all.begin + all.bytes};
}

bool may_overlap(const TensorView& a, const TensorView& b) {
  if (!byte_range(a).meets(byte_range(b))) return false;
  const auto apart = [&](uint64_t period) {
    const Footprint x = footprint(a, period);
    const Footprint y = footprint(b, period);
    const uint64_t distance = (y.begin % period + period - x.begin % period) % period;
    return x.periodic && y.periodic && distance >= x.bytes && distance + y.bytes <= period;
  };
  for (int i = 0; i < a.ndim; ++i) {
    const uint64_t period = static_cast<uint64_t>(std::abs(a.stride[i])) * dtype_size(a.dtype);
    if (period != 0 && a.shape[i] > 1 && apart(period)) return false;
  }
  return true;
}

void check_shape(const TensorView& view, const char* name, const char* letters,
                 std::initializer_list<int64_t> expected) {
  if (view.ndim == static_cast<int>(expected.size()) &&
      std::equal(expected.begin(), expected.end(), view.shape.begin())) {
    return;
  }
  throw_value_error(name, ": expected shape ", letters, " = ", list_string(expected.begin(), expected.end()), ", got ",
                    view.shape_string());
}

void check_float(const TensorView& view, const char* name) {
  if (!is_float(view.dtype)) {
    throw_type_error(name, ": expected float64, float32, bfloat16 or float16, got ", dtype_name(view.dtype));
  }
}

void check_same_dtype(const TensorView& view, const char* name, DType expected, const char* why) {
  if (view.dtype != expected) {
    throw_type_error(name, ": expected ", dtype_name(expected), " (", why, "), got ", dtype_name(view.dtype));
  }
}

}  // namespace cula
