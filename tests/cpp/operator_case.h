// One call of the operator: what it computes, its operands, and what the library and the reference make of them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "support.h"

namespace cula::test {

struct OperatorCase {
  gdn::Problem problem;  // of the type `dtype`; backend kCpu unless set otherwise
  DType dtype = DType::kFloat32;
  bool initial_state = true;
  bool final_state = true;  // wanted, and its gradient given
  bool dt_bias = true;      // with problem.use_gate
  // Types of the operands that may differ from dtype; absent: float32 (float64 for float64).
  std::optional<DType> gate_dtype, beta_dtype, state_dtype;
  uint64_t seed = 1;
};

// A case of these sizes with everything else at its default.
OperatorCase make_case(DType dtype, int64_t B, int64_t T, int64_t H, int64_t HV, int64_t K, int64_t V);

// Every allowed setting of use_qk_l2norm, use_gate, use_beta_sigmoid, allow_neg_eigval, state_v_first, the two states
// and dt_bias, as bits of one number.
std::vector<int> all_flag_sets();
void apply_flags(int flags, OperatorCase& c);
std::string flags_name(int flags);  // "l2norm_gate_h0", for test names

struct Operands {
  Tensor q, k, v, g, beta, A_log, dt_bias, initial_state, grad_output, grad_final_state;
};

// The data that CASES takes unless a case says otherwise: unit q and k (normal ones with l2norm), normal v, beta
// uniform in (0, 1) or normal logits, g = logsigmoid(normal) or a normal raw gate.
Operands make_operands(const OperatorCase& c);

// The operands of packed sequence n alone, as a batch of one; views of the same memory.
Operands operands_of_sequence(const OperatorCase& c, const Operands& x, int64_t n);

struct Results {
  Tensor o, final_state;
  Tensor dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dh0;
  Tensor A, q_normalized, k_normalized, q_rstd, k_rstd;  // saved by forward

  struct Named {
    const char* name;
    Tensor tensor;
    bool is_gradient;
  };
  std::vector<Named> all() const;  // those that exist, without the saved ones
};

enum class Mode { kForward, kTraining };  // without, with SavedTensors and backward

enum class Values { kFiniteIfInputsAre, kAny };  // what results may hold

// Runs the library. Each call gets a workspace of exactly the stated size; fails the test if a red zone was touched,
// an input changed, or (with kFiniteIfInputsAre) a result is not finite, which poison that stayed is not either.
Results run(const OperatorCase& c, const Operands& x, Mode mode = Mode::kTraining,
            Values values = Values::kFiniteIfInputsAre);
Results run_recurrent(const OperatorCase& c, const Operands& x);

// The same results from the float64 reference, in float64.
Results run_reference(const OperatorCase& c, const Operands& x, Mode mode = Mode::kTraining);

// Each result that both have, within the tolerance of the case's dtype.
void expect_close(const OperatorCase& c, const Results& actual, const Results& expected);
void expect_finite(const Results& r);
void expect_same_bits(const Results& actual, const Results& expected);

// run against run_reference.
void check_against_reference(const OperatorCase& c, const Operands& x, Mode mode = Mode::kTraining);
inline void check_against_reference(const OperatorCase& c, Mode mode = Mode::kTraining) {
  check_against_reference(c, make_operands(c), mode);
}

// The lower-level pieces, for tests that need other tensors or calls.
gdn::ForwardTensors forward_tensors(const Operands& x, const Results& r);
gdn::BackwardTensors backward_tensors(const OperatorCase& c, const Operands& x, const Results& r);
gdn::SavedTensors saved_tensors(const Results& r);
// Poisoned results of a case; gradients have the types of their operands, or float64 throughout.
Results empty_results(const OperatorCase& c, const Operands& x, Mode mode, bool in_float64 = false);
void call_forward(const gdn::Plan& plan, const gdn::ForwardTensors& tensors);
void call_backward(const gdn::Plan& plan, const gdn::BackwardTensors& tensors);

}  // namespace cula::test
