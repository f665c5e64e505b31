// The operator's backward pass.
#include "gdn/cuda/kernel/gradient_args.h"
#include "gdn/cuda/launch/backward.h"
#include "gdn/cuda/launch/elementwise.h"
#include "gdn/cuda/launch/scan.h"
#include "gdn/cuda/operator.h"
#include "gdn/cuda/workspace.h"

namespace cula::gdn::cuda {

namespace {

struct BackwardWorkspace {
  void* scores = nullptr;    // [B, T, HV, C] x: P, and dP once the scans have used P
  void* M = nullptr;         // [B, T, HV, C] x
  float* factors = nullptr;  // [6, HV, B T]
  void* S = nullptr;         // [slots, HV] blocks x
  void* D = nullptr;
  void* residual = nullptr;  // [B, T, HV, V] x
  void* dW = nullptr;
  GradientSums sums = {};
  float* dyg = nullptr;  // [B, T, HV], with use_gate
  int padded_key_dim = 0;
  int64_t key_blocks = 0;
  int64_t state_elements = 0;
  SegmentWorkspace segments;
  float* adjoint_summary = nullptr;  // [places, HV, K, V], as segments.seeds
  float* adjoint_seeds = nullptr;
  size_t bytes = 0;

  BackwardWorkspace(const Problem& problem, const ScanCut& cut, DType dtype, WorkspaceCutter cutter)
      : segments(problem, cut, cutter) {
    const int64_t rows = problem.batch * problem.tokens;
    const int64_t wide_rows = rows * problem.value_heads;
    const int64_t size = static_cast<int64_t>(dtype_size(dtype));
    const int64_t chunk = problem.chunk_size;
    const int64_t slots = chunk_slots(problem);
    padded_key_dim = problem.key_dim <= 64 ? 64 : (problem.key_dim <= 128 ? 128 : 256);
    key_blocks = (problem.key_dim + kRows - 1) / kRows;
    state_elements = padded_key_dim * ((problem.value_dim + kRows - 1) / kRows * kRows);

    scores = cutter.take_bytes(wide_rows * chunk * size);
    M = cutter.take_bytes(wide_rows * chunk * size);
    factors = cutter.take<float>(6 * wide_rows);
    S = cutter.take_bytes(slots * problem.value_heads * state_elements * size);
    D = cutter.take_bytes(slots * problem.value_heads * state_elements * size);
    residual = cutter.take_bytes(wide_rows * problem.value_dim * size);
    dW = cutter.take_bytes(wide_rows * problem.value_dim * size);
    sums.stride = wide_rows;
    sums.head_stride = rows;
    sums.state_stride = slots * problem.value_heads;
    sums.scores = cutter.take<float>(wide_rows);
    sums.beta = cutter.take<float>(wide_rows);
    sums.decay = cutter.take<float>(key_blocks * wide_rows);
    sums.to_end = cutter.take<float>(key_blocks * wide_rows);
    sums.beta_state = cutter.take<float>(key_blocks * wide_rows);
    sums.state = cutter.take<float>(key_blocks * sums.state_stride);
    if (cut.schedule.segments) {
      adjoint_summary = cutter.take<float>(segments.state_elements);
      adjoint_seeds = cutter.take<float>(segments.state_elements);
    }
    if (problem.use_gate) dyg = cutter.take<float>(wide_rows);
    bytes = cutter.used();
  }
};

}  // namespace

size_t backward_workspace_bytes(const Plan& plan) {
  return BackwardWorkspace(plan.problem(), plan.schedules().scan(plan), element_type(plan), WorkspaceCutter(nullptr))
      .bytes;
}

void backward(const Plan& plan, const BackwardTensors& t, Workspace workspace, Stream stream_handle) {
  const Call call(plan, t.cu_seqlens);
  const Problem& problem = call.problem;
  const device::DeviceGuard guard(problem.device.device_id);
  const auto stream = static_cast<device::Stream>(stream_handle);
  const ScanCut& cut = plan.schedules().scan(plan);
  const SequenceTable segments = split_table(call.sequences, cut);
  const BackwardWorkspace space(problem, cut, call.dtype, WorkspaceCutter(workspace.data));
  const SavedTensors& saved = *t.saved;
  const bool v_first = problem.state_v_first;
  const int key_dim = static_cast<int>(problem.key_dim);
  const int value_dim = static_cast<int>(problem.value_dim);

  const TensorArg q = token_arg(problem.use_qk_l2norm ? saved.q_normalized : t.q, "q", call.dtype);
  const TensorArg k = token_arg(problem.use_qk_l2norm ? saved.k_normalized : t.k, "k", call.dtype);
  const auto dense = [&](void* data, int64_t columns) {
    return dense_arg(data, call.dtype, problem.tokens, problem.value_heads, columns);
  };
  const TensorArg scores = dense(space.scores, problem.chunk_size);
  const TensorArg residual = dense(space.residual, problem.value_dim);
  const TensorArg dW = dense(space.dW, problem.value_dim);
  const TensorArg grad_output = token_arg(t.grad_output, "do", call.dtype);

  PrepareArgs prepare;
  prepare.sequences = call.sequences;
  prepare.heads = problem.heads;
  prepare.group = call.group;
  prepare.key_dim = key_dim;
  prepare.scale = static_cast<float>(plan.scale());
  prepare.q = q;
  prepare.k = k;
  prepare.gates = operator_gates(call, t.g, t.beta, t.A_log, t.dt_bias);
  prepare.P = scores;
  prepare.factors = space.factors;
  prepare.factor_stride = space.sums.stride;
  prepare.gate_rows = true;

  ForwardScanArgs states;
  states.sequences = segments;
  states.value_heads = problem.value_heads;
  states.group = call.group;
  states.key_dim = key_dim;
  states.value_dim = value_dim;
  states.k = k;
  states.v = token_arg(t.v, "v", call.dtype);
  states.A = token_arg(saved.A, "saved.A", call.dtype);
  states.factors = space.factors;
  states.factor_stride = prepare.factor_stride;
  states.factor_head_stride = space.sums.head_stride;
  states.initial_state = state_arg(t.initial_state, "initial_state", v_first);
  states.states = space.S;
  states.state_elements = space.state_elements;
  states.residual = residual;
  states.summary = dense_states(space.segments.summary, problem.value_heads, key_dim, value_dim + key_dim);
  states.map = dense_states(space.segments.summary, problem.value_heads, key_dim, value_dim + key_dim, value_dim);
  states.for_adjoint = true;
  states.seeds = dense_states(space.segments.seeds, problem.value_heads, key_dim, value_dim);

  AdjointScanArgs adjoint;
  adjoint.sequences = segments;
  adjoint.value_heads = problem.value_heads;
  adjoint.group = call.group;
  adjoint.key_dim = key_dim;
  adjoint.value_dim = value_dim;
  adjoint.scale = prepare.scale;
  adjoint.q = q;
  adjoint.k = k;
  adjoint.A = states.A;
  adjoint.P = scores;
  adjoint.grad_output = grad_output;
  adjoint.factors = space.factors;
  adjoint.factor_stride = prepare.factor_stride;
  adjoint.factor_head_stride = space.sums.head_stride;
  adjoint.grad_final_state = state_arg(t.grad_final_state, "dht", v_first);
  adjoint.dh0 = state_arg(t.dh0, "dh0", v_first);
  adjoint.states = space.D;
  adjoint.state_elements = space.state_elements;
  adjoint.dW = dW;
  adjoint.dv = token_arg(t.dv, "dv", call.dtype);
  adjoint.summary = dense_states(space.adjoint_summary, problem.value_heads, key_dim, value_dim);
  adjoint.seeds = dense_states(space.adjoint_seeds, problem.value_heads, key_dim, value_dim);

  GradientArgs gradient;
  gradient.sequences = call.sequences;
  gradient.heads = problem.heads;
  gradient.group = call.group;
  gradient.key_dim = key_dim;
  gradient.value_dim = value_dim;
  gradient.padded_key_dim = space.padded_key_dim;
  gradient.key_blocks = space.key_blocks;
  gradient.scale = adjoint.scale;
  gradient.q = q;
  gradient.k = k;
  gradient.v = states.v;
  gradient.grad_output = grad_output;
  gradient.residual = residual;
  gradient.dW = dW;
  gradient.gates = prepare.gates;
  gradient.factors = space.factors;
  gradient.S = space.S;
  gradient.D = space.D;
  gradient.state_elements = space.state_elements;
  gradient.dP = scores;
  gradient.M = dense(space.M, problem.chunk_size);
  gradient.sums = space.sums;
  gradient.dq = token_arg(t.dq, "dq", call.dtype);
  gradient.dk = token_arg(t.dk, "dk", call.dtype);
  const TensorArg dg = token_arg(t.dg, "dg", call.dtype);
  const TensorArg dyg = dense_arg(space.dyg, DType::kFloat32, problem.tokens, problem.value_heads, 1);
  gradient.dg = problem.use_gate ? dyg : dg;
  gradient.dbeta = token_arg(t.dbeta, "dbeta", call.dtype);

  with_element_type(call.dtype, [&](auto element) {
    using T = decltype(element);
    launch_prepare<T, GateKind::kLogDecay>(prepare, stream);
    const bool narrow = cut.schedule.narrow;
    if (cut.schedule.segments) {
      launch_state_summary<T>(states, narrow, stream);
      launch_merge(segment_merge(states), false, stream);
      launch_adjoint_summary<T>(adjoint, narrow, stream);
      launch_merge(segment_merge(adjoint, states), true, stream);
    }
    launch_state_scan<T>(states, narrow, stream);
    launch_adjoint_scan<T>(adjoint, narrow, stream);
    launch_gradient<T>(gradient, stream);
  });
  launch_gate_gradient(gradient, stream);
  if (problem.use_gate) {
    launch_zero_padding(call.sequences, dyg, problem.value_heads, 1, stream);
    launch_gate_backward(prepare.gates, {dyg, dg, head_arg(t.dA_log, "dA_log"), head_arg(t.ddt_bias, "ddt_bias")},
                         problem.batch, problem.tokens, problem.value_heads, stream);
  }
  if (problem.use_qk_l2norm) {
    const auto through_norm = [&](const DLTensor* y, const DLTensor* rstd, const DLTensor* dx) {
      if (dx == nullptr) return;
      launch_l2norm_backward(rows_arg(y, "saved", false), rows_arg(rstd, "rstd", true), rows_arg(dx, "dx", false),
                             rows_arg(dx, "dx", false), call.token_rows * problem.heads, key_dim, call.sequences,
                             problem.heads, stream);
    };
    through_norm(saved.q_normalized, saved.q_rstd, t.dq);
    through_norm(saved.k_normalized, saved.k_rstd, t.dk);
  }
  launch_zero_padding(call.sequences, gradient.dq, problem.heads, problem.key_dim, stream);
  launch_zero_padding(call.sequences, gradient.dk, problem.heads, problem.key_dim, stream);
  launch_zero_padding(call.sequences, adjoint.dv, problem.value_heads, problem.value_dim, stream);
  launch_zero_padding(call.sequences, dg, problem.value_heads, 1, stream);
  launch_zero_padding(call.sequences, gradient.dbeta, problem.value_heads, 1, stream);
}

}  // namespace cula::gdn::cuda
