// The stages of the backward pass.
#include "gdn/cuda/launch/backward.h"
#include "gdn/cuda/launch/elementwise.h"
#include "gdn/cuda/operator.h"

namespace cula::gdn::cuda {

namespace {

device::DeviceGuard guard_of(const Plan& plan) { return device::DeviceGuard(plan.problem().device.device_id); }
device::Stream native(Stream stream) { return static_cast<device::Stream>(stream); }

}  // namespace

void chunk_bwd_dv_local(const Plan& plan, const stages::LocalValueGradient& t, Stream stream) {
  const Call call(plan, t.cu_seqlens);
  const auto guard = guard_of(plan);
  LocalValueGradientArgs args;
  args.sequences = call.sequences;
  args.value_heads = call.problem.value_heads;
  args.group = call.group;
  args.key_dim = static_cast<int>(call.problem.key_dim);
  args.value_dim = static_cast<int>(call.problem.value_dim);
  args.value_blocks = (args.value_dim + kRows - 1) / kRows;
  args.scale = static_cast<float>(plan.scale());
  args.q = token_arg(t.q, "q", call.dtype);
  args.k = token_arg(t.k, "k", call.dtype);
  args.grad_output = token_arg(t.grad_output, "do", call.dtype);
  args.dv = token_arg(t.dv, "dv", call.dtype);
  args.gates = stage_gates(t.g, nullptr);
  with_element_type(call.dtype,
                    [&](auto element) { launch_local_value_gradient<decltype(element)>(args, native(stream)); });
  launch_zero_padding(call.sequences, args.dv, args.value_heads, args.value_dim, native(stream));
}

void chunk_gated_delta_rule_bwd_dhu(const Plan& plan, const stages::StateBackward& t, Stream stream) {
  const Call call(plan, t.cu_seqlens);
  const auto guard = guard_of(plan);
  const bool v_first = call.problem.state_v_first;
  StateGradientArgs args;
  args.sequences = call.sequences;
  args.value_heads = call.problem.value_heads;
  args.group = call.group;
  args.key_dim = static_cast<int>(call.problem.key_dim);
  args.value_dim = static_cast<int>(call.problem.value_dim);
  args.scale = static_cast<float>(plan.scale());
  args.q = token_arg(t.q, "q", call.dtype);
  args.k = token_arg(t.k, "k", call.dtype);
  args.w = token_arg(t.w, "w", call.dtype);
  args.grad_output = token_arg(t.grad_output, "do", call.dtype);
  args.dv = token_arg(t.dv, "dv", call.dtype);
  args.dv2 = token_arg(t.dv2, "dv2", call.dtype);
  args.grad_final_state = state_arg(t.dht, "dht", v_first);
  args.dh = chunk_state_arg(t.dh, "dh", call.dtype, v_first);
  args.num_chunks = t.dh->shape[1];
  args.dh0 = state_arg(t.dh0, "dh0", v_first);
  args.gates = stage_gates(t.g, nullptr);
  with_element_type(call.dtype, [&](auto element) { launch_state_gradient<decltype(element)>(args, native(stream)); });
  launch_zero_padding(call.sequences, args.dv2, args.value_heads, args.value_dim, native(stream));
}

void chunk_bwd_dqkwg(const Plan& plan, const stages::OperandGradients& t, Stream stream) {
  const Call call(plan, t.cu_seqlens);
  const auto guard = guard_of(plan);
  const bool v_first = call.problem.state_v_first;
  OperandStageArgs args;
  args.sequences = call.sequences;
  args.heads = call.problem.heads;
  args.group = call.group;
  args.key_dim = static_cast<int>(call.problem.key_dim);
  args.value_dim = static_cast<int>(call.problem.value_dim);
  args.state_v_first = v_first;
  args.scale = static_cast<float>(plan.scale());
  args.q = token_arg(t.q, "q", call.dtype);
  args.k = token_arg(t.k, "k", call.dtype);
  args.v = token_arg(t.v, "v", call.dtype);
  args.h = chunk_state_arg(t.h, "h", call.dtype, v_first);
  args.dv = token_arg(t.dv, "dv", call.dtype);
  args.grad_output = token_arg(t.grad_output, "do", call.dtype);
  args.dh = chunk_state_arg(t.dh, "dh", call.dtype, v_first);
  args.num_chunks = t.dh->shape[1];
  args.dq = token_arg(t.dq, "dq", call.dtype);
  args.dk = token_arg(t.dk, "dk", call.dtype);
  args.dw = token_arg(t.dw, "dw", call.dtype);
  args.dg = token_arg(t.dg, "dg", call.dtype);
  args.gates = stage_gates(t.g, nullptr);
  with_element_type(call.dtype, [&](auto element) { launch_operand_stage<decltype(element)>(args, native(stream)); });
  launch_zero_padding(call.sequences, args.dq, args.heads, args.key_dim, native(stream));
  launch_zero_padding(call.sequences, args.dk, args.heads, args.key_dim, native(stream));
  launch_zero_padding(call.sequences, args.dw, call.problem.value_heads, args.key_dim, native(stream));
  launch_zero_padding(call.sequences, args.dg, call.problem.value_heads, 1, native(stream));
}

void prepare_wy_repr_bwd(const Plan& plan, const stages::WyBackward& t, Stream stream) {
  const Call call(plan, t.cu_seqlens);
  const auto guard = guard_of(plan);
  WyStageArgs args;
  args.sequences = call.sequences;
  args.heads = call.problem.heads;
  args.group = call.group;
  args.key_dim = static_cast<int>(call.problem.key_dim);
  args.value_dim = static_cast<int>(call.problem.value_dim);
  args.k = token_arg(t.k, "k", call.dtype);
  args.v = token_arg(t.v, "v", call.dtype);
  args.A = token_arg(t.A, "A", call.dtype);
  args.dw = token_arg(t.dw, "dw", call.dtype);
  args.du = token_arg(t.du, "du", call.dtype);
  args.dk = token_arg(t.dk, "dk", call.dtype);
  args.dv = token_arg(t.dv, "dv", call.dtype);
  args.db = token_arg(t.db, "db", call.dtype);
  args.dg = token_arg(t.dg, "dg", call.dtype);
  args.gates = stage_gates(t.g, t.beta);
  with_element_type(call.dtype, [&](auto element) { launch_wy_stage<decltype(element)>(args, native(stream)); });
  launch_zero_padding(call.sequences, args.dk, args.heads, args.key_dim, native(stream));
  launch_zero_padding(call.sequences, args.dv, call.problem.value_heads, args.value_dim, native(stream));
  launch_zero_padding(call.sequences, args.db, call.problem.value_heads, 1, native(stream));
  launch_zero_padding(call.sequences, args.dg, call.problem.value_heads, 1, native(stream));
}

}  // namespace cula::gdn::cuda
