// Context parallelism: the tensors that ranks exchange. Its halves of forward are in operator.cpp.
#include "gdn/cp/cp.h"

#include "bindings/operands.h"

namespace cula::gdn::bindings {
namespace {

using Indices = ffi::Array<int64_t>;

std::vector<int64_t> to_vector(const Indices& indices) { return {indices.begin(), indices.end()}; }

// q (or k) and v (or a tensor like it) give the sizes; with use_qk_l2norm the normalised tensors stand in.
Plan make_plan(Request& request, const Tensor& k, const Tensor& k_normalized, const Tensor& v) {
  request.set_sizes(get(k) != nullptr ? get(k) : get(k_normalized), get(v));
  return request.make_plan();
}

void summarize_op(Request request, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor A_log, Tensor dt_bias,
                  Tensor initial_state, Tensor A, Tensor k_normalized, const Indices& sequences, Tensor summary) {
  const Plan plan = make_plan(request, k, k_normalized, v);
  const SavedTensors saved = {.k_normalized = get(k_normalized), .A = get(A)};
  const ScratchMemory scratch(cp::summarize_workspace_bytes(plan), request.problem.device);
  cp::summarize(plan,
                {.k = get(k),
                 .v = get(v),
                 .g = get(g),
                 .beta = get(beta),
                 .A_log = get(A_log),
                 .dt_bias = get(dt_bias),
                 .saved = &saved,
                 .initial_state = get(initial_state),
                 .sequences = to_vector(sequences),
                 .summary = get(summary),
                 .cu_seqlens = request.cu_seqlens},
                scratch.get(), current_stream(request.problem));
}

void summarize_adjoint_op(Request request, Tensor q, Tensor k, Tensor g, Tensor beta, Tensor A_log, Tensor dt_bias,
                          Tensor A, Tensor q_normalized, Tensor k_normalized, Tensor grad_output,
                          Tensor grad_final_state, Tensor transition, const Indices& sequences, Tensor summary) {
  const Plan plan = make_plan(request, k, k_normalized, grad_output);
  const SavedTensors saved = {.q_normalized = get(q_normalized), .k_normalized = get(k_normalized), .A = get(A)};
  const ScratchMemory scratch(cp::summarize_adjoint_workspace_bytes(plan), request.problem.device);
  cp::summarize_adjoint(plan,
                        {.q = get(q),
                         .k = get(k),
                         .g = get(g),
                         .beta = get(beta),
                         .A_log = get(A_log),
                         .dt_bias = get(dt_bias),
                         .saved = &saved,
                         .grad_output = get(grad_output),
                         .grad_final_state = get(grad_final_state),
                         .transition = get(transition),
                         .sequences = to_vector(sequences),
                         .summary = get(summary),
                         .cu_seqlens = request.cu_seqlens},
                        scratch.get(), current_stream(request.problem));
}

// A merge knows its states only: one sequence of one token stands for the rank's own.
void merge_op(Request request, Tensor summaries, const Indices& order, Tensor state, int64_t value_heads,
              int64_t key_dim, int64_t value_dim) {
  if (get(summaries) == nullptr) throw_type_error("summaries: expected a tensor, got None");
  request.set_sizes(1, 1, value_heads, value_heads, key_dim, value_dim);
  request.problem.dtype = get(summaries)->dtype;
  request.problem.device = get(summaries)->device;
  const Plan plan = request.make_plan();
  const ScratchMemory scratch(cp::merge_workspace_bytes(plan), request.problem.device);
  cp::merge(plan, {.summaries = get(summaries), .order = to_vector(order), .state = get(state)}, scratch.get(),
            current_stream(request.problem));
}

}  // namespace
}  // namespace cula::gdn::bindings

CULA_EXPORT(cp_summarize, cula::gdn::bindings::summarize_op)
CULA_EXPORT(cp_summarize_adjoint, cula::gdn::bindings::summarize_adjoint_op)
CULA_EXPORT(cp_merge, cula::gdn::bindings::merge_op)
