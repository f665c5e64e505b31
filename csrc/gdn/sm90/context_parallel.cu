// Summaries of whole sequences for context parallelism on Hopper. The halves of forward are in forward.cu; merges are
// the general backend's.
#include <algorithm>

#include "gdn/cuda/operator.h"
#include "gdn/cuda/views.h"
#include "gdn/cuda/workspace.h"
#include "gdn/sm90/launch/context_parallel.h"
#include "gdn/sm90/operands.h"
#include "gdn/sm90/operator.h"

namespace cula::gdn::sm90 {

namespace {

using cuda::Call;
using cuda::from_entry;
using device::TokenTensor;

// Of one sequence; several are summarised one after the other.
struct SummaryWorkspace {
  ChunkFactors* factors = nullptr;  // [slots, HV]
  size_t bytes = 0;

  SummaryWorkspace(const Problem& problem, void* data) {
    cuda::WorkspaceCutter cutter(data);
    factors = cutter.take<ChunkFactors>((problem.tokens / kRows + 1) * problem.value_heads);
    bytes = cutter.used();
  }
};

// What both directions have, without the maps.
SequenceSummaryArgs summary_args(const Plan& plan, const Call& call, const SummaryWorkspace& space,
                                 const cuda::GateArgs& gates, const TokenTensor& k) {
  const Problem& problem = call.problem;
  SequenceSummaryArgs args = {};
  args.scan.value_heads = problem.value_heads;
  args.scan.group = call.group;
  args.scan.value_tiles = static_cast<int>(problem.value_dim / 64);
  args.scan.scale = static_cast<float>(plan.scale());
  args.scan.factors = space.factors;
  args.factors.value_heads = problem.value_heads;
  args.factors.scale = args.scan.scale;
  args.factors.gates = gates;
  args.factors.wants_norm = true;
  if (!problem.use_qk_l2norm) args.factors.k = tensor_arg(k);
  args.factors.group = call.group;
  args.factors.key_dim = static_cast<int>(problem.key_dim);
  args.factors.factors = space.factors;
  return args;
}

// The same for sequence n alone.
SequenceSummaryArgs of_sequence(SequenceSummaryArgs args, const Call& call, int64_t n) {
  args.batch = call.problem.sequence_offsets ? 0 : static_cast<int>(n);
  args.scan.segments.sequences = args.factors.sequences = cuda::only_sequence(call.sequences, n);
  args.factors.gates.g = from_entry(args.factors.gates.g, args.batch);
  args.factors.gates.beta = from_entry(args.factors.gates.beta, args.batch);
  args.factors.k = from_entry(args.factors.k, args.batch);
  return args;
}

}  // namespace

// Operands that the copy engine can not read go through the general kernels.
size_t cp_summarize_workspace_bytes(const Plan& plan) {
  return std::max(SummaryWorkspace(plan.problem(), nullptr).bytes, cuda::cp_summarize_workspace_bytes(plan));
}

void cp_summarize(const Plan& plan, const cp::Summary& t, Workspace workspace, Stream stream_handle) {
  const Call call(plan, t.cu_seqlens);
  const Problem& problem = call.problem;
  const device::DeviceGuard guard(problem.device.device_id);
  const auto stream = static_cast<device::Stream>(stream_handle);
  const TokenTensor k =
      problem.use_qk_l2norm ? token_tensor(t.saved->k_normalized, "saved.k_normalized") : token_tensor(t.k, "k");
  const TokenTensor v = token_tensor(t.v, "v");
  const TokenTensor A = token_tensor(t.saved->A, "saved.A");
  if (!fit(call.dtype, {&k, &v, &A})) return cuda::cp_summarize(plan, t, workspace, stream_handle);

  const SummaryWorkspace space(problem, workspace.data);
  SequenceSummaryArgs all =
      summary_args(plan, call, space, cuda::operator_gates(call, t.g, t.beta, t.A_log, t.dt_bias), k);
  if (call.token_rows > 0) {
    all.scan.maps.k = device::make_tensor_map(k, "k");
    all.scan.maps.v = device::make_tensor_map(v, "v");
    all.scan.maps.A = device::make_tensor_map(A, "A");
  }
  const cuda::TensorArg start = cuda::state_arg(t.initial_state, "initial_state", problem.state_v_first);
  const cuda::TensorArg summary = cuda::state_arg(t.summary, "summary", false);
  for (size_t entry = 0; entry < t.sequences.size(); ++entry) {
    const auto place = static_cast<int64_t>(entry);
    SequenceSummaryArgs args = of_sequence(all, call, t.sequences[entry]);
    args.scan.initial_state = from_entry(start, place);
    args.summary = from_entry(summary, place);
    args.map = cuda::from_column(args.summary, problem.value_dim);
    with_half_type(call.dtype, [&](auto element) {
      launch_sequence_summary<decltype(element)>(args, args.factors.key_dim, stream);
    });
  }
}

size_t cp_summarize_adjoint_workspace_bytes(const Plan& plan) {
  return std::max(SummaryWorkspace(plan.problem(), nullptr).bytes, cuda::cp_summarize_adjoint_workspace_bytes(plan));
}

void cp_summarize_adjoint(const Plan& plan, const cp::AdjointSummary& t, Workspace workspace, Stream stream_handle) {
  const Call call(plan, t.cu_seqlens);
  const Problem& problem = call.problem;
  const device::DeviceGuard guard(problem.device.device_id);
  const auto stream = static_cast<device::Stream>(stream_handle);
  const bool normalized = problem.use_qk_l2norm;
  const TokenTensor q = normalized ? token_tensor(t.saved->q_normalized, "saved.q_normalized") : token_tensor(t.q, "q");
  const TokenTensor k = normalized ? token_tensor(t.saved->k_normalized, "saved.k_normalized") : token_tensor(t.k, "k");
  const TokenTensor A = token_tensor(t.saved->A, "saved.A");
  const TokenTensor grad_output = token_tensor(t.grad_output, "do");
  if (!fit(call.dtype, {&q, &k, &A, &grad_output})) {
    return cuda::cp_summarize_adjoint(plan, t, workspace, stream_handle);
  }

  const SummaryWorkspace space(problem, workspace.data);
  SequenceSummaryArgs all =
      summary_args(plan, call, space, cuda::operator_gates(call, t.g, t.beta, t.A_log, t.dt_bias), k);
  if (call.token_rows > 0) {
    all.scan.maps.q = device::make_tensor_map(q, "q");
    all.scan.maps.k = device::make_tensor_map(k, "k");
    all.scan.maps.A = device::make_tensor_map(A, "A");
    all.scan.maps.grad_output = device::make_tensor_map(grad_output, "do");
  }
  const cuda::TensorArg start = cuda::state_arg(t.grad_final_state, "dht", problem.state_v_first);
  const cuda::TensorArg known = cuda::state_arg(t.transition, "transition", false);
  const cuda::TensorArg summary = cuda::state_arg(t.summary, "summary", false);
  for (size_t entry = 0; entry < t.sequences.size(); ++entry) {
    const auto place = static_cast<int64_t>(entry);
    SequenceSummaryArgs args = of_sequence(all, call, t.sequences[entry]);
    args.scan.grad_final_state = from_entry(start, place);
    args.summary = from_entry(summary, place);
    args.known = from_entry(known, place);
    // M itself is made, and stored transposed.
    args.map = cuda::from_column(args.summary, problem.value_dim);
    if (!known) args.map = cuda::transposed(args.map);
    with_half_type(call.dtype, [&](auto element) {
      launch_sequence_adjoint_summary<decltype(element)>(args, args.factors.key_dim, stream);
    });
  }
}

}  // namespace cula::gdn::sm90
