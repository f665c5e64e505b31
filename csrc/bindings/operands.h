// What the entry points of the operator and of context parallelism share: their operands, and scratch memory.
#pragma once

#include "bindings/binding.h"

namespace cula::gdn::bindings {

// Scratch memory from the allocator of the framework that the caller's tensors come from.
class ScratchMemory {
 public:
  ScratchMemory(size_t bytes, DLDevice device) {
    if (bytes == 0) return;
    const int64_t shape[1] = {static_cast<int64_t>(bytes)};
    tensor_ =
        ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, ffi::ShapeView(shape, 1), DLDataType{kDLUInt, 8, 1}, device);
    workspace_ = {.data = tensor_->data_ptr(), .bytes = bytes};
  }
  Workspace get() const { return workspace_; }

 private:
  std::optional<ffi::Tensor> tensor_;
  Workspace workspace_;
};

// The operands that all entry points share.
struct Inputs {
  Tensor q, k, v, g, beta, A_log, dt_bias, initial_state;

  template <class Tensors>
  Tensors store_in(Tensors tensors) const {
    tensors.q = get(q);
    tensors.k = get(k);
    tensors.v = get(v);
    tensors.g = get(g);
    tensors.beta = get(beta);
    tensors.A_log = get(A_log);
    tensors.dt_bias = get(dt_bias);
    tensors.initial_state = get(initial_state);
    return tensors;
  }
};

// What forward saves, in the order in which Python passes it.
struct Saved {
  Tensor A, q_normalized, k_normalized, q_rstd, k_rstd;

  SavedTensors tensors() const {
    return {.q_normalized = get(q_normalized),
            .q_rstd = get(q_rstd),
            .k_normalized = get(k_normalized),
            .k_rstd = get(k_rstd),
            .A = get(A)};
  }
};

}  // namespace cula::gdn::bindings
