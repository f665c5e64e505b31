// The operator against the float64 reference: sizes, lengths, flags, layouts, and what must not change a bit.
#include <atomic>
#include <limits>
#include <numbers>
#include <thread>

#include "gdn/schedules.h"
#include "operator_case.h"
#include "stage_formulas.h"

namespace cula::test {
namespace {

constexpr DType kAllTypes[] = {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16};

// Lengths and chunk sizes ---------------------------------------------------------------------------------------------

class Lengths : public testing::TestWithParam<std::tuple<DType, int64_t, int64_t>> {};

TEST_P(Lengths, EqualsTheReference) {
  const auto& [dtype, chunk_size, T] = GetParam();
  OperatorCase c = make_case(dtype, 2, T, 1, 2, 24, 40);
  c.problem.chunk_size = chunk_size;
  check_against_reference(c);
  c.problem.use_gate = c.problem.use_qk_l2norm = c.problem.use_beta_sigmoid = true;
  check_against_reference(c);
  check_against_reference(c, Mode::kForward);
}

INSTANTIATE_TEST_SUITE_P(All, Lengths,
                         testing::Combine(testing::ValuesIn(kAllTypes), testing::Values(16, 32, 64),
                                          testing::Values(0, 1, 15, 16, 17, 63, 64, 65, 130)),
                         [](const auto& info) {
                           return concat(dtype_name(std::get<0>(info.param)), "_C", std::get<1>(info.param), "_T",
                                         std::get<2>(info.param));
                         });

struct Offsets {
  const char* name;
  std::vector<int64_t> offsets;
  int64_t tokens;
};

void PrintTo(const Offsets& offsets, std::ostream* stream) { *stream << offsets.name; }

class Packed : public testing::TestWithParam<std::tuple<DType, int64_t, Offsets>> {};

TEST_P(Packed, EqualsTheReference) {
  const auto& [dtype, chunk_size, packing] = GetParam();
  OperatorCase c = make_case(dtype, 1, packing.tokens, 2, 4, 24, 40);
  c.problem.sequence_offsets = packing.offsets;
  c.problem.chunk_size = chunk_size;
  check_against_reference(c);
  c.problem.state_v_first = c.problem.use_gate = c.problem.use_qk_l2norm = true;
  check_against_reference(c);
  c.initial_state = c.final_state = false;
  check_against_reference(c);
  check_against_reference(c, Mode::kForward);
}

INSTANTIATE_TEST_SUITE_P(
    All, Packed,
    testing::Combine(testing::ValuesIn(kAllTypes), testing::Values(16, 64),
                     testing::Values(Offsets{"empty_ones_and_padding", {0, 0, 5, 5, 70, 134, 134}, 141},
                                     Offsets{"one_token_each", {0, 1, 2, 3, 4}, 4},
                                     Offsets{"around_chunks", {0, 1, 2, 65, 66, 129}, 129},
                                     Offsets{"only_padding", {0, 0}, 7}, Offsets{"nothing", {0, 0}, 0},
                                     Offsets{"no_sequence", {0}, 3})),
    [](const auto& info) {
      return concat(dtype_name(std::get<0>(info.param)), "_C", std::get<1>(info.param), "_",
                    std::get<2>(info.param).name);
    });

TEST(Operator, PaddingGetsExactZeros) {
  OperatorCase c = make_case(DType::kBFloat16, 1, 90, 1, 2, 16, 16);
  c.problem.sequence_offsets = {{0, 33, 70}};
  c.problem.use_qk_l2norm = c.problem.use_gate = true;
  const Operands x = make_operands(c);
  for (const Tensor& t : {x.q, x.k, x.v, x.g, x.beta, x.grad_output}) {
    t.slice(1, 70, 90).filled([](int64_t) { return std::numeric_limits<double>::quiet_NaN(); });
  }
  const Results r = run(c, x);
  for (const Tensor& t : {r.o, r.dq, r.dk, r.dv, r.dg, r.dbeta}) {
    EXPECT_EQ(norm(t.slice(1, 70, 90)), 0);
    EXPECT_TRUE(all_finite(t));
  }
  EXPECT_TRUE(all_finite(r.dA_log) && all_finite(r.ddt_bias) && all_finite(r.final_state));
}

// Head sizes (CASES 36) and groups (CASES 31) -------------------------------------------------------------------------

constexpr int64_t kHeadSizes[] = {8, 16, 60, 64, 96, 100, 128, 192, 256};

class HeadSizesLarge : public testing::TestWithParam<std::tuple<DType, int64_t>> {};

TEST_P(HeadSizesLarge, Case36_EqualsTheReference) {
  const auto& [dtype, K] = GetParam();
  for (const int64_t V : kHeadSizes) {
    // Every pair in float32; elsewhere the pairs that the cases name and the equal ones.
    const bool named = (K == 64 && V == 128) || (K == 128 && V == 256) || (K == 192 && V == 96);
    if (dtype != DType::kFloat32 && K != V && !named) continue;
    SCOPED_TRACE(V);
    check_against_reference(make_case(dtype, 1, 75, 1, 1, K, V));
  }
}

INSTANTIATE_TEST_SUITE_P(All, HeadSizesLarge,
                         testing::Combine(testing::ValuesIn(kAllTypes), testing::ValuesIn(kHeadSizes)),
                         [](const auto& info) {
                           return concat(dtype_name(std::get<0>(info.param)), "_K", std::get<1>(info.param));
                         });

TEST(Operator, OddHeadSizes) {
  for (const DType dtype : kAllTypes) {
    for (const auto& [K, V] : {std::pair<int64_t, int64_t>{1, 1}, {3, 5}, {7, 33}, {17, 129}, {33, 1}}) {
      SCOPED_TRACE(concat(dtype_name(dtype), " ", K, " ", V));
      check_against_reference(make_case(dtype, 1, 70, 1, 2, K, V));
    }
  }
}

class Groups : public testing::TestWithParam<std::tuple<DType, std::pair<int64_t, int64_t>>> {};

TEST_P(Groups, Case31_EqualsRepeatedKeysAndTheReference) {
  const auto& [dtype, heads] = GetParam();
  const auto [H, HV] = heads;
  OperatorCase c = make_case(dtype, 1, 150, H, HV, 32, 16);
  c.problem.sequence_offsets = {{0, 40, 80, 150}};
  const Operands x = make_operands(c);
  const Results r = run(c, x);
  expect_close(c, r, run_reference(c, x));

  const int64_t group = HV / H;
  OperatorCase plain = c;
  plain.problem.heads = HV;
  Operands repeated = x;
  const auto repeat = [&](const Tensor& t) {
    std::vector<Tensor> parts;
    for (int64_t j = 0; j < HV; ++j) parts.push_back(t.slice(2, j / group, j / group + 1));
    return concatenated(parts, 2);
  };
  repeated.q = repeat(x.q);
  repeated.k = repeat(x.k);
  const Results alone = run(plain, repeated);
  EXPECT_TRUE(same_bits(r.o, alone.o));
  EXPECT_TRUE(same_bits(r.final_state, alone.final_state));
  EXPECT_TRUE(close(r.dv, alone.dv, gradient_tolerance(dtype)));
  EXPECT_TRUE(close(r.dg, alone.dg, gradient_tolerance(dtype)));
}

INSTANTIATE_TEST_SUITE_P(All, Groups,
                         testing::Combine(testing::ValuesIn(kAllTypes),
                                          testing::Values(std::pair<int64_t, int64_t>{2, 6},
                                                          std::pair<int64_t, int64_t>{1, 3},
                                                          std::pair<int64_t, int64_t>{2, 16})),
                         [](const auto& info) {
                           const auto heads = std::get<1>(info.param);
                           return concat(dtype_name(std::get<0>(info.param)), "_", heads.first, "_", heads.second);
                         });

// The sum over a group is rounded once: what a float32 gradient holds, rounded, is what a 16-bit gradient holds.
TEST(Operator, GradientsAreRoundedOnceToTheirType) {
  for (const bool l2norm : {false, true}) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
      OperatorCase c = make_case(dtype, 1, 100, 1, 3, 32, 16);
      c.problem.use_gate = true;
      c.problem.use_qk_l2norm = l2norm;
      c.gate_dtype = c.beta_dtype = c.state_dtype = dtype;
      const Operands x = make_operands(c);
      const gdn::Plan plan = gdn::Plan::make(c.problem);
      const Results low = run(c, x);
      Results wide = low;
      for (Tensor* t : {&wide.dq, &wide.dk, &wide.dv, &wide.dg, &wide.dbeta, &wide.dA_log, &wide.ddt_bias, &wide.dh0}) {
        *t = Tensor(stat_dtype(dtype), (*t).shape());
      }
      const gdn::SavedTensors saved = saved_tensors(low);
      gdn::BackwardTensors backward = backward_tensors(c, x, wide);
      backward.saved = &saved;
      call_backward(plan, backward);
      for (size_t i = 0; i < low.all().size(); ++i) {
        const Results::Named result = low.all()[i];
        if (result.is_gradient) {
          EXPECT_TRUE(same_bits(wide.all()[i].tensor.to(dtype), result.tensor)) << result.name << dtype_name(dtype);
        }
      }
    }
  }
}

// Flags (CASES 42) ----------------------------------------------------------------------------------------------------

class Flags : public testing::TestWithParam<int> {};

TEST_P(Flags, Case42_EqualsTheReference) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat64}) {
    SCOPED_TRACE(dtype_name(dtype));
    OperatorCase c = make_case(dtype, 1, 130, 1, 2, 20, 12);
    apply_flags(GetParam(), c);
    check_against_reference(c);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Flags, testing::ValuesIn(all_flag_sets()),
                         [](const auto& info) { return flags_name(info.param); });

TEST(Operator, Scales) {
  for (const double scale : {1.0, -0.3, 0.0, 12.5}) {
    OperatorCase c = make_case(DType::kFloat32, 1, 70, 1, 2, 16, 16);
    c.problem.scale = scale;
    check_against_reference(c);
  }
}

TEST(Operator, TypesOfGateBetaStateAndGradients) {
  for (const DType dtype : kAllTypes) {
    for (const DType other : kAllTypes) {
      SCOPED_TRACE(concat(dtype_name(dtype), " with ", dtype_name(other)));
      OperatorCase c = make_case(dtype, 1, 70, 1, 2, 16, 16);
      c.gate_dtype = c.beta_dtype = c.state_dtype = other;
      const Operands x = make_operands(c);
      Operands y = x;
      y.grad_output = x.grad_output.to(other);
      y.grad_final_state = x.grad_final_state.to(other);
      const Results actual = run(c, y), expected = run_reference(c, y);
      for (size_t i = 0; i < actual.all().size(); ++i) {
        const Results::Named result = actual.all()[i];
        // No result can be better than the type that it is stored in, nor than the problem's arithmetic.
        const double tolerance = std::max(output_tolerance(dtype), output_tolerance(result.tensor.dtype()));
        EXPECT_TRUE(close(result.tensor, expected.all()[i].tensor, 2 * tolerance)) << result.name;
      }
    }
  }
}

// The tensors that forward saves are those of the stages, so that either may read what the other wrote.
TEST(Operator, SavedTensorsAreThoseOfTheStages) {
  for (const DType dtype : kAllTypes) {
    for (const bool packed : {false, true}) {
      OperatorCase c = make_case(dtype, packed ? 1 : 2, 90, 1, 3, 32, 16);
      if (packed) c.problem.sequence_offsets = {{0, 5, 5, 70, 80}};
      c.problem.use_qk_l2norm = c.problem.use_gate = c.problem.use_beta_sigmoid = c.problem.allow_neg_eigval = true;
      const Operands x = make_operands(c);
      const Results r = run(c, x);
      const gdn::Plan plan = gdn::Plan::make(c.problem);
      const double tolerance = output_tolerance(dtype);
      const formulas::Normalized q = formulas::l2norm(x.q), k = formulas::l2norm(x.k);
      const int64_t live = packed ? 80 : 90;
      const auto tokens = [&](const Tensor& t) { return t.slice(1, 0, live); };
      EXPECT_TRUE(close(tokens(r.q_normalized), tokens(q.y), tolerance));
      EXPECT_TRUE(close(tokens(r.k_normalized), tokens(k.y), tolerance));
      EXPECT_TRUE(close(tokens(r.q_rstd), tokens(q.rstd), output_tolerance(stat_dtype(dtype))));
      EXPECT_TRUE(close(tokens(r.k_rstd), tokens(k.rstd), output_tolerance(stat_dtype(dtype))));
      const Tensor log_decay = formulas::gate(plan, x.g, x.A_log, x.dt_bias);
      const Tensor gamma = formulas::local_cumsum(plan, log_decay, 1 / std::numbers::ln2, false);
      const Tensor beta = formulas::beta_sigmoid(x.beta, 2);
      const Tensor A = formulas::inverse(plan, formulas::scaled_dot_kkt(plan, k.y, gamma, beta));
      EXPECT_TRUE(close(tokens(r.A), tokens(A), tolerance)) << "with zeros past each chunk";
    }
  }
}

// DESIGN section 6: the error of the widely used implementation on a GPU for this input, to be met or beaten.
TEST(Operator, Bf16ErrorIsAtMostTheBaselines) {
  const OperatorCase c = make_case(DType::kBFloat16, 1, 512, 2, 2, 128, 128);
  const Operands x = make_operands(c);
  const Results r = run(c, x), expected = run_reference(c, x);
  EXPECT_LE(relative_error(r.o, expected.o), 3.5e-3);
  EXPECT_LE(relative_error(r.dq, expected.dq), 3.8e-3);
  EXPECT_LE(relative_error(r.dk, expected.dk), 4.2e-3);
  EXPECT_LE(relative_error(r.dv, expected.dv), 3.5e-3);
  EXPECT_LE(relative_error(r.dg, expected.dg), 3.2e-3);
  EXPECT_LE(relative_error(r.dbeta, expected.dbeta), 2.8e-3);
}

TEST(Operator, UnwantedGradientsDoNotMatterToTheOthers) {
  OperatorCase c = make_case(DType::kBFloat16, 1, 90, 1, 2, 24, 16);
  c.problem.use_gate = c.problem.use_beta_sigmoid = c.problem.use_qk_l2norm = true;
  const Operands x = make_operands(c);
  const gdn::Plan plan = gdn::Plan::make(c.problem);
  const Results all = run(c, x);
  const gdn::SavedTensors saved = saved_tensors(all);
  DLTensor* gdn::BackwardTensors::*const kGradients[] = {&gdn::BackwardTensors::dq,       &gdn::BackwardTensors::dk,
                                                         &gdn::BackwardTensors::dv,       &gdn::BackwardTensors::dg,
                                                         &gdn::BackwardTensors::dbeta,    &gdn::BackwardTensors::dA_log,
                                                         &gdn::BackwardTensors::ddt_bias, &gdn::BackwardTensors::dh0};
  for (DLTensor* gdn::BackwardTensors::*wanted : kGradients) {
    const Results one = empty_results(c, x, Mode::kTraining);
    gdn::BackwardTensors backward = backward_tensors(c, x, one);
    for (DLTensor* gdn::BackwardTensors::*gradient : kGradients) {
      if (gradient != wanted) backward.*gradient = nullptr;
    }
    backward.saved = &saved;
    call_backward(plan, backward);
    int written = 0;
    for (size_t i = 0; i < one.all().size(); ++i) {
      const Results::Named result = one.all()[i];
      if (!result.is_gradient || result.tensor.untouched()) continue;
      ++written;
      EXPECT_TRUE(same_bits(result.tensor, all.all()[i].tensor)) << result.name;
    }
    EXPECT_EQ(written, 1);
  }
}

// The same bits -------------------------------------------------------------------------------------------------------

std::vector<OperatorCase> bitwise_cases(DType dtype) {
  OperatorCase dense = make_case(dtype, 3, 100, 2, 4, 40, 72);
  OperatorCase packed = make_case(dtype, 1, 200, 1, 3, 64, 160);
  packed.problem.sequence_offsets = {{0, 70, 70, 71, 190}};
  packed.problem.use_gate = packed.problem.use_beta_sigmoid = packed.problem.use_qk_l2norm = true;
  packed.problem.state_v_first = true;
  OperatorCase single = make_case(dtype, 1, 150, 1, 1, 32, 256);
  single.problem.chunk_size = 16;
  return {dense, packed, single};
}

class Bitwise : public testing::TestWithParam<DType> {};

TEST_P(Bitwise, AnyNumberOfThreads) {
  for (OperatorCase c : bitwise_cases(GetParam())) {
    const Operands x = make_operands(c);
    c.problem.num_threads = 1;
    const Results one = run(c, x);
    for (const int threads : {2, 3, 7, 0}) {
      SCOPED_TRACE(threads);
      c.problem.num_threads = threads;
      const Results many = run(c, x);
      expect_same_bits(many, one);
      EXPECT_TRUE(same_bits(many.A, one.A));
    }
  }
}

TEST_P(Bitwise, Case39_RepeatedCalls) {
  for (OperatorCase c : bitwise_cases(GetParam())) {
    c.problem.num_threads = 2;
    const Operands x = make_operands(c);
    const Results first = run(c, x);
    std::vector<std::vector<unsigned char>> before;
    for (const Results::Named& result : first.all()) before.push_back(result.tensor.snapshot());
    OperatorCase other = c;
    other.seed = 99;
    run(other, make_operands(other));
    expect_same_bits(run(c, x), first);
    for (size_t i = 0; i < before.size(); ++i) EXPECT_EQ(first.all()[i].tensor.snapshot(), before[i]);
  }
}

TEST_P(Bitwise, TwoHostThreadsAtOnce) {
  std::vector<OperatorCase> cases = bitwise_cases(GetParam());
  std::vector<Operands> operands;
  std::vector<Results> expected;
  for (OperatorCase& c : cases) {
    c.problem.num_threads = 2;
    operands.push_back(make_operands(c));
    expected.push_back(run(c, operands.back()));
  }
  const auto work = [&](size_t first) {
    for (size_t i = first; i < first + 6; ++i) {
      const size_t which = i % cases.size();
      expect_same_bits(run(cases[which], operands[which]), expected[which]);
    }
  };
  std::thread other(work, 1);
  work(0);
  other.join();
}

TEST_P(Bitwise, InferenceEqualsTrainingForward) {
  for (const OperatorCase& c : bitwise_cases(GetParam())) {
    const Operands x = make_operands(c);
    const Results training = run(c, x), inference = run(c, x, Mode::kForward);
    EXPECT_TRUE(same_bits(inference.o, training.o));
    EXPECT_TRUE(same_bits(inference.final_state, training.final_state));
  }
}

TEST_P(Bitwise, HeadsAndBatchRowsDoNotSeeEachOther) {
  const OperatorCase c = bitwise_cases(GetParam())[0];
  const Operands x = make_operands(c);
  const Results all = run(c, x);
  OperatorCase one = c;
  one.problem.batch = one.problem.heads = 1;
  one.problem.value_heads = 2;
  const auto part = [](const Tensor& t, int head_dim, int64_t first, int64_t count) {
    return t.slice(0, 2, 3).slice(head_dim, first, first + count);
  };
  Operands y = x;
  y.q = part(x.q, 2, 1, 1);
  y.k = part(x.k, 2, 1, 1);
  for (Tensor* t : {&y.v, &y.g, &y.beta, &y.grad_output}) *t = part(*t, 2, 2, 2);
  for (Tensor* t : {&y.initial_state, &y.grad_final_state}) *t = part(*t, 1, 2, 2);
  const Results alone = run(one, y);
  EXPECT_TRUE(same_bits(alone.o, part(all.o, 2, 2, 2)));
  EXPECT_TRUE(same_bits(alone.final_state, part(all.final_state, 1, 2, 2)));
  EXPECT_TRUE(same_bits(alone.dq, part(all.dq, 2, 1, 1)));
  EXPECT_TRUE(same_bits(alone.dk, part(all.dk, 2, 1, 1)));
  EXPECT_TRUE(same_bits(alone.dv, part(all.dv, 2, 2, 2)));
  EXPECT_TRUE(same_bits(alone.dg, part(all.dg, 2, 2, 2)));
  EXPECT_TRUE(same_bits(alone.dbeta, part(all.dbeta, 2, 2, 2)));
  EXPECT_TRUE(same_bits(alone.dh0, part(all.dh0, 1, 2, 2)));
}

// Long enough that forward and backward take several batches of heads and sequences.
TEST(BitwiseLarge, BatchesOfHeadsAndSequences) {
  OperatorCase c = make_case(DType::kFloat32, 1, 2500, 4, 8, 128, 128);
  c.problem.sequence_offsets = {{0, 1000, 1000, 2450}};
  c.problem.use_gate = true;
  c.problem.num_threads = 2;
  const gdn::Plan plan = gdn::Plan::make(c.problem);
  ASSERT_GT(plan.schedules().backward_batches(plan).size(), 2);
  const Operands x = make_operands(c);
  const Results all = run(c, x);
  for (const int64_t head : {0, 3}) {
    SCOPED_TRACE(head);
    OperatorCase one = c;
    one.problem.heads = 1;
    one.problem.value_heads = 2;
    Operands y = x;
    for (Tensor* t : {&y.q, &y.k}) *t = t->slice(2, head, head + 1);
    for (Tensor* t : {&y.v, &y.g, &y.beta, &y.grad_output}) *t = t->slice(2, 2 * head, 2 * head + 2);
    for (Tensor* t : {&y.initial_state, &y.grad_final_state}) *t = t->slice(1, 2 * head, 2 * head + 2);
    for (Tensor* t : {&y.A_log, &y.dt_bias}) *t = t->slice(0, 2 * head, 2 * head + 2);
    const Results alone = run(one, y);
    for (const auto& [actual, expected] : {std::pair(alone.o, all.o), {alone.dv, all.dv}, {alone.dg, all.dg}}) {
      EXPECT_TRUE(same_bits(actual, expected.slice(2, 2 * head, 2 * head + 2)));
    }
    EXPECT_TRUE(same_bits(alone.dq, all.dq.slice(2, head, head + 1)));
    EXPECT_TRUE(same_bits(alone.dk, all.dk.slice(2, head, head + 1)));
    EXPECT_TRUE(same_bits(alone.dh0, all.dh0.slice(1, 2 * head, 2 * head + 2)));
    EXPECT_TRUE(same_bits(alone.dA_log, all.dA_log.slice(0, 2 * head, 2 * head + 2)));
    EXPECT_TRUE(same_bits(run(c, x, Mode::kForward).o, all.o));
  }
}

INSTANTIATE_TEST_SUITE_P(All, Bitwise, testing::ValuesIn(kAllTypes),
                         [](const auto& info) { return dtype_name(info.param); });

// Strides (CASES 35) --------------------------------------------------------------------------------------------------

class Strided : public testing::TestWithParam<DType> {};

TEST_P(Strided, Case35_EqualsContiguousCopies) {
  const int64_t H = 2, D = 24, T = 90;
  for (const bool gate : {false, true}) {
    OperatorCase c = make_case(GetParam(), 2, T, H, H, D, D);
    c.problem.use_gate = c.problem.use_qk_l2norm = c.problem.use_beta_sigmoid = gate;
    c.gate_dtype = c.beta_dtype = GetParam();
    Operands x = make_operands(c);
    // A gradient that is the same for all tokens and heads, as sum() gives it.
    const Tensor row = x.grad_output.slice(0, 0, 1).slice(1, 0, 1).slice(2, 0, 1).contiguous();
    x.grad_output = row.view({2, T, H, D}, {0, 0, 0, 1}).contiguous();
    const Results expected = run(c, x);

    Operands y = x;
    y.grad_output = row.view({2, T, H, D}, {0, 0, 0, 1});
    const Tensor qkv = concatenated({x.q, x.k, x.v}, 2);
    y.q = qkv.slice(2, 0, H);
    y.k = qkv.slice(2, H, 2 * H);
    y.v = qkv.slice(2, 2 * H, 3 * H);
    const Tensor gate_and_beta = concatenated({x.g, x.beta}, 2);
    y.g = gate_and_beta.slice(2, 0, H);
    y.beta = gate_and_beta.slice(2, H, 2 * H);
    y.initial_state = x.initial_state.transposed(2, 3).contiguous().transposed(2, 3);
    y.grad_final_state = x.grad_final_state.transposed(0, 1).contiguous().transposed(0, 1);
    expect_same_bits(run(c, y), expected);

    // Token-major becomes head-major, and the last dimension is no longer dense.
    for (Tensor* t : {&y.q, &y.k, &y.v}) *t = (*t).transposed(1, 3).contiguous().transposed(1, 3);
    y.grad_output = x.grad_output.transposed(1, 2).contiguous().transposed(1, 2);
    expect_same_bits(run(c, y), expected);
  }
}

TEST_P(Strided, Case35_StridedResults) {
  OperatorCase c = make_case(GetParam(), 2, 70, 1, 2, 24, 16);
  c.problem.use_gate = c.problem.use_qk_l2norm = true;
  const Operands x = make_operands(c);
  const Results expected = run(c, x);
  Results strided = expected;
  for (Tensor* t : {&strided.o, &strided.final_state, &strided.dq, &strided.dk, &strided.dv, &strided.dg,
                    &strided.dbeta, &strided.dA_log, &strided.ddt_bias, &strided.dh0, &strided.A, &strided.q_normalized,
                    &strided.k_normalized, &strided.q_rstd, &strided.k_rstd}) {
    Shape strides((*t).shape().size());
    int64_t stride = 2;
    for (size_t i = 0; i < strides.size(); ++i) {
      strides[i] = stride;
      stride *= (*t).shape()[i];
    }
    *t = Tensor((*t).dtype(), (*t).shape(), strides);
  }
  const gdn::Plan plan = gdn::Plan::make(c.problem);
  const gdn::SavedTensors saved = saved_tensors(strided);
  gdn::ForwardTensors forward = forward_tensors(x, strided);
  forward.saved = &saved;
  call_forward(plan, forward);
  gdn::BackwardTensors backward = backward_tensors(c, x, strided);
  backward.saved = &saved;
  call_backward(plan, backward);
  expect_same_bits(strided, expected);
  for (const Results::Named& result : strided.all()) EXPECT_TRUE(result.tensor.only_elements_written()) << result.name;
  EXPECT_TRUE(strided.A.only_elements_written());
}

INSTANTIATE_TEST_SUITE_P(All, Strided, testing::ValuesIn(kAllTypes),
                         [](const auto& info) { return dtype_name(info.param); });

// Decoding ------------------------------------------------------------------------------------------------------------

class Recurrent : public testing::TestWithParam<DType> {};

TEST_P(Recurrent, EqualsTheReferenceForEveryFlag) {
  for (const int flags : all_flag_sets()) {
    SCOPED_TRACE(flags_name(flags));
    OperatorCase c = make_case(GetParam(), 2, 9, 1, 2, 20, 12);
    apply_flags(flags, c);
    const Operands x = make_operands(c);
    expect_close(c, run_recurrent(c, x), run_reference(c, x, Mode::kForward));
  }
}

TEST_P(Recurrent, LengthsAndPacking) {
  for (const int64_t T : {0, 1, 64, 65}) {
    const OperatorCase c = make_case(GetParam(), 2, T, 2, 6, 64, 100);
    const Operands x = make_operands(c);
    expect_close(c, run_recurrent(c, x), run_reference(c, x, Mode::kForward));
  }
  OperatorCase packed = make_case(GetParam(), 1, 60, 1, 2, 33, 20);
  packed.problem.sequence_offsets = {{0, 0, 7, 50, 51}};
  const Operands x = make_operands(packed);
  const Results r = run_recurrent(packed, x);
  expect_close(packed, r, run_reference(packed, x, Mode::kForward));
  EXPECT_EQ(norm(r.o.slice(1, 51, 60)), 0);
}

// Inputs of 16 bits are widened and nothing is rounded before the result is stored.
TEST_P(Recurrent, StateIsExactInFloat32) {
  const OperatorCase c = make_case(GetParam(), 1, 300, 1, 2, 64, 64);
  const Operands x = make_operands(c);
  const Results r = run_recurrent(c, x), expected = run_reference(c, x, Mode::kForward);
  EXPECT_TRUE(close(r.final_state, expected.final_state, output_tolerance(stat_dtype(GetParam())), 0));
}

TEST_P(Recurrent, UpdatesTheStateInPlace) {
  OperatorCase c = make_case(GetParam(), 3, 1, 1, 2, 24, 16);
  c.problem.state_v_first = true;
  const Operands x = make_operands(c);
  const Results expected = run_recurrent(c, x);
  Results r;
  r.o = Tensor(GetParam(), x.v.shape());
  r.final_state = x.initial_state;
  gdn::recurrent_forward(gdn::Plan::make(c.problem), forward_tensors(x, r));
  EXPECT_TRUE(same_bits(r.o, expected.o));
  EXPECT_TRUE(same_bits(r.final_state, expected.final_state));
}

TEST_P(Recurrent, StridesAndThreadsDoNotChangeABit) {
  OperatorCase c = make_case(GetParam(), 2, 5, 1, 3, 24, 40);
  const Operands x = make_operands(c);
  c.problem.num_threads = 1;
  const Results expected = run_recurrent(c, x);
  for (const int threads : {2, 3, 7}) {
    c.problem.num_threads = threads;
    expect_same_bits(run_recurrent(c, x), expected);
  }
  Operands y = x;
  y.q = x.q.transposed(1, 3).contiguous().transposed(1, 3);
  y.v = concatenated({x.v, x.v}, 2).slice(2, 0, 3);
  y.initial_state = x.initial_state.transposed(2, 3).contiguous().transposed(2, 3);
  expect_same_bits(run_recurrent(c, y), expected);
}

INSTANTIATE_TEST_SUITE_P(All, Recurrent, testing::ValuesIn(kAllTypes),
                         [](const auto& info) { return dtype_name(info.param); });

}  // namespace
}  // namespace cula::test
