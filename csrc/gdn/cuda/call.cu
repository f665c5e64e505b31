#include "gdn/cuda/operator.h"

namespace cula::gdn {

namespace cuda {

DType element_type(const Plan& plan) {
  const DType dtype = from_dlpack(plan.problem().dtype, "dtype");
  if (dtype == DType::kFloat64) {
    throw_type_error("q: the cuda backend takes float32, bfloat16 and float16, got float64 (the cpu backend takes it)");
  }
  return dtype;
}

Call::Call(const Plan& plan, const DLTensor* cu_seqlens)
    : problem(plan.problem()),
      dtype(element_type(plan)),
      sequences(sequence_table(plan, cu_seqlens)),
      group(problem.value_heads / problem.heads),
      token_rows(problem.batch * problem.tokens) {}

SequenceTable split_table(SequenceTable sequences, const ScanCut& cut) {
  sequences.segment_chunks = cut.schedule.segments.chunks;
  // Without cu_seqlens all sequences are as long as the longest.
  sequences.segments_per_row = cut.schedule.segments.of(cut.longest);
  return sequences;
}

int64_t chunk_slots(const Problem& problem) {
  const int64_t chunk = problem.chunk_size;
  return problem.sequence_offsets ? problem.tokens / chunk + problem.num_sequences()
                                  : problem.batch * ((problem.tokens + chunk - 1) / chunk);
}

GateArgs operator_gates(const Call& call, const DLTensor* g, const DLTensor* beta, const DLTensor* A_log,
                        const DLTensor* dt_bias) {
  GateArgs gates;
  gates.g = token_arg(g, "g", call.dtype);
  gates.beta = token_arg(beta, "beta", call.dtype);
  if (call.problem.use_gate) {
    gates.A_log = head_arg(A_log, "A_log");
    gates.dt_bias = head_arg(dt_bias, "dt_bias");
  }
  gates.beta_sigmoid = call.problem.use_beta_sigmoid;
  gates.beta_scale = call.problem.allow_neg_eigval ? 2.0f : 1.0f;
  return gates;
}

GateArgs stage_gates(const DLTensor* gamma, const DLTensor* beta) {
  GateArgs gates;
  gates.g = token_arg(gamma, "g", DType::kFloat32);
  gates.beta = token_arg(beta, "beta", DType::kFloat32);
  return gates;
}

}  // namespace cuda

const BackendTable& cuda_backend() {
  static constexpr BackendTable kTable = {
      .forward_workspace_bytes = cuda::forward_workspace_bytes,
      .backward_workspace_bytes = cuda::backward_workspace_bytes,
      .forward = cuda::forward,
      .backward = cuda::backward,
      .recurrent_forward = cuda::recurrent_forward,
      .l2norm_fwd = cuda::l2norm_fwd,
      .l2norm_bwd = cuda::l2norm_bwd,
      .fused_beta_sigmoid_fwd = cuda::fused_beta_sigmoid_fwd,
      .fused_beta_sigmoid_bwd = cuda::fused_beta_sigmoid_bwd,
      .chunk_local_cumsum = cuda::chunk_local_cumsum,
      .gdn_gate_fwd = cuda::gdn_gate_fwd,
      .gdn_gate_chunk_cumsum = cuda::gdn_gate_chunk_cumsum,
      .gdn_gate_bwd = cuda::gdn_gate_bwd,
      .chunk_scaled_dot_kkt_fwd = cuda::chunk_scaled_dot_kkt_fwd,
      .solve_tril = cuda::solve_tril,
      .chunk_gated_delta_rule_fwd_intra = cuda::chunk_gated_delta_rule_fwd_intra,
      .recompute_w_u_fwd = cuda::recompute_w_u_fwd,
      .chunk_gated_delta_rule_fwd_h = cuda::chunk_gated_delta_rule_fwd_h,
      .chunk_fwd_o = cuda::chunk_fwd_o,
      .chunk_bwd_dv_local = cuda::chunk_bwd_dv_local,
      .chunk_gated_delta_rule_bwd_dhu = cuda::chunk_gated_delta_rule_bwd_dhu,
      .chunk_bwd_dqkwg = cuda::chunk_bwd_dqkwg,
      .prepare_wy_repr_bwd = cuda::prepare_wy_repr_bwd,
      .cp_prepare_workspace_bytes = cuda::cp_prepare_workspace_bytes,
      .cp_prepare = cuda::cp_prepare,
      .cp_advance_workspace_bytes = cuda::cp_advance_workspace_bytes,
      .cp_advance = cuda::cp_advance,
      .cp_summarize_workspace_bytes = cuda::cp_summarize_workspace_bytes,
      .cp_summarize = cuda::cp_summarize,
      .cp_summarize_adjoint_workspace_bytes = cuda::cp_summarize_adjoint_workspace_bytes,
      .cp_summarize_adjoint = cuda::cp_summarize_adjoint,
      .cp_merge_workspace_bytes = cuda::cp_merge_workspace_bytes,
      .cp_merge = cuda::cp_merge,
  };
  return kTable;
}

}  // namespace cula::gdn
