// CASES.md by number: the inputs behind public fault reports about kernels of this operator. Those about one stage, one
// rejected argument or all sizes are in the other files, with the number in the test's name.
#include <sys/mman.h>

#include <cmath>
#include <limits>
#include <thread>

#include "gdn/reference/scalar.h"
#include "operator_case.h"

namespace cula::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr DType kLowTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

Tensor head(const Tensor& t, int64_t j) { return t.slice(2, j, j + 1); }
Tensor tokens(const Tensor& t, int64_t begin, int64_t end) { return t.slice(1, begin, end); }

void fill(const Tensor& t, double value) {
  t.filled([=](int64_t) { return value; });
}

Operands tokens_of(const Operands& x, int64_t begin, int64_t end) {
  Operands part = x;
  for (Tensor* t : {&part.q, &part.k, &part.v, &part.g, &part.beta, &part.grad_output}) *t = tokens(*t, begin, end);
  return part;
}

// Strong gates --------------------------------------------------------------------------------------------------------

class StrongGate : public testing::TestWithParam<std::tuple<DType, int>> {};

TEST_P(StrongGate, Case01_StaysFiniteAndExact) {
  const auto [dtype, gate] = GetParam();
  for (const int64_t T : {64, 70}) {
    OperatorCase c = make_case(dtype, 1, T, 1, 1, 64, 64);
    c.initial_state = false;
    const Operands x = make_operands(c);
    fill(x.g, gate);
    const Results r = run(c, x);
    expect_finite(r);
    expect_close(c, r, run_reference(c, x));
    if (gate > -20) continue;
    // Nothing but the token itself is left.
    const Tensor expected(DType::kFloat64, x.v.shape());
    for (int64_t t = 0; t < T; ++t) {
      double q_k = 0;
      for (int64_t i = 0; i < 64; ++i) q_k += x.q.at(64 * t + i) * x.k.at(64 * t + i);
      for (int64_t i = 0; i < 64; ++i) expected.set(64 * t + i, x.beta.at(t) * q_k * x.v.at(64 * t + i) / 8);
    }
    EXPECT_TRUE(close(r.o, expected, output_tolerance(dtype), 0));
    for (const double value : r.dg.values()) EXPECT_LT(std::fabs(value), gate == -20 ? 1e-6 : 1e-30);
    if (gate == -10000) {
      EXPECT_EQ(norm(r.dg), 0);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, StrongGate,
                         testing::Combine(testing::ValuesIn(kLowTypes), testing::Values(-2, -20, -200, -10000)),
                         [](const auto& info) {
                           return concat(dtype_name(std::get<0>(info.param)), "_minus", -std::get<1>(info.param));
                         });

TEST(Cases, Case02_MinusInfinityGate) {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    SCOPED_TRACE(dtype_name(dtype));
    OperatorCase c = make_case(dtype, 1, 100, 2, 2, 64, 64);
    const Operands x = make_operands(c);
    Random random(2);
    x.g.filled([&](int64_t) { return -random.uniform(); });
    const Results clean = run(c, x);
    x.g.set(37 * 2 + 1, -kInf);
    const Results r = run(c, x);
    expect_finite(r);
    EXPECT_EQ(r.dg.at(37 * 2 + 1), 0);
    EXPECT_TRUE(same_bits(head(r.o, 0), head(clean.o, 0)));
    EXPECT_TRUE(same_bits(head(r.dq, 0), head(clean.dq, 0)));
    EXPECT_TRUE(same_bits(head(r.dk, 0), head(clean.dk, 0)));
    EXPECT_TRUE(same_bits(head(r.dv, 0), head(clean.dv, 0)));
    EXPECT_TRUE(same_bits(head(r.dg, 0), head(clean.dg, 0)));
    EXPECT_TRUE(same_bits(head(r.dbeta, 0), head(clean.dbeta, 0)));
    expect_close(c, r, run_reference(c, x));

    // Two runs: the second starts from nothing, and nothing comes back from it into the first.
    OperatorCase first = c, second = c;
    first.problem.tokens = 37;
    second.problem.tokens = 63;
    Operands a = tokens_of(x, 0, 37), b = tokens_of(x, 37, 100);
    fill(b.g.slice(1, 0, 1), 0);  // decays the absent state
    second.initial_state = false;
    b.initial_state = Tensor();
    a.grad_final_state = constant(stat_dtype(dtype), x.grad_final_state.shape(), 0);
    const Results before = run(first, a), after = run(second, b);
    const double o = output_tolerance(dtype), d = gradient_tolerance(dtype);
    EXPECT_TRUE(close(head(tokens(r.o, 0, 37), 1), head(before.o, 1), 2 * o));
    EXPECT_TRUE(close(head(tokens(r.o, 37, 100), 1), head(after.o, 1), 2 * o));
    EXPECT_TRUE(close(head(tokens(r.dk, 0, 37), 1), head(before.dk, 1), 2 * d));
    EXPECT_TRUE(close(head(tokens(r.dk, 37, 100), 1), head(after.dk, 1), 2 * d));
    EXPECT_TRUE(close(r.final_state.slice(1, 1, 2), after.final_state.slice(1, 1, 2), 2 * o));
    EXPECT_TRUE(close(r.dh0.slice(1, 1, 2), before.dh0.slice(1, 1, 2), 2 * d));
  }
}

TEST(Cases, Case02_ResetsAnywhere) {
  const std::vector<std::vector<int64_t>> rows = {{0}, {63}, {64}, {65}, {99}, {10, 11, 12}, {5, 63, 64, 90}};
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kBFloat16}) {
    for (size_t i = 0; i <= rows.size(); ++i) {
      SCOPED_TRACE(concat(dtype_name(dtype), " ", i));
      const OperatorCase c = make_case(dtype, 1, 100, 1, 2, 16, 24);
      const Operands x = make_operands(c);
      if (i == rows.size()) {
        fill(x.g, -kInf);
      } else {
        for (const int64_t t : rows[i]) x.g.set(2 * t, -kInf);
      }
      const Results r = run(c, x);
      expect_finite(r);
      expect_close(c, r, run_reference(c, x));
      for (int64_t j = 0; j < x.g.numel(); ++j) {
        if (std::isinf(x.g.at(j))) {
          EXPECT_EQ(r.dg.at(j), 0);
        }
      }
      expect_close(c, run_recurrent(c, x), run_reference(c, x, Mode::kForward));
    }
  }
}

// A raw gate of +inf is the same reset, through the gate of the kernel.
TEST(Cases, Case02_ResetThroughTheGateInKernel) {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kBFloat16}) {
    OperatorCase c = make_case(dtype, 1, 100, 1, 2, 16, 24);
    c.problem.use_gate = true;
    const Operands x = make_operands(c);
    x.g.set(2 * 37, kInf);
    const Results r = run(c, x);
    expect_finite(r);
    EXPECT_EQ(r.dg.at(2 * 37), 0);
    expect_close(c, r, run_reference(c, x));
  }
}

TEST(Cases, Case03_ZeroGate) {
  OperatorCase c = make_case(DType::kFloat16, 2, 1000, 3, 3, 64, 64);
  c.problem.batch = 1;  // the second row of the batch runs below, with all gates zero
  const Operands x = make_operands(c);
  Random random(3);
  x.g.filled([&](int64_t i) { return random.uniform() < 0.5 ? 0 : x.g.at(i); });
  check_against_reference(c, x);
  fill(x.g, 0);
  check_against_reference(c, x);
}

TEST(Cases, Case03_RepeatedKeyReturnsTheLatestValue) {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    OperatorCase c = make_case(dtype, 1, 130, 1, 1, 64, 32);
    c.initial_state = false;
    Operands x = make_operands(c);
    // Sixteen elements of 1/4: a unit key in every type.
    const Tensor key =
        Tensor(dtype, {64}).filled([](int64_t i) { return i % 4 == 0 ? (i % 8 == 0 ? 0.25 : -0.25) : 0; });
    x.q = x.k = key.view({1, 130, 1, 64}, {0, 0, 0, 1});
    fill(x.g, 0);
    fill(x.beta, 1);
    const Results r = run(c, x, Mode::kForward);
    const Tensor expected = Tensor(DType::kFloat64, x.v.shape()).filled([&](int64_t i) { return x.v.at(i) / 8; });
    const Tensor state = Tensor(DType::kFloat64, {1, 1, 64, 32}).filled([&](int64_t i) {
      return key.at(i / 32) * x.v.at(129 * 32 + i % 32);
    });
    // The output is a telescoping sum of up to 64 residuals v_t - v_{t-1}, each with a rounding error of its own where
    // residuals are operands of 16 bits: eight times the error of one.
    const double tolerance = dtype == DType::kBFloat16 ? 2e-2 : output_tolerance(dtype);
    EXPECT_TRUE(close(r.o, expected, tolerance, 0)) << dtype_name(dtype);
    EXPECT_TRUE(close(r.final_state, state, tolerance, 0)) << dtype_name(dtype);
  }
}

TEST(Cases, Case04_VeryStrongRandomGatesInTheTail) {
  for (const int64_t T : {75, 128}) {
    OperatorCase c = make_case(DType::kFloat16, 2, T, 4, 4, 64, 64);
    c.problem.scale = 1;
    const Operands x = make_operands(c);
    Random random(4);
    x.g.filled([&](int64_t) { return -std::log1p(std::exp(-random.normal())) / 0.01; });
    const Results r = run(c, x);
    expect_finite(r);
    expect_close(c, r, run_reference(c, x));
  }
}

TEST(Cases, Case14_GateGradientAtStrongDecay) {
  for (const bool constant_gate : {false, true}) {
    OperatorCase c = make_case(DType::kBFloat16, 1, 128, 2, 2, 128, 128);
    c.problem.use_gate = !constant_gate;
    const Operands x = make_operands(c);
    if (constant_gate) {
      fill(x.g, -5);
    } else {
      Random random(14);
      x.A_log.filled([&](int64_t) { return std::log(random.uniform(0, 16)); });
      fill(x.dt_bias, 1);
    }
    const Results r = run(c, x), expected = run_reference(c, x);
    const double bound = std::min(2e-2, 4 * relative_error(r.dv, expected.dv));
    EXPECT_LE(relative_error(r.dg, expected.dg), bound);
    if (constant_gate) continue;
    EXPECT_LE(relative_error(r.dA_log, expected.dA_log), bound);
    EXPECT_LE(relative_error(r.ddt_bias, expected.ddt_bias), bound);
  }
}

TEST(Cases, Case23_TrainingLikeGatesLarge) {
  struct Row {
    int64_t T, V;
  };
  for (const Row& row : {Row{2048, 256}, Row{17000, 128}}) {
    SCOPED_TRACE(row.T);
    OperatorCase c = make_case(DType::kBFloat16, 1, row.T, 1, 1, 128, row.V);
    c.problem.use_gate = true;
    const Operands x = make_operands(c);
    Random random(23);
    x.A_log.filled([&](int64_t) { return std::log(random.uniform(0, 16)); });
    // The bias whose softplus is log-uniform in (1e-3, 0.1), as layers initialise it.
    x.dt_bias.filled(
        [&](int64_t) { return std::log(std::expm1(std::exp(random.uniform(std::log(1e-3), std::log(0.1))))); });
    x.g.filled([&](int64_t) { return 5 * random.normal(); });
    const Results r = run(c, x);
    expect_finite(r);
    expect_close(c, r, run_reference(c, x));
  }
}

// States --------------------------------------------------------------------------------------------------------------

TEST(Cases, Case05_FinalStateOfAPartialChunk) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const int64_t T : {63, 500, 1000}) {
      SCOPED_TRACE(concat(dtype_name(dtype), " ", T));
      check_against_reference(make_case(dtype, 1, T, 2, 2, 128, 128), Mode::kForward);
    }
  }
}

TEST(Cases, Case06_StepAfterPrefill) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const double tolerance = dtype == DType::kFloat32 ? 1e-6 : 8e-3;
    const OperatorCase c = make_case(dtype, 1, 5, 1, 2, 64, 64);
    const Operands x = make_operands(c);
    const Results whole = run(c, x, Mode::kForward);
    OperatorCase prefill = c, step = c;
    prefill.problem.tokens = 4;
    step.problem.tokens = 1;
    const Results before = run(prefill, tokens_of(x, 0, 4), Mode::kForward);
    Operands last = tokens_of(x, 4, 5);
    last.initial_state = before.final_state;
    for (const bool recurrent : {false, true}) {
      const Results after = recurrent ? run_recurrent(step, last) : run(step, last, Mode::kForward);
      EXPECT_LE(relative_error(after.o, tokens(whole.o, 4, 5)), tolerance) << recurrent;
      EXPECT_LE(relative_error(after.final_state, whole.final_state), tolerance) << recurrent;
    }
  }
}

TEST(Cases, Case09_HugeStateBesideFloat16) {
  OperatorCase c = make_case(DType::kFloat16, 1, 64, 1, 1, 64, 64);
  c.problem.chunk_size = 64;
  const Operands x = make_operands(c);
  for (const Tensor& t : {x.q, x.k, x.v}) fill(t, 0);
  fill(x.g, -4.0 / 64);
  fill(x.initial_state, 65536);
  const Results r = run(c, x, Mode::kForward);
  EXPECT_EQ(norm(r.o), 0);
  for (const double value : r.final_state.values()) EXPECT_NEAR(value, 1200.33, 0.02);

  // With a query the output may leave the range of float16; the state may not.
  fill(x.q, 1);
  const Results saturated = run(c, x, Mode::kForward, Values::kAny);
  EXPECT_TRUE(same_bits(saturated.final_state, r.final_state));
  for (const double value : saturated.o.values()) EXPECT_FALSE(std::isnan(value));
}

TEST(Cases, Case10_InitialStateInBf16) {
  OperatorCase c = make_case(DType::kBFloat16, 1, 130, 1, 2, 64, 64);
  c.state_dtype = DType::kBFloat16;
  const Operands x = make_operands(c);
  const Results low = run(c, x);
  EXPECT_EQ(low.final_state.dtype(), DType::kFloat32);
  EXPECT_EQ(low.dh0.dtype(), DType::kBFloat16);
  expect_close(c, low, run_reference(c, x));
  OperatorCase wide = c;
  wide.state_dtype.reset();
  Operands y = x;
  y.initial_state = x.initial_state.to(DType::kFloat32);
  const Results high = run(wide, y);
  EXPECT_TRUE(same_bits(low.o, high.o));
  EXPECT_TRUE(same_bits(low.final_state, high.final_state));
  EXPECT_TRUE(same_bits(low.dq, high.dq));
  EXPECT_TRUE(same_bits(low.dh0, high.dh0.to(DType::kBFloat16)));
}

TEST(Cases, Case18_SplitRuns) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const OperatorCase c = make_case(dtype, 1, 512, 1, 2, 64, 32);
    const Operands x = make_operands(c);
    const Results whole = run(c, x);
    for (const int64_t split : {1, 63, 64, 65, 256, 511}) {
      SCOPED_TRACE(concat(dtype_name(dtype), " ", split));
      OperatorCase first = c, second = c;
      first.problem.tokens = split;
      second.problem.tokens = 512 - split;
      Operands a = tokens_of(x, 0, split), b = tokens_of(x, split, 512);
      b.initial_state = run(first, a, Mode::kForward).final_state;
      const Results after = run(second, b);
      a.grad_final_state = after.dh0;
      const Results before = run(first, a);
      const auto joined = [](const Tensor& s, const Tensor& t) { return concatenated({s, t}, 1); };
      Results r;
      r.o = joined(before.o, after.o);
      r.final_state = after.final_state;
      r.dq = joined(before.dq, after.dq);
      r.dk = joined(before.dk, after.dk);
      r.dv = joined(before.dv, after.dv);
      r.dg = joined(before.dg, after.dg);
      r.dbeta = joined(before.dbeta, after.dbeta);
      r.dh0 = before.dh0;
      expect_close(c, r, whole);
      if (split % 64 == 0) {
        EXPECT_TRUE(same_bits(r.o, whole.o));
        EXPECT_TRUE(same_bits(r.final_state, whole.final_state));
      }
    }
  }
}

TEST(Cases, Case34_StateLayouts) {
  for (const DType dtype : kLowTypes) {
    for (const int64_t V : {128, 64}) {
      for (const bool initial_state : {false, true}) {
        OperatorCase c = make_case(dtype, 1, 100, 1, 2, 64, V);
        c.initial_state = initial_state;
        const Operands x = make_operands(c);
        const Results r = run(c, x);
        OperatorCase t = c;
        t.problem.state_v_first = true;
        Operands y = x;
        const auto transposed = [](const Tensor& state) { return state.transposed(2, 3).contiguous(); };
        if (initial_state) y.initial_state = transposed(x.initial_state);
        y.grad_final_state = transposed(x.grad_final_state);
        Results s = run(t, y);
        s.final_state = s.final_state.transposed(2, 3);
        if (initial_state) s.dh0 = s.dh0.transposed(2, 3);
        expect_same_bits(s, r);
      }
    }
  }
}

// Types and precision -------------------------------------------------------------------------------------------------

TEST(Cases, Case07_Bf16Gate) {
  OperatorCase c = make_case(DType::kBFloat16, 1, 128, 1, 2, 128, 128);
  c.gate_dtype = DType::kBFloat16;
  const Operands x = make_operands(c);
  fill(x.g, -0.03);
  const Results low = run(c, x);
  OperatorCase wide = c;
  wide.gate_dtype.reset();
  Operands y = x;
  y.g = x.g.to(DType::kFloat32);
  const Results high = run(wide, y);
  EXPECT_TRUE(same_bits(low.o, high.o));
  EXPECT_TRUE(same_bits(low.final_state, high.final_state));
  EXPECT_TRUE(same_bits(low.dq, high.dq));
  EXPECT_TRUE(same_bits(low.dbeta, high.dbeta));
  EXPECT_EQ(low.dg.dtype(), DType::kBFloat16);
  EXPECT_TRUE(same_bits(low.dg, high.dg.to(DType::kBFloat16)));
}

TEST(Cases, Case08_Float32BetaIsNotRounded) {
  double state_error[2] = {};
  int row = 0;
  for (const int64_t T : {256, 2048}) {
    const OperatorCase c = make_case(DType::kBFloat16, 1, T, 1, 1, 64, 64);
    const Operands x = make_operands(c);
    fill(x.beta, 0.3011);
    fill(x.g, -1e-3);
    const Results r = run(c, x), expected = run_reference(c, x);
    expect_close(c, r, expected);
    EXPECT_EQ(r.dbeta.dtype(), DType::kFloat32);
    state_error[row++] = relative_error(r.final_state, expected.final_state);
  }
  EXPECT_LE(state_error[1], 1.5 * state_error[0]);
}

// In float32 the difference between beta and beta rounded to bf16 is far above the error.
TEST(Cases, Case08_SigmoidOfFloat32AndBf16Logits) {
  for (const DType logits : {DType::kFloat32, DType::kBFloat16}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      OperatorCase c = make_case(dtype, 1, 130, 1, 2, 64, 64);
      c.problem.use_beta_sigmoid = true;
      c.beta_dtype = logits;
      const Operands x = make_operands(c);
      const Results r = run(c, x), expected = run_reference(c, x);
      EXPECT_TRUE(close(r.o, expected.o, output_tolerance(dtype)));
      EXPECT_TRUE(close(r.final_state, expected.final_state, output_tolerance(dtype)));
      EXPECT_TRUE(close(r.dbeta, expected.dbeta, std::max(gradient_tolerance(dtype), output_tolerance(logits))));
    }
  }
}

TEST(Cases, Case11_KeysWithoutUnitNorm) {
  OperatorCase c = make_case(DType::kFloat32, 1, 64, 2, 2, 64, 64);
  c.initial_state = false;
  const Operands x = make_operands(c);
  fill(x.beta, 1);
  fill(head(x.g, 0), 0);
  Random random(11);
  head(x.k, 0).filled([&](int64_t) { return random.normal(); });
  const Results r = run(c, x, Mode::kTraining, Values::kAny);
  OperatorCase one = c;
  one.problem.heads = one.problem.value_heads = 1;
  Operands y = x;
  for (Tensor* t : {&y.q, &y.k, &y.v, &y.g, &y.beta, &y.grad_output}) *t = head(*t, 1);
  y.grad_final_state = x.grad_final_state.slice(1, 1, 2);
  const Results alone = run(one, y);
  EXPECT_TRUE(same_bits(head(r.o, 1), alone.o));
  EXPECT_TRUE(same_bits(r.final_state.slice(1, 1, 2), alone.final_state));
  EXPECT_TRUE(same_bits(head(r.dq, 1), alone.dq));
  EXPECT_TRUE(same_bits(head(r.dk, 1), alone.dk));
  EXPECT_TRUE(same_bits(head(r.dv, 1), alone.dv));
  EXPECT_TRUE(same_bits(head(r.dg, 1), alone.dg));

  // Squared norm 1.5 and beta at most 1: |1 - beta |k|^2| < 1, a stable recurrence.
  const Operands z = make_operands(c);
  z.k.filled([&](int64_t i) { return z.k.at(i) * std::sqrt(1.5); });
  const Results stable = run(c, z);
  expect_finite(stable);
  expect_close(c, stable, run_reference(c, z));
}

TEST(Cases, Case12_OverflowingRateInOneHead) {
  struct Row {
    double A_log, raw;
  };
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kBFloat16}) {
    for (const Row& row : {Row{100, -200}, Row{800, -1000}}) {  // past float32, past float64
      SCOPED_TRACE(concat(dtype_name(dtype), " ", row.A_log));
      OperatorCase c = make_case(dtype, 1, 64, 2, 2, 32, 32);
      c.problem.use_gate = true;
      const Operands x = make_operands(c);
      const Results ordinary = run(c, x);
      x.A_log.set(0, row.A_log);
      x.dt_bias.set(0, 0);
      fill(head(x.g, 0), row.raw);
      const Results r = run(c, x);
      expect_finite(r);
      expect_close(c, r, run_reference(c, x));
      EXPECT_TRUE(same_bits(head(r.o, 1), head(ordinary.o, 1)));
      EXPECT_TRUE(same_bits(head(r.dg, 1), head(ordinary.dg, 1)));
      EXPECT_EQ(r.dA_log.at(1), ordinary.dA_log.at(1));
      expect_close(c, run_recurrent(c, x), run_reference(c, x, Mode::kForward));
    }
  }
}

TEST(Cases, Case13_RawGatesFarAboveZero) {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32}) {
    for (const double raw : {15.0, 19.0, 21.0, 25.0, 60.0}) {
      OperatorCase c = make_case(dtype, 1, 70, 1, 1, 16, 16);
      c.problem.use_gate = true;
      const Operands x = make_operands(c);
      // A weak rate, so that the large input leaves something to compare.
      fill(x.A_log, -std::log(raw) - 2);
      fill(x.dt_bias, raw / 2);
      fill(x.g, raw / 2);
      SCOPED_TRACE(concat(dtype_name(dtype), " ", raw));
      check_against_reference(c, x);
    }
  }
}

// What the library can choose on a CPU: the chunk size, and with the threads the columns of a unit of work.
TEST(Cases, Case15_EverySchedule) {
  for (const int64_t D : {64, 128}) {
    for (const int64_t T : {64, 128, 256}) {
      OperatorCase c = make_case(DType::kFloat16, 1, T, 1, 1, D, D);
      const Operands x = make_operands(c);
      fill(x.g, 0);
      const Results expected = run_reference(c, x);
      for (const int64_t chunk_size : {16, 32, 64}) {
        for (const int threads : {1, 2, 16}) {
          SCOPED_TRACE(concat("D=", D, " T=", T, " C=", chunk_size, " threads=", threads));
          c.problem.chunk_size = chunk_size;
          c.problem.num_threads = threads;
          const Results r = run(c, x);
          EXPECT_LE(relative_error(r.dk, expected.dk), 1e-2);
          EXPECT_LE(relative_error(r.dbeta, expected.dbeta), 1e-2);
          expect_close(c, r, expected);
        }
      }
    }
  }
}

TEST(Cases, Case16_PositiveInputs) {
  for (const int64_t D : {64, 100}) {
    OperatorCase c = make_case(DType::kFloat16, 1, 1024, 2, 2, D, D);
    c.problem.use_qk_l2norm = true;
    const Operands x = make_operands(c);
    Random random(16);
    for (const Tensor& t : {x.q, x.k, x.v}) t.filled([&](int64_t) { return random.uniform(); });
    x.g.filled([&](int64_t) { return -std::log1p(std::exp(-random.normal())) / 0.1; });
    const Results r = run(c, x), expected = run_reference(c, x);
    EXPECT_LE(relative_error(r.dbeta, expected.dbeta), 2e-2);
    EXPECT_LE(relative_error(r.dg, expected.dg), 2e-2);
    expect_close(c, r, expected);
  }
}

TEST(Cases, Case20_ZeroRowsWithL2Norm) {
  for (const DType dtype : kLowTypes) {
    OperatorCase c = make_case(dtype, 1, 70, 1, 1, 32, 32);
    c.problem.use_qk_l2norm = true;
    const Operands x = make_operands(c);
    fill(tokens(x.q, 0, 10), 0);
    fill(tokens(x.k, 0, 10), 0);
    const Results r = run(c, x);
    EXPECT_EQ(norm(tokens(r.o, 0, 10)), 0);
    expect_close(c, r, run_reference(c, x));

    // The gradient at zero is that by the normalised row, times 1 / sqrt(1e-6).
    OperatorCase plain = c;
    plain.problem.use_qk_l2norm = false;
    Operands y = x;
    y.q = r.q_normalized;
    y.k = r.k_normalized;
    const Results inner = run(plain, y);
    const auto times_thousand = [](const Tensor& t) {
      return Tensor(DType::kFloat64, t.shape()).filled([&](int64_t i) { return 1000 * t.at(i); });
    };
    EXPECT_TRUE(close(tokens(r.dq, 0, 10), times_thousand(tokens(inner.dq, 0, 10)), gradient_tolerance(dtype)));
    EXPECT_TRUE(close(tokens(r.dk, 0, 10), times_thousand(tokens(inner.dk, 0, 10)), gradient_tolerance(dtype)));
  }
}

TEST(Cases, Case21_L2NormOfShortAndLongRows) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const double length : {1e-2, 1.0, 300.0}) {
      SCOPED_TRACE(concat(dtype_name(dtype), " ", length));
      OperatorCase c = make_case(dtype, 1, 70, 1, 1, 64, 64);
      c.problem.use_qk_l2norm = true;
      const Operands x = make_operands(c);
      Random random(21);
      const Tensor q = unit_rows(random, DType::kFloat64, x.q.shape()),
                   k = unit_rows(random, DType::kFloat64, x.k.shape());
      x.q.filled([&](int64_t i) { return length * q.at(i); });
      x.k.filled([&](int64_t i) { return length * k.at(i); });
      const Results r = run(c, x);
      EXPECT_EQ(r.o.dtype(), dtype);
      expect_close(c, r, run_reference(c, x));

      // The same as normalising outside in float32 and rounding once: bit for bit.
      const Tensor rounded(dtype, x.k.shape());
      for (int64_t row = 0; row < 70; ++row) {
        double sum = 1e-6;
        for (int64_t i = 0; i < 64; ++i) sum += x.k.at(64 * row + i) * x.k.at(64 * row + i);
        for (int64_t i = 0; i < 64; ++i) rounded.set(64 * row + i, x.k.at(64 * row + i) / std::sqrt(sum));
      }
      int64_t different = 0;
      for (int64_t i = 0; i < rounded.numel(); ++i) different += r.k_normalized.at(i) != rounded.at(i) ? 1 : 0;
      EXPECT_LE(different, rounded.numel() / 100);  // ties that float32 rounds the other way
      EXPECT_TRUE(close(r.k_normalized, rounded, dtype == DType::kBFloat16 ? 1e-3 : 1e-4, 0));
    }
  }
}

TEST(Cases, Case43_TypesTakeTurns) {
  const auto turn = [](DType dtype, DType gate_dtype) {
    OperatorCase c = make_case(dtype, 1, 70, 1, 2, 16, 16);
    c.problem.use_gate = true;
    c.gate_dtype = gate_dtype;
    return run(c, make_operands(c));
  };
  const Results first = turn(DType::kFloat16, DType::kFloat32);
  const Results second = turn(DType::kFloat16, DType::kBFloat16);
  expect_same_bits(turn(DType::kFloat16, DType::kFloat32), first);
  const Results third = turn(DType::kBFloat16, DType::kFloat32);
  expect_same_bits(turn(DType::kFloat16, DType::kBFloat16), second);
  expect_same_bits(turn(DType::kBFloat16, DType::kFloat32), third);
  EXPECT_FALSE(same_bits(first.o, second.o));
}

TEST(Cases, Case44_Float32Inputs) { check_against_reference(make_case(DType::kFloat32, 2, 130, 2, 4, 64, 64)); }

// Sequences and indexing ----------------------------------------------------------------------------------------------

// Every tensor of packed sequence n.
Results sequence_of(const Results& r, const std::vector<int64_t>& offsets, int64_t n) {
  Results part = r;
  for (Tensor* t : {&part.o, &part.dq, &part.dk, &part.dv, &part.dg, &part.dbeta}) {
    if (*t) *t = tokens(*t, offsets[n], offsets[n + 1]);
  }
  for (Tensor* t : {&part.final_state, &part.dh0}) {
    if (*t) *t = (*t).slice(0, n, n + 1);
  }
  part.dA_log = part.ddt_bias = Tensor();
  return part;
}

OperatorCase case_of_sequence(const OperatorCase& c, int64_t n) {
  OperatorCase one = c;
  one.problem.sequence_offsets.reset();
  one.problem.tokens = (*c.problem.sequence_offsets)[n + 1] - (*c.problem.sequence_offsets)[n];
  return one;
}

Results run_sequence_alone(const OperatorCase& c, const Operands& x, int64_t n) {
  Results r = run(case_of_sequence(c, n), operands_of_sequence(c, x, n));
  r.dA_log = r.ddt_bias = Tensor();
  return r;
}

TEST(Cases, Case19_PoisonStaysInItsSequence) {
  for (const DType dtype : kLowTypes) {
    OperatorCase c = make_case(dtype, 1, 200, 2, 2, 32, 32);
    c.problem.sequence_offsets = {{0, 50, 130, 200}};
    const Operands x = make_operands(c);
    const Results clean = run(c, x);
    Operands bad = x;
    bad.initial_state = x.initial_state.contiguous();
    fill(bad.initial_state.slice(0, 1, 2), kNaN);
    const Results r = run(c, bad);
    for (const int64_t n : {0, 2}) {
      const std::vector<int64_t>& offsets = *c.problem.sequence_offsets;
      expect_same_bits(sequence_of(r, offsets, n), sequence_of(clean, offsets, n));
    }
    EXPECT_FALSE(all_finite(tokens(r.o, 50, 51)));

    bad = x;
    bad.v = x.v.contiguous();
    fill(head(bad.v, 0), kNaN);
    const Results s = run(c, bad);
    for (const auto& [actual, expected] :
         {std::pair{s.o, clean.o}, {s.dq, clean.dq}, {s.dk, clean.dk}, {s.dv, clean.dv}, {s.dg, clean.dg}}) {
      EXPECT_TRUE(same_bits(head(actual, 1), head(expected, 1)));
    }
    EXPECT_TRUE(same_bits(s.final_state.slice(1, 1, 2), clean.final_state.slice(1, 1, 2)));
    EXPECT_TRUE(same_bits(s.dh0.slice(1, 1, 2), clean.dh0.slice(1, 1, 2)));
  }
}

TEST(Cases, Case24_DocumentsDoNotLeak) {
  for (const DType dtype : kLowTypes) {
    OperatorCase c = make_case(dtype, 1, 128, 1, 2, 64, 32);
    c.problem.sequence_offsets = {{0, 37, 88, 128}};
    const std::vector<int64_t>& offsets = *c.problem.sequence_offsets;
    const Operands x = make_operands(c);
    const Results packed = run(c, x);
    for (int64_t n = 0; n < 3; ++n) {
      expect_same_bits(sequence_of(packed, offsets, n), run_sequence_alone(c, x, n));
    }
    const Operands y = make_operands(c);
    Random random(24);
    for (const Tensor& t : {y.q, y.k, y.v, y.grad_output}) {
      tokens(t, 0, 37).filled([&](int64_t) { return random.normal(); });
    }
    const Results replaced = run(c, y);
    for (int64_t n = 1; n < 3; ++n) {
      expect_same_bits(sequence_of(replaced, offsets, n), sequence_of(packed, offsets, n));
    }
    EXPECT_FALSE(same_bits(tokens(replaced.o, 0, 37), tokens(packed.o, 0, 37)));
  }
}

TEST(Cases, Case25_NoTokens) {
  OperatorCase dense = make_case(DType::kFloat32, 2, 0, 1, 2, 16, 8);
  OperatorCase packed = make_case(DType::kFloat32, 1, 0, 1, 2, 16, 8);
  packed.problem.sequence_offsets = {{0, 0}};
  for (OperatorCase c : {dense, packed}) {
    for (const bool initial_state : {false, true}) {
      c.initial_state = initial_state;
      const Operands x = make_operands(c);
      const Results r = run(c, x);
      if (initial_state) {
        EXPECT_TRUE(same_bits(r.final_state, x.initial_state));
        EXPECT_TRUE(same_bits(r.dh0, x.grad_final_state));
      } else {
        EXPECT_EQ(norm(r.final_state), 0);
      }
      const Results step = run_recurrent(c, x);
      EXPECT_TRUE(same_bits(step.final_state, r.final_state));
    }
  }
}

TEST(Cases, Case28_ManySequencesLarge) {
  constexpr int64_t kSequences = 2050, kHeads = 32;
  OperatorCase c = make_case(DType::kBFloat16, 1, kSequences * 16, kHeads, kHeads, 32, 32);
  c.problem.chunk_size = 16;
  std::vector<int64_t> offsets;
  for (int64_t n = 0; n <= kSequences; ++n) offsets.push_back(16 * n);
  c.problem.sequence_offsets = offsets;
  // Overlapping views of one long row of numbers: every document has data of its own, drawing takes no time.
  Random random(28);
  const Tensor pool = normal(random, DType::kBFloat16, {kSequences * 16 * 40});
  const Shape qk = {1, kSequences * 16, kHeads, 32}, token = {1, kSequences * 16, kHeads};
  const auto overlapping = [&](const Shape& shape, Shape strides, int64_t offset) {
    return pool.view(shape, std::move(strides), offset);
  };
  c.problem.use_qk_l2norm = c.problem.use_beta_sigmoid = c.problem.use_gate = true;
  Operands x;
  x.q = overlapping(qk, {0, 37, 101, 1}, 0);
  x.k = overlapping(qk, {0, 37, 101, 1}, 500);
  x.v = overlapping(qk, {0, 37, 101, 1}, 1000);
  x.grad_output = overlapping(qk, {0, 37, 101, 1}, 1500);
  x.g = overlapping(token, {0, 37, 3}, 7);
  x.beta = overlapping(token, {0, 37, 3}, 900);
  x.A_log = uniform(random, DType::kFloat32, {kHeads}, -2, 1);
  x.initial_state = overlapping({kSequences, kHeads, 32, 32}, {591, 103, 37, 1}, 0);
  x.grad_final_state = overlapping({kSequences, kHeads, 32, 32}, {591, 103, 37, 1}, 2000);
  c.dt_bias = false;
  const Results whole = run(c, x, Mode::kTraining, Values::kAny);
  for (const Tensor& result : {whole.o, whole.dq, whole.dk, whole.dv, whole.dg, whole.dbeta}) {
    EXPECT_TRUE(all_finite(tokens(result, 16 * (kSequences - 20), 16 * kSequences)));
  }

  OperatorCase half = c;
  half.problem.tokens = kSequences * 8;
  half.problem.sequence_offsets->resize(kSequences / 2 + 1);
  for (int64_t part = 0; part < 2; ++part) {
    const int64_t first = part * kSequences / 2, last = first + kSequences / 2;
    Operands y = tokens_of(x, 16 * first, 16 * last);
    y.initial_state = x.initial_state.slice(0, first, last);
    y.grad_final_state = x.grad_final_state.slice(0, first, last);
    const Results r = run(half, y, Mode::kTraining, Values::kAny);
    EXPECT_TRUE(same_bits(r.o, tokens(whole.o, 16 * first, 16 * last)));
    EXPECT_TRUE(same_bits(r.dk, tokens(whole.dk, 16 * first, 16 * last)));
    EXPECT_TRUE(same_bits(r.dg, tokens(whole.dg, 16 * first, 16 * last)));
    EXPECT_TRUE(same_bits(r.final_state, whole.final_state.slice(0, first, last)));
    EXPECT_TRUE(same_bits(r.dh0, whole.dh0.slice(0, first, last)));
  }
}

// Address space without memory: only the pages that are touched exist.
class VirtualTensor {
 public:
  VirtualTensor(const Tensor& values, Shape strides) : shape_(values.shape()), strides_(std::move(strides)) {
    int64_t last = 0;
    for (size_t i = 0; i < shape_.size(); ++i) last += (shape_[i] - 1) * strides_[i];
    bytes_ = static_cast<size_t>(last + 1) * dtype_size(values.dtype());
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data_ == MAP_FAILED) return;
    dl_ = *values.dl();
    dl_.data = data_;
    dl_.byte_offset = 0;
    dl_.shape = shape_.data();
    dl_.strides = strides_.data();
    dtype_ = values.dtype();
    for (int64_t i = 0; i < values.numel(); ++i) gdn::reference::store_scalar(data_, dtype_, position(i), values.at(i));
  }
  ~VirtualTensor() {
    if (mapped()) munmap(data_, bytes_);
  }
  VirtualTensor(const VirtualTensor&) = delete;
  VirtualTensor& operator=(const VirtualTensor&) = delete;

  bool mapped() const { return data_ != MAP_FAILED; }
  DLTensor* dl() { return &dl_; }
  Tensor copy() const {
    return Tensor(dtype_, shape_).filled([this](int64_t i) {
      return gdn::reference::load_scalar(data_, dtype_, position(i));
    });
  }

 private:
  int64_t position(int64_t index) const {
    int64_t position = 0;
    for (size_t i = shape_.size(); i-- > 0;) {
      position += index % shape_[i] * strides_[i];
      index /= shape_[i];
    }
    return position;
  }
  void* data_ = MAP_FAILED;
  size_t bytes_ = 0;
  DType dtype_ = DType::kFloat32;
  Shape shape_, strides_;
  DLTensor dl_ = {};
};

// The first stride that is larger than one takes the tensor past 2^31 elements.
Shape far_strides(const Tensor& t) {
  Shape strides = t.strides();
  for (size_t i = 0; i < strides.size(); ++i) {
    if (t.shape()[i] < 2) continue;
    strides[i] = ((int64_t{1} << 31) + 12345) / (t.shape()[i] - 1) + 1;
    break;
  }
  return strides;
}

TEST(Cases, Case29_OffsetsPastTwoToThe31Large) {
  for (const int64_t batch : {1, 3}) {  // far along the tokens, and along the batch
    const OperatorCase c = make_case(DType::kBFloat16, batch, 70, 1, 2, 16, 16);
    const Operands x = make_operands(c);
    const Results expected = run(c, x), poison = empty_results(c, x, Mode::kTraining);
    VirtualTensor q(x.q, far_strides(x.q)), k(x.k, far_strides(x.k)), v(x.v, far_strides(x.v)),
        g(x.g, far_strides(x.g)), beta(x.beta, far_strides(x.beta)), dO(x.grad_output, far_strides(x.grad_output)),
        h0(x.initial_state, far_strides(x.initial_state)), o(poison.o, far_strides(x.v)),
        dq(poison.dq, far_strides(x.q)), dv(poison.dv, far_strides(x.v)), dg(poison.dg, far_strides(x.g)),
        ht(poison.final_state, far_strides(x.initial_state));
    for (const VirtualTensor* t : {&q, &k, &v, &g, &beta, &dO, &h0, &o, &dq, &dv, &dg, &ht}) {
      if (!t->mapped()) GTEST_SKIP() << "no address space for sparse tensors";
    }
    const gdn::Plan plan = gdn::Plan::make(c.problem);
    const gdn::SavedTensors saved = saved_tensors(poison);
    gdn::ForwardTensors forward = forward_tensors(x, poison);
    forward.q = q.dl();
    forward.k = k.dl();
    forward.v = v.dl();
    forward.g = g.dl();
    forward.beta = beta.dl();
    forward.initial_state = h0.dl();
    forward.o = o.dl();
    forward.final_state = ht.dl();
    forward.saved = &saved;
    call_forward(plan, forward);
    gdn::BackwardTensors backward = backward_tensors(c, x, poison);
    backward.q = q.dl();
    backward.k = k.dl();
    backward.v = v.dl();
    backward.g = g.dl();
    backward.beta = beta.dl();
    backward.initial_state = h0.dl();
    backward.grad_output = dO.dl();
    backward.dq = dq.dl();
    backward.dv = dv.dl();
    backward.dg = dg.dl();
    backward.saved = &saved;
    call_backward(plan, backward);
    EXPECT_TRUE(same_bits(o.copy(), expected.o));
    EXPECT_TRUE(same_bits(ht.copy(), expected.final_state));
    EXPECT_TRUE(same_bits(dq.copy(), expected.dq));
    EXPECT_TRUE(same_bits(dv.copy(), expected.dv));
    EXPECT_TRUE(same_bits(dg.copy(), expected.dg));
    EXPECT_TRUE(same_bits(poison.dk, expected.dk));
  }
}

TEST(Cases, Case30_StatePoolPastTwoToThe31Large) {
  constexpr int64_t kSequences = 4100;
  OperatorCase c = make_case(DType::kFloat32, 1, kSequences, 1, 2, 16, 16);
  std::vector<int64_t> offsets;
  for (int64_t n = 0; n <= kSequences; ++n) offsets.push_back(n);
  c.problem.sequence_offsets = offsets;
  const Operands x = make_operands(c);
  fill(x.initial_state.slice(0, 0, kSequences - 1), 0);
  const Results expected = run(c, x, Mode::kForward);
  VirtualTensor pool(x.initial_state, far_strides(x.initial_state));
  if (!pool.mapped()) GTEST_SKIP() << "no address space for sparse tensors";
  const gdn::Plan plan = gdn::Plan::make(c.problem);
  for (const bool recurrent : {false, true}) {
    const Results r = empty_results(c, x, Mode::kForward);
    gdn::ForwardTensors forward = forward_tensors(x, r);
    forward.initial_state = pool.dl();
    if (recurrent) {
      gdn::recurrent_forward(plan, forward);
      expect_same_bits(r, run_recurrent(c, x));
    } else {
      call_forward(plan, forward);
      expect_same_bits(r, expected);
    }
  }
  EXPECT_GT(norm(expected.final_state.slice(0, kSequences - 1, kSequences)), 1);
}

TEST(Cases, Case37_OddStartsAndShortSequences) {
  for (const DType dtype : kLowTypes) {
    OperatorCase c = make_case(dtype, 1, 129, 2, 2, 64, 64);
    c.problem.sequence_offsets = {{0, 1, 2, 65, 66, 129}};
    const Operands x = make_operands(c);
    const Results expected = run(c, x);
    expect_close(c, expected, run_reference(c, x));
    Operands odd = x;
    for (Tensor* t : {&odd.q, &odd.k, &odd.v, &odd.grad_output, &odd.initial_state}) {
      const Tensor source = *t;
      const Tensor larger((*t).dtype(), {source.numel() + 1});
      larger.set(0, kNaN);
      *t = larger.view(source.shape(), source.strides(), 1).filled([&](int64_t i) { return source.at(i); });
    }
    expect_same_bits(run(c, odd), expected);
  }
}

TEST(Cases, Case37_LongBf16Large) { check_against_reference(make_case(DType::kBFloat16, 2, 1024, 2, 2, 64, 64)); }

TEST(Cases, Case38_SequencesOfSixteenToSixtyFourLarge) {
  OperatorCase c = make_case(DType::kBFloat16, 1, 4720, 2, 2, 128, 128);
  std::vector<int64_t> offsets = {0};
  for (int n = 0; n < 127; ++n) offsets.push_back(offsets.back() + (int64_t{16} << (n % 3)));
  ASSERT_EQ(offsets.back(), 4720);
  c.problem.sequence_offsets = offsets;
  const Operands x = make_operands(c);
  const Results packed = run(c, x);
  for (const int64_t n : {0, 1, 2, 63, 64, 125, 126}) {
    expect_same_bits(sequence_of(packed, offsets, n), run_sequence_alone(c, x, n));
  }
}

TEST(Cases, Case38_FixedLengthsBesideChunks) {
  for (const int64_t T : {80, 129}) {
    const OperatorCase c = make_case(DType::kBFloat16, 2, T, 1, 2, 64, 64);
    const Operands x = make_operands(c);
    const Results batch = run(c, x);
    OperatorCase one = c;
    one.problem.batch = 1;
    Operands row = x;
    for (Tensor* t :
         {&row.q, &row.k, &row.v, &row.g, &row.beta, &row.grad_output, &row.initial_state, &row.grad_final_state}) {
      *t = (*t).slice(0, 1, 2);
    }
    Results expected = batch;
    for (Tensor* t : {&expected.o, &expected.final_state, &expected.dq, &expected.dk, &expected.dv, &expected.dg,
                      &expected.dbeta, &expected.dh0}) {
      *t = (*t).slice(0, 1, 2);
    }
    expect_same_bits(run(one, row), expected);
  }
}

TEST(Cases, Case40_LargeHeadsLarge) { check_against_reference(make_case(DType::kBFloat16, 1, 200, 1, 2, 256, 512)); }

TEST(Cases, Case54_CallsFromTwoThreads) {
  OperatorCase c = make_case(DType::kBFloat16, 1, 70, 1, 2, 32, 32);
  c.problem.num_threads = 2;
  OperatorCase d = c;
  d.seed = 54;
  const Operands x = make_operands(c), y = make_operands(d);
  const Results expected_x = run(c, x), expected_y = run(d, y);
  std::thread other([&] {
    for (int i = 0; i < 20; ++i) expect_same_bits(run(d, y), expected_y);
  });
  for (int i = 0; i < 20; ++i) expect_same_bits(run(c, x), expected_x);
  other.join();
}

TEST(Cases, Case55_LongVariableLengthsWithStatesLarge) {
  OperatorCase c = make_case(DType::kBFloat16, 1, 7802, 1, 2, 128, 128);
  std::vector<int64_t> offsets = {0};
  for (const int64_t length : {1238, 1199, 1240, 1216, 1187, 1203, 519}) offsets.push_back(offsets.back() + length);
  ASSERT_EQ(offsets.back(), 7802);
  c.problem.sequence_offsets = offsets;
  Operands x = make_operands(c);
  fill(x.initial_state, 0);
  const Results first = run(c, x);
  EXPECT_TRUE(all_finite(first.o) && all_finite(first.final_state));
  expect_same_bits(run(c, x), first);
  // The last sequence against the reference; the others have the same form.
  const OperatorCase tail = case_of_sequence(c, 6);
  Results last = sequence_of(first, offsets, 6);
  last.A = Tensor();
  expect_close(tail, last, run_reference(tail, operands_of_sequence(c, x, 6)));
}

TEST(Cases, Case57_MiddleLengthsLarge) {
  for (const int64_t T : {128, 267, 1900, 3920}) {
    SCOPED_TRACE(T);
    check_against_reference(make_case(DType::kBFloat16, 1, T, 1, 1, 128, 128));
  }
  expect_finite(run(make_case(DType::kBFloat16, 1, 32760, 1, 1, 128, 128),
                    make_operands(make_case(DType::kBFloat16, 1, 32760, 1, 1, 128, 128))));
}

}  // namespace
}  // namespace cula::test
