// CASES.md 5, 6, 9, 10, 18 and 34: initial and final states, and runs that go on from one.
#include <cmath>

#include "slices.h"

namespace cula::test {
namespace {

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
      Results r;
      for (Tensor Results::*t :
           {&Results::o, &Results::dq, &Results::dk, &Results::dv, &Results::dg, &Results::dbeta}) {
        r.*t = concatenated({before.*t, after.*t}, 1);
      }
      r.final_state = after.final_state;
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

}  // namespace
}  // namespace cula::test
