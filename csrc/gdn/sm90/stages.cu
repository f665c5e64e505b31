// The stages that products of tiles make up, on Hopper's wgmma. The elementwise ones, the scores alone and the solver
// in fp32 are the general backend's, and so is every call whose operands the copy engine can not read.
#include "gdn/cuda/launch/elementwise.h"
#include "gdn/cuda/operator.h"
#include "gdn/sm90/launch/stages.h"
#include "gdn/sm90/operands.h"
#include "gdn/sm90/operator.h"

namespace cula::gdn::sm90 {

namespace {

using cuda::Call;
using device::TokenTensor;

// [B, NT, HV, R, C], dense, as [B NT, R, HV, C]: boxes are rows and columns of a state.
TokenTensor chunk_state_tensor(const DLTensor* tensor, const char* name) {
  const TensorView view = TensorView::from(tensor, name);
  TokenTensor x = {view.data, view.dtype, {}, {}};
  const bool one_run = view.shape[0] == 1 || view.stride[0] == view.shape[1] * view.stride[1];
  x.shape[0] = view.shape[0] * view.shape[1];
  x.stride[0] = one_run ? view.stride[1] : -1;  // negative: no map fits it
  x.shape[1] = view.shape[3];
  x.stride[1] = view.stride[3];
  x.shape[2] = view.shape[2];
  x.stride[2] = view.stride[2];
  x.shape[3] = view.shape[4];
  x.stride[3] = view.stride[4];
  return x;
}

// Of a tensor that has elements; of others no map can be made, and none is used.
CUtensorMap map_of(const TokenTensor& x, const char* name) {
  for (const int64_t extent : x.shape) {
    if (extent == 0) return {};
  }
  return x.data == nullptr ? CUtensorMap{} : device::make_tensor_map(x, name);
}

StageGrid stage_grid(const Plan& plan, const Call& call, const DLTensor* gamma, const DLTensor* beta) {
  StageGrid grid;
  grid.sequences = call.sequences;
  grid.heads = call.problem.value_heads;
  grid.group = call.group;
  grid.scale = static_cast<float>(plan.scale());
  grid.gates = cuda::stage_gates(gamma, beta);
  return grid;
}

StageShape stage_shape(const Problem& problem) {
  return {static_cast<int>(problem.key_dim), static_cast<int>(problem.value_dim), problem.state_v_first};
}

device::Stream native(Stream stream) { return static_cast<device::Stream>(stream); }

}  // namespace

void recompute_w_u_fwd(const Plan& plan, const stages::RecomputeWU& t, Stream stream) {
  const Call call(plan, t.cu_seqlens);
  const TokenTensor k = token_tensor(t.k, "k");
  const TokenTensor v = token_tensor(t.v, "v");
  const TokenTensor A = token_tensor(t.A, "A");
  const TokenTensor w = token_tensor(t.w, "w");
  const TokenTensor u = token_tensor(t.u, "u");
  if (!fit(call.dtype, {&k, &v, &A, &w, &u})) return cuda::recompute_w_u_fwd(plan, t, stream);
  const device::DeviceGuard guard(call.problem.device.device_id);
  RecomputeStageArgs args;
  args.grid = stage_grid(plan, call, t.g, t.beta);
  args.k = map_of(k, "k");
  args.v = map_of(v, "v");
  args.A = map_of(A, "A");
  args.w = map_of(w, "w");
  args.u = map_of(u, "u");
  args.w_rows = tensor_arg(w);
  args.u_rows = tensor_arg(u);
  with_half_type(call.dtype, [&](auto element) {
    launch_recompute_stage<decltype(element)>(args, stage_shape(call.problem), native(stream));
  });
  const Problem& problem = call.problem;
  cuda::launch_zero_padding(call.sequences, args.w_rows, problem.value_heads, problem.key_dim, native(stream));
  cuda::launch_zero_padding(call.sequences, args.u_rows, problem.value_heads, problem.value_dim, native(stream));
}

void chunk_gated_delta_rule_fwd_intra(const Plan& plan, const stages::Intra& t, Stream stream) {
  const Call call(plan, t.cu_seqlens);
  const TokenTensor k = token_tensor(t.k, "k");
  const TokenTensor A = token_tensor(t.A, "A");
  if (!fit(call.dtype, {&k, &A})) return cuda::chunk_gated_delta_rule_fwd_intra(plan, t, stream);
  {
    const device::DeviceGuard guard(call.problem.device.device_id);
    IntraArgs args;
    args.grid = stage_grid(plan, call, t.g, t.beta);
    args.head_blocks = 0;
    args.k = map_of(k, "k");
    args.A_rows = tensor_arg(A);
    with_half_type(call.dtype, [&](auto element) {
      launch_intra<decltype(element)>(args, stage_shape(call.problem), native(stream));
    });
    cuda::launch_zero_padding(call.sequences, args.A_rows, call.problem.value_heads, kRows, native(stream));
  }
  recompute_w_u_fwd(plan, {t.k, t.v, t.beta, t.A, t.g, t.w, t.u, t.cu_seqlens}, stream);
}

void chunk_gated_delta_rule_fwd_h(const Plan& plan, const stages::StateForward& t, Stream stream) {
  const Call call(plan, t.cu_seqlens);
  const Problem& problem = call.problem;
  const TokenTensor k = token_tensor(t.k, "k");
  const TokenTensor w = token_tensor(t.w, "w");
  const TokenTensor u = token_tensor(t.u, "u");
  const TokenTensor h = chunk_state_tensor(t.h, "h");
  const TokenTensor v_new = token_tensor(t.v_new, "v_new");
  if (!fit(call.dtype, {&k, &w, &u, &h, &v_new})) return cuda::chunk_gated_delta_rule_fwd_h(plan, t, stream);
  const device::DeviceGuard guard(problem.device.device_id);
  StateStageArgs args = {};
  args.grid = stage_grid(plan, call, t.g, nullptr);
  args.value_tiles = static_cast<int>(problem.value_dim / 64);
  args.value_first = problem.state_v_first;
  args.num_chunks = t.h->shape[1];
  args.k = map_of(k, "k");
  args.w = map_of(w, "w");
  args.u = map_of(u, "u");
  args.h = map_of(h, "h");
  args.rows = map_of(v_new, "v_new");
  args.rows_out = tensor_arg(v_new);
  args.enters = cuda::state_arg(t.initial_state, "initial_state", problem.state_v_first);
  args.leaves = cuda::state_arg(t.final_state, "final_state", problem.state_v_first);
  with_half_type(call.dtype, [&](auto element) {
    launch_state_stage<decltype(element)>(args, stage_shape(problem), native(stream));
  });
  cuda::launch_zero_padding(call.sequences, args.rows_out, problem.value_heads, problem.value_dim, native(stream));
}

void chunk_fwd_o(const Plan& plan, const stages::OutputForward& t, Stream stream) {
  const Call call(plan, t.cu_seqlens);
  const Problem& problem = call.problem;
  const TokenTensor q = token_tensor(t.q, "q");
  const TokenTensor k = token_tensor(t.k, "k");
  const TokenTensor v = token_tensor(t.v, "v");
  const TokenTensor h = chunk_state_tensor(t.h, "h");
  const TokenTensor o = token_tensor(t.o, "o");
  if (!fit(call.dtype, {&q, &k, &v, &h, &o})) return cuda::chunk_fwd_o(plan, t, stream);
  const device::DeviceGuard guard(problem.device.device_id);
  OutputStageArgs args;
  args.grid = stage_grid(plan, call, t.g, nullptr);
  args.q = map_of(q, "q");
  args.k = map_of(k, "k");
  args.v = map_of(v, "v");
  args.h = map_of(h, "h");
  args.o = map_of(o, "o");
  args.o_rows = tensor_arg(o);
  args.num_chunks = t.h->shape[1];
  with_half_type(call.dtype, [&](auto element) {
    launch_output_stage<decltype(element)>(args, stage_shape(problem), native(stream));
  });
  cuda::launch_zero_padding(call.sequences, args.o_rows, problem.value_heads, problem.value_dim, native(stream));
}

void chunk_bwd_dv_local(const Plan& plan, const stages::LocalValueGradient& t, Stream stream) {
  const Call call(plan, t.cu_seqlens);
  const Problem& problem = call.problem;
  const TokenTensor q = token_tensor(t.q, "q");
  const TokenTensor k = token_tensor(t.k, "k");
  const TokenTensor grad_output = token_tensor(t.grad_output, "do");
  const TokenTensor dv = token_tensor(t.dv, "dv");
  if (!fit(call.dtype, {&q, &k, &grad_output, &dv})) return cuda::chunk_bwd_dv_local(plan, t, stream);
  const device::DeviceGuard guard(problem.device.device_id);
  OutputStageArgs args = {};
  args.grid = stage_grid(plan, call, t.g, nullptr);
  args.q = map_of(q, "q");
  args.k = map_of(k, "k");
  args.v = map_of(grad_output, "do");
  args.o = map_of(dv, "dv");
  args.o_rows = tensor_arg(dv);
  with_half_type(call.dtype, [&](auto element) {
    launch_local_value_gradient<decltype(element)>(args, stage_shape(problem), native(stream));
  });
  cuda::launch_zero_padding(call.sequences, args.o_rows, problem.value_heads, problem.value_dim, native(stream));
}

void chunk_gated_delta_rule_bwd_dhu(const Plan& plan, const stages::StateBackward& t, Stream stream) {
  const Call call(plan, t.cu_seqlens);
  const Problem& problem = call.problem;
  const TokenTensor q = token_tensor(t.q, "q");
  const TokenTensor k = token_tensor(t.k, "k");
  const TokenTensor w = token_tensor(t.w, "w");
  const TokenTensor grad_output = token_tensor(t.grad_output, "do");
  const TokenTensor dv = token_tensor(t.dv, "dv");
  const TokenTensor dh = chunk_state_tensor(t.dh, "dh");
  const TokenTensor dv2 = token_tensor(t.dv2, "dv2");
  if (!fit(call.dtype, {&q, &k, &w, &grad_output, &dv, &dh, &dv2})) {
    return cuda::chunk_gated_delta_rule_bwd_dhu(plan, t, stream);
  }
  const device::DeviceGuard guard(problem.device.device_id);
  StateStageArgs args = {};
  args.grid = stage_grid(plan, call, t.g, nullptr);
  args.value_tiles = static_cast<int>(problem.value_dim / 64);
  args.value_first = problem.state_v_first;
  args.num_chunks = t.dh->shape[1];
  args.k = map_of(k, "k");
  args.w = map_of(w, "w");
  args.u = map_of(dv, "dv");
  args.q = map_of(q, "q");
  args.grad_output = map_of(grad_output, "do");
  args.h = map_of(dh, "dh");
  args.rows = map_of(dv2, "dv2");
  args.rows_out = tensor_arg(dv2);
  args.enters = cuda::state_arg(t.dht, "dht", problem.state_v_first);
  args.leaves = cuda::state_arg(t.dh0, "dh0", problem.state_v_first);
  with_half_type(call.dtype, [&](auto element) {
    launch_state_gradient_stage<decltype(element)>(args, stage_shape(problem), native(stream));
  });
  cuda::launch_zero_padding(call.sequences, args.rows_out, problem.value_heads, problem.value_dim, native(stream));
}

void chunk_bwd_dqkwg(const Plan& plan, const stages::OperandGradients& t, Stream stream) {
  const Call call(plan, t.cu_seqlens);
  const Problem& problem = call.problem;
  const TokenTensor q = token_tensor(t.q, "q");
  const TokenTensor k = token_tensor(t.k, "k");
  const TokenTensor v = token_tensor(t.v, "v");
  const TokenTensor h = chunk_state_tensor(t.h, "h");
  const TokenTensor dv = token_tensor(t.dv, "dv");
  const TokenTensor grad_output = token_tensor(t.grad_output, "do");
  const TokenTensor dh = chunk_state_tensor(t.dh, "dh");
  const TokenTensor dq = token_tensor(t.dq, "dq");
  const TokenTensor dk = token_tensor(t.dk, "dk");
  const TokenTensor dw = token_tensor(t.dw, "dw");
  if (!fit(call.dtype, {&q, &k, &v, &h, &dv, &grad_output, &dh, &dq, &dk, &dw})) {
    return cuda::chunk_bwd_dqkwg(plan, t, stream);
  }
  const device::DeviceGuard guard(problem.device.device_id);
  OperandGradientArgs args;
  args.grid = stage_grid(plan, call, t.g, nullptr);
  args.grid.heads = problem.heads;
  args.num_chunks = t.dh->shape[1];
  args.q = map_of(q, "q");
  args.k = map_of(k, "k");
  args.v = map_of(v, "v");
  args.h = map_of(h, "h");
  args.dv = map_of(dv, "dv");
  args.grad_output = map_of(grad_output, "do");
  args.dh = map_of(dh, "dh");
  args.dq = map_of(dq, "dq");
  args.dk = map_of(dk, "dk");
  args.dw = map_of(dw, "dw");
  args.dq_rows = tensor_arg(dq);
  args.dk_rows = tensor_arg(dk);
  args.dw_rows = tensor_arg(dw);
  args.dg = cuda::token_arg(t.dg, "dg", call.dtype);
  with_half_type(call.dtype, [&](auto element) {
    launch_operand_gradient<decltype(element)>(args, stage_shape(problem), native(stream));
  });
  cuda::launch_zero_padding(call.sequences, args.dq_rows, problem.heads, problem.key_dim, native(stream));
  cuda::launch_zero_padding(call.sequences, args.dk_rows, problem.heads, problem.key_dim, native(stream));
  cuda::launch_zero_padding(call.sequences, args.dw_rows, problem.value_heads, problem.key_dim, native(stream));
  cuda::launch_zero_padding(call.sequences, args.dg, problem.value_heads, 1, native(stream));
}

void prepare_wy_repr_bwd(const Plan& plan, const stages::WyBackward& t, Stream stream) {
  const Call call(plan, t.cu_seqlens);
  const Problem& problem = call.problem;
  const TokenTensor k = token_tensor(t.k, "k");
  const TokenTensor v = token_tensor(t.v, "v");
  const TokenTensor A = token_tensor(t.A, "A");
  const TokenTensor dw = token_tensor(t.dw, "dw");
  const TokenTensor du = token_tensor(t.du, "du");
  const TokenTensor dk = token_tensor(t.dk, "dk");
  const TokenTensor dv = token_tensor(t.dv, "dv");
  if (!fit(call.dtype, {&k, &v, &A, &dw, &du, &dk, &dv})) return cuda::prepare_wy_repr_bwd(plan, t, stream);
  const device::DeviceGuard guard(problem.device.device_id);
  WyGradientArgs args;
  args.grid = stage_grid(plan, call, t.g, t.beta);
  args.grid.heads = problem.heads;
  args.grid.scale = 1.0f;
  args.k = map_of(k, "k");
  args.v = map_of(v, "v");
  args.A = map_of(A, "A");
  args.dw = map_of(dw, "dw");
  args.du = map_of(du, "du");
  args.dk = map_of(dk, "dk");
  args.dv = map_of(dv, "dv");
  args.dk_rows = tensor_arg(dk);
  args.dv_rows = tensor_arg(dv);
  args.dbeta = cuda::token_arg(t.db, "db", call.dtype);
  args.dg = cuda::token_arg(t.dg, "dg", call.dtype);
  with_half_type(call.dtype, [&](auto element) {
    launch_wy_gradient<decltype(element)>(args, stage_shape(problem), native(stream));
  });
  cuda::launch_zero_padding(call.sequences, args.dk_rows, problem.heads, problem.key_dim, native(stream));
  cuda::launch_zero_padding(call.sequences, args.dv_rows, problem.value_heads, problem.value_dim, native(stream));
  cuda::launch_zero_padding(call.sequences, args.dbeta, problem.value_heads, 1, native(stream));
  cuda::launch_zero_padding(call.sequences, args.dg, problem.value_heads, 1, native(stream));
}

void put_stages(BackendTable& table) {
  table.chunk_gated_delta_rule_fwd_intra = chunk_gated_delta_rule_fwd_intra;
  table.recompute_w_u_fwd = recompute_w_u_fwd;
  table.chunk_gated_delta_rule_fwd_h = chunk_gated_delta_rule_fwd_h;
  table.chunk_fwd_o = chunk_fwd_o;
  table.chunk_bwd_dv_local = chunk_bwd_dv_local;
  table.chunk_gated_delta_rule_bwd_dhu = chunk_gated_delta_rule_bwd_dhu;
  table.chunk_bwd_dqkwg = chunk_bwd_dqkwg;
  table.prepare_wy_repr_bwd = prepare_wy_repr_bwd;
}

}  // namespace cula::gdn::sm90
