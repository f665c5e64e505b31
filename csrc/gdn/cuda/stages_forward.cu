// The stages of preparation and of the forward pass.
#include "gdn/cuda/launch/elementwise.h"
#include "gdn/cuda/launch/kernels.h"
#include "gdn/cuda/operator.h"

namespace cula::gdn::cuda {

namespace {

device::DeviceGuard guard_of(const Plan& plan) { return device::DeviceGuard(plan.problem().device.device_id); }
device::Stream native(Stream stream) { return static_cast<device::Stream>(stream); }

int64_t row_count(const DLTensor* x) {
  int64_t rows = 1;
  for (int i = 0; i + 1 < x->ndim; ++i) rows *= x->shape[i];
  return rows;
}
int64_t column_count(const DLTensor* x) { return x->ndim > 0 ? x->shape[x->ndim - 1] : 1; }

GateArgs raw_gates(const DLTensor* g, const DLTensor* A_log, const DLTensor* dt_bias) {
  GateArgs gates;
  gates.g = token_arg(g, "g", DType::kFloat32);
  gates.A_log = head_arg(A_log, "A_log");
  gates.dt_bias = head_arg(dt_bias, "dt_bias");
  return gates;
}

PrepareArgs prepare_args(const Call& call, const DLTensor* k, const GateArgs& gates) {
  PrepareArgs args;
  args.sequences = call.sequences;
  args.heads = call.problem.heads;
  args.group = call.group;
  args.key_dim = static_cast<int>(call.problem.key_dim);
  args.k = token_arg(k, "k", call.dtype);
  args.scale = 1.0f;
  args.gates = gates;
  args.factors = nullptr;
  args.factor_stride = 0;
  return args;
}

}  // namespace

void l2norm_fwd(const Plan& plan, const stages::L2NormForward& t, Stream stream) {
  const auto guard = guard_of(plan);
  launch_l2norm(rows_arg(t.x, "x", false), rows_arg(t.y, "y", false), rows_arg(t.rstd, "rstd", true), row_count(t.x),
                static_cast<int>(column_count(t.x)), native(stream));
}

void l2norm_bwd(const Plan& plan, const stages::L2NormBackward& t, Stream stream) {
  const auto guard = guard_of(plan);
  launch_l2norm_backward(rows_arg(t.y, "y", false), rows_arg(t.rstd, "rstd", true), rows_arg(t.dy, "dy", false),
                         rows_arg(t.dx, "dx", false), row_count(t.y), static_cast<int>(column_count(t.y)), {}, 1,
                         native(stream));
}

void fused_beta_sigmoid_fwd(const Plan& plan, const stages::BetaSigmoidForward& t, Stream stream) {
  const auto guard = guard_of(plan);
  const int64_t columns = column_count(t.x);
  launch_sigmoid(rows_arg(t.x, "x", false), rows_arg(t.y, "y", false), row_count(t.x) * columns, columns,
                 static_cast<float>(t.scale), native(stream));
}

void fused_beta_sigmoid_bwd(const Plan& plan, const stages::BetaSigmoidBackward& t, Stream stream) {
  const auto guard = guard_of(plan);
  const int64_t columns = column_count(t.x);
  launch_sigmoid_backward(rows_arg(t.x, "x", false), rows_arg(t.dy, "dy", false), rows_arg(t.dx, "dx", false),
                          row_count(t.x) * columns, columns, static_cast<float>(t.scale), native(stream));
}

void chunk_local_cumsum(const Plan& plan, const stages::LocalCumsum& t, Stream stream) {
  const auto guard = guard_of(plan);
  const SequenceTable sequences = sequence_table(plan, t.cu_seqlens);
  const TensorArg out = token_arg(t.out, "out", DType::kFloat32);
  launch_cumsum(raw_gates(t.g, nullptr, nullptr), out, sequences, plan.problem().value_heads, t.scale, t.reverse,
                native(stream));
  launch_zero_padding(sequences, out, plan.problem().value_heads, 1, native(stream));
}

void gdn_gate_fwd(const Plan& plan, const stages::GateForward& t, Stream stream) {
  const auto guard = guard_of(plan);
  SequenceTable sequences;
  sequences.tokens = plan.problem().tokens;
  launch_gate(raw_gates(t.g, t.A_log, t.dt_bias), token_arg(t.out, "out", DType::kFloat32), sequences,
              plan.problem().batch, plan.problem().value_heads, native(stream));
}

void gdn_gate_chunk_cumsum(const Plan& plan, const stages::GateCumsum& t, Stream stream) {
  const auto guard = guard_of(plan);
  const SequenceTable sequences = sequence_table(plan, t.cu_seqlens);
  const TensorArg out = token_arg(t.out, "out", DType::kFloat32);
  launch_cumsum(raw_gates(t.g, t.A_log, t.dt_bias), out, sequences, plan.problem().value_heads, t.scale, false,
                native(stream));
  launch_zero_padding(sequences, out, plan.problem().value_heads, 1, native(stream));
}

void gdn_gate_bwd(const Plan& plan, const stages::GateBackward& t, Stream stream) {
  const auto guard = guard_of(plan);
  const Problem& problem = plan.problem();
  const GateGradients gradients = {token_arg(t.dyg, "dyg", DType::kFloat32), token_arg(t.dg, "dg", DType::kFloat32),
                                   head_arg(t.dA_log, "dA_log"), head_arg(t.ddt_bias, "ddt_bias")};
  launch_gate_backward(raw_gates(t.g, t.A_log, t.dt_bias), gradients, problem.batch, problem.tokens,
                       problem.value_heads, native(stream));
}

void chunk_scaled_dot_kkt_fwd(const Plan& plan, const stages::ScaledDotKkt& t, Stream stream) {
  const Call call(plan, t.cu_seqlens);
  const auto guard = guard_of(plan);
  PrepareArgs args = prepare_args(call, t.k, stage_gates(t.g, t.beta));
  args.L = token_arg(t.L, "L", DType::kFloat32);
  with_element_type(call.dtype,
                    [&](auto element) { launch_prepare<decltype(element), GateKind::kGamma>(args, native(stream)); });
  launch_zero_padding(call.sequences, args.L, call.problem.value_heads, call.problem.chunk_size, native(stream));
}

void solve_tril(const Plan& plan, const stages::SolveTril& t, Stream stream) {
  const auto guard = guard_of(plan);
  const SequenceTable sequences = sequence_table(plan, t.cu_seqlens);
  const TensorArg A = token_arg(t.A, "A", DType::kFloat32);
  launch_solve(sequences, token_arg(t.L, "L", DType::kFloat32), A, plan.problem().value_heads, native(stream));
  launch_zero_padding(sequences, A, plan.problem().value_heads, plan.problem().chunk_size, native(stream));
}

void chunk_gated_delta_rule_fwd_intra(const Plan& plan, const stages::Intra& t, Stream stream) {
  const Call call(plan, t.cu_seqlens);
  {
    const auto guard = guard_of(plan);
    PrepareArgs args = prepare_args(call, t.k, stage_gates(t.g, t.beta));
    args.A = token_arg(t.A, "A", call.dtype);
    with_element_type(call.dtype,
                      [&](auto element) { launch_prepare<decltype(element), GateKind::kGamma>(args, native(stream)); });
    launch_zero_padding(call.sequences, args.A, call.problem.value_heads, call.problem.chunk_size, native(stream));
  }
  recompute_w_u_fwd(plan, {t.k, t.v, t.beta, t.A, t.g, t.w, t.u, t.cu_seqlens}, stream);
}

void recompute_w_u_fwd(const Plan& plan, const stages::RecomputeWU& t, Stream stream) {
  const Call call(plan, t.cu_seqlens);
  const auto guard = guard_of(plan);
  RecomputeArgs args;
  args.sequences = call.sequences;
  args.value_heads = call.problem.value_heads;
  args.group = call.group;
  args.key_dim = static_cast<int>(call.problem.key_dim);
  args.value_dim = static_cast<int>(call.problem.value_dim);
  args.key_blocks = (args.key_dim + kRows - 1) / kRows;
  args.blocks = args.key_blocks + (args.value_dim + kRows - 1) / kRows;
  args.k = token_arg(t.k, "k", call.dtype);
  args.v = token_arg(t.v, "v", call.dtype);
  args.A = token_arg(t.A, "A", call.dtype);
  args.w = token_arg(t.w, "w", call.dtype);
  args.u = token_arg(t.u, "u", call.dtype);
  args.gates = stage_gates(t.g, t.beta);
  with_element_type(call.dtype, [&](auto element) { launch_recompute<decltype(element)>(args, native(stream)); });
  launch_zero_padding(call.sequences, args.w, args.value_heads, args.key_dim, native(stream));
  launch_zero_padding(call.sequences, args.u, args.value_heads, args.value_dim, native(stream));
}

void chunk_gated_delta_rule_fwd_h(const Plan& plan, const stages::StateForward& t, Stream stream) {
  const Call call(plan, t.cu_seqlens);
  const auto guard = guard_of(plan);
  const bool v_first = call.problem.state_v_first;
  StateStageArgs args;
  args.sequences = call.sequences;
  args.value_heads = call.problem.value_heads;
  args.group = call.group;
  args.key_dim = static_cast<int>(call.problem.key_dim);
  args.value_dim = static_cast<int>(call.problem.value_dim);
  args.k = token_arg(t.k, "k", call.dtype);
  args.w = token_arg(t.w, "w", call.dtype);
  args.u = token_arg(t.u, "u", call.dtype);
  args.gates = stage_gates(t.g, nullptr);
  args.initial_state = state_arg(t.initial_state, "initial_state", v_first);
  args.h = chunk_state_arg(t.h, "h", call.dtype, v_first);
  args.num_chunks = t.h->shape[1];
  args.v_new = token_arg(t.v_new, "v_new", call.dtype);
  args.final_state = state_arg(t.final_state, "final_state", v_first);
  with_element_type(call.dtype, [&](auto element) { launch_state_stage<decltype(element)>(args, native(stream)); });
  launch_zero_padding(call.sequences, args.v_new, args.value_heads, args.value_dim, native(stream));
}

void chunk_fwd_o(const Plan& plan, const stages::OutputForward& t, Stream stream) {
  const Call call(plan, t.cu_seqlens);
  const auto guard = guard_of(plan);
  OutputArgs args;
  args.sequences = call.sequences;
  args.value_heads = call.problem.value_heads;
  args.group = call.group;
  args.key_dim = static_cast<int>(call.problem.key_dim);
  args.value_dim = static_cast<int>(call.problem.value_dim);
  args.value_blocks = (args.value_dim + kRows - 1) / kRows;
  args.state_v_first = call.problem.state_v_first;
  args.scale = static_cast<float>(plan.scale());
  args.q = token_arg(t.q, "q", call.dtype);
  args.k = token_arg(t.k, "k", call.dtype);
  args.v = token_arg(t.v, "v", call.dtype);
  args.h = chunk_state_arg(t.h, "h", call.dtype, args.state_v_first);
  args.num_chunks = t.h->shape[1];
  args.o = token_arg(t.o, "o", call.dtype);
  args.gates = stage_gates(t.g, nullptr);
  with_element_type(call.dtype, [&](auto element) { launch_output<decltype(element)>(args, native(stream)); });
  launch_zero_padding(call.sequences, args.o, args.value_heads, args.value_dim, native(stream));
}

}  // namespace cula::gdn::cuda
