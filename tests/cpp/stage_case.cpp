#include "stage_case.h"

#include <cmath>
#include <limits>
#include <numbers>

#include "stage_formulas.h"

namespace cula::test {

namespace stages = gdn::stages;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kInverseLn2 = 1 / std::numbers::ln2;

}  // namespace

// Inputs --------------------------------------------------------------------------------------------------------------

std::string case_name(const StageCase& s) {
  const char* gates[] = {"nogate", "gate", "resets"};
  return concat(dtype_name(s.dtype), "_C", s.chunk_size, s.packed ? "_packed" : concat("_B", s.B, "_T", s.T), "_H", s.H,
                "_HV", s.HV, "_K", s.K, "_V", s.V, "_", gates[static_cast<int>(s.gate)],
                s.state_v_first ? "_vfirst" : "");
}

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

std::vector<Tensor*> StageInputs::all() {
  return {&q,  &k,  &v,   &beta,  &gamma, &raw_gate,      &log_decay,   &A_log, &dt_bias, &L,
          &A,  &w,  &u,   &v_new, &h,     &initial_state, &grad_output, &dht,   &dv,      &dh,
          &dw, &du, &dyg, &rstd,  &dy};
}

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

namespace {

constexpr Stage kStages[] = {
    {"l2norm_fwd",
     {"y", "rstd"},
     false,
     [](const StageCall& c, const StageInputs& s) -> std::vector<Tensor> {
       const Tensor y = c.x(s.q.shape()), rstd = c.stat(s.rstd.shape());
       stages::l2norm_fwd(c.plan, {.x = s.q.dl(), .y = y.dl(), .rstd = rstd.dl()});
       return {y, rstd};
     },
     [](const gdn::Plan&, const StageInputs& s) -> std::vector<Tensor> {
       const formulas::Normalized r = formulas::l2norm(s.q);
       return {r.y, r.rstd};
     }},
    {"l2norm_bwd",
     {"dx"},
     true,
     [](const StageCall& c, const StageInputs& s) -> std::vector<Tensor> {
       const Tensor dx = c.x(s.q.shape());
       stages::l2norm_bwd(c.plan, {.y = s.q.dl(), .rstd = s.rstd.dl(), .dy = s.dy.dl(), .dx = dx.dl()});
       return {dx};
     },
     [](const gdn::Plan&, const StageInputs& s) -> std::vector<Tensor> {
       return {formulas::l2norm_gradient(s.q, s.rstd, s.dy)};
     }},
    {"fused_beta_sigmoid_fwd",
     {"y"},
     false,
     [](const StageCall& c, const StageInputs& s) -> std::vector<Tensor> {
       const Tensor y = c.stat(s.raw_gate.shape());
       stages::fused_beta_sigmoid_fwd(c.plan, {.x = s.raw_gate.dl(), .scale = 2, .y = y.dl()});
       return {y};
     },
     [](const gdn::Plan&, const StageInputs& s) -> std::vector<Tensor> {
       return {formulas::beta_sigmoid(s.raw_gate, 2)};
     }},
    {"fused_beta_sigmoid_bwd",
     {"dx"},
     true,
     [](const StageCall& c, const StageInputs& s) -> std::vector<Tensor> {
       const Tensor dx = c.x(s.raw_gate.shape());
       stages::fused_beta_sigmoid_bwd(c.plan, {.x = s.raw_gate.dl(), .dy = s.dyg.dl(), .scale = 2, .dx = dx.dl()});
       return {dx};
     },
     [](const gdn::Plan&, const StageInputs& s) -> std::vector<Tensor> {
       return {formulas::beta_sigmoid_gradient(s.raw_gate, s.dyg, 2)};
     }},
    {"chunk_local_cumsum",
     {"out", "reverse"},
     false,
     [](const StageCall& c, const StageInputs& s) -> std::vector<Tensor> {
       const Tensor out = c.stat(s.log_decay.shape()), reverse = c.stat(s.dyg.shape());
       stages::chunk_local_cumsum(c.plan, {.g = s.log_decay.dl(), .scale = kInverseLn2, .out = out.dl()});
       stages::chunk_local_cumsum(c.plan, {.g = s.dyg.dl(), .reverse = true, .out = reverse.dl()});
       return {out, reverse};
     },
     [](const gdn::Plan& plan, const StageInputs& s) -> std::vector<Tensor> {
       return {formulas::local_cumsum(plan, s.log_decay, kInverseLn2, false),
               formulas::local_cumsum(plan, s.dyg, 1, true)};
     }},
    {"gdn_gate_fwd",
     {"out"},
     false,
     [](const StageCall& c, const StageInputs& s) -> std::vector<Tensor> {
       const Tensor out = c.stat(s.raw_gate.shape());
       stages::gdn_gate_fwd(c.plan,
                            {.g = s.raw_gate.dl(), .A_log = s.A_log.dl(), .dt_bias = s.dt_bias.dl(), .out = out.dl()});
       return {out};
     },
     [](const gdn::Plan& plan, const StageInputs& s) -> std::vector<Tensor> {
       return {formulas::gate(plan, s.raw_gate, s.A_log, s.dt_bias)};
     }},
    {"gdn_gate_chunk_cumsum",
     {"out"},
     false,
     [](const StageCall& c, const StageInputs& s) -> std::vector<Tensor> {
       const Tensor out = c.stat(s.raw_gate.shape());
       stages::gdn_gate_chunk_cumsum(
           c.plan,
           {.g = s.raw_gate.dl(), .A_log = s.A_log.dl(), .dt_bias = nullptr, .scale = kInverseLn2, .out = out.dl()});
       return {out};
     },
     [](const gdn::Plan& plan, const StageInputs& s) -> std::vector<Tensor> {
       const Tensor log_decay = formulas::gate(plan, s.raw_gate, s.A_log, Tensor());
       return {formulas::local_cumsum(plan, log_decay, kInverseLn2, false)};
     }},
    {"gdn_gate_bwd",
     {"dg", "dA_log", "ddt_bias"},
     true,
     [](const StageCall& c, const StageInputs& s) -> std::vector<Tensor> {
       const Tensor dg = c.x(s.raw_gate.shape()), dA_log = c.stat(s.A_log.shape());
       const Tensor ddt_bias = c.stat(s.A_log.shape());
       stages::gdn_gate_bwd(c.plan, {.g = s.raw_gate.dl(),
                                     .A_log = s.A_log.dl(),
                                     .dt_bias = s.dt_bias.dl(),
                                     .dyg = s.dyg.dl(),
                                     .dg = dg.dl(),
                                     .dA_log = dA_log.dl(),
                                     .ddt_bias = ddt_bias.dl()});
       return {dg, dA_log, ddt_bias};
     },
     [](const gdn::Plan& plan, const StageInputs& s) -> std::vector<Tensor> {
       const formulas::GateGradients r = formulas::gate_gradients(plan, s.raw_gate, s.A_log, s.dt_bias, s.dyg);
       return {r.dg, r.dA_log, r.ddt_bias};
     }},
    {"chunk_scaled_dot_kkt_fwd",
     {"L"},
     false,
     [](const StageCall& c, const StageInputs& s) -> std::vector<Tensor> {
       const Tensor L = c.stat(s.L.shape());
       stages::chunk_scaled_dot_kkt_fwd(c.plan, {.k = s.k.dl(), .g = s.gamma.dl(), .beta = s.beta.dl(), .L = L.dl()});
       return {L};
     },
     [](const gdn::Plan& plan, const StageInputs& s) -> std::vector<Tensor> {
       return {formulas::scaled_dot_kkt(plan, s.k, s.gamma, s.beta)};
     }},
    {"solve_tril",
     {"A"},
     false,
     [](const StageCall& c, const StageInputs& s) -> std::vector<Tensor> {
       const Tensor A = c.x(s.L.shape());
       stages::solve_tril(c.plan, {.L = s.L.dl(), .A = A.dl()});
       return {A};
     },
     [](const gdn::Plan& plan, const StageInputs& s) -> std::vector<Tensor> { return {formulas::inverse(plan, s.L)}; }},
    {"chunk_gated_delta_rule_fwd_intra",
     {"w", "u", "A"},
     false,
     [](const StageCall& c, const StageInputs& s) -> std::vector<Tensor> {
       const Tensor w = c.x(s.w.shape()), u = c.x(s.u.shape()), A = c.x(s.A.shape());
       stages::chunk_gated_delta_rule_fwd_intra(c.plan, {.k = s.k.dl(),
                                                         .v = s.v.dl(),
                                                         .g = s.gamma.dl(),
                                                         .beta = s.beta.dl(),
                                                         .w = w.dl(),
                                                         .u = u.dl(),
                                                         .A = A.dl()});
       return {w, u, A};
     },
     [](const gdn::Plan& plan, const StageInputs& s) -> std::vector<Tensor> {
       const Tensor A = formulas::inverse(plan, formulas::scaled_dot_kkt(plan, s.k, s.gamma, s.beta));
       const formulas::WU r = formulas::recompute_w_u(plan, s.k, s.v, s.beta, A, s.gamma);
       return {r.w, r.u, A};
     }},
    {"recompute_w_u_fwd",
     {"w", "u"},
     false,
     [](const StageCall& c, const StageInputs& s) -> std::vector<Tensor> {
       const Tensor w = c.x(s.w.shape()), u = c.x(s.u.shape());
       stages::recompute_w_u_fwd(c.plan, {.k = s.k.dl(),
                                          .v = s.v.dl(),
                                          .beta = s.beta.dl(),
                                          .A = s.A.dl(),
                                          .g = s.gamma.dl(),
                                          .w = w.dl(),
                                          .u = u.dl()});
       return {w, u};
     },
     [](const gdn::Plan& plan, const StageInputs& s) -> std::vector<Tensor> {
       const formulas::WU r = formulas::recompute_w_u(plan, s.k, s.v, s.beta, s.A, s.gamma);
       return {r.w, r.u};
     }},
    {"chunk_gated_delta_rule_fwd_h",
     {"h", "v_new", "final_state"},
     false,
     [](const StageCall& c, const StageInputs& s) -> std::vector<Tensor> {
       const Tensor h = c.x(s.h.shape()), v_new = c.x(s.v_new.shape());
       const Tensor final_state = c.stat(s.initial_state.shape());
       stages::chunk_gated_delta_rule_fwd_h(c.plan, {.k = s.k.dl(),
                                                     .w = s.w.dl(),
                                                     .u = s.u.dl(),
                                                     .g = s.gamma.dl(),
                                                     .initial_state = s.initial_state.dl(),
                                                     .h = h.dl(),
                                                     .v_new = v_new.dl(),
                                                     .final_state = final_state.dl()});
       return {h, v_new, final_state};
     },
     [](const gdn::Plan& plan, const StageInputs& s) -> std::vector<Tensor> {
       const formulas::States r = formulas::forward_states(plan, s.k, s.w, s.u, s.gamma, s.initial_state);
       return {r.h, r.v_new, r.final_state};
     }},
    {"chunk_fwd_o",
     {"o"},
     false,
     [](const StageCall& c, const StageInputs& s) -> std::vector<Tensor> {
       const Tensor o = c.x(s.v.shape());
       stages::chunk_fwd_o(
           c.plan, {.q = s.q.dl(), .k = s.k.dl(), .v = s.v_new.dl(), .h = s.h.dl(), .g = s.gamma.dl(), .o = o.dl()});
       return {o};
     },
     [](const gdn::Plan& plan, const StageInputs& s) -> std::vector<Tensor> {
       return {formulas::output(plan, s.q, s.k, s.v_new, s.h, s.gamma)};
     }},
    {"chunk_bwd_dv_local",
     {"dv"},
     true,
     [](const StageCall& c, const StageInputs& s) -> std::vector<Tensor> {
       const Tensor dv = c.x(s.v.shape());
       stages::chunk_bwd_dv_local(
           c.plan, {.q = s.q.dl(), .k = s.k.dl(), .g = s.gamma.dl(), .grad_output = s.grad_output.dl(), .dv = dv.dl()});
       return {dv};
     },
     [](const gdn::Plan& plan, const StageInputs& s) -> std::vector<Tensor> {
       return {formulas::local_value_gradient(plan, s.q, s.k, s.gamma, s.grad_output)};
     }},
    {"chunk_gated_delta_rule_bwd_dhu",
     {"dh", "dh0", "dv2"},
     true,
     [](const StageCall& c, const StageInputs& s) -> std::vector<Tensor> {
       const Tensor dh = c.x(s.dh.shape()), dh0 = c.stat(s.dht.shape());
       const Tensor dv2 = c.x(s.dv.shape());
       stages::chunk_gated_delta_rule_bwd_dhu(c.plan, {.q = s.q.dl(),
                                                       .k = s.k.dl(),
                                                       .w = s.w.dl(),
                                                       .g = s.gamma.dl(),
                                                       .dht = s.dht.dl(),
                                                       .grad_output = s.grad_output.dl(),
                                                       .dv = s.dv.dl(),
                                                       .dh = dh.dl(),
                                                       .dh0 = dh0.dl(),
                                                       .dv2 = dv2.dl()});
       return {dh, dh0, dv2};
     },
     [](const gdn::Plan& plan, const StageInputs& s) -> std::vector<Tensor> {
       const formulas::StateGradients r =
           formulas::backward_states(plan, s.q, s.k, s.w, s.gamma, s.dht, s.grad_output, s.dv);
       return {r.dh, r.dh0, r.dv2};
     }},
    {"chunk_bwd_dqkwg",
     {"dq", "dk", "dw", "dg"},
     true,
     [](const StageCall& c, const StageInputs& s) -> std::vector<Tensor> {
       const Tensor dq = c.x(s.q.shape()), dk = c.x(s.q.shape()), dw = c.x(s.w.shape());
       const Tensor dg = s.gamma ? c.stat(s.gamma.shape()) : Tensor();
       stages::chunk_bwd_dqkwg(c.plan, {.q = s.q.dl(),
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
       return {dq, dk, dw, dg};
     },
     [](const gdn::Plan& plan, const StageInputs& s) -> std::vector<Tensor> {
       const formulas::OperandGradients r = formulas::operand_gradients(plan, {.q = s.q,
                                                                               .k = s.k,
                                                                               .v_new = s.v_new,
                                                                               .w = s.w,
                                                                               .gamma = s.gamma,
                                                                               .h = s.h,
                                                                               .dv2 = s.dv,
                                                                               .grad_output = s.grad_output,
                                                                               .dh = s.dh});
       return {r.dq, r.dk, r.dw, r.dg};
     }},
    {"prepare_wy_repr_bwd",
     {"dk", "dv", "db", "dg"},
     true,
     [](const StageCall& c, const StageInputs& s) -> std::vector<Tensor> {
       const Tensor dk = c.x(s.k.shape()), dv = c.x(s.v.shape()), db = c.stat(s.beta.shape());
       const Tensor dg = s.gamma ? c.stat(s.gamma.shape()) : Tensor();
       stages::prepare_wy_repr_bwd(c.plan, {.k = s.k.dl(),
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
       return {dk, dv, db, dg};
     },
     [](const gdn::Plan& plan, const StageInputs& s) -> std::vector<Tensor> {
       const formulas::WyGradients r = formulas::wy_gradients(
           plan, {.k = s.k, .v = s.v, .beta = s.beta, .gamma = s.gamma, .A = s.A, .dw = s.dw, .du = s.du});
       return {r.dk, r.dv, r.db, r.dg};
     }},
};

}  // namespace

Tensor row_major(DType dtype, const Shape& shape) { return Tensor(dtype, shape); }

Tensor reversed_with_gaps(DType dtype, const Shape& shape) {
  Shape strides(shape.size());
  int64_t stride = 2;
  for (size_t i = 0; i < shape.size(); ++i) {
    strides[i] = stride;
    stride *= shape[i];
  }
  return Tensor(dtype, shape, strides);
}

Tensor StageCall::x(const Shape& shape) const { return allocate(from_dlpack(plan.problem().dtype, "dtype"), shape); }
Tensor StageCall::stat(const Shape& shape) const {
  return allocate(stat_dtype(from_dlpack(plan.problem().dtype, "dtype")), shape);
}

void PrintTo(const Stage& stage, std::ostream* stream) { *stream << stage.name; }
void PrintTo(const StageCase& s, std::ostream* stream) { *stream << case_name(s); }

std::span<const Stage> all_stages() { return kStages; }

const Stage& stage_named(const std::string& name) {
  for (const Stage& stage : all_stages()) {
    if (stage.name == name) return stage;
  }
  throw_runtime_error("no stage ", name);
}

std::vector<Tensor> run_stage(const Stage& stage, const gdn::Plan& plan, StageInputs inputs, Allocate allocate) {
  const auto memory = [&] {
    std::vector<std::vector<unsigned char>> snapshots;
    for (const Tensor* tensor : inputs.all()) {
      snapshots.push_back(*tensor ? tensor->snapshot() : std::vector<unsigned char>());
    }
    return snapshots;
  };
  const auto before = memory();
  std::vector<Tensor> outputs = stage.run({plan, allocate}, inputs);
  EXPECT_TRUE(memory() == before) << "an input was modified";
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (outputs[i]) {
      EXPECT_TRUE(outputs[i].only_elements_written()) << stage.outputs[i];
    }
  }
  return outputs;
}

void expect_stage_close(const Stage& stage, DType dtype, const std::vector<Tensor>& actual,
                        const std::vector<Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  const double tolerance = stage.has_gradients ? gradient_tolerance(dtype) : output_tolerance(dtype);
  for (size_t i = 0; i < actual.size(); ++i) {
    if (!actual[i]) continue;
    const Tensor a = actual[i].to(DType::kFloat64), e = expected[i].contiguous();
    for (int64_t j = 0; j < e.numel(); ++j) {
      if (!std::isinf(e.at(j))) continue;
      EXPECT_EQ(a.at(j), e.at(j)) << stage.outputs[i];
      a.set(j, 0);
      e.set(j, 0);
    }
    EXPECT_TRUE(close(a, e, tolerance)) << stage.outputs[i];
  }
}

}  // namespace cula::test
