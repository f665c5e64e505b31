// Where the rows of a chunk, of a head, and the state of a sequence lie in the user's tensors.
#pragma once

#include <initializer_list>

#include "gdn/cpu/kernels/gate.h"
#include "gdn/gdn.h"

namespace cula::gdn::cpu::CULA_ISA {

inline char* element(const TensorView& x, int64_t offset) {
  return static_cast<char*>(x.data) + offset * static_cast<int64_t>(dtype_size(x.dtype));
}

// Rows from `begin` on of one head of a [B, T, heads, D] or [B, T, heads] tensor.
inline MatrixView rows_of(const TensorView& x, const Problem& problem, int64_t begin, int64_t head) {
  const int64_t batch = begin / problem.tokens, token = begin % problem.tokens;
  const int64_t offset = batch * x.stride[0] + token * x.stride[1] + head * x.stride[2];
  return {element(x, offset), x.dtype, x.stride[1], x.ndim == 4 ? x.stride[3] : 0};
}

// The [K, V] matrix of a [.., HV, K, V] tensor (V, K if state_v_first) whose leading dimensions were resolved to
// `offset`.
inline MatrixView state_at(const TensorView& x, const Problem& problem, int64_t offset, int64_t head) {
  const int last = x.ndim - 1;
  const MatrixView stored = {element(x, offset + head * x.stride[last - 2]), x.dtype, x.stride[last - 1],
                             x.stride[last]};
  return problem.state_v_first ? stored.transposed() : stored;
}

// Of a sequence, in [N, HV, K, V].
inline MatrixView state_of(const TensorView& x, const Problem& problem, int64_t sequence, int64_t head) {
  return state_at(x, problem, sequence * x.stride[0], head);
}

// Of a chunk, in [B, NT, HV, K, V].
inline MatrixView chunk_state_of(const TensorView& x, const Problem& problem, int64_t chunk, int64_t head) {
  const int64_t batch = chunk / x.shape[1], index = chunk % x.shape[1];
  return state_at(x, problem, batch * x.stride[0] + index * x.stride[1], head);
}

// Element offset of the index-th position over the first `dims` dimensions, in row-major order.
inline int64_t offset_of(const TensorView& x, int64_t index, int dims) {
  int64_t offset = 0;
  for (int i = dims - 1; i >= 0; --i) {
    offset += index % x.shape[i] * x.stride[i];
    index /= x.shape[i];
  }
  return offset;
}

template <class T>
T load_scalar(const TensorView& x, int64_t index) {
  T value;
  load_column(MatrixView{element(x, offset_of(x, index, x.ndim)), x.dtype, 0, 0}, 1, &value);
  return value;
}

template <class T>
void store_scalar(const TensorView& x, int64_t index, T value) {
  store_column(&value, 1, MatrixView{element(x, offset_of(x, index, x.ndim)), x.dtype, 0, 0});
}

inline GateParameters gate_parameters(const TensorView& A_log, const TensorView& dt_bias, int64_t head) {
  GateParameters gate;
  gate.A = std::exp(load_scalar<double>(A_log, head));
  if (dt_bias) gate.dt_bias = load_scalar<double>(dt_bias, head);
  return gate;
}

// The natural-log decays of `rows` tokens of a head, from g as the operator gets it.
inline void load_log_gates(const MatrixView& g, const GateParameters* raw_gate, int64_t rows, double* gates) {
  load_column(g, rows, gates);
  if (raw_gate == nullptr) return;
  for (int64_t i = 0; i < rows; ++i) gates[i] = raw_gate->log_decay(gates[i]);
}

// A chunk's share of the gradients of a head's gate parameters.
struct GateSums {
  double dA_log = 0.0, ddt_bias = 0.0;

  void operator+=(const GateSums& other) {
    dA_log += other.dA_log;
    ddt_bias += other.ddt_bias;
  }
};

// From the gradient of the log decays to that of the raw gates, in place.
template <class T>
GateSums backward_through_gate(const GateParameters& parameters, const double* raw, int64_t rows, T* gradient) {
  GateSums sums;
  for (int64_t i = 0; i < rows; ++i) {
    // No gradient stays none, even where the gate has overflowed.
    const double by_log_decay = gradient[i];
    const double by_raw = by_log_decay == 0.0 ? 0.0 : by_log_decay * parameters.derivative(raw[i]);
    sums.dA_log += by_log_decay == 0.0 ? 0.0 : by_log_decay * parameters.log_decay(raw[i]);
    sums.ddt_bias += by_raw;
    gradient[i] = T(by_raw);
  }
  return sums;
}

// beta from logits or as given. `neg_eigval` doubles the range of the sigmoid.
inline double beta_scale(const Problem& problem) { return problem.allow_neg_eigval ? 2.0 : 1.0; }
template <class T>
void load_beta(const MatrixView& beta, const Problem& problem, int64_t rows, T* to) {
  if (!problem.use_beta_sigmoid) return load_column(beta, rows, to);
  double logits[kMaxChunk];
  load_column(beta, rows, logits);
  for (int64_t i = 0; i < rows; ++i) to[i] = T(beta_scale(problem) * sigmoid(logits[i]));
}

// Sets the rows that belong to no sequence to zero.
inline void zero_padding_rows(const TensorView& x, const Plan& plan) {
  if (!x) return;
  const Problem& problem = plan.problem();
  if (!problem.sequence_offsets) return;
  const int64_t heads = x.shape[2], columns = x.ndim == 4 ? x.shape[3] : 1;
  for (int64_t row = problem.sequence_offsets->back(); row < problem.tokens; ++row) {
    for (int64_t head = 0; head < heads; ++head) {
      const MatrixView to = rows_of(x, problem, row, head);
      with_stored_type(to.dtype, [&](auto stored) {
        using Stored = decltype(stored);
        for (int64_t j = 0; j < columns; ++j) reinterpret_cast<Stored*>(to.data)[j * to.column_stride] = Stored{};
      });
    }
  }
}

inline TensorView take_tensor(Arena& arena, DType dtype, std::initializer_list<int64_t> shape) {
  TensorView view;
  view.dtype = dtype;
  view.ndim = static_cast<int>(shape.size());
  int64_t count = 1;
  for (int i = view.ndim - 1; i >= 0; --i) {
    view.shape[i] = shape.begin()[i];
    view.stride[i] = count;
    count *= view.shape[i];
  }
  view.data = arena.take<char>(count * static_cast<int64_t>(dtype_size(dtype)));
  return view;
}

// Equally large scratch areas, one a thread.
struct ThreadScratch {
  char* base = nullptr;
  size_t bytes = 0;

  ThreadScratch() = default;
  ThreadScratch(Arena& arena, size_t bytes_each, int num_threads)
      : base(arena.take<char>(static_cast<int64_t>(bytes_each) * num_threads)), bytes(bytes_each) {}

  void* of(int worker) const { return base + bytes * static_cast<size_t>(worker); }
};

// Calls body with the policy under which a problem's products run.
template <class Body>
void with_policy(const Problem& problem, Body&& body) {
  switch (from_dlpack(problem.dtype, "dtype")) {
    case DType::kFloat64:
      return body(Float64{});
#if defined(__AVX512BF16__)
    case DType::kBFloat16:
      return body(Bf16Pairs{});
#endif
    default:
      return body(Float32{});
  }
}

}  // namespace cula::gdn::cpu::CULA_ISA
