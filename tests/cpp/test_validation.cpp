// What is rejected, with which kind of exception and which words, and that a rejected call writes nothing.
#include <functional>
#include <limits>

#include "gdn/stages.h"
#include "operator_case.h"

namespace cula::test {
namespace {

namespace stages = gdn::stages;

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

using Offsets = std::vector<int64_t>;

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
    {"case26_offsets_past_the_end",
     [](gdn::Problem& p) {
       p.sequence_offsets = Offsets{0, 192};
     },
     "ValueError",
     {"cu_seqlens", "128", "192"}},
    {"case26_descending_offsets",
     [](gdn::Problem& p) {
       p.sequence_offsets = Offsets{0, 50, 40, 128};
     },
     "ValueError",
     {"cu_seqlens", "50", "40"}},
    {"case26_offsets_from_five",
     [](gdn::Problem& p) {
       p.sequence_offsets = Offsets{5, 128};
     },
     "ValueError",
     {"cu_seqlens", "0", "5"}},
    {"case26_no_offsets", [](gdn::Problem& p) { p.sequence_offsets = Offsets{}; }, "ValueError", {"cu_seqlens"}},
    {"case27_batch_with_offsets",
     [](gdn::Problem& p) {
       p.batch = 2, p.sequence_offsets = Offsets{0, 64, 128};
     },
     "ValueError",
     {"cu_seqlens", "batch", "2"}},
    {"negative_threads", [](gdn::Problem& p) { p.num_threads = -1; }, "ValueError", {"num_threads", "-1"}},
    {"integer_operands",
     [](gdn::Problem& p) {
       p.dtype = {kDLInt, 32, 1};
     },
     "TypeError",
     {"float", "int32"}},
    {"eight_bit_operands",
     [](gdn::Problem& p) {
       p.dtype = {kDLUInt, 8, 1};
     },
     "TypeError",
     {}},
    {"vector_operands",
     [](gdn::Problem& p) {
       p.dtype = {kDLFloat, 32, 4};
     },
     "TypeError",
     {}},
    {"cuda_backend_on_the_cpu",
     [](gdn::Problem& p) { p.backend = gdn::Backend::kCuda; },
     "ValueError",
     {"backend", "cpu", "cuda"}},
    {"sm90_backend_on_the_cpu",
     [](gdn::Problem& p) { p.backend = gdn::Backend::kSm90; },
     "ValueError",
     {"backend", "sm90"}},
    {"cpu_backend_on_cuda",
     [](gdn::Problem& p) {
       p.device = {kDLCUDA, 0};
     },
     "ValueError",
     {"backend", "cpu"}},
    {"other_device",
     [](gdn::Problem& p) {
       p.device = {kDLMetal, 0}, p.backend = gdn::Backend::kAuto;
     },
     "ValueError",
     {"device"}},
};

INSTANTIATE_TEST_SUITE_P(All, ProblemRules, testing::ValuesIn(kBadProblems),
                         [](const auto& info) { return std::string(info.param.name); });

// Tensors -------------------------------------------------------------------------------------------------------------

// One argument of a call whose arguments are the struct T. Setting goes through const DLTensor* for inputs and outputs
// alike.
template <class T>
struct Argument {
  const char* name;  // as messages name it
  std::function<const DLTensor*(const T&)> get;
  std::function<void(T&, const DLTensor*)> set;
  bool optional;
  bool output;
};

template <auto kMember, class T>
Argument<T> argument(const char* name, bool optional = false) {
  using Pointer = std::remove_reference_t<decltype(std::declval<T&>().*kMember)>;
  return {name, [](const T& t) -> const DLTensor* { return t.*kMember; },
          [](T& t, const DLTensor* value) { t.*kMember = const_cast<Pointer>(value); }, optional,
          std::is_same_v<Pointer, DLTensor*>};
}

#define INPUT(T, member, name) argument<&T::member, T>(name)
#define OPTIONAL(T, member, name) argument<&T::member, T>(name, true)

struct Mutation {
  const char* name;
  const char* kind;
  bool outputs_only;
  bool (*apply)(DLTensor&, Shape& shape, Shape& strides);  // false if it does not apply
};

const Mutation kMutations[] = {
    {"a dimension more", "ValueError", false,
     [](DLTensor& t, Shape& shape, Shape& strides) {
       shape.insert(shape.begin(), 2);
       strides.insert(strides.begin(), 0);
       ++t.ndim;
       return true;
     }},
    {"one element less", "ValueError", false,
     [](DLTensor&, Shape& shape, Shape&) {
       shape.back() -= 1;
       return true;
     }},
    {"first dimension longer", "ValueError", false,
     [](DLTensor&, Shape& shape, Shape&) {
       shape.front() += 1;
       return true;
     }},
    {"an integer type", "TypeError", false,
     [](DLTensor& t, Shape&, Shape&) {
       t.dtype = {kDLInt, 32, 1};
       return true;
     }},
    {"an unknown type", "TypeError", false,
     [](DLTensor& t, Shape&, Shape&) {
       t.dtype = {kDLComplex, 64, 1};
       return true;
     }},
    {"vector lanes", "TypeError", false,
     [](DLTensor& t, Shape&, Shape&) {
       t.dtype.lanes = 2;
       return true;
     }},
    {"another device", "ValueError", false,
     [](DLTensor& t, Shape&, Shape&) {
       t.device = {kDLCUDA, 0};
       return true;
     }},
    {"a null pointer", "ValueError", false,
     [](DLTensor& t, Shape&, Shape&) {
       t.data = nullptr;
       return true;
     }},
    {"elements on top of each other", "ValueError", true,
     [](DLTensor&, Shape& shape, Shape& strides) {
       for (size_t i = 0; i < shape.size(); ++i) {
         if (shape[i] < 2) continue;
         strides[i] = 0;
         return true;
       }
       return false;
     }},
};

// Messages begin with the argument that is wrong.
void expect_argument_error(const std::function<void()>& call, const char* kind, const std::string& name) {
  const std::string message = expect_error(call, kind, {});
  EXPECT_TRUE(message.rfind(name + ":", 0) == 0 || message.rfind("saved." + name + ":", 0) == 0)
      << "'" << name << ":' does not begin: " << message;
}

// Every argument of `valid` in turn absent or changed in each way: the right kind of exception, naming the argument.
template <class T>
void check_arguments(const T& valid, const std::vector<Argument<T>>& arguments,
                     const std::function<void(const T&)>& call, const std::function<bool()>& untouched) {
  for (const Argument<T>& a : arguments) {
    const DLTensor* original = a.get(valid);
    ASSERT_NE(original, nullptr) << a.name;
    if (!a.optional) {
      SCOPED_TRACE(concat(a.name, " absent"));
      T t = valid;
      a.set(t, nullptr);
      const char* kind = std::string(a.name) == "A_log" && !std::is_same_v<T, stages::GateForward> &&
                                 !std::is_same_v<T, stages::GateCumsum> && !std::is_same_v<T, stages::GateBackward>
                             ? "AssertionError"
                             : "ValueError";
      expect_argument_error([&] { call(t); }, kind, a.name);
    }
    for (const Mutation& mutation : kMutations) {
      if (mutation.outputs_only && !a.output) continue;
      SCOPED_TRACE(concat(a.name, " with ", mutation.name));
      DLTensor changed = *original;
      Shape shape(original->shape, original->shape + original->ndim);
      Shape strides(original->strides, original->strides + original->ndim);
      if (!mutation.apply(changed, shape, strides)) continue;
      changed.shape = shape.data();
      changed.strides = strides.data();
      T t = valid;
      a.set(t, &changed);
      expect_argument_error([&] { call(t); }, mutation.kind, a.name);
    }
    EXPECT_TRUE(untouched()) << a.name;
  }
}

OperatorCase full_case() {
  OperatorCase c = make_case(DType::kFloat32, 2, 20, 1, 2, 8, 4);
  c.problem.use_gate = c.problem.use_qk_l2norm = c.problem.use_beta_sigmoid = true;
  return c;
}

bool all_untouched(const Results& r) {
  for (const Results::Named& result : r.all()) {
    if (!result.tensor.untouched()) return false;
  }
  for (const Tensor& saved : {r.A, r.q_normalized, r.k_normalized, r.q_rstd, r.k_rstd}) {
    if (saved && !saved.untouched()) return false;
  }
  return true;
}

std::vector<Argument<gdn::ForwardTensors>> forward_arguments() {
  using T = gdn::ForwardTensors;
  return {INPUT(T, q, "q"),
          INPUT(T, k, "k"),
          INPUT(T, v, "v"),
          INPUT(T, g, "g"),
          INPUT(T, beta, "beta"),
          INPUT(T, A_log, "A_log"),
          OPTIONAL(T, dt_bias, "dt_bias"),
          OPTIONAL(T, initial_state, "initial_state"),
          INPUT(T, o, "o"),
          OPTIONAL(T, final_state, "final_state")};
}

struct Call {
  OperatorCase c = full_case();
  gdn::Plan plan = gdn::Plan::make(c.problem);
  Operands x = make_operands(c);
  Results r = empty_results(c, x, Mode::kTraining);
  gdn::SavedTensors saved = saved_tensors(r);
  gdn::ForwardTensors forward = forward_tensors(x, r);
  gdn::BackwardTensors backward = backward_tensors(c, x, r);

  Call() {
    forward.saved = &saved;
    backward.saved = &saved;
    backward.q = x.q.dl();
    backward.k = x.k.dl();
  }
};

TEST(Validation, ForwardArguments) {
  const Call call;
  Buffer workspace(call.plan.forward_workspace_bytes(true));
  const auto untouched = [&] { return all_untouched(call.r); };
  check_arguments<gdn::ForwardTensors>(
      call.forward, forward_arguments(),
      [&](const gdn::ForwardTensors& t) {
        gdn::forward(call.plan, t, {workspace.data(), workspace.bytes()});
      },
      untouched);
  gdn::ForwardTensors step = call.forward;
  step.saved = nullptr;
  check_arguments<gdn::ForwardTensors>(
      step, forward_arguments(), [&](const gdn::ForwardTensors& t) { gdn::recurrent_forward(call.plan, t); },
      untouched);
}

TEST(Validation, BackwardArguments) {
  const Call call;
  // The saved tensors are inputs of backward, but their pointers are shared with forward, which writes them.
  for (const Tensor& t : {call.r.A, call.r.q_normalized, call.r.k_normalized, call.r.q_rstd, call.r.k_rstd}) {
    t.filled([](int64_t) { return 0.0; });
  }
  using T = gdn::BackwardTensors;
  const std::vector<Argument<T>> arguments = {OPTIONAL(T, q, "q"),
                                              OPTIONAL(T, k, "k"),
                                              INPUT(T, v, "v"),
                                              INPUT(T, g, "g"),
                                              INPUT(T, beta, "beta"),
                                              INPUT(T, A_log, "A_log"),
                                              OPTIONAL(T, dt_bias, "dt_bias"),
                                              OPTIONAL(T, initial_state, "initial_state"),
                                              INPUT(T, grad_output, "do"),
                                              OPTIONAL(T, grad_final_state, "dht"),
                                              OPTIONAL(T, dq, "dq"),
                                              OPTIONAL(T, dk, "dk"),
                                              OPTIONAL(T, dv, "dv"),
                                              OPTIONAL(T, dg, "dg"),
                                              OPTIONAL(T, dbeta, "dbeta"),
                                              OPTIONAL(T, dA_log, "dA_log"),
                                              OPTIONAL(T, ddt_bias, "ddt_bias"),
                                              OPTIONAL(T, dh0, "dh0")};
  Buffer workspace(call.plan.backward_workspace_bytes());
  const auto untouched = [&] {
    for (const Results::Named& result : call.r.all()) {
      if (result.is_gradient && !result.tensor.untouched()) return false;
    }
    return true;
  };
  check_arguments<T>(
      call.backward, arguments,
      [&](const T& t) {
        gdn::backward(call.plan, t, {workspace.data(), workspace.bytes()});
      },
      untouched);
}

TEST(Validation, SavedTensors) {
  using T = gdn::SavedTensors;
  const std::vector<Argument<T>> arguments = {INPUT(T, q_normalized, "q_normalized"), INPUT(T, q_rstd, "q_rstd"),
                                              INPUT(T, k_normalized, "k_normalized"), INPUT(T, k_rstd, "k_rstd"),
                                              INPUT(T, A, "A")};
  const Call call;
  Buffer workspace(std::max(call.plan.forward_workspace_bytes(true), call.plan.backward_workspace_bytes()));
  const auto untouched = [&] { return all_untouched(call.r); };
  check_arguments<T>(
      call.saved, arguments,
      [&](const T& t) {
        gdn::ForwardTensors forward = call.forward;
        forward.saved = &t;
        gdn::forward(call.plan, forward, {workspace.data(), workspace.bytes()});
      },
      untouched);
  check_arguments<T>(
      call.saved, arguments,
      [&](const T& t) {
        gdn::BackwardTensors backward = call.backward;
        backward.saved = &t;
        gdn::backward(call.plan, backward, {workspace.data(), workspace.bytes()});
      },
      untouched);
}

TEST(Validation, Case45_MixedOperandTypes) {
  const Call call;
  Buffer workspace(call.plan.forward_workspace_bytes(true));
  const auto forward_with = [&](auto member, const Tensor& tensor) {
    return [&, member, tensor] {
      gdn::ForwardTensors t = call.forward;
      t.*member = tensor.dl();
      gdn::forward(call.plan, t, {workspace.data(), workspace.bytes()});
    };
  };
  for (const DType other : {DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    const std::string name = dtype_name(other);
    expect_error(forward_with(&gdn::ForwardTensors::q, call.x.q.to(other)), "TypeError", {"q", "float32", name});
    expect_error(forward_with(&gdn::ForwardTensors::k, call.x.k.to(other)), "TypeError", {"k", "float32", name});
    expect_error(forward_with(&gdn::ForwardTensors::v, call.x.v.to(other)), "TypeError", {"v", "float32", name});
    expect_error(forward_with(&gdn::ForwardTensors::o, Tensor(other, call.x.v.shape())), "TypeError",
                 {"o", "float32", name});
    expect_error(forward_with(&gdn::ForwardTensors::final_state, Tensor(other, call.x.initial_state.shape())),
                 "TypeError", {"final_state", "float32", name});
  }
  EXPECT_TRUE(all_untouched(call.r));
}

TEST(Validation, Case17_AbsentGate) {
  const Call call;
  gdn::ForwardTensors t = call.forward;
  t.g = nullptr;
  Buffer workspace(call.plan.forward_workspace_bytes(true));
  expect_error([&] { gdn::forward(call.plan, t, {workspace.data(), workspace.bytes()}); }, "ValueError", {"g:"});
}

TEST(Validation, Case34_StatesInTheOtherLayout) {
  OperatorCase c = make_case(DType::kFloat32, 1, 10, 1, 1, 8, 4);
  const Operands x = make_operands(c);
  const Results r = empty_results(c, x, Mode::kForward);
  c.problem.state_v_first = true;
  const gdn::Plan plan = gdn::Plan::make(c.problem);
  Buffer workspace(plan.forward_workspace_bytes(false));
  gdn::ForwardTensors t = forward_tensors(x, r);
  expect_error(
      [&] {
        gdn::forward(plan, t, {workspace.data(), workspace.bytes()});
      },
      "ValueError", {"initial_state", "[N, HV, V, K] = [1, 1, 4, 8]", "[1, 1, 8, 4]"});
  t.initial_state = nullptr;
  expect_error(
      [&] {
        gdn::forward(plan, t, {workspace.data(), workspace.bytes()});
      },
      "ValueError", {"final_state", "[N, HV, V, K] = [1, 1, 4, 8]", "[1, 1, 8, 4]"});
  EXPECT_TRUE(all_untouched(r));
}

TEST(Validation, Case26_WrongNumberOfInitialStates) {
  OperatorCase c = make_case(DType::kFloat32, 1, 10, 1, 1, 8, 4);
  const Operands x = make_operands(c);
  const Results r = empty_results(c, x, Mode::kForward);
  c.problem.sequence_offsets = {{0, 4, 10}};
  const gdn::Plan plan = gdn::Plan::make(c.problem);
  Buffer workspace(plan.forward_workspace_bytes(false));
  expect_error(
      [&] {
        gdn::forward(plan, forward_tensors(x, r), {workspace.data(), workspace.bytes()});
      },
      "ValueError", {"initial_state", "[2, 1, 8, 4]", "[1, 1, 8, 4]"});
  EXPECT_TRUE(all_untouched(r));
}

TEST(Validation, ArgumentsThatTheFlagsExclude) {
  OperatorCase c = make_case(DType::kFloat32, 1, 10, 1, 2, 8, 4);
  const Operands x = make_operands(c);
  const Results r = empty_results(c, x, Mode::kTraining);
  const gdn::Plan plan = gdn::Plan::make(c.problem);
  const gdn::SavedTensors saved = saved_tensors(r);
  const Tensor per_head = constant(DType::kFloat32, {2}, 0);
  Buffer workspace(std::max(plan.forward_workspace_bytes(true), plan.backward_workspace_bytes()));
  const gdn::Workspace space = {workspace.data(), workspace.bytes()};
  const auto forward = [&](auto change) {
    return [&, change] {
      gdn::ForwardTensors t = forward_tensors(x, r);
      change(t);
      gdn::forward(plan, t, space);
    };
  };
  const auto backward = [&](auto change) {
    return [&, change] {
      gdn::BackwardTensors t = backward_tensors(c, x, r);
      t.saved = &saved;
      change(t);
      gdn::backward(plan, t, space);
    };
  };
  expect_error(forward([&](auto& t) { t.A_log = per_head.dl(); }), "ValueError", {"A_log"});
  expect_error(forward([&](auto& t) { t.dt_bias = per_head.dl(); }), "ValueError", {"dt_bias"});
  expect_error(backward([&](auto& t) { t.A_log = per_head.dl(); }), "ValueError", {"A_log"});
  expect_error(backward([&](auto& t) { t.dA_log = per_head.dl(); }), "ValueError", {"dA_log"});
  expect_error(backward([&](auto& t) { t.ddt_bias = per_head.dl(); }), "ValueError", {"ddt_bias"});
  expect_error(backward([&](auto& t) { t.saved = nullptr; }), "ValueError", {"saved"});
  expect_error(
      [&] {
        gdn::ForwardTensors t = forward_tensors(x, r);
        t.saved = &saved;
        gdn::recurrent_forward(plan, t);
      },
      "ValueError", {"saved"});
  EXPECT_TRUE(all_untouched(r));
}

TEST(Validation, RawQueriesAndKeysAreNeededWithoutL2Norm) {
  OperatorCase c = make_case(DType::kFloat32, 1, 10, 1, 2, 8, 4);
  const Operands x = make_operands(c);
  const Results r = empty_results(c, x, Mode::kTraining);
  const gdn::Plan plan = gdn::Plan::make(c.problem);
  const gdn::SavedTensors saved = saved_tensors(r);
  Buffer workspace(plan.backward_workspace_bytes());
  for (const DLTensor* gdn::BackwardTensors::*member : {&gdn::BackwardTensors::q, &gdn::BackwardTensors::k}) {
    gdn::BackwardTensors t = backward_tensors(c, x, r);
    t.saved = &saved;
    t.*member = nullptr;
    expect_error(
        [&] {
          gdn::backward(plan, t, {workspace.data(), workspace.bytes()});
        },
        "ValueError", {member == &gdn::BackwardTensors::q ? "q" : "k"});
  }
  EXPECT_TRUE(all_untouched(r));
}

TEST(Validation, Workspace) {
  const Call call;
  for (const bool backward : {false, true}) {
    const size_t bytes = backward ? call.plan.backward_workspace_bytes() : call.plan.forward_workspace_bytes(true);
    ASSERT_GT(bytes, 0U);
    Buffer workspace(bytes + 64);
    const auto run_with = [&](gdn::Workspace space) {
      return [&, space] {
        if (backward) {
          gdn::backward(call.plan, call.backward, space);
        } else {
          gdn::forward(call.plan, call.forward, space);
        }
      };
    };
    expect_error(run_with({}), "ValueError", {"workspace", std::to_string(bytes)});
    expect_error(run_with({workspace.data(), bytes - 1}), "ValueError",
                 {"workspace", std::to_string(bytes), std::to_string(bytes - 1)});
    expect_error(run_with({workspace.data() + 8, bytes}), "ValueError", {"workspace", "64"});
    EXPECT_TRUE(all_untouched(call.r));
    EXPECT_TRUE(
        std::all_of(workspace.data(), workspace.data() + bytes, [](unsigned char byte) { return byte == 0xff; }));
  }
}

// Stages --------------------------------------------------------------------------------------------------------------

// Tensors by the letters of gdn.h, kept alive for the length of a test.
class StageTensors {
 public:
  StageTensors() {
    gdn::Problem p = make_case(DType::kFloat32, 2, 20, 1, 2, 8, 4).problem;
    p.chunk_size = 16;
    plan = std::make_unique<gdn::Plan>(gdn::Plan::make(p));
  }

  const DLTensor* in(Shape shape) { return keep(constant(DType::kFloat32, shape, 0.5)); }
  DLTensor* out(Shape shape) {
    outputs_.push_back(Tensor(DType::kFloat32, std::move(shape)));
    return keep(outputs_.back());
  }
  bool untouched() const {
    return std::all_of(outputs_.begin(), outputs_.end(), [](const Tensor& t) { return t.untouched(); });
  }

  // Calls the stage with every argument in turn wrong, then as it should be.
  template <class T>
  void check(void (*stage)(const gdn::Plan&, const T&, gdn::Stream), const T& valid,
             const std::vector<Argument<T>>& arguments) {
    check_arguments<T>(
        valid, arguments, [&](const T& t) { stage(*plan, t, nullptr); }, [&] { return untouched(); });
    EXPECT_NO_THROW(stage(*plan, valid, nullptr));
    EXPECT_FALSE(untouched());
  }

  std::unique_ptr<gdn::Plan> plan;
  const Shape qk = {2, 20, 1, 8}, wide_k = {2, 20, 2, 8}, wide_v = {2, 20, 2, 4}, token = {2, 20, 2}, head = {2};
  const Shape rows = {2, 20, 2, 16}, chunk = {2, 2, 2, 8, 4}, state = {2, 2, 8, 4};

 private:
  DLTensor* keep(const Tensor& tensor) {
    kept_.push_back(tensor);
    return tensor.dl();
  }
  std::vector<Tensor> outputs_, kept_;
};

TEST(StageValidation, Normalisation) {
  StageTensors s;
  using F = stages::L2NormForward;
  using B = stages::L2NormBackward;
  // The shape of x is free: what is checked is that the others follow it.
  const F forward = {.x = s.in(s.qk), .y = s.out(s.qk), .rstd = s.out({2, 20, 1})};
  check_arguments<F>(
      forward, {INPUT(F, y, "y"), INPUT(F, rstd, "rstd")}, [&](const F& t) { stages::l2norm_fwd(*s.plan, t); },
      [&] { return s.untouched(); });
  F without_x = forward;
  without_x.x = nullptr;
  expect_error([&] { stages::l2norm_fwd(*s.plan, without_x); }, "ValueError", {"x"});
  const B backward = {.y = s.in(s.qk), .rstd = s.in({2, 20, 1}), .dy = s.in(s.qk), .dx = s.out(s.qk)};
  check_arguments<B>(
      backward, {INPUT(B, rstd, "rstd"), INPUT(B, dy, "dy"), INPUT(B, dx, "dx")},
      [&](const B& t) { stages::l2norm_bwd(*s.plan, t); }, [&] { return s.untouched(); });
}

TEST(StageValidation, Beta) {
  StageTensors s;
  using F = stages::BetaSigmoidForward;
  using B = stages::BetaSigmoidBackward;
  check_arguments<F>(
      {.x = s.in(s.token), .scale = 1, .y = s.out(s.token)}, {INPUT(F, y, "y")},
      [&](const F& t) { stages::fused_beta_sigmoid_fwd(*s.plan, t); }, [&] { return s.untouched(); });
  check_arguments<B>(
      {.x = s.in(s.token), .dy = s.in(s.token), .scale = 1, .dx = s.out(s.token)},
      {INPUT(B, dy, "dy"), INPUT(B, dx, "dx")}, [&](const B& t) { stages::fused_beta_sigmoid_bwd(*s.plan, t); },
      [&] { return s.untouched(); });
}

TEST(StageValidation, LocalCumsum) {
  StageTensors s;
  using T = stages::LocalCumsum;
  s.check<T>(stages::chunk_local_cumsum, {.g = s.in(s.token), .out = s.out(s.token)},
             {INPUT(T, g, "g"), INPUT(T, out, "out")});
}

TEST(StageValidation, GateForward) {
  StageTensors s;
  using T = stages::GateForward;
  s.check<T>(stages::gdn_gate_fwd,
             {.g = s.in(s.token), .A_log = s.in(s.head), .dt_bias = s.in(s.head), .out = s.out(s.token)},
             {INPUT(T, g, "g"), INPUT(T, A_log, "A_log"), OPTIONAL(T, dt_bias, "dt_bias"), INPUT(T, out, "out")});
}

TEST(StageValidation, GateCumsum) {
  StageTensors s;
  using T = stages::GateCumsum;
  s.check<T>(stages::gdn_gate_chunk_cumsum,
             {.g = s.in(s.token), .A_log = s.in(s.head), .dt_bias = s.in(s.head), .scale = 1, .out = s.out(s.token)},
             {INPUT(T, g, "g"), INPUT(T, A_log, "A_log"), OPTIONAL(T, dt_bias, "dt_bias"), INPUT(T, out, "out")});
}

TEST(StageValidation, GateBackward) {
  StageTensors s;
  using T = stages::GateBackward;
  const T valid = {.g = s.in(s.token),
                   .A_log = s.in(s.head),
                   .dt_bias = s.in(s.head),
                   .dyg = s.in(s.token),
                   .dg = s.out(s.token),
                   .dA_log = s.out(s.head),
                   .ddt_bias = s.out(s.head)};
  T without_bias = valid;
  without_bias.dt_bias = nullptr;
  expect_error([&] { stages::gdn_gate_bwd(*s.plan, without_bias); }, "ValueError", {"ddt_bias"});
  s.check<T>(stages::gdn_gate_bwd, valid,
             {INPUT(T, g, "g"), INPUT(T, A_log, "A_log"), OPTIONAL(T, dt_bias, "dt_bias"), INPUT(T, dyg, "dyg"),
              INPUT(T, dg, "dg"), INPUT(T, dA_log, "dA_log"), OPTIONAL(T, ddt_bias, "ddt_bias")});
}

TEST(StageValidation, ScaledDotKkt) {
  StageTensors s;
  using T = stages::ScaledDotKkt;
  s.check<T>(stages::chunk_scaled_dot_kkt_fwd,
             {.k = s.in(s.qk), .g = s.in(s.token), .beta = s.in(s.token), .L = s.out(s.rows)},
             {INPUT(T, k, "k"), OPTIONAL(T, g, "g"), INPUT(T, beta, "beta"), INPUT(T, L, "L")});
}

TEST(StageValidation, SolveTril) {
  StageTensors s;
  using T = stages::SolveTril;
  s.check<T>(stages::solve_tril, {.L = s.in(s.rows), .A = s.out(s.rows)}, {INPUT(T, L, "L"), INPUT(T, A, "A")});
}

TEST(StageValidation, Intra) {
  StageTensors s;
  using T = stages::Intra;
  s.check<T>(stages::chunk_gated_delta_rule_fwd_intra,
             {.k = s.in(s.qk),
              .v = s.in(s.wide_v),
              .g = s.in(s.token),
              .beta = s.in(s.token),
              .w = s.out(s.wide_k),
              .u = s.out(s.wide_v),
              .A = s.out(s.rows)},
             {INPUT(T, k, "k"), INPUT(T, v, "v"), OPTIONAL(T, g, "g"), INPUT(T, beta, "beta"), INPUT(T, w, "w"),
              INPUT(T, u, "u"), INPUT(T, A, "A")});
}

TEST(StageValidation, RecomputeWU) {
  StageTensors s;
  using T = stages::RecomputeWU;
  s.check<T>(stages::recompute_w_u_fwd,
             {.k = s.in(s.qk),
              .v = s.in(s.wide_v),
              .beta = s.in(s.token),
              .A = s.in(s.rows),
              .g = s.in(s.token),
              .w = s.out(s.wide_k),
              .u = s.out(s.wide_v)},
             {INPUT(T, k, "k"), INPUT(T, v, "v"), INPUT(T, beta, "beta"), INPUT(T, A, "A"), OPTIONAL(T, g, "g"),
              INPUT(T, w, "w"), INPUT(T, u, "u")});
}

TEST(StageValidation, StateForward) {
  StageTensors s;
  using T = stages::StateForward;
  s.check<T>(stages::chunk_gated_delta_rule_fwd_h,
             {.k = s.in(s.qk),
              .w = s.in(s.wide_k),
              .u = s.in(s.wide_v),
              .g = s.in(s.token),
              .initial_state = s.in(s.state),
              .h = s.out(s.chunk),
              .v_new = s.out(s.wide_v),
              .final_state = s.out(s.state)},
             {INPUT(T, k, "k"), INPUT(T, w, "w"), INPUT(T, u, "u"), OPTIONAL(T, g, "g"),
              OPTIONAL(T, initial_state, "initial_state"), INPUT(T, h, "h"), OPTIONAL(T, v_new, "v_new"),
              OPTIONAL(T, final_state, "final_state")});
}

TEST(StageValidation, OutputForward) {
  StageTensors s;
  using T = stages::OutputForward;
  s.check<T>(
      stages::chunk_fwd_o,
      {.q = s.in(s.qk),
       .k = s.in(s.qk),
       .v = s.in(s.wide_v),
       .h = s.in(s.chunk),
       .g = s.in(s.token),
       .o = s.out(s.wide_v)},
      {INPUT(T, q, "q"), INPUT(T, k, "k"), INPUT(T, v, "v"), INPUT(T, h, "h"), OPTIONAL(T, g, "g"), INPUT(T, o, "o")});
}

TEST(StageValidation, LocalValueGradient) {
  StageTensors s;
  using T = stages::LocalValueGradient;
  s.check<T>(
      stages::chunk_bwd_dv_local,
      {.q = s.in(s.qk), .k = s.in(s.qk), .g = s.in(s.token), .grad_output = s.in(s.wide_v), .dv = s.out(s.wide_v)},
      {INPUT(T, q, "q"), INPUT(T, k, "k"), OPTIONAL(T, g, "g"), INPUT(T, grad_output, "do"), INPUT(T, dv, "dv")});
}

TEST(StageValidation, StateBackward) {
  StageTensors s;
  using T = stages::StateBackward;
  s.check<T>(stages::chunk_gated_delta_rule_bwd_dhu,
             {.q = s.in(s.qk),
              .k = s.in(s.qk),
              .w = s.in(s.wide_k),
              .g = s.in(s.token),
              .dht = s.in(s.state),
              .grad_output = s.in(s.wide_v),
              .dv = s.in(s.wide_v),
              .dh = s.out(s.chunk),
              .dh0 = s.out(s.state),
              .dv2 = s.out(s.wide_v)},
             {INPUT(T, q, "q"), INPUT(T, k, "k"), INPUT(T, w, "w"), OPTIONAL(T, g, "g"), OPTIONAL(T, dht, "dht"),
              INPUT(T, grad_output, "do"), INPUT(T, dv, "dv"), INPUT(T, dh, "dh"), OPTIONAL(T, dh0, "dh0"),
              INPUT(T, dv2, "dv2")});
}

TEST(StageValidation, OperandGradients) {
  StageTensors s;
  using T = stages::OperandGradients;
  const T valid = {.q = s.in(s.qk),
                   .k = s.in(s.qk),
                   .v = s.in(s.wide_v),
                   .w = s.in(s.wide_k),
                   .g = s.in(s.token),
                   .h = s.in(s.chunk),
                   .dv = s.in(s.wide_v),
                   .grad_output = s.in(s.wide_v),
                   .dh = s.in(s.chunk),
                   .dq = s.out(s.qk),
                   .dk = s.out(s.qk),
                   .dw = s.out(s.wide_k),
                   .dg = s.out(s.token)};
  T without_gate = valid;
  without_gate.g = nullptr;
  expect_error([&] { stages::chunk_bwd_dqkwg(*s.plan, without_gate); }, "ValueError", {"dg"});
  s.check<T>(stages::chunk_bwd_dqkwg, valid,
             {INPUT(T, q, "q"), INPUT(T, k, "k"), INPUT(T, v, "v"), OPTIONAL(T, w, "w"), OPTIONAL(T, g, "g"),
              INPUT(T, h, "h"), INPUT(T, dv, "dv"), INPUT(T, grad_output, "do"), INPUT(T, dh, "dh"), INPUT(T, dq, "dq"),
              INPUT(T, dk, "dk"), INPUT(T, dw, "dw"), OPTIONAL(T, dg, "dg")});
}

TEST(StageValidation, WyBackward) {
  StageTensors s;
  using T = stages::WyBackward;
  const T valid = {.k = s.in(s.qk),
                   .v = s.in(s.wide_v),
                   .beta = s.in(s.token),
                   .g = s.in(s.token),
                   .A = s.in(s.rows),
                   .dw = s.in(s.wide_k),
                   .du = s.in(s.wide_v),
                   .dk = s.out(s.qk),
                   .dv = s.out(s.wide_v),
                   .db = s.out(s.token),
                   .dg = s.out(s.token)};
  T without_gate = valid;
  without_gate.g = nullptr;
  expect_error([&] { stages::prepare_wy_repr_bwd(*s.plan, without_gate); }, "ValueError", {"dg"});
  s.check<T>(stages::prepare_wy_repr_bwd, valid,
             {INPUT(T, k, "k"), INPUT(T, v, "v"), INPUT(T, beta, "beta"), OPTIONAL(T, g, "g"), INPUT(T, A, "A"),
              INPUT(T, dw, "dw"), INPUT(T, du, "du"), INPUT(T, dk, "dk"), INPUT(T, dv, "dv"), INPUT(T, db, "db"),
              OPTIONAL(T, dg, "dg")});
}

}  // namespace
}  // namespace cula::test
