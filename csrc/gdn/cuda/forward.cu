// The operator's forward pass and the decoding step.
#include "gdn/cuda/kernel/recurrent.cuh"
#include "gdn/cuda/launch/elementwise.h"
#include "gdn/cuda/launch/kernels.h"
#include "gdn/cuda/launch/scan.h"
#include "gdn/cuda/operator.h"
#include "gdn/cuda/workspace.h"

namespace cula::gdn::cuda {

namespace {

struct ForwardWorkspace {
  void* q_normalized = nullptr;  // [B, T, H, K] x; these two and A only if they are not saved
  void* k_normalized = nullptr;
  void* A = nullptr;         // [B, T, HV, C] x
  void* P = nullptr;         // [B, T, HV, C] x
  float* factors = nullptr;  // [3, HV, B T]
  SegmentWorkspace segments;
  size_t bytes = 0;

  ForwardWorkspace(const Problem& problem, const ScanCut& cut, DType dtype, bool saves, WorkspaceCutter cutter)
      : segments(problem, cut, cutter) {
    const int64_t rows = problem.batch * problem.tokens;
    const size_t size = dtype_size(dtype);
    if (problem.use_qk_l2norm && !saves) {
      q_normalized = cutter.take_bytes(rows * problem.heads * problem.key_dim * size);
      k_normalized = cutter.take_bytes(rows * problem.heads * problem.key_dim * size);
    }
    if (!saves) A = cutter.take_bytes(rows * problem.value_heads * problem.chunk_size * size);
    P = cutter.take_bytes(rows * problem.value_heads * problem.chunk_size * size);
    factors = cutter.take<float>(3 * rows * problem.value_heads);
    bytes = cutter.used();
  }
};

RowsArg dense_rows(void* data, DType dtype, int64_t rows, int64_t columns) {
  RowsArg arg;
  arg.data = data;
  arg.dtype = dtype;
  arg.dims = 1;
  arg.shape[0] = rows;
  arg.stride[0] = columns;
  return arg;
}

}  // namespace

size_t forward_workspace_bytes(const Plan& plan, bool saves_for_backward) {
  return ForwardWorkspace(plan.problem(), plan.schedules().scan(plan), element_type(plan), saves_for_backward,
                          WorkspaceCutter(nullptr))
      .bytes;
}

namespace {

void run_forward(const Plan& plan, const ForwardTensors& t, Workspace workspace, Stream stream_handle, Halves halves) {
  const Call call(plan, t.cu_seqlens);
  const Problem& problem = call.problem;
  const device::DeviceGuard guard(problem.device.device_id);
  const auto stream = static_cast<device::Stream>(stream_handle);
  const bool saves = t.saved != nullptr;
  const ScanCut& cut = plan.schedules().scan(plan);
  const ForwardWorkspace space(problem, cut, call.dtype, saves,
                               WorkspaceCutter(halves.advance ? workspace.data : nullptr));
  const int64_t rows = call.token_rows;
  const int key_dim = static_cast<int>(problem.key_dim);

  TensorArg q = token_arg(t.q, "q", call.dtype);
  TensorArg k = token_arg(t.k, "k", call.dtype);
  if (problem.use_qk_l2norm) {
    const auto normalize = [&](const DLTensor* x, DLTensor* y, DLTensor* rstd, void* scratch, TensorArg& result) {
      const RowsArg target =
          saves ? rows_arg(y, "saved", false) : dense_rows(scratch, call.dtype, rows * problem.heads, problem.key_dim);
      if (halves.prepare) {
        launch_l2norm(rows_arg(x, "q", false), target, saves ? rows_arg(rstd, "rstd", true) : RowsArg{},
                      rows * problem.heads, key_dim, stream);
      }
      result = saves ? token_arg(y, "saved", call.dtype)
                     : dense_arg(scratch, call.dtype, problem.tokens, problem.heads, problem.key_dim);
    };
    normalize(t.q, saves ? t.saved->q_normalized : nullptr, saves ? t.saved->q_rstd : nullptr, space.q_normalized, q);
    normalize(t.k, saves ? t.saved->k_normalized : nullptr, saves ? t.saved->k_rstd : nullptr, space.k_normalized, k);
  }
  const TensorArg A = saves ? token_arg(t.saved->A, "saved.A", call.dtype)
                            : dense_arg(space.A, call.dtype, problem.tokens, problem.value_heads, problem.chunk_size);
  const TensorArg P = dense_arg(space.P, call.dtype, problem.tokens, problem.value_heads, problem.chunk_size);

  PrepareArgs prepare;
  prepare.sequences = call.sequences;
  prepare.heads = problem.heads;
  prepare.group = call.group;
  prepare.key_dim = key_dim;
  prepare.scale = static_cast<float>(plan.scale());
  prepare.q = q;
  prepare.k = k;
  prepare.gates = operator_gates(call, t.g, t.beta, t.A_log, t.dt_bias);
  if (halves.prepare) prepare.A = A;
  if (halves.advance) {
    prepare.P = P;
    prepare.factors = space.factors;
  }
  prepare.factor_stride = rows * problem.value_heads;

  ForwardScanArgs scan;
  scan.sequences = split_table(call.sequences, cut);
  scan.value_heads = problem.value_heads;
  scan.group = call.group;
  scan.key_dim = key_dim;
  scan.value_dim = static_cast<int>(problem.value_dim);
  scan.scale = prepare.scale;
  scan.q = q;
  scan.k = k;
  scan.v = token_arg(t.v, "v", call.dtype);
  scan.A = A;
  scan.P = P;
  scan.factors = space.factors;
  scan.factor_stride = prepare.factor_stride;
  scan.factor_head_stride = rows;
  scan.initial_state = state_arg(t.initial_state, "initial_state", problem.state_v_first);
  scan.final_state = state_arg(t.final_state, "final_state", problem.state_v_first);
  scan.initial_slots = state_slots(t.state_indices, t.initial_state);
  scan.final_slots = state_slots(t.state_indices, t.final_state);
  scan.checkpoints = checkpoint_args(problem, t);
  scan.o = token_arg(t.o, "o", call.dtype);
  scan.summary = dense_states(space.segments.summary, problem.value_heads, key_dim, problem.value_dim + key_dim);
  scan.map = dense_states(space.segments.summary, problem.value_heads, key_dim, problem.value_dim + key_dim,
                          problem.value_dim);
  scan.seeds = dense_states(space.segments.seeds, problem.value_heads, key_dim, problem.value_dim);

  with_element_type(call.dtype, [&](auto element) {
    using T = decltype(element);
    launch_prepare<T, GateKind::kLogDecay>(prepare, stream);
    if (!halves.advance) return;
    if (cut.schedule.segments) {
      launch_state_summary<T>(scan, cut.schedule.narrow, stream);
      launch_merge(segment_merge(scan), false, stream);
    }
    if (scan.checkpoints.states) {
      launch_checkpointed_scan<T>(scan, cut.schedule.narrow, stream);
    } else {
      launch_forward_scan<T>(scan, cut.schedule.narrow, stream);
    }
  });
  if (halves.advance) {
    launch_zero_padding(call.sequences, scan.o, problem.value_heads, problem.value_dim, stream);
  }
}

}  // namespace

void forward(const Plan& plan, const ForwardTensors& t, Workspace workspace, Stream stream) {
  run_forward(plan, t, workspace, stream, {});
}

size_t cp_prepare_workspace_bytes(const Plan&) { return 0; }
void cp_prepare(const Plan& plan, const ForwardTensors& t, Workspace workspace, Stream stream) {
  run_forward(plan, t, workspace, stream, {.advance = false});
}

size_t cp_advance_workspace_bytes(const Plan& plan) { return forward_workspace_bytes(plan, true); }
void cp_advance(const Plan& plan, const ForwardTensors& t, Workspace workspace, Stream stream) {
  run_forward(plan, t, workspace, stream, {.prepare = false});
}

void recurrent_forward(const Plan& plan, const ForwardTensors& t, Stream stream_handle) {
  const Call call(plan, t.cu_seqlens);
  const Problem& problem = call.problem;
  const device::DeviceGuard guard(problem.device.device_id);
  const auto stream = static_cast<device::Stream>(stream_handle);
  RecurrentArgs args;
  args.sequences = call.sequences;
  args.value_heads = problem.value_heads;
  args.group = call.group;
  args.key_dim = static_cast<int>(problem.key_dim);
  args.value_dim = static_cast<int>(problem.value_dim);
  args.scale = static_cast<float>(plan.scale());
  args.l2norm = problem.use_qk_l2norm;
  args.q = token_arg(t.q, "q", call.dtype);
  args.k = token_arg(t.k, "k", call.dtype);
  args.v = token_arg(t.v, "v", call.dtype);
  args.gates = operator_gates(call, t.g, t.beta, t.A_log, t.dt_bias);
  args.initial_state = state_arg(t.initial_state, "initial_state", problem.state_v_first);
  args.final_state = state_arg(t.final_state, "final_state", problem.state_v_first);
  args.initial_slots = state_slots(t.state_indices, t.initial_state);
  args.final_slots = state_slots(t.state_indices, t.final_state);
  args.checkpoints = checkpoint_args(problem, t);
  args.o = token_arg(t.o, "o", call.dtype);
  launch_recurrent(args, stream);
  launch_zero_padding(call.sequences, args.o, problem.value_heads, problem.value_dim, stream);
}

}  // namespace cula::gdn::cuda
