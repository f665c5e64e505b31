// CASES.md 7, 8, 11, 15, 16, 20, 21, 43 and 44: types of operands, precision, normalisation and schedules.
#include <cmath>

#include "slices.h"

namespace cula::test {
namespace {

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
  y.grad_final_state = head_of_state(x.grad_final_state, 1);
  const Results alone = run(one, y);
  expect_same_bits(head_of(r, 1), alone);

  // Squared norm 1.5 and beta at most 1: |1 - beta |k|^2| < 1, a stable recurrence.
  const Operands z = make_operands(c);
  z.k.filled([&](int64_t i) { return z.k.at(i) * std::sqrt(1.5); });
  const Results stable = run(c, z);
  expect_finite(stable);
  expect_close(c, stable, run_reference(c, z));
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

}  // namespace
}  // namespace cula::test
