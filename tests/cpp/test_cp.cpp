// Context parallelism: the halves of forward, summaries and their adjoint against the float64 reference, the merge.
#include "gdn/cp/cp.h"

#include <limits>

#include "argument_checks.h"
#include "operator_case.h"

namespace cula::test {
namespace {

namespace cp = gdn::cp;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Runs a function of gdn::cp with a workspace of exactly the stated size.
template <class Arguments>
void call(void (*function)(const gdn::Plan&, const Arguments&, gdn::Workspace, gdn::Stream),
          size_t (*bytes)(const gdn::Plan&), const gdn::Plan& plan, const Arguments& arguments) {
  Buffer workspace(bytes(plan));
  function(plan, arguments, {.data = workspace.data(), .bytes = workspace.bytes()}, nullptr);
  EXPECT_TRUE(workspace.red_zones_intact());
}

// A case with its operands and what prepare made of them.
struct Prepared {
  OperatorCase c;
  Operands x;
  gdn::Plan plan;
  Results r;
  gdn::SavedTensors saved;

  explicit Prepared(const OperatorCase& operator_case) : Prepared(operator_case, make_operands(operator_case)) {}
  Prepared(const OperatorCase& operator_case, const Operands& operands)
      : c(operator_case),
        x(operands),
        plan(gdn::Plan::make(c.problem)),
        r(empty_results(c, x, Mode::kTraining)),
        saved(saved_tensors(r)) {
    call(cp::prepare, cp::prepare_workspace_bytes, plan, forward_tensors());
  }

  gdn::ForwardTensors forward_tensors() {
    gdn::ForwardTensors t = test::forward_tensors(x, r);
    t.saved = &saved;
    return t;
  }

  Tensor empty_summary(size_t entries) const {
    const gdn::Problem& p = c.problem;
    return {stat_dtype(c.dtype), {static_cast<int64_t>(entries), p.value_heads, p.key_dim, p.value_dim + p.key_dim}};
  }

  cp::Summary summary_arguments(const std::vector<int64_t>& sequences, const Tensor& start, const Tensor& to) const {
    return {.k = c.problem.use_qk_l2norm ? nullptr : x.k.dl(),
            .v = x.v.dl(),
            .g = x.g.dl(),
            .beta = x.beta.dl(),
            .A_log = x.A_log.dl(),
            .dt_bias = x.dt_bias.dl(),
            .saved = &saved,
            .initial_state = start.dl(),
            .sequences = sequences,
            .summary = to.dl()};
  }
  Tensor summary(const std::vector<int64_t>& sequences, const Tensor& start = {}) const {
    const Tensor result = empty_summary(sequences.size());
    call(cp::summarize, cp::summarize_workspace_bytes, plan, summary_arguments(sequences, start, result));
    EXPECT_TRUE(result.only_elements_written());
    return result;
  }

  cp::AdjointSummary adjoint_arguments(const std::vector<int64_t>& sequences, const Tensor& start,
                                       const Tensor& transition, const Tensor& to) const {
    const bool normalized = c.problem.use_qk_l2norm;
    return {.q = normalized ? nullptr : x.q.dl(),
            .k = normalized ? nullptr : x.k.dl(),
            .g = x.g.dl(),
            .beta = x.beta.dl(),
            .A_log = x.A_log.dl(),
            .dt_bias = x.dt_bias.dl(),
            .saved = &saved,
            .grad_output = x.grad_output.dl(),
            .grad_final_state = start.dl(),
            .transition = transition.dl(),
            .sequences = sequences,
            .summary = to.dl()};
  }
  Tensor adjoint_summary(const std::vector<int64_t>& sequences, const Tensor& start = {},
                         const Tensor& transition = {}) const {
    const Tensor result = empty_summary(sequences.size());
    call(cp::summarize_adjoint, cp::summarize_adjoint_workspace_bytes, plan,
         adjoint_arguments(sequences, start, transition, result));
    EXPECT_TRUE(result.only_elements_written());
    return result;
  }

  Tensor merged(const Tensor& summaries, const std::vector<int64_t>& order) const {
    const gdn::Problem& p = c.problem;
    const int64_t rows = p.state_v_first ? p.value_dim : p.key_dim, columns = p.key_dim + p.value_dim - rows;
    const Tensor state(stat_dtype(c.dtype), {p.value_heads, rows, columns});
    call(cp::merge, cp::merge_workspace_bytes, plan,
         cp::Merge{.summaries = summaries.dl(), .order = order, .state = state.dl()});
    EXPECT_TRUE(state.only_elements_written());
    return state;
  }
};

// The state part [.., K, V] and the transition [.., K, K] of a summary.
Tensor state_part(const Prepared& run, const Tensor& summary) { return summary.slice(3, 0, run.c.problem.value_dim); }
Tensor transition_part(const Prepared& run, const Tensor& summary) {
  return summary.slice(3, run.c.problem.value_dim, run.c.problem.value_dim + run.c.problem.key_dim);
}

// Rows of a state tensor in an order, K first.
Tensor rows_of_state(const Prepared& run, const Tensor& state, const std::vector<int64_t>& sequences) {
  std::vector<Tensor> rows;
  rows.reserve(sequences.size());
  for (const int64_t n : sequences) rows.push_back(state.slice(0, n, n + 1));
  const Tensor chosen = concatenated(rows, 0);
  return run.c.problem.state_v_first ? chosen.transposed(2, 3) : chosen;
}

// The same problem with V = K, and the identity as every initial state and gradient of a final state.
OperatorCase transition_case(const OperatorCase& c) {
  OperatorCase t = c;
  t.problem.value_dim = c.problem.key_dim;
  t.initial_state = t.final_state = true;
  return t;
}
Operands transition_operands(const OperatorCase& c, const Operands& x) {
  const gdn::Problem& p = c.problem;
  const int64_t K = p.key_dim;
  const DType stat = stat_dtype(c.dtype);
  Operands result = x;
  result.v = constant(c.dtype, {p.batch, p.tokens, p.value_heads, K}, 0);
  result.grad_output = result.v;
  result.initial_state = Tensor(stat, {p.num_sequences(), p.value_heads, K, K}).filled([K](int64_t i) {
    return i / K % K == i % K ? 1.0 : 0.0;
  });
  result.grad_final_state = result.initial_state;
  return result;
}

Tensor normal_states(const Prepared& run, int64_t entries) {
  const gdn::Problem& p = run.c.problem;
  Random random(5);
  return normal(random, stat_dtype(run.c.dtype), {entries, p.value_heads, p.key_dim, p.value_dim});
}

OperatorCase packed_case(DType dtype, int64_t chunk_size = 16) {
  OperatorCase c = make_case(dtype, 1, 131, 2, 4, 24, 40);
  c.problem.sequence_offsets = {{0, 37, 37, 54, 127}};
  c.problem.chunk_size = chunk_size;
  return c;
}

// Against the reference -----------------------------------------------------------------------------------------------

class SummaryOf : public testing::TestWithParam<std::tuple<DType, int64_t, int>> {
 protected:
  static OperatorCase parameter_case() {
    const auto& [dtype, chunk_size, flags] = GetParam();
    OperatorCase c = packed_case(dtype, chunk_size);
    apply_flags(flags, c);
    c.initial_state = c.final_state = true;
    return c;
  }
  static double tolerance() { return 2 * output_tolerance(std::get<0>(GetParam())); }
  // Any order, an empty one among them, and one twice.
  static std::vector<int64_t> sequences() { return {3, 1, 0, 3}; }
};

TEST_P(SummaryOf, SequencesEqualsReference) {
  const Prepared run(parameter_case());
  std::vector<Tensor> rows;
  for (const int64_t n : sequences()) rows.push_back(run.x.initial_state.slice(0, n, n + 1));
  const Tensor summary = run.summary(sequences(), concatenated(rows, 0));
  const Results expected = run_reference(run.c, run.x, Mode::kForward);
  EXPECT_TRUE(close(state_part(run, summary), rows_of_state(run, expected.final_state, sequences()), tolerance()));

  const OperatorCase m = transition_case(run.c);
  const Results transition = run_reference(m, transition_operands(m, run.x), Mode::kForward);
  const Prepared same_layout(m, transition_operands(m, run.x));
  EXPECT_TRUE(close(transition_part(run, summary), rows_of_state(same_layout, transition.final_state, sequences()),
                    tolerance()));
}

TEST_P(SummaryOf, GradientsEqualsReference) {
  const Prepared run(parameter_case());
  std::vector<Tensor> rows;
  for (const int64_t n : sequences()) rows.push_back(run.x.grad_final_state.slice(0, n, n + 1));
  const Tensor summary = run.adjoint_summary(sequences(), concatenated(rows, 0));
  const Results expected = run_reference(run.c, run.x);
  EXPECT_TRUE(close(state_part(run, summary), rows_of_state(run, expected.dh0, sequences()), tolerance()));

  const OperatorCase m = transition_case(run.c);
  const Results transition = run_reference(m, transition_operands(m, run.x));
  const Prepared same_layout(m, transition_operands(m, run.x));
  EXPECT_TRUE(
      close(transition_part(run, summary), rows_of_state(same_layout, transition.dh0, sequences()), tolerance()));
}

// Every flag alone and all at once: bits of all_flag_sets().
INSTANTIATE_TEST_SUITE_P(All, SummaryOf,
                         testing::Combine(testing::Values(DType::kFloat64, DType::kFloat32, DType::kBFloat16,
                                                          DType::kFloat16),
                                          testing::Values(16, 64), testing::Values(0, 1, 2, 130, 4, 12, 16, 159)),
                         [](const auto& info) {
                           return concat(dtype_name(std::get<0>(info.param)), "_C", std::get<1>(info.param), "_",
                                         flags_name(std::get<2>(info.param)));
                         });

TEST(Summary, WithoutInitialStateStartsFromZero) {
  OperatorCase c = packed_case(DType::kFloat32);
  c.initial_state = c.final_state = false;
  const Prepared run(c);
  const Prepared zero(c);
  const Shape shape = {1, 4, 24, 40};
  EXPECT_TRUE(same_bits(run.summary({3}), zero.summary({3}, constant(DType::kFloat32, shape, 0))));
  EXPECT_TRUE(same_bits(run.adjoint_summary({3}), zero.adjoint_summary({3}, constant(DType::kFloat32, shape, 0))));
}

TEST(Summary, OfAnEmptySequenceIsTheIdentity) {
  const Prepared run(packed_case(DType::kFloat32));
  for (const Tensor& summary : {run.summary({1}), run.adjoint_summary({1})}) {
    for (int64_t i = 0; i < summary.numel(); ++i) {
      const int64_t column = i % 64, row = i / 64 % 24;
      EXPECT_EQ(summary.at(i), column == 40 + row ? 1.0 : 0.0);
    }
  }
}

TEST(Summary, TransposedTransitionTakesThePlaceOfThatOfTheAdjoint) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const Prepared run(packed_case(dtype));
    const Tensor transition = transition_part(run, run.summary({3, 0}));
    const Tensor computed = run.adjoint_summary({3, 0}), reused = run.adjoint_summary({3, 0}, {}, transition);
    EXPECT_TRUE(same_bits(state_part(run, reused), state_part(run, computed)));
    EXPECT_TRUE(same_bits(transition_part(run, reused), transition.transposed(2, 3)));
    EXPECT_TRUE(close(transition_part(run, computed), transition.transposed(2, 3), output_tolerance(dtype)));
  }
}

// Halves of forward, and pieces of a sequence -------------------------------------------------------------------------

TEST(Halves, GiveTheSameBitsAsForward) {
  for (const int flags : {0, 159}) {
    OperatorCase c = packed_case(DType::kBFloat16);
    apply_flags(flags, c);
    Prepared run(c);
    EXPECT_TRUE(run.r.o.untouched());
    call(cp::advance, cp::advance_workspace_bytes, run.plan, run.forward_tensors());
    const Results whole = test::run(c, run.x);
    EXPECT_TRUE(same_bits(run.r.A, whole.A));
    EXPECT_TRUE(same_bits(run.r.o, whole.o));
    if (c.final_state) {
      EXPECT_TRUE(same_bits(run.r.final_state, whole.final_state));
    }
  }
}

// A sequence as one, and as pieces that only exchange summaries.
TEST(Merge, OfPiecesGivesTheStatesOfTheWholeSequence) {
  for (const bool v_first : {false, true}) {
    OperatorCase whole = make_case(DType::kFloat64, 1, 150, 1, 2, 24, 40);
    whole.problem.state_v_first = v_first;
    whole.initial_state = false;
    const Operands x = make_operands(whole);
    OperatorCase pieces = whole;
    pieces.problem.sequence_offsets = {{0, 64, 64, 77, 150}};
    Operands same = x;
    same.grad_final_state = {};  // of the whole sequence: goes into the last piece alone
    pieces.final_state = false;
    const Prepared run(pieces, same);
    const Tensor forward = run.summary({0, 1, 2, 3});
    const Results expected = test::run(whole, x);
    const Tensor final_state = expected.final_state.slice(0, 0, 1);
    const Tensor merged = run.merged(forward, {0, 1, 2, 3});
    EXPECT_TRUE(close(merged.view({1, 2, merged.shape()[1], merged.shape()[2]},
                                  {0, merged.strides()[0], merged.strides()[1], merged.strides()[2]}),
                      final_state, 1e-13));

    // In reverse, with the gradient of the final state entering the last piece.
    const Tensor last = run.adjoint_summary({3}, x.grad_final_state);
    const Tensor backward = concatenated({run.adjoint_summary({0, 1, 2}), last}, 0);
    OperatorCase with_start = whole;  // so that the reference has a dh0
    with_start.initial_state = true;
    Operands from_zero = x;
    from_zero.initial_state = constant(DType::kFloat64, expected.final_state.shape(), 0);
    const Results exact = run_reference(with_start, from_zero);
    const Tensor gradient = run.merged(backward, {3, 2, 1, 0});
    EXPECT_TRUE(close(gradient.view({1, 2, gradient.shape()[1], gradient.shape()[2]},
                                    {0, gradient.strides()[0], gradient.strides()[1], gradient.strides()[2]}),
                      exact.dh0, 1e-12));
  }
}

TEST(Merge, OfNothingIsZero) {
  const Prepared run(packed_case(DType::kFloat32));
  EXPECT_EQ(norm(run.merged(run.summary({0}), {})), 0.0);
}

// What is multiplied by no state yet must not be read: it may have overflowed.
TEST(Merge, DoesNotReadTheFirstTransition) {
  const Prepared run(packed_case(DType::kFloat32));
  const Tensor summaries = run.summary({0, 3});
  const Tensor expected = run.merged(summaries, {0, 1});
  transition_part(run, summaries).slice(0, 0, 1).filled([](int64_t) { return kInfinity; });
  EXPECT_TRUE(same_bits(run.merged(summaries, {0, 1}), expected));
}

TEST(Summary, HardResetLeavesNothingOfTheStateBefore) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const OperatorCase c = packed_case(dtype);
    const Operands x = make_operands(c);
    x.g.set((54 + 20) * 4 + 1, -kInfinity);  // token 20 of the last sequence, second head
    const Prepared run(c, x);
    for (const Tensor& summary : {run.summary({3}), run.adjoint_summary({3})}) {
      ASSERT_TRUE(all_finite(summary));
      const Tensor transition = transition_part(run, summary);
      EXPECT_EQ(norm(transition.slice(1, 1, 2)), 0.0);
      EXPECT_GT(norm(transition.slice(1, 0, 1)), 0.0);
      EXPECT_GT(norm(state_part(run, summary).slice(1, 1, 2)), 0.0);
    }
  }
}

TEST(Summary, NumberOfThreadsChangesNoBit) {
  OperatorCase c = packed_case(DType::kBFloat16);
  c.problem.value_dim = 136;
  const auto all = [&](int threads) {
    c.problem.num_threads = threads;
    const Prepared run(c);
    const Tensor summary = run.summary({3, 0, 2});
    return std::vector<Tensor>{summary, run.adjoint_summary({3, 0, 2}), run.merged(summary, {1, 2, 0})};
  };
  const std::vector<Tensor> expected = all(1);
  for (const int threads : {2, 7}) {
    const std::vector<Tensor> actual = all(threads);
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(same_bits(actual[i], expected[i])) << threads;
  }
}

// Rules ---------------------------------------------------------------------------------------------------------------

// Everything that can be given is given.
OperatorCase full_case() {
  OperatorCase c = packed_case(DType::kFloat32);
  c.problem.use_gate = true;
  return c;
}

TEST(Rules, ArgumentsOfSummaries) {
  const Prepared run(full_case());
  const Tensor to = run.empty_summary(2), start = normal_states(run, 2);
  Buffer workspace(cp::summarize_workspace_bytes(run.plan));
  using T = cp::Summary;
  check_arguments<T>(
      run.summary_arguments({0, 3}, start, to),
      {required<&T::k>("k"), required<&T::v>("v"), required<&T::g>("g"), required<&T::beta>("beta"),
       required<&T::A_log>("A_log", "AssertionError"), optional<&T::dt_bias>("dt_bias"),
       optional<&T::initial_state>("initial_state"), required<&T::summary>("summary")},
      [&](const T& t) { cp::summarize(run.plan, t, {.data = workspace.data(), .bytes = workspace.bytes()}); },
      [&] { return to.untouched(); });
}

TEST(Rules, ArgumentsOfAdjointSummaries) {
  const Prepared run(full_case());
  const Tensor to = run.empty_summary(2), start = normal_states(run, 2);
  const Tensor transition = transition_part(run, run.summary({0, 3}));
  Buffer workspace(cp::summarize_adjoint_workspace_bytes(run.plan));
  using T = cp::AdjointSummary;
  check_arguments<T>(
      run.adjoint_arguments({0, 3}, start, transition, to),
      {required<&T::q>("q"), required<&T::k>("k"), required<&T::g>("g"), required<&T::beta>("beta"),
       required<&T::A_log>("A_log", "AssertionError"), optional<&T::dt_bias>("dt_bias"),
       required<&T::grad_output>("do"), optional<&T::grad_final_state>("dht"), optional<&T::transition>("transition"),
       required<&T::summary>("summary")},
      [&](const T& t) { cp::summarize_adjoint(run.plan, t, {.data = workspace.data(), .bytes = workspace.bytes()}); },
      [&] { return to.untouched(); });
}

TEST(Rules, SavedTensorsOfBothSummaries) {
  OperatorCase c = full_case();
  c.problem.use_qk_l2norm = true;
  Prepared run(c);
  const Tensor to = run.empty_summary(1);
  Buffer workspace(cp::summarize_adjoint_workspace_bytes(run.plan));
  const gdn::Workspace space = {.data = workspace.data(), .bytes = workspace.bytes()};
  using T = gdn::SavedTensors;
  const T valid = run.saved;
  check_arguments<T>(
      valid, {required<&T::A>("A"), required<&T::k_normalized>("k_normalized")},
      [&](const T& t) {
        run.saved = t;
        cp::summarize(run.plan, run.summary_arguments({0}, {}, to), space);
      },
      [&] { return to.untouched(); });
  check_arguments<T>(
      valid,
      {required<&T::A>("A"), required<&T::k_normalized>("k_normalized"), required<&T::q_normalized>("q_normalized")},
      [&](const T& t) {
        run.saved = t;
        cp::summarize_adjoint(run.plan, run.adjoint_arguments({0}, {}, {}, to), space);
      },
      [&] { return to.untouched(); });
}

TEST(Rules, OfSummaries) {
  OperatorCase c = packed_case(DType::kBFloat16);
  c.problem.use_qk_l2norm = true;
  const Prepared run(c);
  const Tensor to = run.empty_summary(1);
  Buffer workspace(cp::summarize_workspace_bytes(run.plan));
  const gdn::Workspace space = {.data = workspace.data(), .bytes = workspace.bytes()};
  const auto rejects = [&](const cp::Summary& t, const char* kind, const std::vector<std::string>& parts) {
    expect_error([&] { cp::summarize(run.plan, t, space); }, kind, parts);
    EXPECT_TRUE(to.untouched());
  };
  const cp::Summary good = run.summary_arguments({3}, {}, to);
  cp::Summary t = good;
  t.sequences = {4};
  rejects(t, "ValueError", {"sequences", "4 sequences", "got 4"});
  t.sequences = {-1};
  rejects(t, "ValueError", {"sequences", "got -1"});
  t.sequences = {0, 3};
  rejects(t, "ValueError", {"summary", "[P, HV, K, V+K] = [2, 4, 24, 64]", "[1, 4, 24, 64]"});
  t = good;
  t.saved = nullptr;
  rejects(t, "ValueError", {"saved", "prepare"});
  const gdn::SavedTensors without_keys = {.A = run.saved.A};
  t.saved = &without_keys;
  rejects(t, "ValueError", {"saved.k_normalized"});
  t = good;
  const Tensor wrong_state(DType::kFloat32, {1, 4, 40, 24});
  t.initial_state = wrong_state.dl();
  rejects(t, "ValueError", {"initial_state", "[P, HV, K, V] = [1, 4, 24, 40]", "[1, 4, 40, 24]"});
  t = good;
  const Tensor wrong_type(DType::kBFloat16, to.shape());
  t.summary = wrong_type.dl();
  rejects(t, "TypeError", {"summary", "float32", "bfloat16"});
  t = good;
  t.A_log = run.x.beta.dl();
  rejects(t, "ValueError", {"A_log", "use_gate_in_kernel"});
  expect_error([&] { cp::summarize(run.plan, good, {.data = space.data, .bytes = space.bytes - 64}); }, "ValueError",
               {"workspace"});
}

TEST(Rules, OfAdjointSummariesAndMerges) {
  const Prepared run(packed_case(DType::kFloat32));
  const Tensor to = run.empty_summary(1);
  Buffer workspace(cp::summarize_adjoint_workspace_bytes(run.plan) + cp::merge_workspace_bytes(run.plan));
  const gdn::Workspace space = {.data = workspace.data(), .bytes = workspace.bytes()};
  const auto rejects = [&](const cp::AdjointSummary& t, const std::vector<std::string>& parts) {
    expect_error([&] { cp::summarize_adjoint(run.plan, t, space); }, "ValueError", parts);
    EXPECT_TRUE(to.untouched());
  };
  const cp::AdjointSummary good = run.adjoint_arguments({0}, {}, {}, to);
  cp::AdjointSummary t = good;
  t.q = nullptr;
  rejects(t, {"q", "none"});
  t = good;
  t.grad_output = nullptr;
  rejects(t, {"do", "none"});
  t = good;
  t.transition = to.dl();
  rejects(t, {"transition", "[P, HV, K, K] = [1, 4, 24, 24]"});

  const Tensor summaries = run.summary({0, 3}), state(DType::kFloat32, {4, 24, 40}), flat(DType::kFloat32, {4, 960});
  expect_error(
      [&] {
        cp::merge(run.plan, {.summaries = summaries.dl(), .order = {0, 2}, .state = state.dl()}, space);
      },
      "ValueError", {"order", "2 summaries", "got 2"});
  expect_error([&] { cp::merge(run.plan, {.summaries = summaries.dl(), .state = flat.dl()}, space); }, "ValueError",
               {"state", "[HV, K, V] = [4, 24, 40]"});
  expect_error([&] { cp::merge(run.plan, {.state = state.dl()}, space); }, "ValueError", {"summaries", "none"});
  EXPECT_TRUE(state.untouched());
}

TEST(Rules, HalvesOfForwardNeedWhatLiesBetween) {
  Prepared run(packed_case(DType::kFloat32));
  Buffer workspace(cp::advance_workspace_bytes(run.plan));
  const gdn::Workspace space = {.data = workspace.data(), .bytes = workspace.bytes()};
  gdn::ForwardTensors t = run.forward_tensors();
  t.saved = nullptr;
  expect_error([&] { cp::prepare(run.plan, t, space); }, "ValueError", {"saved"});
  expect_error([&] { cp::advance(run.plan, t, space); }, "ValueError", {"saved"});
  t = run.forward_tensors();
  t.o = nullptr;
  expect_error([&] { cp::prepare(run.plan, t, space); }, "ValueError", {"o"});
}

// Cuts between ranks follow from the whole stream.
TEST(ContextParallel, RefusesBatchInvariance) {
  gdn::Problem problem = make_case(DType::kFloat32, 1, 100, 1, 2, 16, 16).problem;
  problem.batch_invariant = true;
  const gdn::Plan plan = gdn::Plan::make(problem);
  const auto refuses = [&](auto run) {
    expect_error(run, "ValueError", {"batch_invariant", "context parallelism", "got true"});
  };
  refuses([&] { cp::prepare(plan, {}, {}, nullptr); });
  refuses([&] { cp::advance(plan, {}, {}, nullptr); });
  refuses([&] { cp::summarize(plan, {}, {}, nullptr); });
  refuses([&] { cp::summarize_adjoint(plan, {}, {}, nullptr); });
  refuses([&] { cp::merge(plan, {}, {}, nullptr); });
}

}  // namespace
}  // namespace cula::test
