// CASES.md 1 to 4, 12 to 14 and 23: strong, infinite, zero and raw gates.
#include <cmath>
#include <limits>

#include "slices.h"

namespace cula::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

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
    expect_same_bits(head_of(r, 0), head_of(clean, 0));
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
    EXPECT_TRUE(close(head_of_state(r.final_state, 1), head_of_state(after.final_state, 1), 2 * o));
    EXPECT_TRUE(close(head_of_state(r.dh0, 1), head_of_state(before.dh0, 1), 2 * d));
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
      expect_same_bits(head_of(r, 1), head_of(ordinary, 1));
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

}  // namespace
}  // namespace cula::test
