// Segments one behind the other, whose states follow from the one before: S <- M S + S_ext by the collective that the
// general backend's merges have. States lie as [V, K] and transitions transposed, both fp32; S_ext stands where the
// result goes.
#pragma once

#include "gdn/cuda/collective/state_map.cuh"

namespace cula::gdn::sm90 {

// kForward: of the state; otherwise of its gradient, with M^T.
template <int kKeyDim, bool kForward>
struct SegmentChain {
  using Columns = cuda::StateMap<kKeyDim, kForward>;  // what lies transposed is transposed back
  using Patch = typename Columns::Patch;
  static constexpr size_t kSharedBytes = sizeof(typename Columns::Shared);

  Columns columns;
  cuda::TensorArg states;  // [places, HV, K, V]
  cuda::TensorArg maps;    // [places, HV, K, K], transposed
  int64_t head;

  __device__ __forceinline__ static Columns columns_of(void* shared, int value_dim, int value) {
    return {*static_cast<typename Columns::Shared*>(shared), kKeyDim, value_dim, value};
  }
  __device__ __forceinline__ static cuda::TensorArg states_of(float* data, int64_t heads, int value_dim) {
    cuda::TensorArg x;
    x.data = data;
    x.stride[1] = static_cast<int64_t>(value_dim) * kKeyDim;
    x.stride[0] = heads * x.stride[1];
    x.stride[2] = 1;
    x.stride[3] = kKeyDim;
    return x;
  }
  __device__ __forceinline__ static cuda::TensorArg maps_of(float* data, int64_t heads) {
    cuda::TensorArg x;
    x.data = data;
    x.stride[1] = static_cast<int64_t>(kKeyDim) * kKeyDim;
    x.stride[0] = heads * x.stride[1];
    x.stride[2] = kKeyDim;
    x.stride[3] = 1;
    return x;
  }

  // From state s on through `count` segments, the first of which has place `first`, the next ones `step` further on
  // each. By all threads.
  __device__ __forceinline__ void run(Patch& s, int64_t count, int64_t first, int64_t step) const {
    const auto place = [&](int64_t n) { return first + n * step; };
    columns.run(
        s, count, maps, [&](int64_t n) { return place(n) * maps.stride[0] + head * maps.stride[1]; },
        [&](Patch& x, int64_t n) { columns.load(x, states, place(n), head); },
        [&](const Patch& x, int64_t n) {
          if (n > 0) columns.store(x, states, place(n - 1), head);
        });
    columns.store(s, states, place(count - 1), head);
    device::sync_block();  // a chain behind this one begins anew in shared memory
  }
};

}  // namespace cula::gdn::sm90
