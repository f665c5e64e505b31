// The whole operator, its float64 reference, and what the library says about itself.
#include "bindings/operands.h"
#include "common/host/cpu_features.h"
#include "gdn/cp/cp.h"
#include "gdn/reference/reference.h"

namespace cula::gdn::bindings {

namespace {

// Forward as a whole, or one of its two halves.
enum class Part { kAll, kPrepare, kAdvance };

template <Part kPart>
void forward_op(Request request, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor A_log, Tensor dt_bias,
                Tensor initial_state, Tensor o, Tensor final_state, Tensor A, Tensor q_normalized, Tensor k_normalized,
                Tensor q_rstd, Tensor k_rstd) {
  request.set_sizes(get(q), get(v));
  const Plan plan = request.make_plan();
  const SavedTensors saved = Saved{A, q_normalized, k_normalized, q_rstd, k_rstd}.tensors();
  const ForwardTensors tensors = Inputs{q, k, v, g, beta, A_log, dt_bias, initial_state}.store_in(
      ForwardTensors{.o = get(o),
                     .final_state = get(final_state),
                     .saved = saved.A == nullptr ? nullptr : &saved,
                     .cu_seqlens = request.cu_seqlens});
  const Stream stream = current_stream(request.problem);
  const DLDevice device = request.problem.device;
  if constexpr (kPart == Part::kPrepare) {
    cp::prepare(plan, tensors, ScratchMemory(cp::prepare_workspace_bytes(plan), device).get(), stream);
  } else if constexpr (kPart == Part::kAdvance) {
    cp::advance(plan, tensors, ScratchMemory(cp::advance_workspace_bytes(plan), device).get(), stream);
  } else {
    const ScratchMemory scratch(plan.forward_workspace_bytes(tensors), device);
    forward(plan, tensors, scratch.get(), stream);
  }
}

// For serving: outputs, pools and checkpoints of the caller's.
struct Serving {
  Tensor o, final_state, state_indices, state_checkpoints, checkpoint_cu_starts;
  int64_t checkpoint_every_n_tokens;

  ForwardTensors tensors() const {
    ForwardTensors tensors{.o = get(o), .final_state = get(final_state)};
    tensors.state_indices = get(state_indices);
    tensors.state_checkpoints = get(state_checkpoints);
    tensors.checkpoint_cu_starts = get(checkpoint_cu_starts);
    tensors.checkpoint_every_n_tokens = checkpoint_every_n_tokens;
    return tensors;
  }
};

template <bool kRecurrent>
void serve_op(Request request, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor A_log, Tensor dt_bias,
              Tensor initial_state, Tensor o, Tensor final_state, Tensor state_indices, Tensor state_checkpoints,
              Tensor checkpoint_cu_starts, int64_t checkpoint_every_n_tokens) {
  request.set_sizes(get(q), get(v));
  const Plan plan = request.make_plan();
  const Serving serving{
      o, final_state, state_indices, state_checkpoints, checkpoint_cu_starts, checkpoint_every_n_tokens};
  ForwardTensors tensors = Inputs{q, k, v, g, beta, A_log, dt_bias, initial_state}.store_in(serving.tensors());
  tensors.cu_seqlens = request.cu_seqlens;
  const Stream stream = current_stream(request.problem);
  if constexpr (kRecurrent) {
    recurrent_forward(plan, tensors, stream);
  } else {
    forward(plan, tensors, ScratchMemory(plan.forward_workspace_bytes(tensors), request.problem.device).get(), stream);
  }
}

void recurrent_forward_op(Request request, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor A_log,
                          Tensor dt_bias, Tensor initial_state, Tensor o, Tensor final_state) {
  request.set_sizes(get(q), get(v));
  const ForwardTensors tensors = Inputs{q, k, v, g, beta, A_log, dt_bias, initial_state}.store_in(
      ForwardTensors{.o = get(o), .final_state = get(final_state), .cu_seqlens = request.cu_seqlens});
  recurrent_forward(request.make_plan(), tensors, current_stream(request.problem));
}

// The results of backward, in the order of the operator's inputs.
struct Gradients {
  Tensor dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dh0;

  BackwardTensors store_in(BackwardTensors tensors) const {
    tensors.dq = get(dq);
    tensors.dk = get(dk);
    tensors.dv = get(dv);
    tensors.dg = get(dg);
    tensors.dbeta = get(dbeta);
    tensors.dA_log = get(dA_log);
    tensors.ddt_bias = get(ddt_bias);
    tensors.dh0 = get(dh0);
    return tensors;
  }
};

// With use_qk_l2norm q and k may be None: their normalised copies stand in for them.
void backward_op(Request request, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor A_log, Tensor dt_bias,
                 Tensor initial_state, Tensor A, Tensor q_normalized, Tensor k_normalized, Tensor q_rstd, Tensor k_rstd,
                 Tensor grad_output, Tensor grad_final_state, Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta,
                 Tensor dA_log, Tensor ddt_bias, Tensor dh0) {
  request.set_sizes(get(q) != nullptr ? get(q) : get(q_normalized), get(v));
  const Plan plan = request.make_plan();
  const SavedTensors saved = Saved{A, q_normalized, k_normalized, q_rstd, k_rstd}.tensors();
  const BackwardTensors tensors = Inputs{q, k, v, g, beta, A_log, dt_bias, initial_state}.store_in(
      Gradients{dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dh0}.store_in(
          BackwardTensors{.saved = &saved,
                          .grad_output = get(grad_output),
                          .grad_final_state = get(grad_final_state),
                          .cu_seqlens = request.cu_seqlens}));
  const ScratchMemory scratch(plan.backward_workspace_bytes(tensors), request.problem.device);
  backward(plan, tensors, scratch.get(), current_stream(request.problem));
}

void reference_forward_op(Request request, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor A_log,
                          Tensor dt_bias, Tensor initial_state, Tensor o, Tensor final_state) {
  request.set_sizes(get(q), get(v));
  reference::forward(request.problem, Inputs{q, k, v, g, beta, A_log, dt_bias, initial_state}.store_in(
                                          ForwardTensors{.o = get(o), .final_state = get(final_state)}));
}

void reference_backward_op(Request request, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor A_log,
                           Tensor dt_bias, Tensor initial_state, Tensor grad_output, Tensor grad_final_state, Tensor dq,
                           Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dA_log, Tensor ddt_bias, Tensor dh0) {
  request.set_sizes(get(q), get(v));
  const BackwardTensors tensors = Inputs{q, k, v, g, beta, A_log, dt_bias, initial_state}.store_in(
      Gradients{dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dh0}.store_in(
          BackwardTensors{.grad_output = get(grad_output), .grad_final_state = get(grad_final_state)}));
  reference::backward(request.problem, tensors);
}

using Properties = ffi::Map<ffi::String, ffi::Any>;

Properties plan_info(Request request, int64_t batch, int64_t tokens, int64_t heads, int64_t value_heads,
                     int64_t key_dim, int64_t value_dim, DLDataType dtype, int64_t device_type, int64_t device_index) {
  request.set_sizes(batch, tokens, heads, value_heads, key_dim, value_dim);
  Problem& problem = request.problem;
  problem.dtype = dtype;
  problem.device = {static_cast<DLDeviceType>(device_type), static_cast<int32_t>(device_index)};
  const Plan plan = request.make_plan();
  Properties info;
  info.Set("backend", ffi::String(backend_name(plan.backend())));
  info.Set("num_sequences", static_cast<int64_t>(plan.sequences().size()));
  info.Set("num_chunks", plan.num_chunks());
  info.Set("num_threads", static_cast<int64_t>(plan.num_threads()));
  info.Set("value_block", plan.value_block());
  info.Set("inference_workspace_bytes", static_cast<int64_t>(plan.forward_workspace_bytes(false)));
  info.Set("forward_workspace_bytes", static_cast<int64_t>(plan.forward_workspace_bytes(true)));
  info.Set("backward_workspace_bytes", static_cast<int64_t>(plan.backward_workspace_bytes()));
  info.Set("description", ffi::String(plan.describe()));
  return info;
}

Properties library_info() {
  return translate_errors([] {
    ffi::Array<ffi::String> backends;
    for (const Backend backend : compiled_backends()) backends.push_back(backend_name(backend));
    Properties info;
    info.Set("version", ffi::String(CULA_VERSION));
    info.Set("backends", backends);
    info.Set("cpu_isa", ffi::String(cpu_isa_name()));
    info.Set("hardware_threads", static_cast<int64_t>(hardware_threads()));
    return info;
  });
}

}  // namespace
}  // namespace cula::gdn::bindings

CULA_EXPORT(forward, cula::gdn::bindings::forward_op<cula::gdn::bindings::Part::kAll>)
CULA_EXPORT(cp_prepare, cula::gdn::bindings::forward_op<cula::gdn::bindings::Part::kPrepare>)
CULA_EXPORT(cp_advance, cula::gdn::bindings::forward_op<cula::gdn::bindings::Part::kAdvance>)
CULA_EXPORT(backward, cula::gdn::bindings::backward_op)
CULA_EXPORT(recurrent_forward, cula::gdn::bindings::recurrent_forward_op)
CULA_EXPORT(serve_forward, cula::gdn::bindings::serve_op<false>)
CULA_EXPORT(serve_recurrent_forward, cula::gdn::bindings::serve_op<true>)
CULA_EXPORT(reference_forward, cula::gdn::bindings::reference_forward_op)
CULA_EXPORT(reference_backward, cula::gdn::bindings::reference_backward_op)
CULA_EXPORT(plan_info, cula::gdn::bindings::plan_info)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(library_info, cula::gdn::bindings::library_info)
