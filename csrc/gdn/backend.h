// What a backend implements: one function an operation, called with arguments that validate.h has accepted.
#pragma once

#include <initializer_list>

#include "gdn/cp/cp.h"
#include "gdn/gdn.h"
#include "gdn/stages.h"

// Every stage: its function in cula::gdn::stages, which is also its field in BackendTable, and its arguments.
// clang-format off
#define CULA_GDN_STAGES(X)                         \
  X(l2norm_fwd, L2NormForward)                     \
  X(l2norm_bwd, L2NormBackward)                    \
  X(fused_beta_sigmoid_fwd, BetaSigmoidForward)    \
  X(fused_beta_sigmoid_bwd, BetaSigmoidBackward)   \
  X(chunk_local_cumsum, LocalCumsum)               \
  X(gdn_gate_fwd, GateForward)                     \
  X(gdn_gate_chunk_cumsum, GateCumsum)             \
  X(gdn_gate_bwd, GateBackward)                    \
  X(chunk_scaled_dot_kkt_fwd, ScaledDotKkt)        \
  X(solve_tril, SolveTril)                         \
  X(chunk_gated_delta_rule_fwd_intra, Intra)       \
  X(recompute_w_u_fwd, RecomputeWU)                \
  X(chunk_gated_delta_rule_fwd_h, StateForward)    \
  X(chunk_fwd_o, OutputForward)                    \
  X(chunk_bwd_dv_local, LocalValueGradient)        \
  X(chunk_gated_delta_rule_bwd_dhu, StateBackward) \
  X(chunk_bwd_dqkwg, OperandGradients)             \
  X(prepare_wy_repr_bwd, WyBackward)
// clang-format on

// What context parallelism is made of: functions of cula::gdn::cp and their arguments.
// clang-format off
#define CULA_GDN_CP(X)                   \
  X(prepare, ForwardTensors)             \
  X(advance, ForwardTensors)             \
  X(summarize, cp::Summary)              \
  X(summarize_adjoint, cp::AdjointSummary) \
  X(merge, cp::Merge)
// clang-format on

namespace cula::gdn {

struct BackendTable {
  size_t (*forward_workspace_bytes)(const Plan&, bool saves_for_backward);
  size_t (*backward_workspace_bytes)(const Plan&);
  // For these tensors; null: as for any.
  size_t (*forward_workspace_bytes_for)(const Plan&, const ForwardTensors&) = nullptr;
  size_t (*backward_workspace_bytes_for)(const Plan&, const BackwardTensors&) = nullptr;
  void (*forward)(const Plan&, const ForwardTensors&, Workspace, Stream);
  void (*backward)(const Plan&, const BackwardTensors&, Workspace, Stream);
  void (*recurrent_forward)(const Plan&, const ForwardTensors&, Stream);

#define CULA_GDN_STAGE_FIELD(function, Arguments) void (*function)(const Plan&, const stages::Arguments&, Stream);
  CULA_GDN_STAGES(CULA_GDN_STAGE_FIELD)
#undef CULA_GDN_STAGE_FIELD

#define CULA_GDN_CP_FIELD(function, Arguments)            \
  size_t (*cp_##function##_workspace_bytes)(const Plan&); \
  void (*cp_##function)(const Plan&, const Arguments&, Workspace, Stream);
  CULA_GDN_CP(CULA_GDN_CP_FIELD)
#undef CULA_GDN_CP_FIELD
};

const BackendTable& cpu_backend();
#ifdef CULA_WITH_CUDA
const BackendTable& cuda_backend();
#endif
#ifdef CULA_WITH_SM90
const BackendTable& sm90_backend();
#endif

// On the CPU: the areas that a call is about to fill.
void expect_writes(const Plan& plan, Workspace workspace, std::initializer_list<const DLTensor*> outputs);

// The table of a backend that this build has.
const BackendTable& backend_table(Backend backend);

}  // namespace cula::gdn
