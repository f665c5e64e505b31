// What a backend implements: one function an operation, called with arguments that validate.h has accepted.
#pragma once

#include "gdn/gdn.h"
#include "gdn/stages.h"

namespace cula::gdn {

struct BackendTable {
  size_t (*forward_workspace_bytes)(const Plan&, bool saves_for_backward);
  size_t (*backward_workspace_bytes)(const Plan&);
  void (*forward)(const Plan&, const ForwardTensors&, Workspace, Stream);
  void (*backward)(const Plan&, const BackwardTensors&, Workspace, Stream);
  void (*recurrent_forward)(const Plan&, const ForwardTensors&, Stream);

  void (*l2norm_fwd)(const Plan&, const stages::L2NormForward&, Stream);
  void (*l2norm_bwd)(const Plan&, const stages::L2NormBackward&, Stream);
  void (*fused_beta_sigmoid_fwd)(const Plan&, const stages::BetaSigmoidForward&, Stream);
  void (*fused_beta_sigmoid_bwd)(const Plan&, const stages::BetaSigmoidBackward&, Stream);
  void (*chunk_local_cumsum)(const Plan&, const stages::LocalCumsum&, Stream);
  void (*gdn_gate_fwd)(const Plan&, const stages::GateForward&, Stream);
  void (*gdn_gate_chunk_cumsum)(const Plan&, const stages::GateCumsum&, Stream);
  void (*gdn_gate_bwd)(const Plan&, const stages::GateBackward&, Stream);
  void (*chunk_scaled_dot_kkt_fwd)(const Plan&, const stages::ScaledDotKkt&, Stream);
  void (*solve_tril)(const Plan&, const stages::SolveTril&, Stream);
  void (*chunk_gated_delta_rule_fwd_intra)(const Plan&, const stages::Intra&, Stream);
  void (*recompute_w_u_fwd)(const Plan&, const stages::RecomputeWU&, Stream);
  void (*chunk_gated_delta_rule_fwd_h)(const Plan&, const stages::StateForward&, Stream);
  void (*chunk_fwd_o)(const Plan&, const stages::OutputForward&, Stream);
  void (*chunk_bwd_dv_local)(const Plan&, const stages::LocalValueGradient&, Stream);
  void (*chunk_gated_delta_rule_bwd_dhu)(const Plan&, const stages::StateBackward&, Stream);
  void (*chunk_bwd_dqkwg)(const Plan&, const stages::OperandGradients&, Stream);
  void (*prepare_wy_repr_bwd)(const Plan&, const stages::WyBackward&, Stream);
};

const BackendTable& cpu_backend();
#ifdef CULA_WITH_CUDA
const BackendTable& cuda_backend();
#endif

}  // namespace cula::gdn
