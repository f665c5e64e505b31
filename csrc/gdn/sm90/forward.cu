// The operator's forward pass on Hopper: prepare, then the fused recurrence.
#include <algorithm>
#include <cmath>

#include "gdn/cuda/launch/elementwise.h"
#include "gdn/cuda/operator.h"
#include "gdn/cuda/workspace.h"
#include "gdn/sm90/launch/kernels.h"
#include "gdn/sm90/operands.h"
#include "gdn/sm90/operator.h"

namespace cula::gdn {

namespace sm90 {

namespace {

using cuda::Call;
using cuda::dense_arg;
using cuda::Halves;
using cuda::token_arg;
using device::TokenTensor;

struct ForwardWorkspace {
  void* q_normalized = nullptr;  // [B, T, H, K] x; these two and A only if they are not saved
  void* k_normalized = nullptr;
  void* A = nullptr;                // [B, T, HV, C] x
  ChunkFactors* factors = nullptr;  // [slots, HV]
  int32_t* order = nullptr;         // [N], with the longest sequences first
  float* states = nullptr;          // [places, HV, V, K]; these three only with segments
  float* transitions = nullptr;     // [places, HV, K, K]
  int32_t* independent = nullptr;   // [places, HV]
  size_t bytes = 0;

  ForwardWorkspace(const Plan& plan, const Schedule& schedule, DType dtype, bool saves, void* data) {
    const Problem& problem = plan.problem();
    cuda::WorkspaceCutter cutter(data);
    const int64_t rows = problem.batch * problem.tokens;
    const size_t size = dtype_size(dtype);
    if (problem.use_qk_l2norm && !saves) {
      q_normalized = cutter.take_bytes(rows * problem.heads * problem.key_dim * size);
      k_normalized = cutter.take_bytes(rows * problem.heads * problem.key_dim * size);
    }
    if (!saves) A = cutter.take_bytes(rows * problem.value_heads * kRows * size);
    const int64_t slots = problem.sequence_offsets ? problem.tokens / kRows + problem.num_sequences()
                                                   : problem.batch * ((problem.tokens + kRows - 1) / kRows);
    factors = cutter.take<ChunkFactors>(slots * problem.value_heads);
    if (schedule.longest_first) order = cutter.take<int32_t>(problem.num_sequences());
    if (schedule.segment_chunks != 0) {
      Segmentation segments;
      segments.chunks = schedule.segment_chunks;
      segments.sequences.num_sequences = problem.num_sequences();
      segments.sequences.slots_per_row = (problem.tokens + kRows - 1) / kRows;
      const int64_t places =
          problem.sequence_offsets ? problem.num_sequences() + slots / schedule.segment_chunks : segments.num_places();
      states = cutter.take<float>(places * problem.value_heads * problem.value_dim * problem.key_dim);
      transitions = cutter.take<float>(places * problem.value_heads * problem.key_dim * problem.key_dim);
      independent = cutter.take<int32_t>(places * problem.value_heads);
    }
    bytes = cutter.used();
  }
};

TokenTensor dense_token_tensor(const void* data, DType dtype, const Problem& problem, int64_t heads, int64_t columns) {
  return {data,
          dtype,
          {problem.batch, problem.tokens, heads, columns},
          {problem.tokens * heads * columns, heads * columns, columns, 1}};
}

// The tensors of a call as the copy engine sees them.
struct Operands {
  TokenTensor q;  // normalised, if the problem says so
  TokenTensor k;
  TokenTensor v;
  TokenTensor A;
  TokenTensor o;

  Operands(const Problem& problem, DType dtype, const ForwardTensors& t, const ForwardWorkspace& space)
      : v(token_tensor(t.v, "v")), o(token_tensor(t.o, "o")) {
    if (!problem.use_qk_l2norm) {
      q = token_tensor(t.q, "q");
      k = token_tensor(t.k, "k");
    } else if (t.saved != nullptr) {
      q = token_tensor(t.saved->q_normalized, "saved.q_normalized");
      k = token_tensor(t.saved->k_normalized, "saved.k_normalized");
    } else {
      q = dense_token_tensor(space.q_normalized, dtype, problem, problem.heads, problem.key_dim);
      k = dense_token_tensor(space.k_normalized, dtype, problem, problem.heads, problem.key_dim);
    }
    A = t.saved != nullptr ? token_tensor(t.saved->A, "saved.A")
                           : dense_token_tensor(space.A, dtype, problem, problem.value_heads, kRows);
  }

  // The first one that the copy engine can not read or write; null: none.
  const char* first_misfit() const {
    struct Named {
      const TokenTensor& x;
      const char* name;
    };
    for (const Named& operand : {Named{q, "q"}, Named{k, "k"}, Named{v, "v"}, Named{A, "A"}, Named{o, "o"}}) {
      if (!device::fits_tensor_map(operand.x)) return operand.name;
    }
    return nullptr;
  }
};

// The raw inputs of a normalisation. Any layout but the vectors' goes through the general kernel.
bool normalize_general(const DLTensor* x, const char* name, const TokenTensor& y, DLTensor* rstd,
                       device::Stream stream) {
  if (device::fits_tensor_map(token_tensor(x, name))) return false;
  cuda::RowsArg target;
  target.data = const_cast<void*>(y.data);
  target.dtype = y.dtype;
  target.dims = 3;
  std::copy_n(y.shape, 3, target.shape);
  std::copy_n(y.stride, 3, target.stride);
  cuda::launch_l2norm(cuda::rows_arg(x, name, false), target,
                      rstd != nullptr ? cuda::rows_arg(rstd, "rstd", true) : cuda::RowsArg{},
                      y.shape[0] * y.shape[1] * y.shape[2], static_cast<int>(y.shape[3]), stream);
  return true;
}

NormalizeTensors normalize_tensors(const DLTensor* x, const char* name, const TokenTensor& y, DLTensor* rstd) {
  return {tensor_arg(token_tensor(x, name)), tensor_arg(y), cuda::token_arg(rstd, "rstd", DType::kFloat32)};
}

template <class T>
void normalize(const Call& call, const ForwardTensors& t, const Operands& operands, const KernelShape& shape,
               device::Stream stream) {
  DLTensor* q_rstd = t.saved != nullptr ? t.saved->q_rstd : nullptr;
  DLTensor* k_rstd = t.saved != nullptr ? t.saved->k_rstd : nullptr;
  const Problem& problem = call.problem;
  NormalizeArgs args = {normalize_tensors(t.q, "q", operands.q, q_rstd),
                        normalize_tensors(t.k, "k", operands.k, k_rstd), problem.tokens, problem.heads,
                        call.token_rows * problem.heads};
  const bool q_done = normalize_general(t.q, "q", operands.q, q_rstd, stream);
  const bool k_done = normalize_general(t.k, "k", operands.k, k_rstd, stream);
  if (q_done && k_done) return;
  if (q_done) args.q = args.k;  // the same rows twice, with the same results
  if (k_done) args.k = args.q;
  launch_normalize<T>(args, shape, stream);
}

}  // namespace

size_t forward_workspace_bytes(const Plan& plan, bool saves_for_backward) {
  return ForwardWorkspace(plan, plan.schedules().sm90_forward(plan), cuda::element_type(plan), saves_for_backward,
                          nullptr)
      .bytes;
}

// Operands that the copy engine can not read or write go through the general kernels.
size_t forward_workspace_bytes(const Plan& plan, const ForwardTensors& t) {
  const DType dtype = cuda::element_type(plan);
  const bool saves = t.saved != nullptr;
  const ForwardWorkspace space(plan, plan.schedules().sm90_forward(plan), dtype, saves, nullptr);
  if (Operands(plan.problem(), dtype, t, space).first_misfit() == nullptr) return space.bytes;
  return std::max(space.bytes, cuda::forward_workspace_bytes(plan, saves));
}

namespace {

void run_forward(const Plan& plan, const ForwardTensors& t, Workspace workspace, Stream stream_handle, Halves halves) {
  const Call call(plan, t.cu_seqlens);
  const Problem& problem = call.problem;
  const device::DeviceGuard guard(problem.device.device_id);
  const auto stream = static_cast<device::Stream>(stream_handle);
  const Schedule& schedule = plan.schedules().sm90_forward(plan);
  const ForwardWorkspace space(plan, schedule, call.dtype, t.saved != nullptr,
                               halves.advance ? workspace.data : nullptr);
  const Operands operands(problem, call.dtype, t, space);
  if (const char* name = operands.first_misfit()) {
    if (halves.advance) {
      const size_t needed = cuda::forward_workspace_bytes(plan, t.saved != nullptr);
      if (workspace.bytes < needed) {
        throw_value_error("workspace: expected ", needed, " bytes, as forward_workspace_bytes(tensors) says, since ",
                          name, " has rows or a base that are not aligned to 16 bytes, got ", workspace.bytes);
      }
    }
    const auto general = halves.prepare && halves.advance ? cuda::forward
                         : halves.prepare                 ? cuda::cp_prepare
                                                          : cuda::cp_advance;
    return general(plan, t, workspace, stream_handle);
  }

  PrepareArgs prepare;
  prepare.sequences = call.sequences;
  prepare.value_heads = problem.value_heads;
  prepare.group = call.group;
  prepare.head_blocks = 0;
  prepare.scale = static_cast<float>(plan.scale());
  prepare.gates = cuda::operator_gates(call, t.g, t.beta, t.A_log, t.dt_bias);
  if (halves.prepare) prepare.A_rows = tensor_arg(operands.A);
  prepare.whole = t.saved != nullptr;
  prepare.factors = halves.advance ? space.factors : nullptr;
  prepare.order = halves.advance ? space.order : nullptr;

  ForwardArgs args;
  if (call.token_rows > 0) {
    args.maps.q = device::make_tensor_map(operands.q, "q");
    args.maps.k = device::make_tensor_map(operands.k, "k");
    args.maps.v = device::make_tensor_map(operands.v, "v");
    TokenTensor upper = operands.A;
    upper.shape[3] = kRows / 2;
    args.maps.A_upper = device::make_tensor_map(upper, "A", kRows / 2);
    args.maps.A_lower = device::make_tensor_map(operands.A, "A", kRows / 2);
    args.maps.o = device::make_tensor_map(operands.o, "o");
    prepare.k = args.maps.k;
  }
  args.segments.sequences = call.sequences;
  args.segments.chunks = schedule.segment_chunks;
  args.value_heads = problem.value_heads;
  args.group = call.group;
  args.value_dim = static_cast<int>(problem.value_dim);
  args.log2_scale = std::log2(std::fabs(prepare.scale));
  args.scale_sign = std::signbit(prepare.scale) ? 0x80008000u : 0u;
  args.factors = space.factors;
  args.order = space.order;
  args.initial_state = cuda::state_arg(t.initial_state, "initial_state", problem.state_v_first);
  args.final_state = cuda::state_arg(t.final_state, "final_state", problem.state_v_first);
  args.initial_state_bytes = static_cast<int>(dtype_size(args.initial_state.dtype));
  args.final_state_bytes = static_cast<int>(dtype_size(args.final_state.dtype));
  args.initial_slots = cuda::state_slots(t.state_indices, t.initial_state);
  args.final_slots = cuda::state_slots(t.state_indices, t.final_state);
  args.checkpoints = cuda::checkpoint_args(problem, t);
  args.moves_initial_state =
      schedule.segment_chunks != 0 && args.initial_state && args.initial_state.data == args.final_state.data;
  args.o = tensor_arg(operands.o);
  args.states = space.states;
  args.transitions = space.transitions;
  args.independent = space.independent;

  const KernelShape shape = {static_cast<int>(problem.key_dim), schedule.value_tiles};
  with_half_type(call.dtype, [&](auto element) {
    using T = decltype(element);
    if (problem.use_qk_l2norm && halves.prepare) normalize<T>(call, t, operands, shape, stream);
    launch_prepare<T>(prepare, shape, stream);
    if (!halves.advance) return;
    if (schedule.segment_chunks != 0) {
      launch_summary<T>(args, shape, stream);
      launch_merge(args, shape, stream);
    }
    if (args.checkpoints.states) {
      launch_checkpointed_forward<T>(args, shape, stream);
    } else {
      launch_forward<T>(args, shape, stream);
    }
  });
  if (halves.advance) {
    cuda::launch_zero_padding(call.sequences, args.o, problem.value_heads, problem.value_dim, stream);
  }
}

}  // namespace

void forward(const Plan& plan, const ForwardTensors& t, Workspace workspace, Stream stream) {
  run_forward(plan, t, workspace, stream, {});
}

void cp_prepare(const Plan& plan, const ForwardTensors& t, Workspace workspace, Stream stream) {
  run_forward(plan, t, workspace, stream, {.advance = false});
}

size_t cp_advance_workspace_bytes(const Plan& plan) {
  return std::max(forward_workspace_bytes(plan, true), cuda::cp_advance_workspace_bytes(plan));
}
void cp_advance(const Plan& plan, const ForwardTensors& t, Workspace workspace, Stream stream) {
  run_forward(plan, t, workspace, stream, {.prepare = false});
}

}  // namespace sm90

const BackendTable& sm90_backend() {
  static const BackendTable kTable = [] {
    BackendTable table = cuda_backend();
    sm90::put_stages(table);
    table.forward_workspace_bytes = sm90::forward_workspace_bytes;
    table.forward_workspace_bytes_for = sm90::forward_workspace_bytes;
    table.forward = sm90::forward;
    table.cp_prepare = sm90::cp_prepare;  // like the general backend's, it needs no workspace
    table.cp_advance_workspace_bytes = sm90::cp_advance_workspace_bytes;
    table.cp_advance = sm90::cp_advance;
    table.cp_summarize_workspace_bytes = sm90::cp_summarize_workspace_bytes;
    table.cp_summarize = sm90::cp_summarize;
    table.cp_summarize_adjoint_workspace_bytes = sm90::cp_summarize_adjoint_workspace_bytes;
    table.cp_summarize_adjoint = sm90::cp_summarize_adjoint;
    table.backward_workspace_bytes = [](const Plan& plan) { return sm90::backward_workspace_bytes(plan); };
    table.backward_workspace_bytes_for = [](const Plan& plan, const BackwardTensors& t) {
      return sm90::backward_workspace_bytes(plan, t);
    };
    table.backward = sm90::backward;
    return table;
  }();
  return kTable;
}

}  // namespace cula::gdn
