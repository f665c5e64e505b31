// Parts of what a kernel is told of, as tensors and tables of their own.
#pragma once

#include <utility>

#include "gdn/cuda/launch/arguments.h"

namespace cula::gdn::cuda {

// A sequence as the only one of its row of the batch.
inline SequenceTable only_sequence(SequenceTable table, int64_t n) {
  if (table.offsets != nullptr) {
    const int64_t size = table.wide ? sizeof(int64_t) : sizeof(int32_t);
    table.offsets = static_cast<const char*>(table.offsets) + n * size;
  }
  table.num_sequences = 1;
  return table;
}

// From entry n of the first dimension on.
inline TensorArg from_entry(TensorArg x, int64_t n) {
  if (x) x.data = static_cast<char*>(x.data) + n * x.stride[0] * static_cast<int64_t>(dtype_size(x.dtype));
  return x;
}

// The columns of a [P, HV, K, columns] tensor from `column` on.
inline TensorArg from_column(TensorArg x, int64_t column) {
  x.data = static_cast<char*>(x.data) + column * x.stride[3] * static_cast<int64_t>(dtype_size(x.dtype));
  return x;
}

inline TensorArg transposed(TensorArg x) {
  std::swap(x.stride[2], x.stride[3]);
  return x;
}

}  // namespace cula::gdn::cuda
