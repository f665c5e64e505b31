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

// What the scans leave for the gradients may take this much at a time. It bounds the workspace of long inputs; each
// window but the last of a sequence costs one more pass over the states in front of it.
constexpr int64_t kWindowBytes = int64_t{864} << 20;

int64_t count_slots(const Problem& problem) {
  return problem.sequence_offsets ? problem.tokens / kRows + problem.num_sequences()
                                  : problem.batch * ((problem.tokens + kRows - 1) / kRows);
}

// Slots of a window.
int64_t window_slots(const Problem& problem) {
  const int64_t slots = count_slots(problem);
  const int64_t tiles = (problem.value_dim / 64) * (2 * problem.key_dim / 64 + 2);
  const int64_t slot_bytes = problem.value_heads * tiles * static_cast<int64_t>(sizeof(SwizzledTile));
  const int64_t most = std::max<int64_t>(kWindowBytes / slot_bytes, 1);
  if (slots <= most) return std::max<int64_t>(slots, 1);
  if (problem.sequence_offsets) return most;
  // Whole sequences, if they fit: then none is parted.
  const int64_t row = slots / problem.batch;
  return most >= row ? most / row * row : most;
}

struct BackwardWorkspace {
  ChunkFactors* factors = nullptr;  // [slots, HV]
  SwizzledTile* S = nullptr;        // [slots of a window, HV, V / 64, K / 64]
  SwizzledTile* D = nullptr;
  SwizzledTile* residual = nullptr;  // [slots of a window, HV, V / 64]
  SwizzledTile* dW = nullptr;
  float* kept_states = nullptr;  // [windows - 1, HV, V, K]
  float* carried = nullptr;      // [2, HV, V, K]
  float* dyg = nullptr;          // [B, T, HV], with use_gate
  size_t bytes = 0;

  BackwardWorkspace(const Problem& problem, void* data) {
    cuda::WorkspaceCutter cutter(data);
    const int64_t slots = count_slots(problem);
    const int64_t window = window_slots(problem);
    const int64_t row_tiles = window * problem.value_heads * (problem.value_dim / 64);
    const int64_t state_tiles = row_tiles * (problem.key_dim / 64);
    factors = cutter.take<ChunkFactors>(slots * problem.value_heads);
    S = cutter.take<SwizzledTile>(state_tiles);
    D = cutter.take<SwizzledTile>(state_tiles);
    residual = cutter.take<SwizzledTile>(row_tiles);
    dW = cutter.take<SwizzledTile>(row_tiles);
    const int64_t state_elements = problem.value_heads * problem.value_dim * problem.key_dim;
    const int64_t starts = (slots + window - 1) / window - 1;  // of windows, but the first
    if (starts > 0) {
      kept_states = cutter.take<float>(starts * state_elements);
      carried = cutter.take<float>(2 * state_elements);
    }
    if (problem.use_gate) dyg = cutter.take<float>(problem.batch * problem.tokens * problem.value_heads);
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
  TokenTensor dv;

  BackwardOperands(const Problem& problem, const BackwardTensors& t)
      : q(problem.use_qk_l2norm ? token_tensor(t.saved->q_normalized, "saved.q_normalized") : token_tensor(t.q, "q")),
        k(problem.use_qk_l2norm ? token_tensor(t.saved->k_normalized, "saved.k_normalized") : token_tensor(t.k, "k")),
        v(token_tensor(t.v, "v")),
        A(token_tensor(t.saved->A, "saved.A")),
        grad_output(token_tensor(t.grad_output, "do")),
        dq(token_tensor(t.dq, "dq")),
        dk(token_tensor(t.dk, "dk")),
        dv(token_tensor(t.dv, "dv")) {}

  bool fit(DType dtype) const {
    for (const TokenTensor* x : {&q, &k, &v, &A, &grad_output}) {
      if (x->dtype != dtype || !device::fits_tensor_map(*x)) return false;
    }
    for (const TokenTensor* x : {&dq, &dk, &dv}) {
      if (x->data != nullptr && (x->dtype != dtype || !device::fits_tensor_map(*x))) return false;
    }
    return true;
  }
};

// Operands that the copy engine can not read or write go through the general kernels. These need more memory, which is
// got from the stream's pool: reserving it would double what every other call asks for.
void run_general(const Plan& plan, const BackwardTensors& t, Stream stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  Workspace workspace;
  workspace.bytes = cuda::backward_workspace_bytes(plan);
  device::check_cuda(cudaMallocAsync(&workspace.data, std::max<size_t>(workspace.bytes, 1), stream),
                     "workspace of backend cuda");
  try {
    cuda::backward(plan, t, workspace, stream_handle);
  } catch (...) {
    cudaFreeAsync(workspace.data, stream);
    throw;
  }
  device::check_cuda(cudaFreeAsync(workspace.data, stream), "workspace of backend cuda");
}

}  // namespace

size_t backward_workspace_bytes(const Plan& plan) { return BackwardWorkspace(plan.problem(), nullptr).bytes; }

void backward(const Plan& plan, const BackwardTensors& t, Workspace workspace, Stream stream_handle) {
  const Call call(plan, t.cu_seqlens);
  const Problem& problem = call.problem;
  const device::DeviceGuard guard(problem.device.device_id);
  const auto stream = static_cast<device::Stream>(stream_handle);
  const BackwardOperands operands(problem, t);
  if (!operands.fit(call.dtype)) return run_general(plan, t, stream_handle);
  const BackwardWorkspace space(problem, workspace.data);
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
    if (t.dq != nullptr) maps.dq = device::make_tensor_map(operands.dq, "dq");
    if (t.dk != nullptr) maps.dk = device::make_tensor_map(operands.dk, "dk");
  }
  FactorArgs factors;
  factors.sequences = call.sequences;
  factors.value_heads = problem.value_heads;
  factors.scale = scale;
  factors.gates = cuda::operator_gates(call, t.g, t.beta, t.A_log, t.dt_bias);
  factors.factors = space.factors;

  ScanArgs scan;
  scan.maps = maps;
  scan.sequences = call.sequences;
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
  scan.dW = space.dW;
  scan.kept_states = space.kept_states;
  scan.carried = space.carried;

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
  gradient.dW = space.dW;
  gradient.v = tensor_arg(operands.v);
  gradient.dq = tensor_arg(operands.dq);
  gradient.dk = tensor_arg(operands.dk);
  gradient.dv = tensor_arg(operands.dv);
  const TensorArg dg = token_arg(t.dg, "dg", call.dtype);
  const TensorArg dyg = dense_arg(space.dyg, DType::kFloat32, problem.tokens, problem.value_heads, 1);
  gradient.dg = problem.use_gate ? dyg : dg;
  gradient.dbeta = token_arg(t.dbeta, "dbeta", call.dtype);

  launch_factors(factors, stream);
  const auto run = [&](auto element) {
    using T = decltype(element);
    SlotWindow window;
    window.total = static_cast<int>(count_slots(problem));
    window.length = static_cast<int>(window_slots(problem));
    // An input without chunks has sequences without any, whose states' gradients pass through.
    for (window.end = window.total;; window.end = window.begin) {
      window.begin = std::max(window.end - window.length, 0);
      scan.window = gradient.window = window;
      launch_backward_scan<T>(scan, key_dim, stream);
      launch_gradient<T>(gradient, key_dim, value_dim, stream);
      if (window.begin == 0) break;
    }
  };
  if (call.dtype == DType::kBFloat16) {
    run(device::bf16{});
  } else {
    run(device::fp16{});
  }
  if (problem.use_gate) {
    cuda::launch_zero_padding(call.sequences, dyg, problem.value_heads, 1, stream);
    cuda::launch_gate_backward(factors.gates,
                               {dyg, dg, cuda::head_arg(t.dA_log, "dA_log"), cuda::head_arg(t.ddt_bias, "ddt_bias")},
                               problem.batch, problem.tokens, problem.value_heads, stream);
  }
  if (problem.use_qk_l2norm) {
    const auto through_norm = [&](const DLTensor* y, const DLTensor* rstd, const DLTensor* dx) {
      if (dx == nullptr) return;
      cuda::launch_l2norm_backward(cuda::rows_arg(y, "saved", false), cuda::rows_arg(rstd, "rstd", true),
                                   cuda::rows_arg(dx, "dx", false), cuda::rows_arg(dx, "dx", false),
                                   call.token_rows * problem.heads, key_dim, stream);
    };
    through_norm(t.saved->q_normalized, t.saved->q_rstd, t.dq);
    through_norm(t.saved->k_normalized, t.saved->k_rstd, t.dk);
  }
  cuda::launch_zero_padding(call.sequences, gradient.dq, problem.heads, problem.key_dim, stream);
  cuda::launch_zero_padding(call.sequences, gradient.dk, problem.heads, problem.key_dim, stream);
  cuda::launch_zero_padding(call.sequences, gradient.dv, problem.value_heads, problem.value_dim, stream);
  cuda::launch_zero_padding(call.sequences, dg, problem.value_heads, 1, stream);
  cuda::launch_zero_padding(call.sequences, gradient.dbeta, problem.value_heads, 1, stream);
}

}  // namespace cula::gdn::sm90
