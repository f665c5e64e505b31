// Every stage alone against its formula.
#include <cmath>
#include <numbers>

#include "stage_case.h"
#include "stage_formulas.h"

namespace cula::test {
namespace {

namespace stages = gdn::stages;

constexpr double kInverseLn2 = 1 / std::numbers::ln2;

// Each stage alone ----------------------------------------------------------------------------------------------------

class StageTest : public testing::TestWithParam<std::tuple<Stage, StageCase>> {};

TEST_P(StageTest, EqualsItsFormula) {
  const auto& [stage, s] = GetParam();
  OperatorCase c = operator_case(s);
  c.problem.num_threads = 1;
  const gdn::Plan plan = gdn::Plan::make(c.problem);
  const StageInputs inputs = make_inputs(plan, s.gate);
  const std::vector<Tensor> outputs = run_stage(stage, plan, inputs, row_major);
  expect_stage_close(stage, s.dtype, outputs, stage.expected(plan, inputs));

  c.problem.num_threads = 3;
  const std::vector<Tensor> threaded = run_stage(stage, gdn::Plan::make(c.problem), inputs, row_major);
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (outputs[i]) {
      EXPECT_TRUE(same_bits(threaded[i], outputs[i])) << stage.outputs[i] << " with 3 threads";
    }
  }
}

std::vector<StageCase> small_cases() {
  std::vector<StageCase> cases;
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const bool packed : {false, true}) {
      for (const Gate gate : {Gate::kAbsent, Gate::kOrdinary, Gate::kResets}) {
        // Chunk size and state layout take turns, so that each meets each dtype, length pattern and gate kind.
        cases.push_back({.dtype = dtype, .chunk_size = 64, .packed = packed, .gate = gate, .state_v_first = packed});
        cases.push_back({.dtype = dtype, .chunk_size = 32, .packed = packed, .gate = gate, .state_v_first = !packed});
      }
    }
    cases.push_back({.dtype = dtype, .chunk_size = 16, .packed = true, .gate = Gate::kOrdinary});
  }
  return cases;
}

std::vector<StageCase> large_cases() {
  std::vector<StageCase> cases;
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const auto& [K, V] :
         {std::pair<int64_t, int64_t>{64, 64}, {128, 128}, {256, 96}, {96, 192}, {60, 100}, {8, 16}}) {
      cases.push_back({.dtype = dtype, .H = 1, .HV = 2, .K = K, .V = V, .B = 1, .T = 90});
    }
    for (const int64_t T : {0, 1, 63, 64}) {
      cases.push_back({.dtype = dtype, .state_v_first = true, .H = 1, .HV = 1, .K = 32, .V = 48, .T = T});
    }
    for (const int64_t chunk_size : {16, 32}) {
      cases.push_back({.dtype = dtype, .chunk_size = chunk_size, .H = 2, .HV = 2, .K = 64, .V = 64, .T = 100});
    }
  }
  return cases;
}

std::string stage_test_name(const testing::TestParamInfo<std::tuple<Stage, StageCase>>& info) {
  return concat(std::get<0>(info.param).name, "_", case_name(std::get<1>(info.param)));
}

INSTANTIATE_TEST_SUITE_P(Small, StageTest,
                         testing::Combine(testing::ValuesIn(all_stages()), testing::ValuesIn(small_cases())),
                         stage_test_name);
INSTANTIATE_TEST_SUITE_P(Large, StageTest,
                         testing::Combine(testing::ValuesIn(all_stages()), testing::ValuesIn(large_cases())),
                         stage_test_name);

// CASES 35 for the stages: inputs and outputs with any strides.
class StridedStage : public testing::TestWithParam<std::tuple<Stage, DType>> {};

TEST_P(StridedStage, Case35_EqualsTheContiguousCall) {
  const auto& [stage, dtype] = GetParam();
  const gdn::Plan plan = gdn::Plan::make(operator_case({.dtype = dtype, .packed = true}).problem);
  const StageInputs inputs = make_inputs(plan, Gate::kOrdinary);
  StageInputs strided = inputs;
  for (Tensor* tensor : strided.all()) {
    const Tensor source = *tensor;
    *tensor = reversed_with_gaps(source.dtype(), source.shape()).filled([&](int64_t i) { return source.at(i); });
  }
  const std::vector<Tensor> expected = run_stage(stage, plan, inputs, row_major);
  const std::vector<Tensor> actual = run_stage(stage, plan, strided, reversed_with_gaps);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(same_bits(actual[i], expected[i])) << stage.outputs[i];
  }
}

INSTANTIATE_TEST_SUITE_P(All, StridedStage,
                         testing::Combine(testing::ValuesIn(all_stages()),
                                          testing::Values(DType::kFloat64, DType::kFloat32, DType::kBFloat16)),
                         [](const auto& info) {
                           return concat(std::get<0>(info.param).name, "_", dtype_name(std::get<1>(info.param)));
                         });

// Optional arguments --------------------------------------------------------------------------------------------------

TEST(Stages, StateForwardWithoutOptionalArguments) {
  const gdn::Plan plan = gdn::Plan::make(operator_case({}).problem);
  const StageInputs s = make_inputs(plan, Gate::kOrdinary);
  const Tensor h(DType::kFloat32, s.h.shape());
  stages::StateForward t = {.k = s.k.dl(),
                            .w = s.w.dl(),
                            .u = s.u.dl(),
                            .g = s.gamma.dl(),
                            .initial_state = nullptr,
                            .h = h.dl(),
                            .v_new = nullptr,
                            .final_state = nullptr};
  stages::chunk_gated_delta_rule_fwd_h(plan, t);
  EXPECT_TRUE(close(h, formulas::forward_states(plan, s.k, s.w, s.u, s.gamma, Tensor()).h, 1e-5));
}

TEST(Stages, StateBackwardInPlaceAndWithoutOptionalArguments) {
  const gdn::Plan plan = gdn::Plan::make(operator_case({}).problem);
  const StageInputs s = make_inputs(plan, Gate::kOrdinary);
  const Tensor dh(DType::kFloat32, s.dh.shape()), dv = s.dv.contiguous();
  stages::chunk_gated_delta_rule_bwd_dhu(plan, {.q = s.q.dl(),
                                                .k = s.k.dl(),
                                                .w = s.w.dl(),
                                                .g = s.gamma.dl(),
                                                .dht = nullptr,
                                                .grad_output = s.grad_output.dl(),
                                                .dv = dv.dl(),
                                                .dh = dh.dl(),
                                                .dh0 = nullptr,
                                                .dv2 = dv.dl()});
  const formulas::StateGradients expected =
      formulas::backward_states(plan, s.q, s.k, s.w, s.gamma, Tensor(), s.grad_output, s.dv);
  EXPECT_TRUE(close(dh, expected.dh, 2e-5));
  EXPECT_TRUE(close(dv, expected.dv2, 2e-5));
}

TEST(Stages, GateBackwardWithoutBias) {
  const gdn::Plan plan = gdn::Plan::make(operator_case({}).problem);
  const StageInputs s = make_inputs(plan, Gate::kOrdinary);
  const Tensor dg(DType::kFloat32, s.raw_gate.shape()), dA_log(DType::kFloat32, s.A_log.shape());
  stages::gdn_gate_bwd(plan, {.g = s.raw_gate.dl(),
                              .A_log = s.A_log.dl(),
                              .dt_bias = nullptr,
                              .dyg = s.dyg.dl(),
                              .dg = dg.dl(),
                              .dA_log = dA_log.dl(),
                              .ddt_bias = nullptr});
  const formulas::GateGradients expected = formulas::gate_gradients(plan, s.raw_gate, s.A_log, Tensor(), s.dyg);
  EXPECT_TRUE(close(dg, expected.dg, 2e-5));
  EXPECT_TRUE(close(dA_log, expected.dA_log, 2e-5));
}

TEST(Stages, BetaInTheOperandType) {
  const gdn::Plan plan = gdn::Plan::make(operator_case({.dtype = DType::kBFloat16}).problem);
  StageInputs s = make_inputs(plan, Gate::kOrdinary);
  const Stage& intra = stage_named("chunk_gated_delta_rule_fwd_intra");
  s.beta = s.beta.to(DType::kBFloat16);
  const std::vector<Tensor> low = run_stage(intra, plan, s, row_major);
  s.beta = s.beta.to(DType::kFloat32);
  const std::vector<Tensor> same_values = run_stage(intra, plan, s, row_major);
  for (size_t i = 0; i < low.size(); ++i) EXPECT_TRUE(same_bits(low[i], same_values[i])) << intra.outputs[i];
}

TEST(Stages, InverseHasAnExactDiagonalAndExactZeros) {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const StageCase s = {.dtype = dtype, .packed = true};
    const gdn::Plan plan = gdn::Plan::make(operator_case(s).problem);
    const StageInputs inputs = make_inputs(plan, Gate::kOrdinary);
    const Tensor A(dtype, inputs.L.shape());
    stages::solve_tril(plan, {.L = inputs.L.dl(), .A = A.dl()});
    for (const gdn::ChunkRange& chunk : plan.chunks()) {
      for (int64_t i = 0; i < chunk.length; ++i) {
        for (int64_t j = 0; j < s.HV; ++j) {
          const int64_t row = ((chunk.begin + i) * s.HV + j) * s.chunk_size;
          EXPECT_EQ(A.at(row + i), 1);
          for (int64_t column = i + 1; column < s.chunk_size; ++column) ASSERT_EQ(A.at(row + column), 0);
        }
      }
    }
  }
}

// Cases of CASES.md that are about one stage --------------------------------------------------------------------------

Tensor log_decay_of(DType dtype, double A_log, double raw, double bias) {
  const gdn::Plan plan = gdn::Plan::make(make_case(dtype, 1, 1, 1, 1, 8, 8).problem);
  const DType stat = stat_dtype(dtype);
  const Tensor out(stat, {1, 1, 1});
  stages::gdn_gate_fwd(plan, {.g = constant(stat, {1, 1, 1}, raw).dl(),
                              .A_log = constant(stat, {1}, A_log).dl(),
                              .dt_bias = constant(stat, {1}, bias).dl(),
                              .out = out.dl()});
  return out;
}

formulas::GateGradients gate_gradients_of(DType dtype, double A_log, double raw, double bias, double dyg) {
  const gdn::Plan plan = gdn::Plan::make(make_case(dtype, 1, 1, 1, 1, 8, 8).problem);
  const DType stat = stat_dtype(dtype);
  const formulas::GateGradients r = {Tensor(stat, {1, 1, 1}), Tensor(stat, {1}), Tensor(stat, {1})};
  stages::gdn_gate_bwd(plan, {.g = constant(stat, {1, 1, 1}, raw).dl(),
                              .A_log = constant(stat, {1}, A_log).dl(),
                              .dt_bias = constant(stat, {1}, bias).dl(),
                              .dyg = constant(stat, {1, 1, 1}, dyg).dl(),
                              .dg = r.dg.dl(),
                              .dA_log = r.dA_log.dl(),
                              .ddt_bias = r.ddt_bias.dl()});
  return r;
}

TEST(Cases, Case12_GateStageWithOverflowingRate) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
    const double log_decay = log_decay_of(dtype, 100, -200, 0).at(0);
    EXPECT_LE(log_decay, 0);
    EXPECT_GT(log_decay, -1e-40);
    const formulas::GateGradients r = gate_gradients_of(dtype, 100, -200, 0, 3);
    EXPECT_LT(std::fabs(r.dg.at(0)), 1e-40);
    EXPECT_LT(std::fabs(r.dA_log.at(0)), 1e-40);
    EXPECT_LT(std::fabs(r.ddt_bias.at(0)), 1e-40);
  }
}

TEST(Cases, Case13_GateStageFarAboveZero) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
    const double tolerance = output_tolerance(dtype);
    const double large = -100 * std::exp(dtype == DType::kFloat32 ? double(2.77f) : 2.77);
    EXPECT_NEAR(log_decay_of(dtype, 0, 100, 0).at(0), -100, 100 * tolerance);
    EXPECT_NEAR(log_decay_of(dtype, 0, 60, 40).at(0), -100, 100 * tolerance);
    EXPECT_NEAR(log_decay_of(dtype, 2.77, 60, 40).at(0), large, 1600 * tolerance);
    EXPECT_NEAR(large, -1595.86, 0.01);
    const formulas::GateGradients one = gate_gradients_of(dtype, 0, 60, 40, 1);
    EXPECT_NEAR(one.dg.at(0), -1, tolerance);
    EXPECT_NEAR(one.dA_log.at(0), -100, 100 * tolerance);
    EXPECT_NEAR(one.ddt_bias.at(0), -1, tolerance);
    const formulas::GateGradients strong = gate_gradients_of(dtype, 2.77, 60, 40, 0.5);
    EXPECT_NEAR(strong.dg.at(0), 0.5 * large / 100, 16 * tolerance);
    EXPECT_NEAR(strong.dA_log.at(0), 0.5 * large, 1600 * tolerance);
  }
}

TEST(Cases, Case07_CumsumOfABf16GateRunsInFloat32) {
  const gdn::Plan plan = gdn::Plan::make(make_case(DType::kBFloat16, 1, 128, 1, 1, 128, 128).problem);
  const Tensor g = constant(DType::kBFloat16, {1, 128, 1}, -0.03), wide = g.to(DType::kFloat32);
  const Tensor from_bf16(DType::kFloat32, {1, 128, 1}), from_fp32(DType::kFloat32, {1, 128, 1});
  stages::chunk_local_cumsum(plan, {.g = g.dl(), .out = from_bf16.dl()});
  stages::chunk_local_cumsum(plan, {.g = wide.dl(), .out = from_fp32.dl()});
  EXPECT_TRUE(same_bits(from_bf16, from_fp32));
  EXPECT_NEAR(from_bf16.at(63), 64 * g.at(0), 1e-4);
}

TEST(Cases, Case01_FactorsOfAStrongGateStayFinite) {
  for (const double gate : {-2.0, -20.0, -200.0, -1e4}) {
    const gdn::Plan plan = gdn::Plan::make(operator_case({}).problem);
    StageInputs s = make_inputs(plan, Gate::kOrdinary);
    s.log_decay.filled([=](int64_t) { return gate; });
    s.gamma = formulas::local_cumsum(plan, s.log_decay, kInverseLn2, false).to(DType::kFloat32);
    for (const Stage& stage : all_stages()) {
      expect_stage_close(stage, DType::kFloat32, run_stage(stage, plan, s, row_major), stage.expected(plan, s));
    }
  }
}

}  // namespace
}  // namespace cula::test
