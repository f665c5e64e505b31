// The stages of the chunked algorithm as their formulas read, in float64 and one chunk after another: what the stages
// of the library are compared with. Arguments of any float type; results are row-major float64. An absent gate is an
// absent tensor. Letters as in gdn/stages.h.
#pragma once

#include "support.h"

namespace cula::test::formulas {

struct WU {
  Tensor w, u;
};
struct States {
  Tensor h, v_new, final_state;
};
struct StateGradients {
  Tensor dh, dh0, dv2;
};
struct OperandGradients {
  Tensor dq, dk, dw, dg;
};
struct WyGradients {
  Tensor dk, dv, db, dg;
};
struct GateGradients {
  Tensor dg, dA_log, ddt_bias;
};
struct Normalized {
  Tensor y, rstd;
};

Normalized l2norm(const Tensor& x);
Tensor l2norm_gradient(const Tensor& y, const Tensor& rstd, const Tensor& dy);
Tensor beta_sigmoid(const Tensor& x, double scale);
Tensor beta_sigmoid_gradient(const Tensor& x, const Tensor& dy, double scale);
Tensor gate(const gdn::Plan& plan, const Tensor& g, const Tensor& A_log, const Tensor& dt_bias);
GateGradients gate_gradients(const gdn::Plan& plan, const Tensor& g, const Tensor& A_log, const Tensor& dt_bias,
                             const Tensor& dyg);
Tensor local_cumsum(const gdn::Plan& plan, const Tensor& g, double scale, bool reverse);

Tensor scaled_dot_kkt(const gdn::Plan& plan, const Tensor& k, const Tensor& gamma, const Tensor& beta);
Tensor inverse(const gdn::Plan& plan, const Tensor& L);
WU recompute_w_u(const gdn::Plan& plan, const Tensor& k, const Tensor& v, const Tensor& beta, const Tensor& A,
                 const Tensor& gamma);
States forward_states(const gdn::Plan& plan, const Tensor& k, const Tensor& w, const Tensor& u, const Tensor& gamma,
                      const Tensor& initial_state);
Tensor output(const gdn::Plan& plan, const Tensor& q, const Tensor& k, const Tensor& v_new, const Tensor& h,
              const Tensor& gamma);

Tensor local_value_gradient(const gdn::Plan& plan, const Tensor& q, const Tensor& k, const Tensor& gamma,
                            const Tensor& grad_output);
StateGradients backward_states(const gdn::Plan& plan, const Tensor& q, const Tensor& k, const Tensor& w,
                               const Tensor& gamma, const Tensor& dht, const Tensor& grad_output, const Tensor& dv);

struct OperandGradientInputs {
  Tensor q, k, v_new, w, gamma, h, dv2, grad_output, dh;
};
OperandGradients operand_gradients(const gdn::Plan& plan, const OperandGradientInputs& x);

struct WyGradientInputs {
  Tensor k, v, beta, gamma, A, dw, du;
};
WyGradients wy_gradients(const gdn::Plan& plan, const WyGradientInputs& x);

}  // namespace cula::test::formulas
