// CASES.md 19, 24, 25, 28, 37, 38, 40, 54, 55 and 57: packed sequences, lengths and sizes, and calls beside each other.
#include <limits>
#include <thread>

#include "slices.h"

namespace cula::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

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
    expect_same_bits(head_of(s, 1), head_of(clean, 1));
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
  half.problem.sequence_offsets = std::vector(offsets.begin(), offsets.begin() + kSequences / 2 + 1);
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
