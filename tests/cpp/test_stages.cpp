// Every stage alone against its formula, and all of them together against the recurrence.
#include <cmath>
#include <limits>
#include <numbers>

#include "gdn/stages.h"
#include "operator_case.h"
#include "stage_formulas.h"

namespace cula::test {
namespace {

namespace stages = gdn::stages;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kInverseLn2 = 1 / std::numbers::ln2;

// Inputs --------------------------------------------------------------------------------------------------------------

enum class Gate { kAbsent, kOrdinary, kResets };

struct StageCase {
  DType dtype = DType::kFloat32;
  int64_t chunk_size = 64;
  bool packed = false;
  Gate gate = Gate::kOrdinary;
  bool state_v_first = false;
  int64_t H = 2, HV = 4, K = 20, V = 12;
  int64_t B = 2, T = 65;
};

OperatorCase operator_case(const StageCase& s) {
  OperatorCase c = make_case(s.dtype, s.B, s.T, s.H, s.HV, s.K, s.V);
  if (s.packed) {
    c.problem.batch = 1;
    c.problem.tokens = 84;
    c.problem.sequence_offsets = {{0, 0, 5, 70, 71, 80}};
  }
  c.problem.chunk_size = s.chunk_size;
  c.problem.state_v_first = s.state_v_first;
  return c;
}

// What all stages together read. Each is drawn on its own, so that a stage is tested without the others; only A must be
// a triangular inverse.
struct StageInputs {
  Tensor q, k, v, beta, gamma, raw_gate, log_decay, A_log, dt_bias;
  Tensor L, A, w, u, v_new, h, initial_state;
  Tensor grad_output, dht, dv, dh, dw, du, dyg, rstd, dy;

  std::vector<Tensor*> all() {
    return {&q,  &k,  &v,   &beta,  &gamma, &raw_gate,      &log_decay,   &A_log, &dt_bias, &L,
            &A,  &w,  &u,   &v_new, &h,     &initial_state, &grad_output, &dht,   &dv,      &dh,
            &dw, &du, &dyg, &rstd,  &dy};
  }
};

StageInputs make_inputs(const gdn::Plan& plan, Gate gate) {
  const gdn::Problem& p = plan.problem();
  const DType x = from_dlpack(p.dtype, "dtype"), stat = stat_dtype(x);
  const Shape qk = {p.batch, p.tokens, p.heads, p.key_dim}, token = {p.batch, p.tokens, p.value_heads};
  const Shape wide_k = {p.batch, p.tokens, p.value_heads, p.key_dim};
  const Shape wide_v = {p.batch, p.tokens, p.value_heads, p.value_dim};
  Shape chunk = {p.batch, static_cast<int64_t>(plan.chunks().size()) / p.batch, p.value_heads, p.key_dim, p.value_dim};
  Shape state = {p.num_sequences(), p.value_heads, p.key_dim, p.value_dim};
  if (p.state_v_first) {
    std::swap(chunk[3], chunk[4]);
    std::swap(state[2], state[3]);
  }
  Random random(5);
  StageInputs s;
  s.q = unit_rows(random, x, qk);
  s.k = unit_rows(random, x, qk);
  s.v = normal(random, x, wide_v);
  s.beta = uniform(random, stat, token, 0, 1);
  s.log_decay = log_sigmoid_gate(random, stat, token);
  if (gate == Gate::kResets) {
    for (int64_t i = 0; i < s.log_decay.numel(); ++i) {
      if (random.uniform() < 0.1) s.log_decay.set(i, -kInf);
    }
  }
  if (gate != Gate::kAbsent) s.gamma = formulas::local_cumsum(plan, s.log_decay, kInverseLn2, false).to(stat);
  s.raw_gate = normal(random, stat, token);
  s.A_log = uniform(random, stat, {p.value_heads}, -2, 1);
  s.dt_bias = normal(random, stat, {p.value_heads});
  s.L = formulas::scaled_dot_kkt(plan, s.k, s.gamma, s.beta).to(stat);
  s.A = formulas::inverse(plan, s.L).to(x);
  s.w = unit_rows(random, x, wide_k);
  s.u = normal(random, x, wide_v);
  s.v_new = normal(random, x, wide_v);
  s.h = normal(random, x, chunk);
  s.initial_state = normal(random, stat, state);
  s.grad_output = normal(random, x, wide_v);
  s.dht = normal(random, stat, state);
  s.dv = normal(random, x, wide_v);
  s.dh = normal(random, x, chunk);
  s.dw = normal(random, x, wide_k);
  s.du = normal(random, x, wide_v);
  s.dyg = normal(random, stat, token);
  s.rstd = uniform(random, stat, {p.batch, p.tokens, p.heads}, 0.5, 2);
  s.dy = normal(random, x, qk);
  return s;
}

// Stages --------------------------------------------------------------------------------------------------------------

struct Output {
  const char* name;
  Tensor actual;
  Tensor expected;  // filled by the formula
};

using Allocate = std::function<Tensor(DType, const Shape&)>;

// One stage of the library and its formula, which give the same list of outputs.
struct Stage {
  const char* name;
  std::vector<Output> (*run)(const gdn::Plan&, const StageInputs&, const Allocate&);
  std::vector<Output> (*expected)(const gdn::Plan&, const StageInputs&);
  bool has_gradients;
};

struct Types {
  DType x, stat;
};
Types types_of(const gdn::Plan& plan) {
  const DType x = from_dlpack(plan.problem().dtype, "dtype");
  return {x, stat_dtype(x)};
}
Shape without_last(Shape shape) {
  shape.pop_back();
  return shape;
}

const Stage kStages[] = {
    {"l2norm_fwd",
     [](const gdn::Plan& plan, const StageInputs& s, const Allocate& make) -> std::vector<Output> {
       const Tensor y = make(s.q.dtype(), s.q.shape()), rstd = make(types_of(plan).stat, without_last(s.q.shape()));
       stages::l2norm_fwd(plan, {.x = s.q.dl(), .y = y.dl(), .rstd = rstd.dl()});
       return {{"y", y, {}}, {"rstd", rstd, {}}};
     },
     [](const gdn::Plan&, const StageInputs& s) -> std::vector<Output> {
       const formulas::Normalized r = formulas::l2norm(s.q);
       return {{"y", {}, r.y}, {"rstd", {}, r.rstd}};
     },
     false},
    {"l2norm_bwd",
     [](const gdn::Plan& plan, const StageInputs& s, const Allocate& make) -> std::vector<Output> {
       const Tensor dx = make(types_of(plan).x, s.q.shape());
       stages::l2norm_bwd(plan, {.y = s.q.dl(), .rstd = s.rstd.dl(), .dy = s.dy.dl(), .dx = dx.dl()});
       return {{"dx", dx, {}}};
     },
     [](const gdn::Plan&, const StageInputs& s) -> std::vector<Output> {
       return {{"dx", {}, formulas::l2norm_gradient(s.q, s.rstd, s.dy)}};
     },
     true},
    {"fused_beta_sigmoid_fwd",
     [](const gdn::Plan& plan, const StageInputs& s, const Allocate& make) -> std::vector<Output> {
       const Tensor y = make(types_of(plan).stat, s.raw_gate.shape());
       stages::fused_beta_sigmoid_fwd(plan, {.x = s.raw_gate.dl(), .scale = 2, .y = y.dl()});
       return {{"y", y, {}}};
     },
     [](const gdn::Plan&, const StageInputs& s) -> std::vector<Output> {
       return {{"y", {}, formulas::beta_sigmoid(s.raw_gate, 2)}};
     },
     false},
    {"fused_beta_sigmoid_bwd",
     [](const gdn::Plan& plan, const StageInputs& s, const Allocate& make) -> std::vector<Output> {
       const Tensor dx = make(types_of(plan).x, s.raw_gate.shape());
       stages::fused_beta_sigmoid_bwd(plan, {.x = s.raw_gate.dl(), .dy = s.dyg.dl(), .scale = 2, .dx = dx.dl()});
       return {{"dx", dx, {}}};
     },
     [](const gdn::Plan&, const StageInputs& s) -> std::vector<Output> {
       return {{"dx", {}, formulas::beta_sigmoid_gradient(s.raw_gate, s.dyg, 2)}};
     },
     true},
    {"chunk_local_cumsum",
     [](const gdn::Plan& plan, const StageInputs& s, const Allocate& make) -> std::vector<Output> {
       const Tensor out = make(types_of(plan).stat, s.log_decay.shape());
       const Tensor reverse = make(types_of(plan).stat, s.log_decay.shape());
       stages::chunk_local_cumsum(plan, {.g = s.log_decay.dl(), .scale = kInverseLn2, .out = out.dl()});
       stages::chunk_local_cumsum(plan, {.g = s.dyg.dl(), .reverse = true, .out = reverse.dl()});
       return {{"out", out, {}}, {"reverse", reverse, {}}};
     },
     [](const gdn::Plan& plan, const StageInputs& s) -> std::vector<Output> {
       return {{"out", {}, formulas::local_cumsum(plan, s.log_decay, kInverseLn2, false)},
               {"reverse", {}, formulas::local_cumsum(plan, s.dyg, 1, true)}};
     },
     false},
    {"gdn_gate_fwd",
     [](const gdn::Plan& plan, const StageInputs& s, const Allocate& make) -> std::vector<Output> {
       const Tensor out = make(types_of(plan).stat, s.raw_gate.shape());
       stages::gdn_gate_fwd(plan,
                            {.g = s.raw_gate.dl(), .A_log = s.A_log.dl(), .dt_bias = s.dt_bias.dl(), .out = out.dl()});
       return {{"out", out, {}}};
     },
     [](const gdn::Plan& plan, const StageInputs& s) -> std::vector<Output> {
       return {{"out", {}, formulas::gate(plan, s.raw_gate, s.A_log, s.dt_bias)}};
     },
     false},
    {"gdn_gate_chunk_cumsum",
     [](const gdn::Plan& plan, const StageInputs& s, const Allocate& make) -> std::vector<Output> {
       const Tensor out = make(types_of(plan).stat, s.raw_gate.shape());
       stages::gdn_gate_chunk_cumsum(
           plan,
           {.g = s.raw_gate.dl(), .A_log = s.A_log.dl(), .dt_bias = nullptr, .scale = kInverseLn2, .out = out.dl()});
       return {{"out", out, {}}};
     },
     [](const gdn::Plan& plan, const StageInputs& s) -> std::vector<Output> {
       const Tensor log_decay = formulas::gate(plan, s.raw_gate, s.A_log, Tensor());
       return {{"out", {}, formulas::local_cumsum(plan, log_decay, kInverseLn2, false)}};
     },
     false},
    {"gdn_gate_bwd",
     [](const gdn::Plan& plan, const StageInputs& s, const Allocate& make) -> std::vector<Output> {
       const Types t = types_of(plan);
       const Tensor dg = make(t.x, s.raw_gate.shape()), dA_log = make(t.stat, s.A_log.shape());
       const Tensor ddt_bias = make(t.stat, s.A_log.shape());
       stages::gdn_gate_bwd(plan, {.g = s.raw_gate.dl(),
                                   .A_log = s.A_log.dl(),
                                   .dt_bias = s.dt_bias.dl(),
                                   .dyg = s.dyg.dl(),
                                   .dg = dg.dl(),
                                   .dA_log = dA_log.dl(),
                                   .ddt_bias = ddt_bias.dl()});
       return {{"dg", dg, {}}, {"dA_log", dA_log, {}}, {"ddt_bias", ddt_bias, {}}};
     },
     [](const gdn::Plan& plan, const StageInputs& s) -> std::vector<Output> {
       const formulas::GateGradients r = formulas::gate_gradients(plan, s.raw_gate, s.A_log, s.dt_bias, s.dyg);
       return {{"dg", {}, r.dg}, {"dA_log", {}, r.dA_log}, {"ddt_bias", {}, r.ddt_bias}};
     },
     true},
    {"chunk_scaled_dot_kkt_fwd",
     [](const gdn::Plan& plan, const StageInputs& s, const Allocate& make) -> std::vector<Output> {
       const Tensor L = make(types_of(plan).stat, s.L.shape());
       stages::chunk_scaled_dot_kkt_fwd(plan, {.k = s.k.dl(), .g = s.gamma.dl(), .beta = s.beta.dl(), .L = L.dl()});
       return {{"L", L, {}}};
     },
     [](const gdn::Plan& plan, const StageInputs& s) -> std::vector<Output> {
       return {{"L", {}, formulas::scaled_dot_kkt(plan, s.k, s.gamma, s.beta)}};
     },
     false},
    {"solve_tril",
     [](const gdn::Plan& plan, const StageInputs& s, const Allocate& make) -> std::vector<Output> {
       const Tensor A = make(types_of(plan).x, s.L.shape());
       stages::solve_tril(plan, {.L = s.L.dl(), .A = A.dl()});
       return {{"A", A, {}}};
     },
     [](const gdn::Plan& plan, const StageInputs& s) -> std::vector<Output> {
       return {{"A", {}, formulas::inverse(plan, s.L)}};
     },
     false},
    {"chunk_gated_delta_rule_fwd_intra",
     [](const gdn::Plan& plan, const StageInputs& s, const Allocate& make) -> std::vector<Output> {
       const DType x = types_of(plan).x;
       const Tensor w = make(x, s.w.shape()), u = make(x, s.u.shape()), A = make(x, s.A.shape());
       stages::chunk_gated_delta_rule_fwd_intra(plan, {.k = s.k.dl(),
                                                       .v = s.v.dl(),
                                                       .g = s.gamma.dl(),
                                                       .beta = s.beta.dl(),
                                                       .w = w.dl(),
                                                       .u = u.dl(),
                                                       .A = A.dl()});
       return {{"w", w, {}}, {"u", u, {}}, {"A", A, {}}};
     },
     [](const gdn::Plan& plan, const StageInputs& s) -> std::vector<Output> {
       const Tensor A = formulas::inverse(plan, formulas::scaled_dot_kkt(plan, s.k, s.gamma, s.beta));
       const formulas::WU r = formulas::recompute_w_u(plan, s.k, s.v, s.beta, A, s.gamma);
       return {{"w", {}, r.w}, {"u", {}, r.u}, {"A", {}, A}};
     },
     false},
    {"recompute_w_u_fwd",
     [](const gdn::Plan& plan, const StageInputs& s, const Allocate& make) -> std::vector<Output> {
       const Tensor w = make(types_of(plan).x, s.w.shape()), u = make(types_of(plan).x, s.u.shape());
       stages::recompute_w_u_fwd(plan, {.k = s.k.dl(),
                                        .v = s.v.dl(),
                                        .beta = s.beta.dl(),
                                        .A = s.A.dl(),
                                        .g = s.gamma.dl(),
                                        .w = w.dl(),
                                        .u = u.dl()});
       return {{"w", w, {}}, {"u", u, {}}};
     },
     [](const gdn::Plan& plan, const StageInputs& s) -> std::vector<Output> {
       const formulas::WU r = formulas::recompute_w_u(plan, s.k, s.v, s.beta, s.A, s.gamma);
       return {{"w", {}, r.w}, {"u", {}, r.u}};
     },
     false},
    {"chunk_gated_delta_rule_fwd_h",
     [](const gdn::Plan& plan, const StageInputs& s, const Allocate& make) -> std::vector<Output> {
       const Types t = types_of(plan);
       const Tensor h = make(t.x, s.h.shape()), v_new = make(t.x, s.v_new.shape());
       const Tensor final_state = make(t.stat, s.initial_state.shape());
       stages::chunk_gated_delta_rule_fwd_h(plan, {.k = s.k.dl(),
                                                   .w = s.w.dl(),
                                                   .u = s.u.dl(),
                                                   .g = s.gamma.dl(),
                                                   .initial_state = s.initial_state.dl(),
                                                   .h = h.dl(),
                                                   .v_new = v_new.dl(),
                                                   .final_state = final_state.dl()});
       return {{"h", h, {}}, {"v_new", v_new, {}}, {"final_state", final_state, {}}};
     },
     [](const gdn::Plan& plan, const StageInputs& s) -> std::vector<Output> {
       const formulas::States r = formulas::forward_states(plan, s.k, s.w, s.u, s.gamma, s.initial_state);
       return {{"h", {}, r.h}, {"v_new", {}, r.v_new}, {"final_state", {}, r.final_state}};
     },
     false},
    {"chunk_fwd_o",
     [](const gdn::Plan& plan, const StageInputs& s, const Allocate& make) -> std::vector<Output> {
       const Tensor o = make(types_of(plan).x, s.v.shape());
       stages::chunk_fwd_o(
           plan, {.q = s.q.dl(), .k = s.k.dl(), .v = s.v_new.dl(), .h = s.h.dl(), .g = s.gamma.dl(), .o = o.dl()});
       return {{"o", o, {}}};
     },
     [](const gdn::Plan& plan, const StageInputs& s) -> std::vector<Output> {
       return {{"o", {}, formulas::output(plan, s.q, s.k, s.v_new, s.h, s.gamma)}};
     },
     false},
    {"chunk_bwd_dv_local",
     [](const gdn::Plan& plan, const StageInputs& s, const Allocate& make) -> std::vector<Output> {
       const Tensor dv = make(types_of(plan).x, s.v.shape());
       stages::chunk_bwd_dv_local(
           plan, {.q = s.q.dl(), .k = s.k.dl(), .g = s.gamma.dl(), .grad_output = s.grad_output.dl(), .dv = dv.dl()});
       return {{"dv", dv, {}}};
     },
     [](const gdn::Plan& plan, const StageInputs& s) -> std::vector<Output> {
       return {{"dv", {}, formulas::local_value_gradient(plan, s.q, s.k, s.gamma, s.grad_output)}};
     },
     true},
    {"chunk_gated_delta_rule_bwd_dhu",
     [](const gdn::Plan& plan, const StageInputs& s, const Allocate& make) -> std::vector<Output> {
       const Types t = types_of(plan);
       const Tensor dh = make(t.x, s.dh.shape()), dh0 = make(t.stat, s.dht.shape());
       const Tensor dv2 = make(t.x, s.dv.shape());
       stages::chunk_gated_delta_rule_bwd_dhu(plan, {.q = s.q.dl(),
                                                     .k = s.k.dl(),
                                                     .w = s.w.dl(),
                                                     .g = s.gamma.dl(),
                                                     .dht = s.dht.dl(),
                                                     .grad_output = s.grad_output.dl(),
                                                     .dv = s.dv.dl(),
                                                     .dh = dh.dl(),
                                                     .dh0 = dh0.dl(),
                                                     .dv2 = dv2.dl()});
       return {{"dh", dh, {}}, {"dh0", dh0, {}}, {"dv2", dv2, {}}};
     },
     [](const gdn::Plan& plan, const StageInputs& s) -> std::vector<Output> {
       const formulas::StateGradients r =
           formulas::backward_states(plan, s.q, s.k, s.w, s.gamma, s.dht, s.grad_output, s.dv);
       return {{"dh", {}, r.dh}, {"dh0", {}, r.dh0}, {"dv2", {}, r.dv2}};
     },
     true},
    {"chunk_bwd_dqkwg",
     [](const gdn::Plan& plan, const StageInputs& s, const Allocate& make) -> std::vector<Output> {
       const Types t = types_of(plan);
       const Tensor dq = make(t.x, s.q.shape()), dk = make(t.x, s.q.shape()), dw = make(t.x, s.w.shape());
       const Tensor dg = s.gamma ? make(t.stat, s.gamma.shape()) : Tensor();
       stages::chunk_bwd_dqkwg(plan, {.q = s.q.dl(),
                                      .k = s.k.dl(),
                                      .v = s.v_new.dl(),
                                      .w = s.w.dl(),
                                      .g = s.gamma.dl(),
                                      .h = s.h.dl(),
                                      .dv = s.dv.dl(),
                                      .grad_output = s.grad_output.dl(),
                                      .dh = s.dh.dl(),
                                      .dq = dq.dl(),
                                      .dk = dk.dl(),
                                      .dw = dw.dl(),
                                      .dg = dg.dl()});
       return {{"dq", dq, {}}, {"dk", dk, {}}, {"dw", dw, {}}, {"dg", dg, {}}};
     },
     [](const gdn::Plan& plan, const StageInputs& s) -> std::vector<Output> {
       const formulas::OperandGradients r = formulas::operand_gradients(plan, {.q = s.q,
                                                                               .k = s.k,
                                                                               .v_new = s.v_new,
                                                                               .w = s.w,
                                                                               .gamma = s.gamma,
                                                                               .h = s.h,
                                                                               .dv2 = s.dv,
                                                                               .grad_output = s.grad_output,
                                                                               .dh = s.dh});
       return {{"dq", {}, r.dq}, {"dk", {}, r.dk}, {"dw", {}, r.dw}, {"dg", {}, r.dg}};
     },
     true},
    {"prepare_wy_repr_bwd",
     [](const gdn::Plan& plan, const StageInputs& s, const Allocate& make) -> std::vector<Output> {
       const Types t = types_of(plan);
       const Tensor dk = make(t.x, s.k.shape()), dv = make(t.x, s.v.shape()), db = make(t.stat, s.beta.shape());
       const Tensor dg = s.gamma ? make(t.stat, s.gamma.shape()) : Tensor();
       stages::prepare_wy_repr_bwd(plan, {.k = s.k.dl(),
                                          .v = s.v.dl(),
                                          .beta = s.beta.dl(),
                                          .g = s.gamma.dl(),
                                          .A = s.A.dl(),
                                          .dw = s.dw.dl(),
                                          .du = s.du.dl(),
                                          .dk = dk.dl(),
                                          .dv = dv.dl(),
                                          .db = db.dl(),
                                          .dg = dg.dl()});
       return {{"dk", dk, {}}, {"dv", dv, {}}, {"db", db, {}}, {"dg", dg, {}}};
     },
     [](const gdn::Plan& plan, const StageInputs& s) -> std::vector<Output> {
       const formulas::WyGradients r = formulas::wy_gradients(
           plan, {.k = s.k, .v = s.v, .beta = s.beta, .gamma = s.gamma, .A = s.A, .dw = s.dw, .du = s.du});
       return {{"dk", {}, r.dk}, {"dv", {}, r.dv}, {"db", {}, r.db}, {"dg", {}, r.dg}};
     },
     true},
};

Tensor row_major(DType dtype, const Shape& shape) { return Tensor(dtype, shape); }

// The same shape with the dimensions in reverse order in memory and one element between any two.
Tensor reversed_with_gaps(DType dtype, const Shape& shape) {
  Shape strides(shape.size());
  int64_t stride = 2;
  for (size_t i = 0; i < shape.size(); ++i) {
    strides[i] = stride;
    stride *= shape[i];
  }
  return Tensor(dtype, shape, strides);
}

std::vector<Output> run_stage(const Stage& stage, const gdn::Plan& plan, StageInputs inputs, const Allocate& allocate) {
  std::vector<std::vector<unsigned char>> before, after;
  for (const Tensor* tensor : inputs.all())
    before.push_back(*tensor ? tensor->snapshot() : std::vector<unsigned char>());
  std::vector<Output> outputs = stage.run(plan, inputs, allocate);
  for (const Tensor* tensor : inputs.all())
    after.push_back(*tensor ? tensor->snapshot() : std::vector<unsigned char>());
  EXPECT_TRUE(after == before) << "an input was modified";
  for (const Output& output : outputs) {
    if (output.actual) {
      EXPECT_TRUE(output.actual.only_elements_written()) << output.name;
    }
  }
  return outputs;
}

// Where the expected value is -inf (gamma of a reset), so must be the actual one; the rest is compared as usual.
void expect_stage_close(const Stage& stage, DType dtype, const std::vector<Output>& actual,
                        const std::vector<Output>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    if (!actual[i].actual) continue;
    const double tolerance = stage.has_gradients ? gradient_tolerance(dtype) : output_tolerance(dtype);
    const Tensor a = actual[i].actual.to(DType::kFloat64), e = expected[i].expected.contiguous();
    for (int64_t j = 0; j < e.numel(); ++j) {
      if (!std::isinf(e.at(j))) continue;
      EXPECT_EQ(a.at(j), e.at(j)) << actual[i].name;
      a.set(j, 0);
      e.set(j, 0);
    }
    EXPECT_TRUE(close(a, e, tolerance)) << actual[i].name;
  }
}

// Each stage alone ----------------------------------------------------------------------------------------------------

std::string case_name(const StageCase& s) {
  const char* gates[] = {"nogate", "gate", "resets"};
  return concat(dtype_name(s.dtype), "_C", s.chunk_size, s.packed ? "_packed" : concat("_B", s.B, "_T", s.T), "_H", s.H,
                "_HV", s.HV, "_K", s.K, "_V", s.V, "_", gates[static_cast<int>(s.gate)],
                s.state_v_first ? "_vfirst" : "");
}

void PrintTo(const Stage& stage, std::ostream* stream) { *stream << stage.name; }
void PrintTo(const StageCase& s, std::ostream* stream) { *stream << case_name(s); }

class StageTest : public testing::TestWithParam<std::tuple<Stage, StageCase>> {};

TEST_P(StageTest, EqualsItsFormula) {
  const auto& [stage, s] = GetParam();
  OperatorCase c = operator_case(s);
  c.problem.num_threads = 1;
  const gdn::Plan plan = gdn::Plan::make(c.problem);
  const StageInputs inputs = make_inputs(plan, s.gate);
  const std::vector<Output> outputs = run_stage(stage, plan, inputs, row_major);
  expect_stage_close(stage, s.dtype, outputs, stage.expected(plan, inputs));

  c.problem.num_threads = 3;
  const std::vector<Output> threaded = run_stage(stage, gdn::Plan::make(c.problem), inputs, row_major);
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (outputs[i].actual) {
      EXPECT_TRUE(same_bits(threaded[i].actual, outputs[i].actual)) << outputs[i].name << " with 3 threads";
    }
  }
}

std::vector<StageCase> small_cases() {
  std::vector<StageCase> cases;
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const bool packed : {false, true}) {
      for (const Gate gate : {Gate::kAbsent, Gate::kOrdinary, Gate::kResets}) {
        // Chunk size and state layout take turns, so that each meets each dtype, length pattern and gate kind.
        cases.push_back({.dtype = dtype, .chunk_size = 64, .packed = packed, .gate = gate, .state_v_first = packed});
        cases.push_back({.dtype = dtype, .chunk_size = 32, .packed = packed, .gate = gate, .state_v_first = !packed});
      }
    }
    cases.push_back({.dtype = dtype, .chunk_size = 16, .packed = true, .gate = Gate::kOrdinary});
  }
  return cases;
}

std::vector<StageCase> large_cases() {
  std::vector<StageCase> cases;
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const auto& [K, V] :
         {std::pair<int64_t, int64_t>{64, 64}, {128, 128}, {256, 96}, {96, 192}, {60, 100}, {8, 16}}) {
      cases.push_back({.dtype = dtype, .H = 1, .HV = 2, .K = K, .V = V, .B = 1, .T = 90});
    }
    for (const int64_t T : {0, 1, 63, 64}) {
      cases.push_back({.dtype = dtype, .state_v_first = true, .H = 1, .HV = 1, .K = 32, .V = 48, .T = T});
    }
    for (const int64_t chunk_size : {16, 32}) {
      cases.push_back({.dtype = dtype, .chunk_size = chunk_size, .H = 2, .HV = 2, .K = 64, .V = 64, .T = 100});
    }
  }
  return cases;
}

std::string stage_test_name(const testing::TestParamInfo<std::tuple<Stage, StageCase>>& info) {
  return concat(std::get<0>(info.param).name, "_", case_name(std::get<1>(info.param)));
}

INSTANTIATE_TEST_SUITE_P(Small, StageTest,
                         testing::Combine(testing::ValuesIn(kStages), testing::ValuesIn(small_cases())),
                         stage_test_name);
INSTANTIATE_TEST_SUITE_P(Large, StageTest,
                         testing::Combine(testing::ValuesIn(kStages), testing::ValuesIn(large_cases())),
                         stage_test_name);

// CASES 35 for the stages: inputs and outputs with any strides.
class StridedStage : public testing::TestWithParam<std::tuple<Stage, DType>> {};

TEST_P(StridedStage, Case35_EqualsTheContiguousCall) {
  const auto& [stage, dtype] = GetParam();
  const gdn::Plan plan = gdn::Plan::make(operator_case({.dtype = dtype, .packed = true}).problem);
  const StageInputs inputs = make_inputs(plan, Gate::kOrdinary);
  StageInputs strided = inputs;
  for (Tensor* tensor : strided.all()) {
    const Tensor source = *tensor;
    *tensor = reversed_with_gaps(source.dtype(), source.shape()).filled([&](int64_t i) { return source.at(i); });
  }
  const std::vector<Output> expected = run_stage(stage, plan, inputs, row_major);
  const std::vector<Output> actual = run_stage(stage, plan, strided, reversed_with_gaps);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(same_bits(actual[i].actual, expected[i].actual)) << expected[i].name;
  }
}

INSTANTIATE_TEST_SUITE_P(All, StridedStage,
                         testing::Combine(testing::ValuesIn(kStages),
                                          testing::Values(DType::kFloat64, DType::kFloat32, DType::kBFloat16)),
                         [](const auto& info) {
                           return concat(std::get<0>(info.param).name, "_", dtype_name(std::get<1>(info.param)));
                         });

// Optional arguments --------------------------------------------------------------------------------------------------

TEST(Stages, StateForwardWithoutOptionalArguments) {
  const gdn::Plan plan = gdn::Plan::make(operator_case({}).problem);
  const StageInputs s = make_inputs(plan, Gate::kOrdinary);
  const Tensor h(DType::kFloat32, s.h.shape());
  stages::StateForward t = {.k = s.k.dl(),
                            .w = s.w.dl(),
                            .u = s.u.dl(),
                            .g = s.gamma.dl(),
                            .initial_state = nullptr,
                            .h = h.dl(),
                            .v_new = nullptr,
                            .final_state = nullptr};
  stages::chunk_gated_delta_rule_fwd_h(plan, t);
  EXPECT_TRUE(close(h, formulas::forward_states(plan, s.k, s.w, s.u, s.gamma, Tensor()).h, 1e-5));
}

TEST(Stages, StateBackwardInPlaceAndWithoutOptionalArguments) {
  const gdn::Plan plan = gdn::Plan::make(operator_case({}).problem);
  const StageInputs s = make_inputs(plan, Gate::kOrdinary);
  const Tensor dh(DType::kFloat32, s.dh.shape()), dv = s.dv.contiguous();
  stages::chunk_gated_delta_rule_bwd_dhu(plan, {.q = s.q.dl(),
                                                .k = s.k.dl(),
                                                .w = s.w.dl(),
                                                .g = s.gamma.dl(),
                                                .dht = nullptr,
                                                .grad_output = s.grad_output.dl(),
                                                .dv = dv.dl(),
                                                .dh = dh.dl(),
                                                .dh0 = nullptr,
                                                .dv2 = dv.dl()});
  const formulas::StateGradients expected =
      formulas::backward_states(plan, s.q, s.k, s.w, s.gamma, Tensor(), s.grad_output, s.dv);
  EXPECT_TRUE(close(dh, expected.dh, 2e-5));
  EXPECT_TRUE(close(dv, expected.dv2, 2e-5));
}

TEST(Stages, GateBackwardWithoutBias) {
  const gdn::Plan plan = gdn::Plan::make(operator_case({}).problem);
  const StageInputs s = make_inputs(plan, Gate::kOrdinary);
  const Tensor dg(DType::kFloat32, s.raw_gate.shape()), dA_log(DType::kFloat32, s.A_log.shape());
  stages::gdn_gate_bwd(plan, {.g = s.raw_gate.dl(),
                              .A_log = s.A_log.dl(),
                              .dt_bias = nullptr,
                              .dyg = s.dyg.dl(),
                              .dg = dg.dl(),
                              .dA_log = dA_log.dl(),
                              .ddt_bias = nullptr});
  const formulas::GateGradients expected = formulas::gate_gradients(plan, s.raw_gate, s.A_log, Tensor(), s.dyg);
  EXPECT_TRUE(close(dg, expected.dg, 2e-5));
  EXPECT_TRUE(close(dA_log, expected.dA_log, 2e-5));
}

TEST(Stages, BetaInTheOperandType) {
  const gdn::Plan plan = gdn::Plan::make(operator_case({.dtype = DType::kBFloat16}).problem);
  StageInputs s = make_inputs(plan, Gate::kOrdinary);
  const Stage& intra = kStages[10];
  ASSERT_STREQ(intra.name, "chunk_gated_delta_rule_fwd_intra");
  s.beta = s.beta.to(DType::kBFloat16);
  const std::vector<Output> low = run_stage(intra, plan, s, row_major);
  s.beta = s.beta.to(DType::kFloat32);
  const std::vector<Output> same_values = run_stage(intra, plan, s, row_major);
  for (size_t i = 0; i < low.size(); ++i) EXPECT_TRUE(same_bits(low[i].actual, same_values[i].actual)) << low[i].name;
}

TEST(Stages, InverseHasAnExactDiagonalAndExactZeros) {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const StageCase s = {.dtype = dtype, .packed = true};
    const gdn::Plan plan = gdn::Plan::make(operator_case(s).problem);
    const StageInputs inputs = make_inputs(plan, Gate::kOrdinary);
    const Tensor A(dtype, inputs.L.shape());
    stages::solve_tril(plan, {.L = inputs.L.dl(), .A = A.dl()});
    for (const gdn::ChunkRange& chunk : plan.chunks()) {
      for (int64_t i = 0; i < chunk.length; ++i) {
        for (int64_t j = 0; j < s.HV; ++j) {
          const int64_t row = ((chunk.begin + i) * s.HV + j) * s.chunk_size;
          EXPECT_EQ(A.at(row + i), 1);
          for (int64_t column = i + 1; column < s.chunk_size; ++column) ASSERT_EQ(A.at(row + column), 0);
        }
      }
    }
  }
}

// Cases of CASES.md that are about one stage --------------------------------------------------------------------------

Tensor log_decay_of(DType dtype, double A_log, double raw, double bias) {
  const gdn::Plan plan = gdn::Plan::make(make_case(dtype, 1, 1, 1, 1, 8, 8).problem);
  const DType stat = stat_dtype(dtype);
  const Tensor out(stat, {1, 1, 1});
  stages::gdn_gate_fwd(plan, {.g = constant(stat, {1, 1, 1}, raw).dl(),
                              .A_log = constant(stat, {1}, A_log).dl(),
                              .dt_bias = constant(stat, {1}, bias).dl(),
                              .out = out.dl()});
  return out;
}

formulas::GateGradients gate_gradients_of(DType dtype, double A_log, double raw, double bias, double dyg) {
  const gdn::Plan plan = gdn::Plan::make(make_case(dtype, 1, 1, 1, 1, 8, 8).problem);
  const DType stat = stat_dtype(dtype);
  const formulas::GateGradients r = {Tensor(stat, {1, 1, 1}), Tensor(stat, {1}), Tensor(stat, {1})};
  stages::gdn_gate_bwd(plan, {.g = constant(stat, {1, 1, 1}, raw).dl(),
                              .A_log = constant(stat, {1}, A_log).dl(),
                              .dt_bias = constant(stat, {1}, bias).dl(),
                              .dyg = constant(stat, {1, 1, 1}, dyg).dl(),
                              .dg = r.dg.dl(),
                              .dA_log = r.dA_log.dl(),
                              .ddt_bias = r.ddt_bias.dl()});
  return r;
}

TEST(Cases, Case12_GateStageWithOverflowingRate) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
    const double log_decay = log_decay_of(dtype, 100, -200, 0).at(0);
    EXPECT_LE(log_decay, 0);
    EXPECT_GT(log_decay, -1e-40);
    const formulas::GateGradients r = gate_gradients_of(dtype, 100, -200, 0, 3);
    EXPECT_LT(std::fabs(r.dg.at(0)), 1e-40);
    EXPECT_LT(std::fabs(r.dA_log.at(0)), 1e-40);
    EXPECT_LT(std::fabs(r.ddt_bias.at(0)), 1e-40);
  }
}

TEST(Cases, Case13_GateStageFarAboveZero) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
    const double tolerance = output_tolerance(dtype);
    const double large = -100 * std::exp(dtype == DType::kFloat32 ? double(2.77f) : 2.77);
    EXPECT_NEAR(log_decay_of(dtype, 0, 100, 0).at(0), -100, 100 * tolerance);
    EXPECT_NEAR(log_decay_of(dtype, 0, 60, 40).at(0), -100, 100 * tolerance);
    EXPECT_NEAR(log_decay_of(dtype, 2.77, 60, 40).at(0), large, 1600 * tolerance);
    EXPECT_NEAR(large, -1595.86, 0.01);
    const formulas::GateGradients one = gate_gradients_of(dtype, 0, 60, 40, 1);
    EXPECT_NEAR(one.dg.at(0), -1, tolerance);
    EXPECT_NEAR(one.dA_log.at(0), -100, 100 * tolerance);
    EXPECT_NEAR(one.ddt_bias.at(0), -1, tolerance);
    const formulas::GateGradients strong = gate_gradients_of(dtype, 2.77, 60, 40, 0.5);
    EXPECT_NEAR(strong.dg.at(0), 0.5 * large / 100, 16 * tolerance);
    EXPECT_NEAR(strong.dA_log.at(0), 0.5 * large, 1600 * tolerance);
  }
}

TEST(Cases, Case07_CumsumOfABf16GateRunsInFloat32) {
  const gdn::Plan plan = gdn::Plan::make(make_case(DType::kBFloat16, 1, 128, 1, 1, 128, 128).problem);
  const Tensor g = constant(DType::kBFloat16, {1, 128, 1}, -0.03), wide = g.to(DType::kFloat32);
  const Tensor from_bf16(DType::kFloat32, {1, 128, 1}), from_fp32(DType::kFloat32, {1, 128, 1});
  stages::chunk_local_cumsum(plan, {.g = g.dl(), .out = from_bf16.dl()});
  stages::chunk_local_cumsum(plan, {.g = wide.dl(), .out = from_fp32.dl()});
  EXPECT_TRUE(same_bits(from_bf16, from_fp32));
  EXPECT_NEAR(from_bf16.at(63), 64 * g.at(0), 1e-4);
}

TEST(Cases, Case01_FactorsOfAStrongGateStayFinite) {
  for (const double gate : {-2.0, -20.0, -200.0, -1e4}) {
    const gdn::Plan plan = gdn::Plan::make(operator_case({}).problem);
    StageInputs s = make_inputs(plan, Gate::kOrdinary);
    s.log_decay.filled([=](int64_t) { return gate; });
    s.gamma = formulas::local_cumsum(plan, s.log_decay, kInverseLn2, false).to(DType::kFloat32);
    for (const Stage& stage : kStages) {
      expect_stage_close(stage, DType::kFloat32, run_stage(stage, plan, s, row_major), stage.expected(plan, s));
    }
  }
}

// All stages together -------------------------------------------------------------------------------------------------

OperatorCase composed_case(DType dtype, bool packed, bool state_v_first) {
  OperatorCase c = operator_case({.dtype = dtype, .chunk_size = 16, .packed = packed, .state_v_first = state_v_first});
  return c;
}

Operands with_resets(Operands x) {
  x.g.set(5, -kInf);
  x.g.set(33 * 4, -kInf);
  x.g.set(34 * 4, -kInf);
  return x;
}

// The order of SPEC section 2.2. The formulas are checked by the reference here, before the library is by them.
Results compose_formulas(const OperatorCase& c, const Operands& x) {
  const gdn::Plan plan = gdn::Plan::make(c.problem);
  const Tensor gamma = formulas::local_cumsum(plan, x.g, kInverseLn2, false);
  const Tensor A = formulas::inverse(plan, formulas::scaled_dot_kkt(plan, x.k, gamma, x.beta));
  const formulas::WU wu = formulas::recompute_w_u(plan, x.k, x.v, x.beta, A, gamma);
  const formulas::States states = formulas::forward_states(plan, x.k, wu.w, wu.u, gamma, x.initial_state);
  Results r;
  r.o = formulas::output(plan, x.q, x.k, states.v_new, states.h, gamma);
  r.final_state = states.final_state;
  const Tensor dv_local = formulas::local_value_gradient(plan, x.q, x.k, gamma, x.grad_output);
  const formulas::StateGradients ds =
      formulas::backward_states(plan, x.q, x.k, wu.w, gamma, x.grad_final_state, x.grad_output, dv_local);
  const formulas::OperandGradients d = formulas::operand_gradients(plan, {.q = x.q,
                                                                          .k = x.k,
                                                                          .v_new = states.v_new,
                                                                          .w = wu.w,
                                                                          .gamma = gamma,
                                                                          .h = states.h,
                                                                          .dv2 = ds.dv2,
                                                                          .grad_output = x.grad_output,
                                                                          .dh = ds.dh});
  const formulas::WyGradients wy = formulas::wy_gradients(
      plan, {.k = x.k, .v = x.v, .beta = x.beta, .gamma = gamma, .A = A, .dw = d.dw, .du = ds.dv2});
  const auto sum = [](const Tensor& a, const Tensor& b) {
    return Tensor(DType::kFloat64, a.shape()).filled([&](int64_t i) { return a.at(i) + b.at(i); });
  };
  r.dq = d.dq;
  r.dk = sum(d.dk, wy.dk);
  r.dv = wy.dv;
  r.dg = formulas::local_cumsum(plan, sum(d.dg, wy.dg), 1, true);
  r.dbeta = wy.db;
  r.dh0 = ds.dh0;
  return r;
}

TEST(StageFormulas, ComposeToTheReference) {
  for (const bool packed : {false, true}) {
    for (const bool resets : {false, true}) {
      const OperatorCase c = composed_case(DType::kFloat64, packed, packed);
      const Operands x = resets ? with_resets(make_operands(c)) : make_operands(c);
      expect_close(c, compose_formulas(c, x), run_reference(c, x));
    }
  }
}

// The library's stages in the same order, each fed with what the one before stored.
Results compose_stages(const OperatorCase& c, const Operands& x) {
  const gdn::Plan plan = gdn::Plan::make(c.problem);
  StageInputs s = make_inputs(plan, Gate::kOrdinary);  // for the shapes; every value below is replaced
  const auto run = [&](const char* name) {
    for (const Stage& stage : kStages) {
      if (std::string(stage.name) == name) return run_stage(stage, plan, s, row_major);
    }
    throw_runtime_error("no stage ", name);
  };
  s.q = x.q;
  s.k = x.k;
  s.v = x.v;
  s.beta = x.beta;
  s.log_decay = x.g;
  s.initial_state = x.initial_state;
  s.grad_output = x.grad_output;
  s.dht = x.grad_final_state;
  s.gamma = run("chunk_local_cumsum")[0].actual;
  const std::vector<Output> intra = run("chunk_gated_delta_rule_fwd_intra");
  s.w = intra[0].actual;
  s.u = intra[1].actual;
  s.A = intra[2].actual;
  const std::vector<Output> states = run("chunk_gated_delta_rule_fwd_h");
  s.h = states[0].actual;
  s.v_new = states[1].actual;
  Results r;
  r.final_state = states[2].actual;
  r.o = run("chunk_fwd_o")[0].actual;
  s.dv = run("chunk_bwd_dv_local")[0].actual;
  const std::vector<Output> ds = run("chunk_gated_delta_rule_bwd_dhu");
  s.dh = ds[0].actual;
  r.dh0 = ds[1].actual;
  s.dv = s.du = ds[2].actual;
  const std::vector<Output> d = run("chunk_bwd_dqkwg");
  s.dw = d[2].actual;
  const std::vector<Output> wy = run("prepare_wy_repr_bwd");
  const auto sum = [](const Tensor& a, const Tensor& b) {
    return Tensor(a.dtype(), a.shape()).filled([&](int64_t i) { return a.at(i) + b.at(i); });
  };
  r.dq = d[0].actual;
  r.dk = sum(d[1].actual, wy[0].actual);
  r.dv = wy[1].actual;
  s.dyg = sum(d[3].actual, wy[3].actual);
  r.dg = run("chunk_local_cumsum")[1].actual;
  r.dbeta = wy[2].actual;
  return r;
}

TEST(Stages, ComposeToTheReference) {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const bool packed : {false, true}) {
      for (const bool resets : {false, true}) {
        const OperatorCase c = composed_case(dtype, packed, packed);
        const Operands x = resets ? with_resets(make_operands(c)) : make_operands(c);
        expect_close(c, compose_stages(c, x), run_reference(c, x));
      }
    }
  }
}

}  // namespace
}  // namespace cula::test
