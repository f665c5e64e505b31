// Tensors of a call as the copy engine and the kernels see them.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "common/device/tensor_map.h"
#include "gdn/cuda/launch/arguments.h"

namespace cula::gdn::sm90 {

inline device::TokenTensor token_tensor(const DLTensor* tensor, const char* name) {
  const TensorView view = TensorView::from(tensor, name);
  device::TokenTensor x = {view.data, view.dtype, {}, {}};
  std::copy_n(view.shape.begin(), 4, x.shape);
  std::copy_n(view.stride.begin(), 4, x.stride);
  return x;
}

inline cuda::TensorArg tensor_arg(const device::TokenTensor& x) {
  cuda::TensorArg arg;
  arg.data = const_cast<void*>(x.data);
  arg.dtype = x.dtype;
  std::copy_n(x.stride, 4, arg.stride);
  arg.vector_bytes = 16;  // as fits_tensor_map has it
  return arg;
}

// Whether the copy engine can read or write every one of the tensors that are there.
inline bool fit(DType dtype, std::initializer_list<const device::TokenTensor*> tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const device::TokenTensor* x) {
    return x->data == nullptr || (x->dtype == dtype && device::fits_tensor_map(*x));
  });
}

// Calls f(T{}) for the element type T of a call: one of the two that this backend takes.
template <class F>
void with_half_type(DType dtype, F&& f) {
  if (dtype == DType::kBFloat16) return f(device::bf16{});
  f(device::fp16{});
}

}  // namespace cula::gdn::sm90
