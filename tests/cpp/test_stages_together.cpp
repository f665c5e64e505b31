// All stages one after another against the recurrence: the formulas first, then the library's.
#include <limits>
#include <numbers>

#include "stage_case.h"
#include "stage_formulas.h"

namespace cula::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kInverseLn2 = 1 / std::numbers::ln2;

OperatorCase composed_case(DType dtype, bool packed, bool state_v_first) {
  return operator_case({.dtype = dtype, .chunk_size = 16, .packed = packed, .state_v_first = state_v_first});
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
  const auto run = [&](const char* name) { return run_stage(stage_named(name), plan, s, row_major); };
  s.q = x.q;
  s.k = x.k;
  s.v = x.v;
  s.beta = x.beta;
  s.log_decay = x.g;
  s.initial_state = x.initial_state;
  s.grad_output = x.grad_output;
  s.dht = x.grad_final_state;
  s.gamma = run("chunk_local_cumsum")[0];
  const std::vector<Tensor> intra = run("chunk_gated_delta_rule_fwd_intra");
  s.w = intra[0];
  s.u = intra[1];
  s.A = intra[2];
  const std::vector<Tensor> states = run("chunk_gated_delta_rule_fwd_h");
  s.h = states[0];
  s.v_new = states[1];
  Results r;
  r.final_state = states[2];
  r.o = run("chunk_fwd_o")[0];
  s.dv = run("chunk_bwd_dv_local")[0];
  const std::vector<Tensor> ds = run("chunk_gated_delta_rule_bwd_dhu");
  s.dh = ds[0];
  r.dh0 = ds[1];
  s.dv = s.du = ds[2];
  const std::vector<Tensor> d = run("chunk_bwd_dqkwg");
  s.dw = d[2];
  const std::vector<Tensor> wy = run("prepare_wy_repr_bwd");
  const auto sum = [](const Tensor& a, const Tensor& b) {
    return Tensor(a.dtype(), a.shape()).filled([&](int64_t i) { return a.at(i) + b.at(i); });
  };
  r.dq = d[0];
  r.dk = sum(d[1], wy[0]);
  r.dv = wy[1];
  s.dyg = sum(d[3], wy[3]);
  r.dg = run("chunk_local_cumsum")[1];
  r.dbeta = wy[2];
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
