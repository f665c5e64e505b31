#include "gdn/gdn.h"

#include "gdn/backend.h"
#include "gdn/validate.h"

namespace cula::gdn {

namespace {

const BackendTable& backend_of(const Plan& plan) {
#ifdef CULA_WITH_CUDA
  if (plan.backend() == Backend::kCuda) return cuda_backend();
#endif
  static_cast<void>(plan);
  return cpu_backend();
}

}  // namespace

void forward(const Plan& plan, const ForwardTensors& tensors, Workspace workspace, Stream stream) {
  validate_forward(plan, tensors);
  validate_workspace(workspace, plan.forward_workspace_bytes(tensors.saved != nullptr));
  backend_of(plan).forward(plan, tensors, workspace, stream);
}

void backward(const Plan& plan, const BackwardTensors& tensors, Workspace workspace, Stream stream) {
  validate_backward(plan, tensors);
  validate_workspace(workspace, plan.backward_workspace_bytes());
  backend_of(plan).backward(plan, tensors, workspace, stream);
}

void recurrent_forward(const Plan& plan, const ForwardTensors& tensors, Stream stream) {
  validate_recurrent(plan, tensors);
  backend_of(plan).recurrent_forward(plan, tensors, stream);
}

namespace stages {

void l2norm_fwd(const Plan& plan, const L2NormForward& t, Stream stream) {
  validate(plan, t);
  backend_of(plan).l2norm_fwd(plan, t, stream);
}

void l2norm_bwd(const Plan& plan, const L2NormBackward& t, Stream stream) {
  validate(plan, t);
  backend_of(plan).l2norm_bwd(plan, t, stream);
}

void fused_beta_sigmoid_fwd(const Plan& plan, const BetaSigmoidForward& t, Stream stream) {
  validate(plan, t);
  backend_of(plan).fused_beta_sigmoid_fwd(plan, t, stream);
}

void fused_beta_sigmoid_bwd(const Plan& plan, const BetaSigmoidBackward& t, Stream stream) {
  validate(plan, t);
  backend_of(plan).fused_beta_sigmoid_bwd(plan, t, stream);
}

void chunk_local_cumsum(const Plan& plan, const LocalCumsum& t, Stream stream) {
  validate(plan, t);
  backend_of(plan).chunk_local_cumsum(plan, t, stream);
}

void gdn_gate_fwd(const Plan& plan, const GateForward& t, Stream stream) {
  validate(plan, t);
  backend_of(plan).gdn_gate_fwd(plan, t, stream);
}

void gdn_gate_chunk_cumsum(const Plan& plan, const GateCumsum& t, Stream stream) {
  validate(plan, t);
  backend_of(plan).gdn_gate_chunk_cumsum(plan, t, stream);
}

void gdn_gate_bwd(const Plan& plan, const GateBackward& t, Stream stream) {
  validate(plan, t);
  backend_of(plan).gdn_gate_bwd(plan, t, stream);
}

void chunk_scaled_dot_kkt_fwd(const Plan& plan, const ScaledDotKkt& t, Stream stream) {
  validate(plan, t);
  backend_of(plan).chunk_scaled_dot_kkt_fwd(plan, t, stream);
}

void solve_tril(const Plan& plan, const SolveTril& t, Stream stream) {
  validate(plan, t);
  backend_of(plan).solve_tril(plan, t, stream);
}

void chunk_gated_delta_rule_fwd_intra(const Plan& plan, const Intra& t, Stream stream) {
  validate(plan, t);
  backend_of(plan).chunk_gated_delta_rule_fwd_intra(plan, t, stream);
}

void recompute_w_u_fwd(const Plan& plan, const RecomputeWU& t, Stream stream) {
  validate(plan, t);
  backend_of(plan).recompute_w_u_fwd(plan, t, stream);
}

void chunk_gated_delta_rule_fwd_h(const Plan& plan, const StateForward& t, Stream stream) {
  validate(plan, t);
  backend_of(plan).chunk_gated_delta_rule_fwd_h(plan, t, stream);
}

void chunk_fwd_o(const Plan& plan, const OutputForward& t, Stream stream) {
  validate(plan, t);
  backend_of(plan).chunk_fwd_o(plan, t, stream);
}

void chunk_bwd_dv_local(const Plan& plan, const LocalValueGradient& t, Stream stream) {
  validate(plan, t);
  backend_of(plan).chunk_bwd_dv_local(plan, t, stream);
}

void chunk_gated_delta_rule_bwd_dhu(const Plan& plan, const StateBackward& t, Stream stream) {
  validate(plan, t);
  backend_of(plan).chunk_gated_delta_rule_bwd_dhu(plan, t, stream);
}

void chunk_bwd_dqkwg(const Plan& plan, const OperandGradients& t, Stream stream) {
  validate(plan, t);
  backend_of(plan).chunk_bwd_dqkwg(plan, t, stream);
}

void prepare_wy_repr_bwd(const Plan& plan, const WyBackward& t, Stream stream) {
  validate(plan, t);
  backend_of(plan).prepare_wy_repr_bwd(plan, t, stream);
}

}  // namespace stages

}  // namespace cula::gdn
