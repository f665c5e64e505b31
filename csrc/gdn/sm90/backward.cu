// The operator's backward pass on Hopper: states and their gradients chunk by chunk (the scans), then every chunk's
// gradients side by side.
#include <algorithm>

#include "gdn/cuda/launch/elementwise.h"
#include "gdn/cuda/operator.h"
#include "gdn/cuda/workspace.h"
#include "gdn/sm90/launch/backward.h"
#include "gdn/sm90/operands.h"
#include "gdn/sm90/operator.h"

namespace cula::gdn::sm90 {

namespace {

using cuda::Call;
using cuda::dense_arg;
using cuda::token_arg;
using device::TokenTensor;

struct BackwardWorkspace {
  ChunkFactors* factors = nullptr;  // [slots, HV]
  SwizzledTile* S = nullptr;        // [slots of a window, HV, V / 64, K / 64]
  SwizzledTile* D = nullptr;
  SwizzledTile* residual = nullptr;  // [slots of a window, HV, V / 64]
  uint16_t* dv = nullptr;            // [B, T, HV, V], in the problem's type; only if the caller does not want it
  float* states = nullptr;           // [places, HV, V, K]; these five only with segments
  float* state_gradients = nullptr;
  float* transitions = nullptr;    // [places, HV, K, K]
  int32_t* state_known = nullptr;  // [places, HV]
  int32_t* gradient_known = nullptr;
  float* dyg = nullptr;  // [B, T, HV]; these two with use_gate
  cuda::GatePartialSums gate_sums;
  size_t bytes = 0;

  BackwardWorkspace(const Problem& problem, const BackwardSchedule& schedule, bool has_dv, void* data) {
    cuda::WorkspaceCutter cutter(data);
    const int64_t slots = count_slots(problem);
    const int64_t row_tiles = std::min(schedule.window_slots, slots) * problem.value_heads * (problem.value_dim / 64);
    const int64_t state_tiles = row_tiles * (problem.key_dim / 64);
    factors = cutter.take<ChunkFactors>(slots * problem.value_heads);
    S = cutter.take<SwizzledTile>(state_tiles);
    D = cutter.take<SwizzledTile>(state_tiles);
    residual = cutter.take<SwizzledTile>(row_tiles);
    if (!has_dv) dv = cutter.take<uint16_t>(problem.batch * problem.tokens * problem.value_heads * problem.value_dim);
    if (schedule.segment_chunks != 0) {
      const int64_t places = problem.num_sequences() + (slots + schedule.segment_chunks - 1) / schedule.segment_chunks;
      const int64_t units = places * problem.value_heads;
      states = cutter.take<float>(units * problem.value_dim * problem.key_dim);
      state_gradients = cutter.take<float>(units * problem.value_dim * problem.key_dim);
      transitions = cutter.take<float>(units * problem.key_dim * problem.key_dim);
      state_known = cutter.take<int32_t>(units);
      gradient_known = cutter.take<int32_t>(units);
    }
    if (problem.use_gate) {
      constexpr int64_t kTokensOfPart = 1024;
      const int64_t tokens = problem.batch * problem.tokens;
      dyg = cutter.take<float>(tokens * problem.value_heads);
      gate_sums.parts = std::max<int64_t>((tokens + kTokensOfPart - 1) / kTokensOfPart, 1);
      gate_sums.data = cutter.take<double>(gate_sums.parts * problem.value_heads * 2);
    }
    bytes = cutter.used();
  }
};

struct BackwardOperands {
  TokenTensor q;  // normalised, if the problem says so
  TokenTensor k;
  TokenTensor v;
  TokenTensor A;
  TokenTensor grad_output;
  TokenTensor dq;  // these three only if they are wanted
  TokenTensor dk;
  TokenTensor dv;  // else its place is the workspace

  BackwardOperands(const Problem& problem, const BackwardTensors& t)
      : q(problem.use_qk_l2norm ? token_tensor(t.saved->q_normalized, "saved.q_normalized") : token_tensor(t.q, "q")),
        k(problem.use_qk_l2norm ? token_tensor(t.saved->k_normalized, "saved.k_normalized") : token_tensor(t.k, "k")),
        v(token_tensor(t.v, "v")),
        A(token_tensor(t.saved->A, "saved.A")),
        grad_output(token_tensor(t.grad_output, "do")),
        dq(token_tensor(t.dq, "dq")),
        dk(token_tensor(t.dk, "dk")),
        dv(token_tensor(t.dv, "dv")) {}

  // The first operand that the copy engine can not read or write; null: none.
  const char* first_misfit(DType dtype) const {
    struct Named {
      const TokenTensor& x;
      const char* name;
      bool optional;
    };
    for (const Named& operand :
         {Named{q, "q", false}, Named{k, "k", false}, Named{v, "v", false}, Named{A, "A", false},
          Named{grad_output, "do", false}, Named{dq, "dq", true}, Named{dk, "dk", true}, Named{dv, "dv", true}}) {
      if (operand.optional && operand.x.data == nullptr) continue;
      if (operand.x.dtype != dtype || !device::fits_tensor_map(operand.x)) return operand.name;
    }
    return nullptr;
  }
};

TokenTensor dense_values(const Problem& problem, DType dtype, void* data) {
  const int64_t row = problem.value_heads * problem.value_dim;
  return {data,
          dtype,
          {problem.batch, problem.tokens, problem.value_heads, problem.value_dim},
          {problem.tokens * row, row, problem.value_dim, 1}};
}

// The places that may hold segments of a window.
void set_places(ScanArgs& scan, const Problem& problem) {
  const SlotSegments& segments = scan.segments;
  const SlotWindow& window = scan.window;
  const int64_t chunks = segments.chunks;
  const int64_t row = segments.sequences.slots_per_row;
  int64_t first_sequence = 0;
  int64_t last_sequence = problem.num_sequences() - 1;
  if (!problem.sequence_offsets && window.total > 0) {
    first_sequence = window.begin / row;
    last_sequence = (window.end - 1) / row;
  }
  const int64_t first = first_sequence + (chunks == 0 ? 0 : window.begin / chunks);
  const int64_t last = last_sequence + (chunks == 0 || window.total == 0 ? 0 : (window.end - 1) / chunks);
  scan.first_place = static_cast<int>(first);
  scan.places = static_cast<int>(last - first + 1);
}

}  // namespace

size_t backward_workspace_bytes(const Plan& plan) {
  return BackwardWorkspace(plan.problem(), plan.schedules().sm90_backward(plan), true, nullptr).bytes;
}

// Operands that the copy engine can not read or write go through the general kernels, which need more memory. So does a
// dv that is not wanted, since it is on the way to the others.
size_t backward_workspace_bytes(const Plan& plan, const BackwardTensors& t) {
  const bool fits = BackwardOperands(plan.problem(), t).first_misfit(cuda::element_type(plan)) == nullptr;
  if (!fits) return std::max(backward_workspace_bytes(plan), cuda::backward_workspace_bytes(plan));
  return BackwardWorkspace(plan.problem(), plan.schedules().sm90_backward(plan), t.dv != nullptr, nullptr).bytes;
}

void backward(const Plan& plan, const BackwardTensors& t, Workspace workspace, Stream stream_handle) {
  const Call call(plan, t.cu_seqlens);
  const Problem& problem = call.problem;
  const device::DeviceGuard guard(problem.device.device_id);
  const auto stream = static_cast<device::Stream>(stream_handle);
  BackwardOperands operands(problem, t);
  if (const char* name = operands.first_misfit(call.dtype)) {
    const size_t needed = cuda::backward_workspace_bytes(plan);
    if (workspace.bytes < needed) {
      throw_value_error("workspace: expected ", needed, " bytes, as backward_workspace_bytes(tensors) says, since ",
                        name, " is not of the problem's type with rows and base aligned to 16 bytes, got ",
                        workspace.bytes);
    }
    return cuda::backward(plan, t, workspace, stream_handle);
  }
  const BackwardSchedule& schedule = plan.schedules().sm90_backward(plan);
  const BackwardWorkspace space(problem, schedule, t.dv != nullptr, workspace.data);
  if (workspace.bytes < space.bytes) {
    throw_value_error("workspace: expected ", space.bytes, " bytes, as backward_workspace_bytes(tensors) says, since ",
                      "there is no dv, got ", workspace.bytes);
  }
  if (t.dv == nullptr) operands.dv = dense_values(problem, call.dtype, space.dv);
  const int key_dim = static_cast<int>(problem.key_dim);
  const int value_dim = static_cast<int>(problem.value_dim);
  const float scale = static_cast<float>(plan.scale());

  BackwardMaps maps = {};
  if (call.token_rows > 0) {
    maps.q = device::make_tensor_map(operands.q, "q");
    maps.k = device::make_tensor_map(operands.k, "k");
    maps.v = device::make_tensor_map(operands.v, "v");
    maps.A = device::make_tensor_map(operands.A, "A");
    maps.grad_output = device::make_tensor_map(operands.grad_output, "do");
    maps.dv = device::make_tensor_map(operands.dv, "dv");
    if (t.dq != nullptr) maps.dq = device::make_tensor_map(operands.dq, "dq");
    if (t.dk != nullptr) maps.dk = device::make_tensor_map(operands.dk, "dk");
  }
  FactorArgs factors;
  factors.sequences = call.sequences;
  factors.value_heads = problem.value_heads;
  factors.scale = scale;
  factors.gates = cuda::operator_gates(call, t.g, t.beta, t.A_log, t.dt_bias);
  factors.factors = space.factors;
  factors.group = call.group;
  factors.key_dim = key_dim;
  factors.wants_norm = schedule.segment_chunks != 0;
  if (factors.wants_norm && !problem.use_qk_l2norm) factors.k = tensor_arg(operands.k);

  ScanArgs scan;
  scan.maps = maps;
  scan.segments.sequences = call.sequences;
  scan.segments.chunks = schedule.segment_chunks;
  scan.segments.from_start = schedule.cuts_from_start();
  scan.value_heads = problem.value_heads;
  scan.group = call.group;
  scan.value_tiles = value_dim / 64;
  scan.scale = scale;
  scan.factors = space.factors;
  scan.initial_state = cuda::state_arg(t.initial_state, "initial_state", problem.state_v_first);
  scan.grad_final_state = cuda::state_arg(t.grad_final_state, "dht", problem.state_v_first);
  scan.dh0 = cuda::state_arg(t.dh0, "dh0", problem.state_v_first);
  scan.S = space.S;
  scan.D = space.D;
  scan.residual = space.residual;
  scan.dv = tensor_arg(operands.dv);
  scan.states = space.states;
  scan.state_gradients = space.state_gradients;
  scan.transitions = space.transitions;
  scan.state_known = space.state_known;
  scan.gradient_known = space.gradient_known;

  GradientArgs gradient;
  gradient.maps = maps;
  gradient.sequences = call.sequences;
  gradient.heads = static_cast<int>(problem.heads);
  gradient.group = static_cast<int>(call.group);
  gradient.scale = scale;
  gradient.beta_scale = factors.gates.beta_scale;
  gradient.beta_sigmoid = factors.gates.beta_sigmoid;
  gradient.factors = space.factors;
  gradient.S = space.S;
  gradient.D = space.D;
  gradient.residual = space.residual;
  if (problem.use_qk_l2norm) {
    gradient.q_rstd = token_arg(t.saved->q_rstd, "saved.q_rstd", DType::kFloat32);
    gradient.k_rstd = token_arg(t.saved->k_rstd, "saved.k_rstd", DType::kFloat32);
  }
  gradient.dq = tensor_arg(operands.dq);
  gradient.dk = tensor_arg(operands.dk);
  gradient.dv = scan.dv;
  const TensorArg dg = token_arg(t.dg, "dg", call.dtype);
  const TensorArg dyg = dense_arg(space.dyg, DType::kFloat32, problem.tokens, problem.value_heads, 1);
  gradient.dg = problem.use_gate ? dyg : dg;
  gradient.dbeta = token_arg(t.dbeta, "dbeta", call.dtype);

  launch_factors(factors, stream);
  with_half_type(call.dtype, [&](auto element) {
    using T = decltype(element);
    SlotWindow window;
    window.total = static_cast<int>(count_slots(problem));
    if (schedule.segment_chunks != 0) {
      scan.first_place = 0;
      scan.places = static_cast<int>(scan.segments.num_places());
      launch_backward_summary<T>(scan, key_dim, stream);
      launch_backward_merge(scan, key_dim, stream);
    }
    // The last window may be the short one: it comes first. An input without chunks has sequences without any, whose
    // states' gradients pass through.
    for (window.end = window.total;; window.end = window.begin) {
      const int length = static_cast<int>(schedule.window_slots);
      window.begin = std::max((window.end - 1) / length * length, 0);
      scan.window = gradient.window = window;
      set_places(scan, problem);
      launch_backward_scan<T>(scan, key_dim, stream);
      launch_gradient<T>(gradient, key_dim, value_dim, stream);
      if (window.begin == 0) break;
    }
  });
  if (problem.use_gate) {
    cuda::launch_zero_padding(call.sequences, dyg, problem.value_heads, 1, stream);
    cuda::launch_gate_backward(factors.gates,
                               {dyg, dg, cuda::head_arg(t.dA_log, "dA_log"), cuda::head_arg(t.ddt_bias, "ddt_bias")},
                               problem.batch, problem.tokens, problem.value_heads, stream, space.gate_sums);
  }
  cuda::launch_zero_padding(call.sequences, gradient.dq, problem.heads, problem.key_dim, stream);
  cuda::launch_zero_padding(call.sequences, gradient.dk, problem.heads, problem.key_dim, stream);
  cuda::launch_zero_padding(call.sequences, gradient.dv, problem.value_heads, problem.value_dim, stream);
  cuda::launch_zero_padding(call.sequences, dg, problem.value_heads, 1, stream);
  cuda::launch_zero_padding(call.sequences, gradient.dbeta, problem.value_heads, 1, stream);
}

}  // namespace cula::gdn::sm90
