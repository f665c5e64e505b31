// What each stage rejects: every argument of every stage in turn absent or wrong.
#include <algorithm>

#include "argument_checks.h"
#include "gdn/stages.h"
#include "operator_case.h"

namespace cula::test {
namespace {

namespace stages = gdn::stages;

// The shapes of gdn/stages.h for one plan: B = 2, T = 20, H = 1, HV = 2, K = 8, V = 4, C = 16.
const Shape kQK = {2, 20, 1, 8}, kQKRows = {2, 20, 1}, kWideK = {2, 20, 2, 8}, kWideV = {2, 20, 2, 4};
const Shape kToken = {2, 20, 2}, kHead = {2}, kMatrixRows = {2, 20, 2, 16};
const Shape kChunk = {2, 2, 2, 8, 4}, kState = {2, 2, 8, 4};

gdn::Plan make_plan() {
  gdn::Problem p = make_case(DType::kFloat32, 2, 20, 1, 2, 8, 4).problem;
  p.chunk_size = 16;
  return gdn::Plan::make(p);
}

template <class T>
struct StageArgument {
  Argument<T> argument;
  Shape shape;
  bool any_shape = false;  // the stage takes its sizes from this argument, so that only its absence is wrong
};

// An optional output that is rejected where the optional input that it belongs to is absent.
struct Dependence {
  const char* input = nullptr;
  const char* output = nullptr;
};

// Calls the stage with every argument in turn wrong, then as it should be. `others` holds what is not a tensor.
template <class T>
void check_stage(void (*stage)(const gdn::Plan&, const T&, gdn::Stream), const std::vector<StageArgument<T>>& arguments,
                 Dependence dependence = {}, const T& others = {}) {
  const gdn::Plan plan = make_plan();
  T valid = others;
  std::vector<Tensor> inputs, outputs;
  std::vector<Argument<T>> checked;
  for (const auto& [argument, shape, any_shape] : arguments) {
    std::vector<Tensor>& tensors = argument.output ? outputs : inputs;
    tensors.push_back(argument.output ? Tensor(DType::kFloat32, shape) : constant(DType::kFloat32, shape, 0.5));
    argument.set(valid, tensors.back().dl());
    if (!any_shape) checked.push_back(argument);
  }
  const auto call = [&](const T& t) { stage(plan, t, nullptr); };
  const auto untouched = [&] {
    return std::all_of(outputs.begin(), outputs.end(), [](const Tensor& t) { return t.untouched(); });
  };
  check_arguments<T>(valid, checked, call, untouched);
  bool dependence_checked = dependence.input == nullptr;
  for (const auto& [argument, shape, any_shape] : arguments) {
    T without = valid;
    argument.set(without, nullptr);
    if (any_shape) expect_argument_error([&] { call(without); }, "ValueError", argument.name);
    if (dependence.input != nullptr && argument.name == std::string(dependence.input)) {
      expect_argument_error([&] { call(without); }, "ValueError", dependence.output);
      dependence_checked = true;
    }
  }
  EXPECT_TRUE(dependence_checked);
  EXPECT_TRUE(untouched());
  EXPECT_NO_THROW(call(valid));
  for (const Tensor& output : outputs) EXPECT_FALSE(output.untouched());
}

TEST(StageValidation, Normalisation) {
  using F = stages::L2NormForward;
  check_stage<F>(
      stages::l2norm_fwd,
      {{required<&F::x>("x"), kQK, true}, {required<&F::y>("y"), kQK}, {required<&F::rstd>("rstd"), kQKRows}});
  using B = stages::L2NormBackward;
  check_stage<B>(stages::l2norm_bwd, {{required<&B::y>("y"), kQK, true},
                                      {required<&B::rstd>("rstd"), kQKRows},
                                      {required<&B::dy>("dy"), kQK},
                                      {required<&B::dx>("dx"), kQK}});
}

TEST(StageValidation, Beta) {
  using F = stages::BetaSigmoidForward;
  F forward = {};
  forward.scale = 1;
  check_stage<F>(stages::fused_beta_sigmoid_fwd, {{required<&F::x>("x"), kToken, true}, {required<&F::y>("y"), kToken}},
                 {}, forward);
  using B = stages::BetaSigmoidBackward;
  B backward = {};
  backward.scale = 1;
  check_stage<B>(
      stages::fused_beta_sigmoid_bwd,
      {{required<&B::x>("x"), kToken, true}, {required<&B::dy>("dy"), kToken}, {required<&B::dx>("dx"), kToken}}, {},
      backward);
}

TEST(StageValidation, LocalCumsum) {
  using T = stages::LocalCumsum;
  check_stage<T>(stages::chunk_local_cumsum, {{required<&T::g>("g"), kToken}, {required<&T::out>("out"), kToken}});
}

TEST(StageValidation, GateForward) {
  using T = stages::GateForward;
  check_stage<T>(stages::gdn_gate_fwd, {{required<&T::g>("g"), kToken},
                                        {required<&T::A_log>("A_log"), kHead},
                                        {optional<&T::dt_bias>("dt_bias"), kHead},
                                        {required<&T::out>("out"), kToken}});
}

TEST(StageValidation, GateCumsum) {
  using T = stages::GateCumsum;
  check_stage<T>(stages::gdn_gate_chunk_cumsum, {{required<&T::g>("g"), kToken},
                                                 {required<&T::A_log>("A_log"), kHead},
                                                 {optional<&T::dt_bias>("dt_bias"), kHead},
                                                 {required<&T::out>("out"), kToken}});
}

TEST(StageValidation, GateBackward) {
  using T = stages::GateBackward;
  check_stage<T>(stages::gdn_gate_bwd,
                 {{required<&T::g>("g"), kToken},
                  {required<&T::A_log>("A_log"), kHead},
                  {optional<&T::dt_bias>("dt_bias"), kHead},
                  {required<&T::dyg>("dyg"), kToken},
                  {required<&T::dg>("dg"), kToken},
                  {required<&T::dA_log>("dA_log"), kHead},
                  {optional<&T::ddt_bias>("ddt_bias"), kHead}},
                 {.input = "dt_bias", .output = "ddt_bias"});
}

TEST(StageValidation, ScaledDotKkt) {
  using T = stages::ScaledDotKkt;
  check_stage<T>(stages::chunk_scaled_dot_kkt_fwd, {{required<&T::k>("k"), kQK},
                                                    {optional<&T::g>("g"), kToken},
                                                    {required<&T::beta>("beta"), kToken},
                                                    {required<&T::L>("L"), kMatrixRows}});
}

TEST(StageValidation, SolveTril) {
  using T = stages::SolveTril;
  check_stage<T>(stages::solve_tril, {{required<&T::L>("L"), kMatrixRows}, {required<&T::A>("A"), kMatrixRows}});
}

TEST(StageValidation, Intra) {
  using T = stages::Intra;
  check_stage<T>(stages::chunk_gated_delta_rule_fwd_intra, {{required<&T::k>("k"), kQK},
                                                            {required<&T::v>("v"), kWideV},
                                                            {optional<&T::g>("g"), kToken},
                                                            {required<&T::beta>("beta"), kToken},
                                                            {required<&T::w>("w"), kWideK},
                                                            {required<&T::u>("u"), kWideV},
                                                            {required<&T::A>("A"), kMatrixRows}});
}

TEST(StageValidation, RecomputeWU) {
  using T = stages::RecomputeWU;
  check_stage<T>(stages::recompute_w_u_fwd, {{required<&T::k>("k"), kQK},
                                             {required<&T::v>("v"), kWideV},
                                             {required<&T::beta>("beta"), kToken},
                                             {required<&T::A>("A"), kMatrixRows},
                                             {optional<&T::g>("g"), kToken},
                                             {required<&T::w>("w"), kWideK},
                                             {required<&T::u>("u"), kWideV}});
}

TEST(StageValidation, StateForward) {
  using T = stages::StateForward;
  check_stage<T>(stages::chunk_gated_delta_rule_fwd_h, {{required<&T::k>("k"), kQK},
                                                        {required<&T::w>("w"), kWideK},
                                                        {required<&T::u>("u"), kWideV},
                                                        {optional<&T::g>("g"), kToken},
                                                        {optional<&T::initial_state>("initial_state"), kState},
                                                        {required<&T::h>("h"), kChunk},
                                                        {optional<&T::v_new>("v_new"), kWideV},
                                                        {optional<&T::final_state>("final_state"), kState}});
}

TEST(StageValidation, OutputForward) {
  using T = stages::OutputForward;
  check_stage<T>(stages::chunk_fwd_o, {{required<&T::q>("q"), kQK},
                                       {required<&T::k>("k"), kQK},
                                       {required<&T::v>("v"), kWideV},
                                       {required<&T::h>("h"), kChunk},
                                       {optional<&T::g>("g"), kToken},
                                       {required<&T::o>("o"), kWideV}});
}

TEST(StageValidation, LocalValueGradient) {
  using T = stages::LocalValueGradient;
  check_stage<T>(stages::chunk_bwd_dv_local, {{required<&T::q>("q"), kQK},
                                              {required<&T::k>("k"), kQK},
                                              {optional<&T::g>("g"), kToken},
                                              {required<&T::grad_output>("do"), kWideV},
                                              {required<&T::dv>("dv"), kWideV}});
}

TEST(StageValidation, StateBackward) {
  using T = stages::StateBackward;
  check_stage<T>(stages::chunk_gated_delta_rule_bwd_dhu, {{required<&T::q>("q"), kQK},
                                                          {required<&T::k>("k"), kQK},
                                                          {required<&T::w>("w"), kWideK},
                                                          {optional<&T::g>("g"), kToken},
                                                          {optional<&T::dht>("dht"), kState},
                                                          {required<&T::grad_output>("do"), kWideV},
                                                          {required<&T::dv>("dv"), kWideV},
                                                          {required<&T::dh>("dh"), kChunk},
                                                          {optional<&T::dh0>("dh0"), kState},
                                                          {required<&T::dv2>("dv2"), kWideV}});
}

TEST(StageValidation, OperandGradients) {
  using T = stages::OperandGradients;
  check_stage<T>(stages::chunk_bwd_dqkwg,
                 {{required<&T::q>("q"), kQK},
                  {required<&T::k>("k"), kQK},
                  {required<&T::v>("v"), kWideV},
                  {optional<&T::w>("w"), kWideK},
                  {optional<&T::g>("g"), kToken},
                  {required<&T::h>("h"), kChunk},
                  {required<&T::dv>("dv"), kWideV},
                  {required<&T::grad_output>("do"), kWideV},
                  {required<&T::dh>("dh"), kChunk},
                  {required<&T::dq>("dq"), kQK},
                  {required<&T::dk>("dk"), kQK},
                  {required<&T::dw>("dw"), kWideK},
                  {optional<&T::dg>("dg"), kToken}},
                 {.input = "g", .output = "dg"});
}

TEST(StageValidation, WyBackward) {
  using T = stages::WyBackward;
  check_stage<T>(stages::prepare_wy_repr_bwd,
                 {{required<&T::k>("k"), kQK},
                  {required<&T::v>("v"), kWideV},
                  {required<&T::beta>("beta"), kToken},
                  {optional<&T::g>("g"), kToken},
                  {required<&T::A>("A"), kMatrixRows},
                  {required<&T::dw>("dw"), kWideK},
                  {required<&T::du>("du"), kWideV},
                  {required<&T::dk>("dk"), kQK},
                  {required<&T::dv>("dv"), kWideV},
                  {required<&T::db>("db"), kToken},
                  {optional<&T::dg>("dg"), kToken}},
                 {.input = "g", .output = "dg"});
}

}  // namespace
}  // namespace cula::test
