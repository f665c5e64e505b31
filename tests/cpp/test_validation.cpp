// What plans and calls of the operator reject, with which kind of exception and which words, and that a rejected call
// writes nothing.
#include <algorithm>

#include "argument_checks.h"
#include "operator_case.h"

namespace cula::test {
namespace {

// Problems ------------------------------------------------------------------------------------------------------------

struct BadProblem {
  const char* name;
  std::function<void(gdn::Problem&)> change;
  const char* kind;
  std::vector<std::string> parts;
};

void PrintTo(const BadProblem& bad, std::ostream* stream) { *stream << bad.name; }

class ProblemRules : public testing::TestWithParam<BadProblem> {};

TEST_P(ProblemRules, AreCheckedByPlan) {
  gdn::Problem problem = make_case(DType::kFloat32, 1, 128, 2, 4, 16, 8).problem;
  ASSERT_NO_THROW(gdn::Plan::make(problem));
  GetParam().change(problem);
  expect_error([&] { gdn::Plan::make(problem); }, GetParam().kind, GetParam().parts);
}

std::function<void(gdn::Problem&)> offsets(const std::vector<int64_t>& values) {
  return [values](gdn::Problem& p) { p.sequence_offsets = values; };
}

std::function<void(gdn::Problem&)> operands(DLDataTypeCode code, uint8_t bits, uint16_t lanes) {
  return [=](gdn::Problem& p) { p.dtype = {static_cast<uint8_t>(code), bits, lanes}; };
}

std::function<void(gdn::Problem&)> device(DLDeviceType type, gdn::Backend backend) {
  return [=](gdn::Problem& p) {
    p.device = {type, 0};
    p.backend = backend;
  };
}

const BadProblem kBadProblems[] = {
    {"negative_batch", [](gdn::Problem& p) { p.batch = -1; }, "ValueError", {"batch", "-1"}},
    {"negative_tokens", [](gdn::Problem& p) { p.tokens = -5; }, "ValueError", {"tokens", "-5"}},
    {"no_heads", [](gdn::Problem& p) { p.heads = 0; }, "ValueError", {"H", "0"}},
    {"case32_four_and_six_heads",
     [](gdn::Problem& p) { p.heads = 4, p.value_heads = 6; },
     "ValueError",
     {"H", "4", "HV", "6"}},
    {"case32_fewer_value_heads",
     [](gdn::Problem& p) { p.heads = 4, p.value_heads = 2; },
     "ValueError",
     {"H", "4", "HV", "2"}},
    {"no_value_heads", [](gdn::Problem& p) { p.value_heads = 0; }, "ValueError", {"HV", "0"}},
    {"no_key_dim", [](gdn::Problem& p) { p.key_dim = 0; }, "ValueError", {"K", "0"}},
    {"no_value_dim", [](gdn::Problem& p) { p.value_dim = 0; }, "ValueError", {"V", "0"}},
    {"case36_key_dim_past_the_limit", [](gdn::Problem& p) { p.key_dim = 257; }, "AssertionError", {"K", "256", "257"}},
    {"chunk_size", [](gdn::Problem& p) { p.chunk_size = 48; }, "ValueError", {"chunk_size", "16, 32 or 64", "48"}},
    {"chunk_size_128", [](gdn::Problem& p) { p.chunk_size = 128; }, "ValueError", {"chunk_size", "128"}},
    {"neg_eigval_alone",
     [](gdn::Problem& p) { p.allow_neg_eigval = true; },
     "ValueError",
     {"allow_neg_eigval", "use_beta_sigmoid"}},
    {"case26_offsets_past_the_end", offsets({0, 192}), "ValueError", {"cu_seqlens", "128", "192"}},
    {"case26_descending_offsets", offsets({0, 50, 40, 128}), "ValueError", {"cu_seqlens", "50", "40"}},
    {"case26_offsets_from_five", offsets({5, 128}), "ValueError", {"cu_seqlens", "0", "5"}},
    {"case26_no_offsets", offsets({}), "ValueError", {"cu_seqlens"}},
    {"case27_batch_with_offsets",
     [](gdn::Problem& p) {
       p.batch = 2, offsets({0, 64, 128})(p);
     },
     "ValueError",
     {"cu_seqlens", "batch", "2"}},
    {"negative_threads", [](gdn::Problem& p) { p.num_threads = -1; }, "ValueError", {"num_threads", "-1"}},
    {"integer_operands", operands(kDLInt, 32, 1), "TypeError", {"float", "int32"}},
    {"eight_bit_operands", operands(kDLUInt, 8, 1), "TypeError", {}},
    {"vector_operands", operands(kDLFloat, 32, 4), "TypeError", {}},
    {"cuda_backend_on_the_cpu",
     [](gdn::Problem& p) { p.backend = gdn::Backend::kCuda; },
     "ValueError",
     {"backend", "cpu", "cuda"}},
    {"sm90_backend_on_the_cpu",
     [](gdn::Problem& p) { p.backend = gdn::Backend::kSm90; },
     "ValueError",
     {"backend", "sm90"}},
    {"cpu_backend_on_cuda", device(kDLCUDA, gdn::Backend::kCpu), "ValueError", {"backend", "cpu"}},
    {"other_device", device(kDLMetal, gdn::Backend::kAuto), "ValueError", {"device"}},
};

INSTANTIATE_TEST_SUITE_P(All, ProblemRules, testing::ValuesIn(kBadProblems),
                         [](const auto& info) { return std::string(info.param.name); });

// Calls ---------------------------------------------------------------------------------------------------------------

OperatorCase plain_case() { return make_case(DType::kFloat32, 1, 10, 1, 2, 8, 4); }

// The flags on, so that every argument has a use.
OperatorCase full_case() {
  OperatorCase c = make_case(DType::kFloat32, 2, 20, 1, 2, 8, 4);
  c.problem.use_gate = c.problem.use_qk_l2norm = c.problem.use_beta_sigmoid = true;
  return c;
}

enum class Step { kForward, kBackward, kRecurrent };

// Everything that a call of the operator takes, valid until a test changes it.
struct Call {
  explicit Call(const OperatorCase& operator_case) : c(operator_case) {
    forward.saved = backward.saved = &saved;
    backward.q = x.q.dl();
    backward.k = x.k.dl();
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  gdn::Plan plan() const { return gdn::Plan::make(problem); }

  void run(Step step, gdn::Workspace workspace) const {
    if (step == Step::kForward) gdn::forward(plan(), forward, workspace);
    if (step == Step::kBackward) gdn::backward(plan(), backward, workspace);
    if (step == Step::kRecurrent) gdn::recurrent_forward(plan(), forward);
  }
  void run(Step step) const {
    Buffer workspace(std::max(plan().forward_workspace_bytes(true), plan().backward_workspace_bytes()));
    run(step, {workspace.data(), workspace.bytes()});
  }

  bool untouched() const {
    const std::vector<Results::Named> results = r.all();
    const Tensor saved_by_forward[] = {r.A, r.q_normalized, r.k_normalized, r.q_rstd, r.k_rstd};
    return std::all_of(results.begin(), results.end(), [](const auto& result) { return result.tensor.untouched(); }) &&
           std::all_of(std::begin(saved_by_forward), std::end(saved_by_forward),
                       [](const Tensor& t) { return !t || t.untouched(); });
  }

  OperatorCase c;
  gdn::Problem problem = c.problem;  // what the call is planned for
  Operands x = make_operands(c);
  Results r = empty_results(c, x, Mode::kTraining);
  gdn::SavedTensors saved = saved_tensors(r);
  gdn::ForwardTensors forward = forward_tensors(x, r);
  gdn::BackwardTensors backward = backward_tensors(c, x, r);
  Tensor per_head = constant(DType::kFloat32, {c.problem.value_heads}, 0);
};

TEST(Validation, UnchangedCallsAreAccepted) {
  for (const OperatorCase& c : {plain_case(), full_case()}) {
    for (const Step step : {Step::kForward, Step::kRecurrent}) {
      Call call(c);
      if (step == Step::kRecurrent) call.forward.saved = nullptr;
      EXPECT_NO_THROW(call.run(step));
      EXPECT_FALSE(call.untouched());
    }
    Call call(c);
    EXPECT_NO_THROW(call.run(Step::kForward));
    EXPECT_NO_THROW(call.run(Step::kBackward));
  }
}

// Every argument in turn ----------------------------------------------------------------------------------------------

std::vector<Argument<gdn::ForwardTensors>> forward_arguments() {
  using T = gdn::ForwardTensors;
  return {required<&T::q>("q"),
          required<&T::k>("k"),
          required<&T::v>("v"),
          required<&T::g>("g"),
          required<&T::beta>("beta"),
          required<&T::A_log>("A_log", "AssertionError"),
          optional<&T::dt_bias>("dt_bias"),
          optional<&T::initial_state>("initial_state"),
          required<&T::o>("o"),
          optional<&T::final_state>("final_state")};
}

void check_forward_arguments(Call& call, Step step) {
  const gdn::ForwardTensors valid = call.forward;
  check_arguments<gdn::ForwardTensors>(
      valid, forward_arguments(),
      [&](const gdn::ForwardTensors& t) {
        call.forward = t;
        call.run(step);
      },
      [&] { return call.untouched(); });
}

TEST(Validation, ForwardArguments) {
  Call call(full_case());
  check_forward_arguments(call, Step::kForward);
}

TEST(Validation, RecurrentForwardArguments) {
  Call call(full_case());
  call.forward.saved = nullptr;
  check_forward_arguments(call, Step::kRecurrent);
}

TEST(Validation, BackwardArguments) {
  Call call(full_case());
  using T = gdn::BackwardTensors;
  const T valid = call.backward;
  check_arguments<T>(
      valid,
      {optional<&T::q>("q"), optional<&T::k>("k"), required<&T::v>("v"), required<&T::g>("g"),
       required<&T::beta>("beta"), required<&T::A_log>("A_log", "AssertionError"), optional<&T::dt_bias>("dt_bias"),
       optional<&T::initial_state>("initial_state"), required<&T::grad_output>("do"),
       optional<&T::grad_final_state>("dht"), optional<&T::dq>("dq"), optional<&T::dk>("dk"), optional<&T::dv>("dv"),
       optional<&T::dg>("dg"), optional<&T::dbeta>("dbeta"), optional<&T::dA_log>("dA_log"),
       optional<&T::ddt_bias>("ddt_bias"), optional<&T::dh0>("dh0")},
      [&](const T& t) {
        call.backward = t;
        call.run(Step::kBackward);
      },
      [&] { return call.untouched(); });
}

TEST(Validation, SavedTensors) {
  using T = gdn::SavedTensors;
  for (const Step step : {Step::kForward, Step::kBackward}) {
    Call call(full_case());
    const T valid = call.saved;
    check_arguments<T>(
        valid,
        {required<&T::q_normalized>("q_normalized"), required<&T::q_rstd>("q_rstd"),
         required<&T::k_normalized>("k_normalized"), required<&T::k_rstd>("k_rstd"), required<&T::A>("A")},
        [&](const T& t) {
          call.saved = t;
          call.run(step);
        },
        [&] { return call.untouched(); });
  }
}

TEST(Validation, Case45_MixedOperandTypes) {
  Call call(full_case());
  const gdn::ForwardTensors valid = call.forward;
  int checked = 0;
  for (const Argument<gdn::ForwardTensors>& a : forward_arguments()) {
    const std::string name = a.name;
    if (name != "q" && name != "k" && name != "v" && name != "o") continue;
    ++checked;
    const DLTensor* original = a.get(valid);
    for (const DType other : {DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
      const Tensor changed(other, Shape(original->shape, original->shape + original->ndim));
      call.forward = valid;
      a.set(call.forward, changed.dl());
      expect_error([&] { call.run(Step::kForward); }, "TypeError", {name, "float32", dtype_name(other)});
      EXPECT_TRUE(changed.untouched());
    }
  }
  EXPECT_EQ(checked, 4);
  EXPECT_TRUE(call.untouched());
}

// Arguments that do not fit together ----------------------------------------------------------------------------------

struct BadCall {
  const char* name;
  Step step;
  std::function<void(Call&)> change;
  std::vector<std::string> parts;
};

void PrintTo(const BadCall& bad, std::ostream* stream) { *stream << bad.name; }

class CallRules : public testing::TestWithParam<BadCall> {};

TEST_P(CallRules, AreCheckedBeforeAnythingIsWritten) {
  const auto& [name, step, change, parts] = GetParam();
  Call call(plain_case());
  change(call);
  expect_error([&, step = step] { call.run(step); }, "ValueError", parts);
  EXPECT_TRUE(call.untouched());
}

const BadCall kBadCalls[] = {
    {"case17_absent_gate", Step::kForward, [](Call& t) { t.forward.g = nullptr; }, {"g:"}},
    {"case26_wrong_number_of_initial_states",
     Step::kForward,
     [](Call& t) {
       offsets({0, 4, 10})(t.problem);
     },
     {"initial_state", "[2, 2, 8, 4]", "[1, 2, 8, 4]"}},
    {"case34_initial_state_in_the_other_layout",
     Step::kForward,
     [](Call& t) { t.problem.state_v_first = true; },
     {"initial_state", "[N, HV, V, K] = [1, 2, 4, 8]", "[1, 2, 8, 4]"}},
    {"case34_final_state_in_the_other_layout",
     Step::kForward,
     [](Call& t) { t.problem.state_v_first = true, t.forward.initial_state = nullptr; },
     {"final_state", "[N, HV, V, K] = [1, 2, 4, 8]", "[1, 2, 8, 4]"}},
    {"rate_without_gate", Step::kForward, [](Call& t) { t.forward.A_log = t.per_head.dl(); }, {"A_log:"}},
    {"bias_without_gate", Step::kForward, [](Call& t) { t.forward.dt_bias = t.per_head.dl(); }, {"dt_bias:"}},
    {"backward_rate_without_gate", Step::kBackward, [](Call& t) { t.backward.A_log = t.per_head.dl(); }, {"A_log:"}},
    {"rate_gradient_without_gate", Step::kBackward, [](Call& t) { t.backward.dA_log = t.per_head.dl(); }, {"dA_log:"}},
    {"bias_gradient_without_gate",
     Step::kBackward,
     [](Call& t) { t.backward.ddt_bias = t.per_head.dl(); },
     {"ddt_bias:"}},
    {"gradient_over_an_input",
     Step::kBackward,
     [](Call& t) { t.backward.dv->data = t.backward.v->data; },
     {"dv: expected memory of its own", "got some of v's"}},
    {"gradients_over_each_other",
     Step::kBackward,
     [](Call& t) { t.backward.dk->data = t.backward.dq->data; },
     {"dk: expected memory of its own", "got some of dq's"}},
    {"backward_without_saved", Step::kBackward, [](Call& t) { t.backward.saved = nullptr; }, {"saved:"}},
    {"recurrent_with_saved", Step::kRecurrent, [](Call& t) { ASSERT_NE(t.forward.saved, nullptr); }, {"saved:"}},
    // Only with l2norm are normalised rows saved, which stand for the raw ones.
    {"no_queries_without_l2norm", Step::kBackward, [](Call& t) { t.backward.q = nullptr; }, {"q:"}},
    {"no_keys_without_l2norm", Step::kBackward, [](Call& t) { t.backward.k = nullptr; }, {"k:"}},
};

INSTANTIATE_TEST_SUITE_P(All, CallRules, testing::ValuesIn(kBadCalls),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(Validation, Workspace) {
  const Call call(full_case());
  for (const Step step : {Step::kForward, Step::kBackward}) {
    const size_t bytes =
        step == Step::kForward ? call.plan().forward_workspace_bytes(true) : call.plan().backward_workspace_bytes();
    ASSERT_GT(bytes, 0U);
    Buffer workspace(bytes + 64);
    const std::string needed = std::to_string(bytes), given = std::to_string(bytes - 1);
    expect_error([&] { call.run(step, {}); }, "ValueError", {"workspace", needed});
    expect_error([&] { call.run(step, {workspace.data(), bytes - 1}); }, "ValueError", {"workspace", needed, given});
    expect_error([&] { call.run(step, {workspace.data() + 8, bytes}); }, "ValueError", {"workspace", "64"});
    EXPECT_TRUE(call.untouched());
    EXPECT_TRUE(
        std::all_of(workspace.data(), workspace.data() + bytes, [](unsigned char byte) { return byte == 0xff; }));
  }
}

TEST(Tensors, ShapeThatIsNotThere) {
  DLTensor tensor = {};
  tensor.ndim = 2;
  tensor.dtype = {kDLFloat, 32, 1};
  expect_error([&] { TensorView::from(&tensor, "q"); }, "ValueError", {"q: expected a shape of 2 dimensions"});
}

}  // namespace
}  // namespace cula::test
