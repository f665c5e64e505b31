// The reference itself: its adjoint against finite differences of its forward, closed forms, and its scalar types.
#include <cmath>
#include <limits>

#include "gdn/reference/reference.h"
#include "gdn/reference/scalar.h"
#include "operator_case.h"

namespace cula::test {
namespace {

using gdn::reference::decode;
using gdn::reference::encode;
using gdn::reference::Format16;
using gdn::reference::kBFloat16Format;
using gdn::reference::kFloat16Format;

constexpr double kInf = std::numeric_limits<double>::infinity();

double inner_product(const Tensor& a, const Tensor& b) {
  double sum = 0;
  for (int64_t i = 0; i < a.numel(); ++i) sum += a.at(i) * b.at(i);
  return sum;
}

double loss(const OperatorCase& c, const Operands& x) {
  const Results r = run_reference(c, x, Mode::kForward);
  return inner_product(x.grad_output, r.o) + (c.final_state ? inner_product(x.grad_final_state, r.final_state) : 0);
}

// Fourth-order central difference of the loss along `move(step)`.
double derivative(const OperatorCase& c, const Operands& x, const std::function<void(double)>& move) {
  constexpr double kStep = 1e-3;
  const auto at = [&](double step) {
    move(step);
    return loss(c, x);
  };
  const double near = at(kStep) - at(-kStep), far = at(2 * kStep) - at(-2 * kStep);
  move(0);
  return (8 * near - far) / (12 * kStep);
}

struct Pair {
  const char* name;
  Tensor operand, gradient;
};

std::vector<Pair> differentiable(const Operands& x, const Results& r) {
  const std::vector<Pair> pairs = {{"q", x.q, r.dq},
                                   {"k", x.k, r.dk},
                                   {"v", x.v, r.dv},
                                   {"g", x.g, r.dg},
                                   {"beta", x.beta, r.dbeta},
                                   {"A_log", x.A_log, r.dA_log},
                                   {"dt_bias", x.dt_bias, r.ddt_bias},
                                   {"initial_state", x.initial_state, r.dh0}};
  std::vector<Pair> existing;
  for (const Pair& pair : pairs) {
    if (pair.operand) existing.push_back(pair);
  }
  return existing;
}

void check_every_derivative(const OperatorCase& c) {
  const Operands x = make_operands(c);
  const Results r = run_reference(c, x);
  for (const Pair& pair : differentiable(x, r)) {
    const Tensor expected(DType::kFloat64, pair.operand.shape());
    for (int64_t i = 0; i < expected.numel(); ++i) {
      const double value = pair.operand.at(i);
      expected.set(i, derivative(c, x, [&](double step) { pair.operand.set(i, value + step); }));
    }
    EXPECT_TRUE(close(pair.gradient, expected, 1e-8, 1e-3)) << pair.name;
  }
}

OperatorCase small_case(int64_t B, int64_t T, int64_t H, int64_t HV) {
  OperatorCase c = make_case(DType::kFloat64, B, T, H, HV, 3, 2);
  c.problem.num_threads = 1;
  return c;
}

// Finite differences --------------------------------------------------------------------------------------------------

class ReferenceFlags : public testing::TestWithParam<int> {};

TEST_P(ReferenceFlags, AdjointIsTheDerivative) {
  OperatorCase c = small_case(1, 5, 1, 2);
  apply_flags(GetParam(), c);
  check_every_derivative(c);
}

INSTANTIATE_TEST_SUITE_P(All, ReferenceFlags, testing::ValuesIn(all_flag_sets()),
                         [](const auto& info) { return flags_name(info.param); });

TEST(Reference, AdjointOfABatchIsTheDerivative) {
  OperatorCase c = small_case(2, 4, 2, 6);
  check_every_derivative(c);
}

TEST(Reference, AdjointOfPackedSequencesIsTheDerivative) {
  OperatorCase c = small_case(1, 12, 2, 4);
  c.problem.sequence_offsets = {{0, 0, 3, 3, 9, 10, 10}};
  c.problem.use_gate = c.problem.use_beta_sigmoid = c.problem.use_qk_l2norm = true;
  check_every_derivative(c);
}

TEST(Reference, AdjointOfAnExplicitScaleIsTheDerivative) {
  OperatorCase c = small_case(1, 4, 1, 1);
  c.problem.scale = -1.7;
  check_every_derivative(c);
}

TEST(Reference, AdjointBesideAResetIsTheDerivative) {
  OperatorCase c = small_case(1, 7, 1, 2);
  const Operands x = make_operands(c);
  x.g.set(2 * 3 + 0, -kInf);
  x.g.set(2 * 0 + 1, -kInf);
  const Results r = run_reference(c, x);
  EXPECT_EQ(r.dg.at(2 * 3 + 0), 0);
  EXPECT_EQ(r.dg.at(2 * 0 + 1), 0);
  for (const Pair& pair : differentiable(x, r)) {
    for (int64_t i = 0; i < pair.operand.numel(); ++i) {
      const double value = pair.operand.at(i);
      const double expected = derivative(c, x, [&](double step) { pair.operand.set(i, value + step); });
      EXPECT_NEAR(pair.gradient.at(i), expected, 1e-8) << pair.name << " " << i;
    }
  }
}

// Lengths around the segments in which backward recomputes the states, along random directions.
class ReferenceLengths : public testing::TestWithParam<int> {};

TEST_P(ReferenceLengths, DirectionalDerivative) {
  OperatorCase c = make_case(DType::kFloat64, 1, GetParam(), 2, 4, 12, 20);
  c.problem.use_gate = c.problem.use_qk_l2norm = true;
  const Operands x = make_operands(c);
  const Results r = run_reference(c, x);
  Random random(7);
  for (const Pair& pair : differentiable(x, r)) {
    const Tensor start = pair.operand.contiguous();
    const Tensor direction = normal(random, DType::kFloat64, start.shape(), 0.1);
    const double expected = derivative(c, x, [&](double step) {
      pair.operand.filled([&](int64_t i) { return start.at(i) + step * direction.at(i); });
    });
    EXPECT_NEAR(inner_product(pair.gradient, direction), expected, 1e-8 * (1 + std::fabs(expected))) << pair.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Segments, ReferenceLengths, testing::Values(0, 1, 2, 15, 16, 17, 130));

// Meaning of the arguments --------------------------------------------------------------------------------------------

// The four equations of gdn.h, typed once more for the plainest problem: K = V = 1, where everything is a number.
TEST(Reference, ScalarStateFollowsTheEquations) {
  OperatorCase c = make_case(DType::kFloat64, 1, 6, 1, 1, 1, 1);
  c.problem.scale = 0.7;
  const Operands x = make_operands(c);
  x.k.filled([](int64_t t) { return 0.3 + 0.1 * static_cast<double>(t); });
  const Results r = run_reference(c, x, Mode::kForward);
  double S = x.initial_state.at(0);
  for (int64_t t = 0; t < 6; ++t) {
    S *= std::exp(x.g.at(t));
    S += x.k.at(t) * x.beta.at(t) * (x.v.at(t) - S * x.k.at(t));
    EXPECT_NEAR(r.o.at(t), 0.7 * S * x.q.at(t), 1e-15);
  }
  EXPECT_NEAR(r.final_state.at(0), S, 1e-15);
}

TEST(Reference, DefaultScaleIsOneOverTheRootOfK) {
  OperatorCase c = make_case(DType::kFloat64, 1, 9, 1, 1, 16, 4);
  const Operands x = make_operands(c);
  const Results implicit = run_reference(c, x);
  c.problem.scale = 0.25;
  expect_same_bits(implicit, run_reference(c, x));
}

TEST(Reference, ValueHeadReadsItsGroupsKeyHead) {
  const OperatorCase grouped = make_case(DType::kFloat64, 2, 9, 2, 6, 5, 4);
  const Operands x = make_operands(grouped);
  OperatorCase plain = make_case(DType::kFloat64, 2, 9, 6, 6, 5, 4);
  Operands repeated = x;
  const auto repeat = [](const Tensor& t) {
    std::vector<Tensor> heads;
    for (int64_t j = 0; j < 6; ++j) heads.push_back(t.slice(2, j / 3, j / 3 + 1));
    return concatenated(heads, 2);
  };
  repeated.q = repeat(x.q);
  repeated.k = repeat(x.k);
  const Results r = run_reference(grouped, x), expected = run_reference(plain, repeated);
  EXPECT_TRUE(same_bits(r.o, expected.o));
  EXPECT_TRUE(same_bits(r.final_state, expected.final_state));
  EXPECT_TRUE(same_bits(r.dg, expected.dg));
  for (int64_t h = 0; h < 2; ++h) {
    const Tensor sum = Tensor(DType::kFloat64, {2, 9, 1, 5}).filled([&](int64_t i) {
      double total = 0;
      for (int64_t j = 3 * h; j < 3 * h + 3; ++j) total += expected.dk.slice(2, j, j + 1).at(i);
      return total;
    });
    EXPECT_TRUE(close(r.dk.slice(2, h, h + 1), sum, 1e-15));
  }
}

TEST(Reference, StateLayoutIsATranspose) {
  OperatorCase c = make_case(DType::kFloat64, 2, 9, 1, 2, 5, 4);
  const Operands x = make_operands(c);
  const Results r = run_reference(c, x);
  Operands v_first = x;
  v_first.initial_state = x.initial_state.transposed(2, 3).contiguous();
  v_first.grad_final_state = x.grad_final_state.transposed(2, 3).contiguous();
  c.problem.state_v_first = true;
  const Results t = run_reference(c, v_first);
  EXPECT_TRUE(same_bits(t.o, r.o));
  EXPECT_TRUE(same_bits(t.dq, r.dq));
  EXPECT_TRUE(same_bits(t.final_state.transposed(2, 3), r.final_state));
  EXPECT_TRUE(same_bits(t.dh0.transposed(2, 3), r.dh0));
}

TEST(Reference, PackedSequencesEqualSeparateCalls) {
  OperatorCase c = make_case(DType::kFloat64, 1, 21, 1, 2, 5, 4);
  c.problem.sequence_offsets = {{0, 7, 7, 18}};
  const Operands x = make_operands(c);
  const Results r = run_reference(c, x);
  const std::vector<int64_t>& offsets = *c.problem.sequence_offsets;
  for (size_t n = 0; n + 1 < offsets.size(); ++n) {
    const auto tokens = [&](const Tensor& t) { return t.slice(1, offsets[n], offsets[n + 1]); };
    const auto state = [&](const Tensor& t) { return t.slice(0, n, n + 1); };
    OperatorCase one = make_case(DType::kFloat64, 1, offsets[n + 1] - offsets[n], 1, 2, 5, 4);
    const Operands y = operands_of_sequence(c, x, n);
    const Results s = run_reference(one, y);
    EXPECT_TRUE(same_bits(tokens(r.o), s.o));
    EXPECT_TRUE(same_bits(state(r.final_state), s.final_state));
    EXPECT_TRUE(same_bits(tokens(r.dq), s.dq));
    EXPECT_TRUE(same_bits(tokens(r.dg), s.dg));
    EXPECT_TRUE(same_bits(state(r.dh0), s.dh0));
  }
  for (const Results::Named& result : r.all()) {
    if (result.tensor.shape().size() < 3 || result.tensor.shape()[1] != 21) continue;
    EXPECT_EQ(norm(result.tensor.slice(1, 18, 21)), 0) << result.name << " of the padding";
  }
}

TEST(Reference, NoTokensPassTheStateThrough) {
  OperatorCase c = make_case(DType::kFloat64, 2, 0, 1, 2, 3, 4);
  const Operands x = make_operands(c);
  const Results r = run_reference(c, x);
  EXPECT_TRUE(same_bits(r.final_state, x.initial_state));
  EXPECT_TRUE(same_bits(r.dh0, x.grad_final_state));
}

TEST(Reference, StridedInputsEqualTheirCopies) {
  const OperatorCase c = make_case(DType::kFloat32, 2, 6, 1, 2, 5, 4);
  const Operands x = make_operands(c);
  Operands strided = x;
  strided.v = x.v.transposed(1, 3).contiguous().transposed(1, 3);
  strided.initial_state = x.initial_state.transposed(2, 3).contiguous().transposed(2, 3);
  strided.g = concatenated({x.g, x.beta}, 2).slice(2, 0, 2);
  expect_same_bits(run_reference(c, strided), run_reference(c, x));
}

TEST(Reference, ResultsAreRoundedOnceToTheirType) {
  const OperatorCase c = make_case(DType::kFloat64, 1, 20, 1, 1, 8, 8);
  const Operands x = make_operands(c);
  const Results exact = run_reference(c, x, Mode::kForward);
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    Results rounded;
    rounded.o = Tensor(dtype, exact.o.shape());
    gdn::reference::forward(c.problem, forward_tensors(x, rounded));
    EXPECT_TRUE(same_bits(rounded.o, exact.o.to(dtype)));
  }
}

TEST(Reference, ThreadsDoNotChangeABit) {
  OperatorCase c = make_case(DType::kFloat64, 1, 40, 2, 6, 9, 7);
  c.problem.sequence_offsets = {{0, 11, 11, 30, 38}};
  c.problem.use_gate = true;
  c.problem.num_threads = 1;
  const Operands x = make_operands(c);
  const Results one = run_reference(c, x);
  for (const int threads : {2, 3, 7}) {
    c.problem.num_threads = threads;
    expect_same_bits(run_reference(c, x), one);
  }
}

TEST(Reference, RejectsWhatDoesNotFit) {
  const OperatorCase c = make_case(DType::kFloat64, 1, 4, 1, 2, 3, 2);
  const Operands x = make_operands(c);
  const Results r = empty_results(c, x, Mode::kTraining, true);
  const auto forward = [&](const Operands& operands) {
    return [&] { gdn::reference::forward(c.problem, forward_tensors(operands, r)); };
  };
  Operands bad = x;
  bad.k = Tensor(DType::kFloat64, {1, 4, 1, 4});
  expect_error(forward(bad), "ValueError", {"k", "[1, 4, 1, 3]", "[1, 4, 1, 4]"});
  bad = x;
  bad.g = Tensor();
  expect_error(forward(bad), "ValueError", {"g"});
  bad = x;
  bad.beta = Tensor(DType::kInt32, {1, 4, 2});
  expect_error(forward(bad), "TypeError", {"beta", "int32"});
  gdn::ForwardTensors with_saved = forward_tensors(x, r);
  const gdn::SavedTensors saved;
  with_saved.saved = &saved;
  expect_error([&] { gdn::reference::forward(c.problem, with_saved); }, "ValueError", {"saved"});
  gdn::BackwardTensors unwanted = backward_tensors(c, x, r);
  const Tensor per_head(DType::kFloat64, {2});
  unwanted.dA_log = per_head.dl();
  expect_error([&] { gdn::reference::backward(c.problem, unwanted); }, "ValueError", {"dA_log"});
  EXPECT_TRUE(r.o.untouched() && r.dq.untouched() && r.final_state.untouched());
}

// Closed forms of CASES -----------------------------------------------------------------------------------------------

TEST(ReferenceCases, Case01_StrongGateLeavesTheTokensOwnValue) {
  for (const double gate : {-20.0, -200.0, -1e4}) {
    OperatorCase c = make_case(DType::kFloat64, 1, 70, 1, 1, 64, 64);
    c.initial_state = false;
    const Operands x = make_operands(c);
    x.g.filled([=](int64_t) { return gate; });
    const Results r = run_reference(c, x);
    const Tensor expected(DType::kFloat64, x.v.shape());
    for (int64_t t = 0; t < 70; ++t) {
      double q_k = 0;
      for (int64_t i = 0; i < 64; ++i) q_k += x.q.at(64 * t + i) * x.k.at(64 * t + i);
      for (int64_t i = 0; i < 64; ++i) expected.set(64 * t + i, x.beta.at(t) * q_k * x.v.at(64 * t + i) / 8);
    }
    EXPECT_TRUE(close(r.o, expected, 4 * std::exp(gate) + 1e-15, 0)) << gate;
    for (int64_t t = 0; t < 70; ++t) EXPECT_LT(std::fabs(r.dg.at(t)), 1e-6) << gate;
    if (gate == -1e4) {
      EXPECT_EQ(norm(r.dg), 0);
    }
  }
}

TEST(ReferenceCases, Case02_ResetEqualsTwoRuns) {
  OperatorCase c = make_case(DType::kFloat64, 1, 100, 1, 2, 16, 16);
  c.initial_state = false;
  const Operands x = make_operands(c);
  const Results clean = run_reference(c, x);
  x.g.set(2 * 37, -kInf);
  const Results r = run_reference(c, x);
  EXPECT_EQ(r.dg.at(2 * 37), 0);
  const auto head = [](const Tensor& t, int64_t j) { return t.slice(2, j, j + 1); };
  EXPECT_TRUE(same_bits(head(r.o, 1), head(clean.o, 1)));
  EXPECT_TRUE(same_bits(head(r.dv, 1), head(clean.dv, 1)));
  OperatorCase parts = c;
  parts.problem.sequence_offsets = {{0, 37, 100}};
  parts.final_state = false;
  const Results split = run_reference(parts, x, Mode::kForward);
  EXPECT_TRUE(same_bits(head(r.o, 0), head(split.o, 0)));
}

TEST(Reference, ResetForgetsEvenNaN) {
  const OperatorCase c = make_case(DType::kFloat64, 1, 6, 1, 1, 4, 4);
  const Operands x = make_operands(c);
  x.initial_state.filled([](int64_t) { return kInf; });
  x.g.set(3, -kInf);
  const Results r = run_reference(c, x);
  EXPECT_FALSE(all_finite(r.o.slice(1, 2, 3)));
  EXPECT_TRUE(all_finite(r.o.slice(1, 3, 6)));
  EXPECT_TRUE(all_finite(r.final_state));
  EXPECT_TRUE(all_finite(r.dv.slice(1, 3, 6)));
  // Nor does the gradient pass: what lies behind the reset can not harm what lies before it.
  const Operands y = make_operands(c);
  y.g.set(3, -kInf);
  y.grad_output.slice(1, 4, 6).filled([](int64_t) { return kInf; });
  const Results s = run_reference(c, y);
  EXPECT_FALSE(all_finite(s.dk.slice(1, 3, 6)));
  EXPECT_TRUE(all_finite(s.dk.slice(1, 0, 3)));
  EXPECT_TRUE(all_finite(s.dh0));
  EXPECT_EQ(s.dg.at(3), 0);
}

TEST(ReferenceCases, Case03_RepeatedKeyReturnsTheLatestValue) {
  OperatorCase c = make_case(DType::kFloat64, 1, 130, 1, 1, 16, 8);
  c.initial_state = false;
  Operands x = make_operands(c);
  Random random(3);
  const Tensor key = unit_rows(random, DType::kFloat64, {16});
  x.q = x.k = key.view({1, 130, 1, 16}, {0, 0, 0, 1});
  x.g.filled([](int64_t) { return 0.0; });
  x.beta.filled([](int64_t) { return 1.0; });
  const Results r = run_reference(c, x, Mode::kForward);
  const Tensor expected = Tensor(DType::kFloat64, x.v.shape()).filled([&](int64_t i) { return x.v.at(i) / 4; });
  EXPECT_TRUE(close(r.o, expected, 1e-14));
  const Tensor state =
      Tensor(DType::kFloat64, {1, 1, 16, 8}).filled([&](int64_t i) { return key.at(i / 8) * x.v.at(129 * 8 + i % 8); });
  EXPECT_TRUE(close(r.final_state, state, 1e-14));
}

TEST(ReferenceCases, Case09_HugeStateDecaysAlone) {
  OperatorCase c = make_case(DType::kFloat16, 1, 64, 1, 1, 8, 8);
  Operands x = make_operands(c);
  for (const Tensor& tensor : {x.q, x.k, x.v}) tensor.filled([](int64_t) { return 0.0; });
  x.g.filled([](int64_t) { return -4.0 / 64; });
  x.initial_state.filled([](int64_t) { return 65536.0; });
  const Results r = run_reference(c, x, Mode::kForward);
  EXPECT_EQ(norm(r.o), 0);
  for (const double value : r.final_state.values()) EXPECT_NEAR(value, 1200.33, 0.005);
}

TEST(ReferenceCases, Case11_KeysBeyondUnitNorm) {
  OperatorCase c = make_case(DType::kFloat64, 1, 64, 2, 2, 64, 8);
  c.initial_state = false;
  const Operands x = make_operands(c);
  x.beta.filled([](int64_t) { return 1.0; });
  x.g.filled([](int64_t) { return 0.0; });
  const Results unit = run_reference(c, x);
  Random random(11);
  x.k.slice(2, 0, 1).filled([&](int64_t) { return random.normal(); });
  const Results r = run_reference(c, x);
  EXPECT_TRUE(same_bits(r.o.slice(2, 1, 2), unit.o.slice(2, 1, 2)));
  const double largest = norm(r.final_state.slice(1, 0, 1));
  EXPECT_GT(largest, 1e40);
  EXPECT_TRUE(std::isfinite(largest));
}

OperatorCase gate_case(int64_t T, int64_t HV) {
  OperatorCase c = make_case(DType::kFloat64, 1, T, 1, HV, 8, 8);
  c.problem.use_gate = true;
  return c;
}

TEST(ReferenceCases, Case12_OverflowingRateTimesUnderflowingSoftplus) {
  const OperatorCase c = gate_case(64, 2);
  const Operands x = make_operands(c);
  const Results ordinary = run_reference(c, x);
  for (const double raw : {-200.0, -1000.0}) {
    x.A_log.set(0, raw == -200 ? 100 : 800);
    x.dt_bias.set(0, 0);
    x.g.slice(2, 0, 1).filled([=](int64_t) { return raw; });
    const Results r = run_reference(c, x);
    for (const Results::Named& result : r.all()) EXPECT_TRUE(all_finite(result.tensor)) << result.name << raw;
    // The decay is e^-3.7e-44 = 1: the same as no gate at all.
    OperatorCase plain = c;
    plain.problem.use_gate = false;
    Operands no_decay = x;
    no_decay.A_log = no_decay.dt_bias = Tensor();
    no_decay.g = constant(DType::kFloat64, x.g.shape(), 0);
    const Results expected = run_reference(plain, no_decay, Mode::kForward);
    EXPECT_TRUE(same_bits(r.o.slice(2, 0, 1), expected.o.slice(2, 0, 1)));
    EXPECT_TRUE(same_bits(r.o.slice(2, 1, 2), ordinary.o.slice(2, 1, 2)));
    EXPECT_EQ(r.dA_log.at(1), ordinary.dA_log.at(1));
  }
}

// Both factors leave the range of float64, their product is e^-1.
TEST(Reference, GateIsExactWhereItsFactorsAreNot) {
  const OperatorCase c = gate_case(10, 1);
  const Operands x = make_operands(c);
  x.A_log.set(0, 999);
  x.dt_bias.set(0, -500);
  x.g.filled([](int64_t) { return -500.0; });
  OperatorCase plain = c;
  plain.problem.use_gate = false;
  Operands y = x;
  y.A_log = y.dt_bias = Tensor();
  y.g = constant(DType::kFloat64, x.g.shape(), -std::exp(-1.0));
  const Results r = run_reference(c, x), expected = run_reference(plain, y);
  EXPECT_TRUE(close(r.o, expected.o, 1e-12));
  // softplus is e^z here, so its derivative is itself.
  EXPECT_TRUE(close(r.dg, expected.dg.filled([&](int64_t i) { return expected.dg.at(i) * -std::exp(-1.0); }), 1e-12));
}

// One token, so that the gradients are what the gate makes of the gradient by the log decay.
TEST(ReferenceCases, Case13_SoftplusFarAboveZero) {
  struct Row {
    double A_log, raw, bias, log_decay, slope;
  };
  for (const Row& row : {Row{0, 60, 40, -100, -1}, Row{2.77, 60, 40, -1595.86, -15.9586}}) {
    // A decay of e^-100 leaves no gradient to see: a state of e^100 brings it back into range.
    const OperatorCase c = gate_case(1, 1);
    const Operands x = make_operands(c);
    x.A_log.set(0, row.A_log);
    x.g.set(0, row.raw);
    x.dt_bias.set(0, row.bias);
    x.initial_state.filled([](int64_t) { return std::exp(100.0); });
    const Results r = run_reference(c, x);

    OperatorCase plain = c;
    plain.problem.use_gate = false;
    Operands y = x;
    y.A_log = y.dt_bias = Tensor();
    y.g = constant(DType::kFloat64, {1, 1, 1}, row.log_decay);
    const Results direct = run_reference(plain, y);
    if (row.A_log == 0) {
      EXPECT_TRUE(close(r.final_state, direct.final_state, 1e-12));
      EXPECT_NEAR(r.dg.at(0) / direct.dg.at(0), row.slope, 1e-12);
      EXPECT_NEAR(r.dA_log.at(0) / direct.dg.at(0), row.log_decay, 1e-10);
    } else {
      EXPECT_NEAR(r.dg.at(0), 0, 1e-300);  // e^-1495.86 underflows
    }
    EXPECT_EQ(r.ddt_bias.at(0), r.dg.at(0));
  }
}

// Scalars -------------------------------------------------------------------------------------------------------------

TEST(Scalars, EveryBitPatternSurvivesARoundTrip) {
  for (const Format16 format : {kFloat16Format, kBFloat16Format}) {
    for (int bits = 0; bits < 0x10000; ++bits) {
      const double value = decode(format, static_cast<uint16_t>(bits));
      if (std::isnan(value)) {
        EXPECT_TRUE(std::isnan(decode(format, encode(format, value))));
      } else {
        ASSERT_EQ(encode(format, value), bits);
      }
    }
  }
}

TEST(Scalars, RoundsToNearestAndTiesToEven) {
  for (const Format16 format : {kFloat16Format, kBFloat16Format}) {
    for (int bits = 0; bits + 1 < format.infinity(); ++bits) {
      const double low = decode(format, static_cast<uint16_t>(bits)),
                   high = decode(format, static_cast<uint16_t>(bits + 1));
      const double middle = (low + high) / 2;
      ASSERT_EQ(encode(format, middle), bits % 2 == 0 ? bits : bits + 1);
      ASSERT_EQ(encode(format, std::nextafter(middle, 0)), bits);
      ASSERT_EQ(encode(format, std::nextafter(middle, kInf)), bits + 1);
      ASSERT_EQ(encode(format, -std::nextafter(middle, kInf)), 0x8000 + bits + 1);
    }
  }
}

TEST(Scalars, KnownValues) {
  EXPECT_EQ(encode(kFloat16Format, 1.0), 0x3c00);
  EXPECT_EQ(encode(kFloat16Format, -2.0), 0xc000);
  EXPECT_EQ(encode(kFloat16Format, 65504), 0x7bff);
  EXPECT_EQ(encode(kFloat16Format, 65519.99), 0x7bff);
  EXPECT_EQ(encode(kFloat16Format, 65520), 0x7c00);
  EXPECT_EQ(encode(kFloat16Format, 1e300), 0x7c00);
  EXPECT_EQ(encode(kFloat16Format, 0x1p-24), 1);
  EXPECT_EQ(encode(kFloat16Format, 1e-300), 0);
  EXPECT_EQ(encode(kFloat16Format, -kInf), 0xfc00);
  EXPECT_EQ(encode(kBFloat16Format, 1.0), 0x3f80);
  EXPECT_EQ(encode(kBFloat16Format, 0.1), 0x3dcd);
  EXPECT_EQ(encode(kBFloat16Format, 3.4e38), 0x7f80);
  EXPECT_EQ(encode(kBFloat16Format, 3.38e38), 0x7f7e);
  EXPECT_TRUE(std::signbit(decode(kBFloat16Format, 0x8000)));
}

}  // namespace
}  // namespace cula::test
