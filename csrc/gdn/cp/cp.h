// Context parallelism (CP): sequences that span several ranks, or several ranges of one device. No transport inside:
// what crosses is one tensor a rank and direction, and the caller moves it.
//
// Over any range of tokens the state map of a value head is affine, S_out = M S_in + S_ext, and so is that of the
// gradient in reverse, D_in = dM D_out + dS_ext with dM = M^T. A rank sends (S_ext | M) of the part of a sequence that
// it hands on, and makes the state that enters it from what the ranks before it sent:
//
//   forward                                           backward
//   prepare                                           summarize_adjoint   of the first sequence here
//   summarize   of the last sequence here             <all-gather>
//   <all-gather>                                      merge               entries of the ranks behind, last one first
//   merge       entries of the ranks before, in order gdn::backward       with that as grad_final_state
//   advance     with that as initial_state
//
// Everything is float32 (float64 for float64 problems): the carried state, M and the merge. The layout of a summary,
// [HV, K, V + K] with S_ext in front, is that of flash-linear-attention 0.6.0, whose ranks can sit in the same group;
// it does not depend on Problem::state_v_first.
//
// `plan` is the plan of the rank's own tokens, packed sequences included. Functions throw as those of gdn.h do.
//
// Where gates forget, S_ext on a GPU comes from the chunks that still show at the end of the sequence (its start, for
// dS_ext), and M is zero: what was left out is below 2^-128 of the state that enters. Unless that state's norm exceeds
// 4, fp32 has no normal number for it; it is not zero, should all later inputs be that small.
#pragma once

#include <vector>

#include "gdn/gdn.h"

namespace cula::gdn::cp {

// forward() in two halves, `saved` being required: prepare fills it in, chunk by chunk, and needs no state; advance
// reads it and does the rest. Both take all arguments of forward, so that prepare can check them before anything is
// written; o and final_state are left to advance.
void prepare(const Plan& plan, const ForwardTensors& t, Workspace workspace, Stream stream = nullptr);
size_t prepare_workspace_bytes(const Plan& plan);
void advance(const Plan& plan, const ForwardTensors& t, Workspace workspace, Stream stream = nullptr);
size_t advance_workspace_bytes(const Plan& plan);

// (S_ext | M) of whole sequences of the plan.
struct Summary {
  const DLTensor* k = nullptr;              // as in forward; may be absent with use_qk_l2norm
  const DLTensor* v = nullptr;              // ..
  const DLTensor* g = nullptr;              // ..
  const DLTensor* beta = nullptr;           // ..
  const DLTensor* A_log = nullptr;          // ..
  const DLTensor* dt_bias = nullptr;        // ..
  const SavedTensors* saved = nullptr;      // A, and k_normalized with use_qk_l2norm, as prepare left them
  const DLTensor* initial_state = nullptr;  // [P, HV, K, V] float type: S_ext starts from it; optional, zero if absent
  std::vector<int64_t> sequences = {};      // P indices into Plan::sequences()
  DLTensor* summary = nullptr;              // [P, HV, K, V + K] float32 (float64 for float64 problems)
  const DLTensor* cu_seqlens = nullptr;     // as in forward
};
void summarize(const Plan& plan, const Summary& t, Workspace workspace, Stream stream = nullptr);
size_t summarize_workspace_bytes(const Plan& plan);

// (dS_ext | dM) of whole sequences of the plan.
struct AdjointSummary {
  const DLTensor* q = nullptr;  // as in backward
  const DLTensor* k = nullptr;
  const DLTensor* g = nullptr;
  const DLTensor* beta = nullptr;
  const DLTensor* A_log = nullptr;
  const DLTensor* dt_bias = nullptr;
  const SavedTensors* saved = nullptr;         // A, and q_normalized and k_normalized with use_qk_l2norm
  const DLTensor* grad_output = nullptr;       // do [B, T, HV, V] float type
  const DLTensor* grad_final_state = nullptr;  // [P, HV, K, V] float type: dS_ext starts from it; optional
  // [P, HV, K, K] float type: M of the same sequences, as in the last K columns of their summaries. Its transpose is
  // dM, which then is not computed again. Optional.
  const DLTensor* transition = nullptr;
  std::vector<int64_t> sequences = {};  // P indices into Plan::sequences()
  DLTensor* summary = nullptr;          // [P, HV, K, V + K] float32 (float64 for float64 problems)
  const DLTensor* cu_seqlens = nullptr;
};
void summarize_adjoint(const Plan& plan, const AdjointSummary& t, Workspace workspace, Stream stream = nullptr);
size_t summarize_adjoint_workspace_bytes(const Plan& plan);

// state <- M_i state + S_ext,i for the entries i of `order`, from zero; so M of the first one is not read.
struct Merge {
  const DLTensor* summaries = nullptr;  // [P, HV, K, V + K] float type
  std::vector<int64_t> order = {};      // indices into the first dimension; none: the state is zero
  DLTensor* state = nullptr;            // [HV, K, V] ([HV, V, K] with state_v_first) float type
};
void merge(const Plan& plan, const Merge& t, Workspace workspace, Stream stream = nullptr);
size_t merge_workspace_bytes(const Plan& plan);

}  // namespace cula::gdn::cp
