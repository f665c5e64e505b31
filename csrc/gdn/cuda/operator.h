// The operator and the stages as the backend table wants them.
#pragma once

#include "gdn/backend.h"
#include "gdn/cuda/collective/gate.cuh"
#include "gdn/cuda/launch/arguments.h"
#include "gdn/schedules.h"

namespace cula::gdn::cuda {

// What most calls start from. Making one checks that the problem is one for this backend.
struct Call {
  explicit Call(const Plan& plan, const DLTensor* cu_seqlens);

  const Problem& problem;
  DType dtype;
  SequenceTable sequences;
  int64_t group;       // value heads a key head
  int64_t token_rows;  // B T
};

// Which halves of forward a call runs: what depends on one chunk alone and is saved (normalised q and k, A), and the
// rest. The second without the first reads what that saved.
struct Halves {
  bool prepare = true;
  bool advance = true;
};

// The sequences with the segments of the passes over the chunks.
SequenceTable split_table(SequenceTable sequences, const ScanCut& cut);
// Of any plan, before there is a tensor.
int64_t chunk_slots(const Problem& problem);

// Calls f(T{}) for the element type T of the problem.
template <class F>
void with_element_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kBFloat16:
      return f(device::bf16{});
    case DType::kFloat16:
      return f(device::fp16{});
    default:
      return f(float{});
  }
}

// TypeError for a float64 problem.
DType element_type(const Plan& plan);

// Gates as the operator gets them: g (with use_gate raw) and beta (with use_beta_sigmoid logits).
GateArgs operator_gates(const Call& call, const DLTensor* g, const DLTensor* beta, const DLTensor* A_log,
                        const DLTensor* dt_bias);
// Gates as the stages get them: gamma and beta, both optional.
GateArgs stage_gates(const DLTensor* gamma, const DLTensor* beta);

size_t forward_workspace_bytes(const Plan& plan, bool saves_for_backward);
size_t backward_workspace_bytes(const Plan& plan);
void forward(const Plan& plan, const ForwardTensors& t, Workspace workspace, Stream stream);
void backward(const Plan& plan, const BackwardTensors& t, Workspace workspace, Stream stream);
void recurrent_forward(const Plan& plan, const ForwardTensors& t, Stream stream);

#define CULA_GDN_DECLARE_CP(function, Arguments)            \
  size_t cp_##function##_workspace_bytes(const Plan& plan); \
  void cp_##function(const Plan& plan, const Arguments& t, Workspace workspace, Stream stream);
CULA_GDN_CP(CULA_GDN_DECLARE_CP)
#undef CULA_GDN_DECLARE_CP

void l2norm_fwd(const Plan& plan, const stages::L2NormForward& t, Stream stream);
void l2norm_bwd(const Plan& plan, const stages::L2NormBackward& t, Stream stream);
void fused_beta_sigmoid_fwd(const Plan& plan, const stages::BetaSigmoidForward& t, Stream stream);
void fused_beta_sigmoid_bwd(const Plan& plan, const stages::BetaSigmoidBackward& t, Stream stream);
void chunk_local_cumsum(const Plan& plan, const stages::LocalCumsum& t, Stream stream);
void gdn_gate_fwd(const Plan& plan, const stages::GateForward& t, Stream stream);
void gdn_gate_chunk_cumsum(const Plan& plan, const stages::GateCumsum& t, Stream stream);
void gdn_gate_bwd(const Plan& plan, const stages::GateBackward& t, Stream stream);
void chunk_scaled_dot_kkt_fwd(const Plan& plan, const stages::ScaledDotKkt& t, Stream stream);
void solve_tril(const Plan& plan, const stages::SolveTril& t, Stream stream);
void chunk_gated_delta_rule_fwd_intra(const Plan& plan, const stages::Intra& t, Stream stream);
void recompute_w_u_fwd(const Plan& plan, const stages::RecomputeWU& t, Stream stream);
void chunk_gated_delta_rule_fwd_h(const Plan& plan, const stages::StateForward& t, Stream stream);
void chunk_fwd_o(const Plan& plan, const stages::OutputForward& t, Stream stream);
void chunk_bwd_dv_local(const Plan& plan, const stages::LocalValueGradient& t, Stream stream);
void chunk_gated_delta_rule_bwd_dhu(const Plan& plan, const stages::StateBackward& t, Stream stream);
void chunk_bwd_dqkwg(const Plan& plan, const stages::OperandGradients& t, Stream stream);
void prepare_wy_repr_bwd(const Plan& plan, const stages::WyBackward& t, Stream stream);

}  // namespace cula::gdn::cuda
