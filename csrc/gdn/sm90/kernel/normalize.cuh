// q and k divided by their norms, 16 bytes a thread.
#pragma once

#include "common/device/launch.cuh"
#include "gdn/cuda/collective/arguments.cuh"
#include "gdn/gdn.h"

namespace cula::gdn::sm90 {

using namespace cula::device;
using cuda::TensorArg;

inline constexpr int kNormalizeThreads = 256;

struct NormalizeTensors {
  TensorArg x;     // [B, T, H, K]
  TensorArg y;     // the same
  TensorArg rstd;  // [B, T, H] fp32; optional
};

struct NormalizeArgs {
  NormalizeTensors q;
  NormalizeTensors k;
  int64_t tokens;  // of a row of the batch
  int64_t heads;
  int64_t rows;  // B T H, of each of the two
};

template <class T, int kKeyDim>
__global__ void __launch_bounds__(kNormalizeThreads) normalize_kernel(const NormalizeArgs args) {
  constexpr int kLanes = kKeyDim / 8;  // a row
  const int64_t index = blockIdx.x * static_cast<int64_t>(kNormalizeThreads / kLanes) + threadIdx.x / kLanes;
  const bool valid = index < 2 * args.rows;
  const bool is_k = index >= args.rows;
  const NormalizeTensors& t = is_k ? args.k : args.q;
  const int64_t row = valid ? (is_k ? index - args.rows : index) : 0;
  const int64_t token_row = row / args.heads;
  const int64_t head = row - token_row * args.heads;
  const int64_t batch = token_row / args.tokens;
  const int64_t token = token_row - batch * args.tokens;
  const int piece = static_cast<int>(threadIdx.x) % kLanes * 8;

  uint32_t packed[4] = {};
  if (valid) {
    *reinterpret_cast<uint4*>(packed) =
        *reinterpret_cast<const uint4*>(static_cast<const T*>(t.x.data) + t.x.offset(batch, token, head) + piece);
  }
  float2 x[4];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = unpack2<T>(packed[i]);
    sum += x[i].x * x[i].x + x[i].y * x[i].y;
  }
  sum = group_sum<kLanes>(sum);
  const float rstd = 1.0f / sqrtf(sum + static_cast<float>(kL2NormEpsilon));
  if (!valid) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) packed[i] = pack2<T>(x[i].x * rstd, x[i].y * rstd);
  *reinterpret_cast<uint4*>(static_cast<T*>(t.y.data) + t.y.offset(batch, token, head) + piece) =
      *reinterpret_cast<const uint4*>(packed);
  if (t.rstd && piece == 0) static_cast<float*>(t.rstd.data)[t.rstd.offset(batch, token, head)] = rstd;
}

}  // namespace cula::gdn::sm90
