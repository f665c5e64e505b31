// How a C++ function becomes one that Python calls through apache-tvm-ffi.
//
// A bound function takes a Request and its own arguments. `Binding` puts the options that all of them share behind
// those arguments, builds the Request from the options and turns cula::Error into the Python exception of its kind.
#pragma once

#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/tvm_ffi.h>

#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/host/error.h"
#include "gdn/gdn.h"

namespace cula::gdn::bindings {

namespace ffi = tvm::ffi;

// A tensor argument; None is no tensor.
using Tensor = ffi::Optional<DLTensor*>;

inline DLTensor* get(const Tensor& tensor) { return tensor.has_value() ? tensor.value() : nullptr; }

// Elements of a one-dimensional int32 or int64 tensor on the CPU; nothing for no tensor.
std::optional<std::vector<int64_t>> read_offsets(const DLTensor* cu_seqlens);

// What the shared options say; sizes, dtype and device are left to the bound function.
struct Request {
  Problem problem;
  const DLTensor* cu_seqlens = nullptr;  // on the problem's device, for packed sequences on a GPU
  // The caller's own chunk table, if any. It must be the one that follows from the lengths; on a device it is not read.
  const DLTensor* chunk_indices = nullptr;

  // B, T, H, K from q and HV, V from v; dtype and device from q.
  void set_sizes(const DLTensor* q, const DLTensor* v);
  void set_sizes(int64_t batch, int64_t tokens, int64_t heads, int64_t value_heads, int64_t key_dim, int64_t value_dim);
  Plan make_plan() const;
};

// The stream that the caller's framework has made current on the problem's device.
inline Stream current_stream(const Problem& problem) {
  if (problem.device.device_type == kDLCPU) return nullptr;
  return TVMFFIEnvGetStream(problem.device.device_type, problem.device.device_id);
}

template <class Body>
auto translate_errors(Body&& body) {
  try {
    return body();
  } catch (const Error& error) {
    throw ffi::Error(error.kind(), error.what(), "");
  } catch (const std::bad_alloc&) {
    throw ffi::Error("MemoryError", "out of host memory", "");
  }
}

template <auto Function>
struct Binding;

template <class Result, class... Args, Result (*Function)(Request, Args...)>
struct Binding<Function> {
  Result operator()(Args... args, Tensor offsets, Tensor cu_seqlens, Tensor chunk_indices, ffi::Optional<double> scale,
                    int64_t chunk_size, bool use_qk_l2norm, bool use_gate, bool use_beta_sigmoid, bool allow_neg_eigval,
                    bool state_v_first, bool batch_invariant, std::string backend, int64_t num_threads) const {
    return translate_errors([&] {
      Request request;
      request.cu_seqlens = get(cu_seqlens);
      request.chunk_indices = get(chunk_indices);
      Problem& problem = request.problem;
      problem.sequence_offsets = read_offsets(get(offsets));
      problem.chunk_size = chunk_size;
      if (scale.has_value()) problem.scale = scale.value();
      problem.use_qk_l2norm = use_qk_l2norm;
      problem.use_gate = use_gate;
      problem.use_beta_sigmoid = use_beta_sigmoid;
      problem.allow_neg_eigval = allow_neg_eigval;
      problem.state_v_first = state_v_first;
      problem.batch_invariant = batch_invariant;
      problem.backend = backend_from_name(backend);
      problem.num_threads = static_cast<int>(num_threads);
      return Function(std::move(request), args...);
    });
  }
};

}  // namespace cula::gdn::bindings

#define CULA_EXPORT(name, ...) TVM_FFI_DLL_EXPORT_TYPED_FUNC(name, (::cula::gdn::bindings::Binding<__VA_ARGS__>{}))
