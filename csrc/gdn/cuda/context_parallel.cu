// What context parallelism adds to forward and backward: the state map of whole sequences, its adjoint, and the state
// that the maps of several ranks make. The halves of forward are in forward.cu.
#include <algorithm>

#include "gdn/cuda/kernel/reach.cuh"
#include "gdn/cuda/launch/kernels.h"
#include "gdn/cuda/launch/scan.h"
#include "gdn/cuda/operator.h"
#include "gdn/cuda/views.h"
#include "gdn/cuda/workspace.h"

namespace cula::gdn::cuda {

namespace {

// Of one sequence; several are summarised one after the other.
struct SummaryWorkspace {
  float* factors = nullptr;     // [3, HV, T]
  float* log2_norms = nullptr;  // [slots, HV]
  int* from_end = nullptr;      // [HV]
  int* from_start = nullptr;    // [HV]
  void* P = nullptr;            // [T, HV, C] x; of the adjoint
  size_t bytes = 0;

  SummaryWorkspace(const Problem& problem, DType dtype, bool adjoint, WorkspaceCutter cutter) {
    const int64_t rows = problem.tokens * problem.value_heads;
    factors = cutter.take<float>(3 * rows);
    log2_norms = cutter.take<float>((problem.tokens / problem.chunk_size + 1) * problem.value_heads);
    from_end = cutter.take<int>(problem.value_heads);
    from_start = cutter.take<int>(problem.value_heads);
    if (adjoint) P = cutter.take_bytes(rows * problem.chunk_size * static_cast<int64_t>(dtype_size(dtype)));
    bytes = cutter.used();
  }
};

// What both directions start from.
struct SequenceInput {
  SequenceTable sequences;
  TensorArg k;
  TensorArg A;
  GateArgs gates;
  int64_t row;  // of the batch

  SequenceInput(const Call& call, const SequenceTable& table, int64_t n, const TensorArg& keys,
                const TensorArg& inverse, const GateArgs& all_gates)
      : sequences(only_sequence(table, n)), gates(all_gates), row(call.problem.sequence_offsets ? 0 : n) {
    k = from_entry(keys, row);
    A = from_entry(inverse, row);
    gates.g = from_entry(gates.g, row);
    gates.beta = from_entry(gates.beta, row);
  }
};

void make_factors(const Call& call, const SequenceInput& in, const SummaryWorkspace& space, device::Stream stream) {
  const Problem& problem = call.problem;
  ReachArgs args;
  args.sequences = in.sequences;
  args.value_heads = problem.value_heads;
  args.group = call.group;
  args.key_dim = static_cast<int>(problem.key_dim);
  args.k = in.k;
  args.gates = in.gates;
  args.factors = space.factors;
  args.factor_stride = problem.tokens * problem.value_heads;
  args.log2_norms = space.log2_norms;
  args.from_end = space.from_end;
  args.from_start = space.from_start;
  const int64_t items = in.sequences.num_slots() * problem.value_heads;
  device::launch<summary_factors_kernel>(
      "summary_factors",
      {.blocks = (items + kReachWarps - 1) / kReachWarps, .threads = 32 * kReachWarps, .stream = stream}, args);
  device::launch<reach_kernel>("summary_reach", {.blocks = 2 * problem.value_heads, .threads = 32, .stream = stream},
                               args);
}

ForwardScanArgs state_summary(const Call& call, const SequenceInput& in, const SummaryWorkspace& space) {
  const Problem& problem = call.problem;
  ForwardScanArgs args;
  args.sequences = in.sequences;
  args.value_heads = problem.value_heads;
  args.group = call.group;
  args.key_dim = static_cast<int>(problem.key_dim);
  args.value_dim = static_cast<int>(problem.value_dim);
  args.k = in.k;
  args.A = in.A;
  args.factors = space.factors;
  args.factor_stride = problem.tokens * problem.value_heads;
  args.factor_head_stride = problem.tokens;
  args.of_sequences = true;
  args.reach = space.from_end;
  return args;
}

}  // namespace

size_t cp_summarize_workspace_bytes(const Plan& plan) {
  return SummaryWorkspace(plan.problem(), element_type(plan), false, WorkspaceCutter(nullptr)).bytes;
}

void cp_summarize(const Plan& plan, const cp::Summary& t, Workspace workspace, Stream stream_handle) {
  const Call call(plan, t.cu_seqlens);
  const Problem& problem = call.problem;
  const device::DeviceGuard guard(problem.device.device_id);
  const auto stream = static_cast<device::Stream>(stream_handle);
  const SummaryWorkspace space(problem, call.dtype, false, WorkspaceCutter(workspace.data));
  const TensorArg k = token_arg(problem.use_qk_l2norm ? t.saved->k_normalized : t.k, "k", call.dtype);
  const TensorArg v = token_arg(t.v, "v", call.dtype);
  const TensorArg A = token_arg(t.saved->A, "saved.A", call.dtype);
  const GateArgs gates = operator_gates(call, t.g, t.beta, t.A_log, t.dt_bias);
  const TensorArg start = state_arg(t.initial_state, "initial_state", problem.state_v_first);
  const TensorArg summary = state_arg(t.summary, "summary", false);
  const bool narrow = plan.schedules().summary(plan).narrow;
  for (size_t entry = 0; entry < t.sequences.size(); ++entry) {
    const auto place = static_cast<int64_t>(entry);
    const SequenceInput in(call, call.sequences, t.sequences[entry], k, A, gates);
    make_factors(call, in, space, stream);
    ForwardScanArgs args = state_summary(call, in, space);
    args.v = from_entry(v, in.row);
    args.initial_state = from_entry(start, place);
    args.summary = from_entry(summary, place);
    args.map = from_column(args.summary, problem.value_dim);
    with_element_type(call.dtype, [&](auto element) { launch_state_summary<decltype(element)>(args, narrow, stream); });
  }
}

size_t cp_summarize_adjoint_workspace_bytes(const Plan& plan) {
  return SummaryWorkspace(plan.problem(), element_type(plan), true, WorkspaceCutter(nullptr)).bytes;
}

void cp_summarize_adjoint(const Plan& plan, const cp::AdjointSummary& t, Workspace workspace, Stream stream_handle) {
  const Call call(plan, t.cu_seqlens);
  const Problem& problem = call.problem;
  const device::DeviceGuard guard(problem.device.device_id);
  const auto stream = static_cast<device::Stream>(stream_handle);
  const SummaryWorkspace space(problem, call.dtype, true, WorkspaceCutter(workspace.data));
  const TensorArg q = token_arg(problem.use_qk_l2norm ? t.saved->q_normalized : t.q, "q", call.dtype);
  const TensorArg k = token_arg(problem.use_qk_l2norm ? t.saved->k_normalized : t.k, "k", call.dtype);
  const TensorArg A = token_arg(t.saved->A, "saved.A", call.dtype);
  const TensorArg grad_output = token_arg(t.grad_output, "do", call.dtype);
  const GateArgs gates = operator_gates(call, t.g, t.beta, t.A_log, t.dt_bias);
  const TensorArg start = state_arg(t.grad_final_state, "dht", problem.state_v_first);
  const TensorArg transition = state_arg(t.transition, "transition", false);
  const TensorArg summary = state_arg(t.summary, "summary", false);
  const bool narrow = plan.schedules().adjoint_summary(plan).narrow;
  for (size_t entry = 0; entry < t.sequences.size(); ++entry) {
    const auto place = static_cast<int64_t>(entry);
    const SequenceInput in(call, call.sequences, t.sequences[entry], k, A, gates);
    make_factors(call, in, space, stream);

    PrepareArgs prepare;
    prepare.sequences = in.sequences;
    prepare.heads = problem.heads;
    prepare.group = call.group;
    prepare.key_dim = static_cast<int>(problem.key_dim);
    prepare.scale = static_cast<float>(plan.scale());
    prepare.q = from_entry(q, in.row);
    prepare.k = in.k;
    prepare.gates = in.gates;
    prepare.P = dense_arg(space.P, call.dtype, problem.tokens, problem.value_heads, problem.chunk_size);
    prepare.factors = nullptr;
    prepare.factor_stride = 0;
    prepare.reach = space.from_start;

    AdjointScanArgs adjoint;
    adjoint.sequences = in.sequences;
    adjoint.value_heads = problem.value_heads;
    adjoint.group = call.group;
    adjoint.key_dim = prepare.key_dim;
    adjoint.value_dim = static_cast<int>(problem.value_dim);
    adjoint.scale = prepare.scale;
    adjoint.q = prepare.q;
    adjoint.k = in.k;
    adjoint.A = in.A;
    adjoint.P = prepare.P;
    adjoint.grad_output = from_entry(grad_output, in.row);
    adjoint.factors = space.factors;
    adjoint.factor_stride = problem.tokens * problem.value_heads;
    adjoint.factor_head_stride = problem.tokens;
    adjoint.grad_final_state = from_entry(start, place);
    adjoint.states = nullptr;
    adjoint.state_elements = 0;
    adjoint.summary = from_entry(summary, place);
    adjoint.of_sequences = true;
    adjoint.reach = space.from_start;

    const TensorArg map = from_column(adjoint.summary, problem.value_dim);
    ForwardScanArgs forward = state_summary(call, in, space);
    forward.map_only = true;
    forward.map = transposed(map);
    with_element_type(call.dtype, [&](auto element) {
      using T = decltype(element);
      launch_prepare<T, GateKind::kLogDecay>(prepare, stream);
      launch_adjoint_summary<T>(adjoint, narrow, stream);
      if (!transition) launch_state_summary<T>(forward, narrow, stream);
    });
    if (!transition) continue;
    const int64_t elements = problem.value_heads * problem.key_dim * problem.key_dim;
    device::launch<transpose_kernel>(
        "transpose",
        {.blocks = (elements + kTransposeThreads - 1) / kTransposeThreads,
         .threads = kTransposeThreads,
         .stream = stream},
        TransposeArgs{problem.value_heads, prepare.key_dim, from_entry(transition, place), map});
  }
}

// What a launch of the chain hands to the next.
size_t cp_merge_workspace_bytes(const Plan& plan) {
  const Problem& problem = plan.problem();
  WorkspaceCutter cutter(nullptr);
  cutter.take<float>(problem.value_heads * problem.key_dim * problem.value_dim);
  return cutter.used();
}

void cp_merge(const Plan& plan, const cp::Merge& t, Workspace workspace, Stream stream_handle) {
  element_type(plan);
  const Problem& problem = plan.problem();
  const device::DeviceGuard guard(problem.device.device_id);
  const auto stream = static_cast<device::Stream>(stream_handle);
  const TensorView state = TensorView::from(t.state, "state");
  ChainArgs args;
  args.value_heads = problem.value_heads;
  args.key_dim = static_cast<int>(problem.key_dim);
  args.value_dim = static_cast<int>(problem.value_dim);
  args.value_blocks = 0;
  args.summary = state_arg(t.summaries, "summaries", false);
  args.map = from_column(args.summary, problem.value_dim);
  TensorArg result;  // [HV, K, V], as the only entry of a tensor of states
  result.data = state.data;
  result.dtype = state.dtype;
  std::copy_n(state.stride.begin(), 3, result.stride + 1);
  if (problem.state_v_first) result = transposed(result);
  const TensorArg carried =
      dense_states(static_cast<float*>(workspace.data), problem.value_heads, problem.key_dim, problem.value_dim);
  const size_t length = t.order.size();
  size_t done = 0;
  do {
    args.count = static_cast<int>(std::min<size_t>(length - done, kChainLength));
    for (int i = 0; i < args.count; ++i) args.order[i] = static_cast<int32_t>(t.order[done + static_cast<size_t>(i)]);
    done += static_cast<size_t>(args.count);
    args.state = done == length ? result : carried;
    launch_chain(args, stream);
    args.entry = carried;
  } while (done < length);
}

}  // namespace cula::gdn::cuda
