// A C entry to the whole public interface for run_cuda.py, which knows tensors as DLPack structures and nothing else.
#include <cstring>
#include <string>
#include <vector>

#include "gdn/backend.h"
#include "gdn/gdn.h"
#include "gdn/schedules.h"
#include "gdn/stages.h"

namespace {

using namespace cula::gdn;

}  // namespace

extern "C" {

struct CulaProblem {
  int64_t batch, tokens, heads, value_heads, key_dim, value_dim, chunk_size;
  const int64_t* offsets;  // host, num_offsets of them; null: not packed
  int64_t num_offsets;
  double scale;                            // 0: default
  int64_t window_bytes, shortest_segment;  // of the sm90 backward, where few tokens shall need several; 0: as built
  uint8_t dtype_code, dtype_bits;
  uint8_t l2norm, gate, sigmoid, neg_eigval, v_first;
  uint8_t batch_invariant;
  uint8_t sequences_whole;  // no segments
  uint8_t backend;          // 0 cuda, 1 sm90, 2 the one that the library chooses
};

void* cula_plan(const CulaProblem* p, int device_id, char* error, size_t error_bytes);
void cula_free_plan(void* plan);
void cula_describe(void* plan, char* text, size_t bytes);
// 0 forward, 1 forward that saves, 2 backward; cp: 3 prepare, 4 advance, 5 summarize, 6 summarize_adjoint, 7 merge
int64_t cula_workspace(void* plan, int kind);
// Of the tensors of cula_call.
int64_t cula_forward_workspace(void* plan, DLTensor** t);
int64_t cula_backward_workspace(void* plan, DLTensor** t);
int cula_call(const char* operation, void* plan, DLTensor** t, const double* scalars, void* workspace,
              int64_t workspace_bytes, void* stream, char* error, size_t error_bytes);
}

namespace {

template <class F>
int guarded(char* error, size_t error_bytes, F&& f) {
  try {
    f();
    return 0;
  } catch (const cula::Error& e) {
    std::strncpy(error, (e.kind() + ": " + e.what()).c_str(), error_bytes - 1);
  } catch (const std::exception& e) {
    std::strncpy(error, e.what(), error_bytes - 1);
  }
  return 1;
}

SavedTensors saved_tensors(DLTensor** t) { return {t[10], t[11], t[12], t[13], t[14]}; }

ForwardTensors forward_tensors(DLTensor** t, const SavedTensors& saved) {
  ForwardTensors f = {t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], t[9], nullptr, t[15]};
  if (saved.A != nullptr) f.saved = &saved;
  f.state_indices = t[16];
  f.state_checkpoints = t[17];
  f.checkpoint_cu_starts = t[18];
  return f;
}

BackwardTensors backward_tensors(DLTensor** t, const SavedTensors& saved) {
  return {t[0], t[1],  t[2],  t[3],  t[4],  t[5],  t[6],  t[7],  &saved, t[8],
          t[9], t[16], t[17], t[18], t[19], t[20], t[21], t[22], t[23],  t[15]};
}

// Elements of a one-dimensional int64 tensor on the host.
std::vector<int64_t> indices(const DLTensor* t) {
  const auto* data = static_cast<const int64_t*>(t->data);
  return {data, data + t->shape[0]};
}

void call_context_parallel(const std::string& name, const Plan& plan, DLTensor** t, Workspace workspace,
                           Stream stream) {
  if (name == "cp_prepare" || name == "cp_advance") {
    const SavedTensors saved = saved_tensors(t);
    const ForwardTensors f = {t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], t[9], &saved, t[15]};
    return name == "cp_prepare" ? cp::prepare(plan, f, workspace, stream) : cp::advance(plan, f, workspace, stream);
  }
  if (name == "cp_summarize") {
    const SavedTensors saved = {.k_normalized = t[7], .A = t[8]};
    return cp::summarize(plan, {t[0], t[1], t[2], t[3], t[4], t[5], &saved, t[6], indices(t[9]), t[10], t[11]},
                         workspace, stream);
  }
  if (name == "cp_summarize_adjoint") {
    const SavedTensors saved = {.q_normalized = t[6], .k_normalized = t[7], .A = t[8]};
    return cp::summarize_adjoint(
        plan, {t[0], t[1], t[2], t[3], t[4], t[5], &saved, t[9], t[10], t[11], indices(t[12]), t[13], t[14]}, workspace,
        stream);
  }
  return cp::merge(plan, {t[0], indices(t[1]), t[2]}, workspace, stream);
}

void call(const std::string& name, const Plan& plan, DLTensor** t, const double* s, Workspace workspace,
          Stream stream) {
  if (name.starts_with("cp_")) return call_context_parallel(name, plan, t, workspace, stream);
  if (name == "forward" || name == "recurrent_forward") {
    const SavedTensors saved = saved_tensors(t);
    ForwardTensors f = forward_tensors(t, saved);
    f.checkpoint_every_n_tokens = static_cast<int64_t>(s[0]);
    if (name == "forward") return forward(plan, f, workspace, stream);
    return recurrent_forward(plan, f, stream);
  }
  if (name == "backward") {
    const SavedTensors saved = saved_tensors(t);
    return backward(plan, backward_tensors(t, saved), workspace, stream);
  }
  if (name == "l2norm_fwd") return stages::l2norm_fwd(plan, {t[0], t[1], t[2]}, stream);
  if (name == "l2norm_bwd") return stages::l2norm_bwd(plan, {t[0], t[1], t[2], t[3]}, stream);
  if (name == "fused_beta_sigmoid_fwd") return stages::fused_beta_sigmoid_fwd(plan, {t[0], s[0], t[1]}, stream);
  if (name == "fused_beta_sigmoid_bwd") return stages::fused_beta_sigmoid_bwd(plan, {t[0], t[1], s[0], t[2]}, stream);
  if (name == "chunk_local_cumsum") {
    return stages::chunk_local_cumsum(plan, {t[0], s[0], s[1] != 0, t[1], t[2]}, stream);
  }
  if (name == "gdn_gate_fwd") return stages::gdn_gate_fwd(plan, {t[0], t[1], t[2], t[3]}, stream);
  if (name == "gdn_gate_chunk_cumsum") {
    return stages::gdn_gate_chunk_cumsum(plan, {t[0], t[1], t[2], s[0], t[3], t[4]}, stream);
  }
  if (name == "gdn_gate_bwd") return stages::gdn_gate_bwd(plan, {t[0], t[1], t[2], t[3], t[4], t[5], t[6]}, stream);
  if (name == "chunk_scaled_dot_kkt_fwd") {
    return stages::chunk_scaled_dot_kkt_fwd(plan, {t[0], t[1], t[2], t[3], t[4]}, stream);
  }
  if (name == "solve_tril") return stages::solve_tril(plan, {t[0], t[1], t[2]}, stream);
  if (name == "chunk_gated_delta_rule_fwd_intra") {
    return stages::chunk_gated_delta_rule_fwd_intra(plan, {t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7]}, stream);
  }
  if (name == "recompute_w_u_fwd") {
    return stages::recompute_w_u_fwd(plan, {t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7]}, stream);
  }
  if (name == "chunk_gated_delta_rule_fwd_h") {
    return stages::chunk_gated_delta_rule_fwd_h(plan, {t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8]}, stream);
  }
  if (name == "chunk_fwd_o") return stages::chunk_fwd_o(plan, {t[0], t[1], t[2], t[3], t[4], t[5], t[6]}, stream);
  if (name == "chunk_bwd_dv_local") {
    return stages::chunk_bwd_dv_local(plan, {t[0], t[1], t[2], t[3], t[4], t[5]}, stream);
  }
  if (name == "chunk_gated_delta_rule_bwd_dhu") {
    return stages::chunk_gated_delta_rule_bwd_dhu(
        plan, {t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], t[9], t[10]}, stream);
  }
  if (name == "chunk_bwd_dqkwg") {
    return stages::chunk_bwd_dqkwg(
        plan, {t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], t[9], t[10], t[11], t[12], t[13]}, stream);
  }
  if (name == "prepare_wy_repr_bwd") {
    return stages::prepare_wy_repr_bwd(plan, {t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], t[9], t[10], t[11]},
                                       stream);
  }
  throw cula::Error("ValueError", "no operation of this name: " + name);
}

}  // namespace

extern "C" {

void* cula_plan(const CulaProblem* p, int device_id, char* error, size_t error_bytes) {
  Plan* result = nullptr;
  guarded(error, error_bytes, [&] {
    Problem problem;
    problem.batch = p->batch;
    problem.tokens = p->tokens;
    problem.heads = p->heads;
    problem.value_heads = p->value_heads;
    problem.key_dim = p->key_dim;
    problem.value_dim = p->value_dim;
    problem.chunk_size = p->chunk_size;
    if (p->offsets != nullptr) problem.sequence_offsets.emplace(p->offsets, p->offsets + p->num_offsets);
    if (p->scale != 0) problem.scale = p->scale;
    problem.dtype = {p->dtype_code, p->dtype_bits, 1};
    problem.use_qk_l2norm = p->l2norm;
    problem.use_gate = p->gate;
    problem.use_beta_sigmoid = p->sigmoid;
    problem.allow_neg_eigval = p->neg_eigval;
    problem.state_v_first = p->v_first;
    problem.batch_invariant = p->batch_invariant;
    constexpr Backend kBackends[] = {Backend::kCuda, Backend::kSm90, Backend::kAuto};
    problem.backend = kBackends[p->backend];
    problem.device = {kDLCUDA, device_id};
    ScheduleOptions options;
    options.may_split = p->sequences_whole == 0;
    sm90::BackwardCosts& costs = options.backward_costs;
    if (p->window_bytes != 0) costs.small_bytes = costs.window_bytes = p->window_bytes;
    if (p->shortest_segment != 0) {
      costs.shortest_segment = p->shortest_segment;
      costs.summary_us = 0.0;
      costs.remembered_chunks = 0;
    }
    result = new Plan(Plan::make(problem, options));
  });
  return result;
}

void cula_free_plan(void* plan) { delete static_cast<Plan*>(plan); }

void cula_describe(void* plan, char* text, size_t bytes) {
  std::strncpy(text, static_cast<Plan*>(plan)->describe().c_str(), bytes - 1);
}

int64_t cula_workspace(void* plan, int kind) {
  const Plan& p = *static_cast<Plan*>(plan);
  const auto bytes = [&]() -> size_t {
    switch (kind) {
      case 2:
        return p.backward_workspace_bytes();
      case 3:
        return cp::prepare_workspace_bytes(p);
      case 4:
        return cp::advance_workspace_bytes(p);
      case 5:
        return cp::summarize_workspace_bytes(p);
      case 6:
        return cp::summarize_adjoint_workspace_bytes(p);
      case 7:
        return cp::merge_workspace_bytes(p);
      default:
        return p.forward_workspace_bytes(kind == 1);
    }
  };
  return static_cast<int64_t>(bytes());
}

int64_t cula_forward_workspace(void* plan, DLTensor** t) {
  const SavedTensors saved = saved_tensors(t);
  return static_cast<int64_t>(static_cast<Plan*>(plan)->forward_workspace_bytes(forward_tensors(t, saved)));
}

int64_t cula_backward_workspace(void* plan, DLTensor** t) {
  const SavedTensors saved = saved_tensors(t);
  return static_cast<int64_t>(static_cast<Plan*>(plan)->backward_workspace_bytes(backward_tensors(t, saved)));
}

int cula_call(const char* operation, void* plan, DLTensor** t, const double* scalars, void* workspace,
              int64_t workspace_bytes, void* stream, char* error, size_t error_bytes) {
  return guarded(error, error_bytes, [&] {
    call(operation, *static_cast<Plan*>(plan), t, scalars, {workspace, static_cast<size_t>(workspace_bytes)}, stream);
  });
}
}
