// Host side of TMA: descriptions of tensors. The driver's function is asked for at run time, so that nothing links to
// the driver library.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "common/device/launch.cuh"
#include "common/host/tensor.h"

namespace cula::device {

// A 16-bit tensor [batch, token, head, column], seen in boxes of 64 (or 32) tokens x 64 columns of one head.
struct TokenTensor {
  const void* data;
  DType dtype;
  int64_t shape[4];   // batch, token, head, column
  int64_t stride[4];  // elements
};

inline constexpr int kBoxRows = 64;
inline constexpr int kBoxColumns = 64;

// Whether the copy engine can read and write it: dense columns, rows and base aligned to 16 bytes, no repeated rows.
inline bool fits_tensor_map(const TokenTensor& x) {
  constexpr int64_t kMaxStrideBytes = int64_t{1} << 40;
  constexpr int64_t kMaxExtent = int64_t{1} << 31;
  bool fits = dtype_size(x.dtype) == 2 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
  fits = fits && (x.stride[3] == 1 || x.shape[3] == 1);
  for (int i = 0; i < 3; ++i) {
    fits = fits && x.shape[i] < kMaxExtent;
    if (x.shape[i] > 1) fits = fits && x.stride[i] > 0 && x.stride[i] % 8 == 0 && 2 * x.stride[i] < kMaxStrideBytes;
  }
  return fits && x.shape[3] % kBoxColumns == 0;
}

inline CUtensorMap make_tensor_map(const TokenTensor& x, const char* name, int rows = kBoxRows) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
               "cuTensorMapEncodeTiled");
    if (found != cudaDriverEntryPointSuccess) throw_runtime_error("the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<Encode>(function);
  }();
  cuuint64_t shape[4];
  cuuint64_t stride[3];
  for (int i = 0; i < 4; ++i) shape[i] = static_cast<cuuint64_t>(x.shape[3 - i]);
  // The stride of a dimension of one element is never used, but it is checked.
  for (int i = 0; i < 3; ++i) stride[i] = x.shape[2 - i] > 1 ? static_cast<cuuint64_t>(2 * x.stride[2 - i]) : 16;
  const cuuint32_t box[4] = {kBoxColumns, 1, static_cast<cuuint32_t>(rows), 1};
  const cuuint32_t step[4] = {1, 1, 1, 1};
  // What lies behind rows that end before a box does is not fetched along with them.
  const CUtensorMapL2promotion promotion =
      x.shape[3] < kBoxColumns ? CU_TENSOR_MAP_L2_PROMOTION_NONE : CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  CUtensorMap map;
  const CUresult status =
      encode(&map, x.dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
             const_cast<void*>(x.data), shape, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw_runtime_error(name, ": cuTensorMapEncodeTiled failed with CUDA driver error ", static_cast<int>(status));
  }
  return map;
}

}  // namespace cula::device
