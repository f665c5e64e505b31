#include "operator_case.h"

#include <algorithm>

#include "gdn/reference/reference.h"

namespace cula::test {

namespace {

Shape state_shape(const gdn::Problem& p) {
  return p.state_v_first ? Shape{p.num_sequences(), p.value_heads, p.value_dim, p.key_dim}
                         : Shape{p.num_sequences(), p.value_heads, p.key_dim, p.value_dim};
}

std::vector<Tensor> tensors_of(const Operands& x) {
  return {x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, x.initial_state, x.grad_output, x.grad_final_state};
}

// The memory of every operand, to compare after a call.
std::vector<std::vector<unsigned char>> snapshots(const Operands& x) {
  std::vector<std::vector<unsigned char>> result;
  for (const Tensor& tensor : tensors_of(x)) {
    if (tensor) result.push_back(tensor.snapshot());
  }
  return result;
}

bool operands_finite(const Operands& x) {
  for (const Tensor& tensor : tensors_of(x)) {
    if (tensor && !all_finite(tensor)) return false;
  }
  return true;
}

void expect_inside(const Results& r) {
  for (const Results::Named& result : r.all()) EXPECT_TRUE(result.tensor.only_elements_written()) << result.name;
  for (const Tensor& saved : {r.A, r.q_normalized, r.k_normalized, r.q_rstd, r.k_rstd}) {
    if (saved) {
      EXPECT_TRUE(saved.only_elements_written()) << "saved";
    }
  }
}

gdn::Workspace workspace_of(Buffer& buffer) { return {.data = buffer.data(), .bytes = buffer.bytes()}; }

}  // namespace

OperatorCase make_case(DType dtype, int64_t B, int64_t T, int64_t H, int64_t HV, int64_t K, int64_t V) {
  OperatorCase c;
  c.dtype = dtype;
  c.problem.batch = B;
  c.problem.tokens = T;
  c.problem.heads = H;
  c.problem.value_heads = HV;
  c.problem.key_dim = K;
  c.problem.value_dim = V;
  c.problem.dtype = to_dlpack(dtype);
  c.problem.backend = gdn::Backend::kCpu;
  return c;
}

namespace {

enum Flag { kL2Norm, kGate, kSigmoid, kNegEigval, kValueFirst, kInitialState, kFinalState, kDtBias, kNumFlags };
constexpr const char* kFlagNames[kNumFlags] = {"l2norm", "gate", "sigmoid", "neg", "vfirst", "h0", "ht", "bias"};

bool has(int flags, Flag flag) { return (flags >> flag & 1) != 0; }

}  // namespace

std::vector<int> all_flag_sets() {
  std::vector<int> sets;
  for (int flags = 0; flags < 1 << kNumFlags; ++flags) {
    if (has(flags, kNegEigval) && !has(flags, kSigmoid)) continue;
    if (has(flags, kDtBias) && !has(flags, kGate)) continue;
    sets.push_back(flags);
  }
  return sets;
}

void apply_flags(int flags, OperatorCase& c) {
  c.problem.use_qk_l2norm = has(flags, kL2Norm);
  c.problem.use_gate = has(flags, kGate);
  c.problem.use_beta_sigmoid = has(flags, kSigmoid);
  c.problem.allow_neg_eigval = has(flags, kNegEigval);
  c.problem.state_v_first = has(flags, kValueFirst);
  c.initial_state = has(flags, kInitialState);
  c.final_state = has(flags, kFinalState);
  c.dt_bias = has(flags, kDtBias);
}

std::string flags_name(int flags) {
  std::string name;
  for (int flag = 0; flag < kNumFlags; ++flag) {
    if (!has(flags, static_cast<Flag>(flag))) continue;
    if (!name.empty()) name.push_back('_');
    name.append(kFlagNames[flag]);
  }
  return name.empty() ? "none" : name;
}

Operands make_operands(const OperatorCase& c) {
  const gdn::Problem& p = c.problem;
  const DType x = c.dtype, stat = stat_dtype(x);
  const Shape qk = {p.batch, p.tokens, p.heads, p.key_dim};
  const Shape value = {p.batch, p.tokens, p.value_heads, p.value_dim};
  const Shape token = {p.batch, p.tokens, p.value_heads};
  const DType gate_dtype = c.gate_dtype.value_or(stat), beta_dtype = c.beta_dtype.value_or(stat);
  Random random(c.seed);
  Operands operands;
  operands.q = p.use_qk_l2norm ? normal(random, x, qk) : unit_rows(random, x, qk);
  operands.k = p.use_qk_l2norm ? normal(random, x, qk) : unit_rows(random, x, qk);
  operands.v = normal(random, x, value);
  operands.g = p.use_gate ? normal(random, gate_dtype, token) : log_sigmoid_gate(random, gate_dtype, token);
  operands.beta = p.use_beta_sigmoid ? normal(random, beta_dtype, token) : uniform(random, beta_dtype, token, 0, 1);
  if (p.use_gate) {
    operands.A_log = uniform(random, gate_dtype, {p.value_heads}, -2, 1);
    if (c.dt_bias) operands.dt_bias = normal(random, gate_dtype, {p.value_heads});
  }
  if (c.initial_state) operands.initial_state = normal(random, c.state_dtype.value_or(stat), state_shape(p), 0.5);
  operands.grad_output = normal(random, x, value);
  if (c.final_state) operands.grad_final_state = normal(random, stat, state_shape(p), 0.5);
  return operands;
}

Operands operands_of_sequence(const OperatorCase& c, const Operands& x, int64_t n) {
  const std::vector<int64_t>& offsets = *c.problem.sequence_offsets;
  const auto tokens = [&](const Tensor& t) { return t.slice(1, offsets[n], offsets[n + 1]); };
  const auto state = [&](const Tensor& t) { return t ? t.slice(0, n, n + 1) : t; };
  Operands result = x;
  for (Tensor* t : {&result.q, &result.k, &result.v, &result.g, &result.beta, &result.grad_output}) *t = tokens(*t);
  for (Tensor* t : {&result.initial_state, &result.grad_final_state}) *t = state(*t);
  return result;
}

std::vector<Results::Named> Results::all() const {
  const std::vector<Named> named = {{"o", o, false},
                                    {"final_state", final_state, false},
                                    {"dq", dq, true},
                                    {"dk", dk, true},
                                    {"dv", dv, true},
                                    {"dg", dg, true},
                                    {"dbeta", dbeta, true},
                                    {"dA_log", dA_log, true},
                                    {"ddt_bias", ddt_bias, true},
                                    {"dh0", dh0, true}};
  std::vector<Named> existing;
  for (const Named& result : named) {
    if (result.tensor) existing.push_back(result);
  }
  return existing;
}

Results empty_results(const OperatorCase& c, const Operands& x, Mode mode, bool in_float64) {
  const gdn::Problem& p = c.problem;
  const DType stat = in_float64 ? DType::kFloat64 : stat_dtype(c.dtype);
  const auto like = [&](const Tensor& t) { return Tensor(in_float64 ? DType::kFloat64 : t.dtype(), t.shape()); };
  Results r;
  r.o = like(x.v);
  if (c.final_state) r.final_state = Tensor(stat, state_shape(p));
  if (mode == Mode::kForward) return r;
  r.dq = like(x.q);
  r.dk = like(x.k);
  r.dv = like(x.v);
  r.dg = like(x.g);
  r.dbeta = like(x.beta);
  if (x.A_log) r.dA_log = like(x.A_log);
  if (x.dt_bias) r.ddt_bias = like(x.dt_bias);
  if (x.initial_state) r.dh0 = like(x.initial_state);
  if (in_float64) return r;
  r.A = Tensor(c.dtype, {p.batch, p.tokens, p.value_heads, p.chunk_size});
  if (p.use_qk_l2norm) {
    const Shape rows = {p.batch, p.tokens, p.heads};
    r.q_normalized = like(x.q);
    r.k_normalized = like(x.k);
    r.q_rstd = Tensor(stat, rows);
    r.k_rstd = Tensor(stat, rows);
  }
  return r;
}

gdn::SavedTensors saved_tensors(const Results& r) {
  return {.q_normalized = r.q_normalized.dl(),
          .q_rstd = r.q_rstd.dl(),
          .k_normalized = r.k_normalized.dl(),
          .k_rstd = r.k_rstd.dl(),
          .A = r.A.dl()};
}

gdn::ForwardTensors forward_tensors(const Operands& x, const Results& r) {
  return {.q = x.q.dl(),
          .k = x.k.dl(),
          .v = x.v.dl(),
          .g = x.g.dl(),
          .beta = x.beta.dl(),
          .A_log = x.A_log.dl(),
          .dt_bias = x.dt_bias.dl(),
          .initial_state = x.initial_state.dl(),
          .o = r.o.dl(),
          .final_state = r.final_state.dl()};
}

gdn::BackwardTensors backward_tensors(const OperatorCase& c, const Operands& x, const Results& r) {
  // With l2norm the raw q and k are not needed, so they are not given: a backend that reads them would crash.
  const bool raw = !c.problem.use_qk_l2norm || !r.A;
  return {.q = raw ? x.q.dl() : nullptr,
          .k = raw ? x.k.dl() : nullptr,
          .v = x.v.dl(),
          .g = x.g.dl(),
          .beta = x.beta.dl(),
          .A_log = x.A_log.dl(),
          .dt_bias = x.dt_bias.dl(),
          .initial_state = x.initial_state.dl(),
          .grad_output = x.grad_output.dl(),
          .grad_final_state = x.grad_final_state.dl(),
          .dq = r.dq.dl(),
          .dk = r.dk.dl(),
          .dv = r.dv.dl(),
          .dg = r.dg.dl(),
          .dbeta = r.dbeta.dl(),
          .dA_log = r.dA_log.dl(),
          .ddt_bias = r.ddt_bias.dl(),
          .dh0 = r.dh0.dl()};
}

void call_forward(const gdn::Plan& plan, const gdn::ForwardTensors& tensors) {
  Buffer workspace(plan.forward_workspace_bytes(tensors.saved != nullptr));
  gdn::forward(plan, tensors, workspace_of(workspace));
  EXPECT_TRUE(workspace.red_zones_intact()) << "forward wrote outside its workspace";
}

void call_backward(const gdn::Plan& plan, const gdn::BackwardTensors& tensors) {
  Buffer workspace(plan.backward_workspace_bytes());
  gdn::backward(plan, tensors, workspace_of(workspace));
  EXPECT_TRUE(workspace.red_zones_intact()) << "backward wrote outside its workspace";
}

Results run(const OperatorCase& c, const Operands& x, Mode mode, Values values) {
  const gdn::Plan plan = gdn::Plan::make(c.problem);
  const Results r = empty_results(c, x, mode);
  const auto before = snapshots(x);
  const gdn::SavedTensors saved = saved_tensors(r);
  gdn::ForwardTensors forward = forward_tensors(x, r);
  if (mode == Mode::kTraining) forward.saved = &saved;
  call_forward(plan, forward);
  if (mode == Mode::kTraining) {
    gdn::BackwardTensors backward = backward_tensors(c, x, r);
    backward.saved = &saved;
    call_backward(plan, backward);
  }
  EXPECT_EQ(snapshots(x), before) << "an input was modified";
  expect_inside(r);
  if (values == Values::kFiniteIfInputsAre && operands_finite(x)) expect_finite(r);
  return r;
}

Results run_recurrent(const OperatorCase& c, const Operands& x) {
  const gdn::Plan plan = gdn::Plan::make(c.problem);
  const Results r = empty_results(c, x, Mode::kForward);
  const auto before = snapshots(x);
  gdn::recurrent_forward(plan, forward_tensors(x, r));
  EXPECT_EQ(snapshots(x), before) << "an input was modified";
  expect_inside(r);
  if (operands_finite(x)) expect_finite(r);
  return r;
}

Results run_reference(const OperatorCase& c, const Operands& x, Mode mode) {
  const Results r = empty_results(c, x, mode, true);
  gdn::reference::forward(c.problem, forward_tensors(x, r));
  if (mode == Mode::kTraining) gdn::reference::backward(c.problem, backward_tensors(c, x, r));
  return r;
}

void expect_close(const OperatorCase& c, const Results& actual, const Results& expected) {
  const std::vector<Results::Named> results = actual.all(), references = expected.all();
  ASSERT_EQ(results.size(), references.size());
  for (size_t i = 0; i < results.size(); ++i) {
    const double tolerance = results[i].is_gradient ? gradient_tolerance(c.dtype) : output_tolerance(c.dtype);
    // Gradients of the gate's parameters are sums of terms of either sign, as large as dg: the sum can not have a
    // smaller error than its terms have.
    const bool is_sum = results[i].tensor.shape().size() == 1;
    const double floor = is_sum ? std::max(1e-2, norm(expected.dg)) : 1e-2;
    EXPECT_TRUE(close(results[i].tensor, references[i].tensor, tolerance, floor)) << results[i].name;
  }
}

void expect_finite(const Results& r) {
  for (const Results::Named& result : r.all()) EXPECT_TRUE(all_finite(result.tensor)) << result.name;
}

void expect_same_bits(const Results& actual, const Results& expected) {
  const std::vector<Results::Named> results = actual.all(), references = expected.all();
  ASSERT_EQ(results.size(), references.size());
  for (size_t i = 0; i < results.size(); ++i) {
    EXPECT_TRUE(same_bits(results[i].tensor, references[i].tensor)) << results[i].name;
  }
}

void check_against_reference(const OperatorCase& c, const Operands& x, Mode mode) {
  expect_close(c, run(c, x, mode), run_reference(c, x, mode));
}

}  // namespace cula::test
