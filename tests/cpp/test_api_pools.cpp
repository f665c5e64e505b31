// State pools, checkpoints and updates in place, in memory whose every other byte is watched.
#include <cmath>

#include "gdn/state_pools.h"
#include "operator_case.h"

namespace cula::test {
namespace {

bool overlap(const Tensor& a, const Tensor& b) {
  const bool result = may_overlap(TensorView::from(a.dl(), "a"), TensorView::from(b.dl(), "b"));
  EXPECT_EQ(may_overlap(TensorView::from(b.dl(), "b"), TensorView::from(a.dl(), "a")), result);
  return result;
}

TEST(Memory, OverlapOfDenseTensors) {
  const Tensor x(DType::kFloat32, {4, 6});
  EXPECT_TRUE(overlap(x, x));
  EXPECT_FALSE(overlap(x, Tensor(DType::kFloat32, {4, 6})));
  EXPECT_FALSE(overlap(x.slice(0, 0, 2), x.slice(0, 2, 4)));
  EXPECT_TRUE(overlap(x.slice(0, 0, 3), x.slice(0, 2, 4)));
  EXPECT_TRUE(overlap(x, x.transposed(0, 1)));
  EXPECT_FALSE(overlap(x.slice(0, 2, 2), x));  // nothing in it
  EXPECT_FALSE(overlap(x.view({4, 6}, {0, 0}), x.slice(0, 1, 4)));
}

TEST(Memory, OverlapOfSlicesOfOneBuffer) {
  const Tensor x(DType::kFloat32, {4, 6});
  EXPECT_FALSE(overlap(x.slice(1, 0, 2), x.slice(1, 2, 6)));
  EXPECT_FALSE(overlap(x.slice(1, 4, 6), x.slice(1, 0, 4).slice(0, 1, 3)));
  EXPECT_TRUE(overlap(x.slice(1, 0, 3), x.slice(1, 2, 6)));
  // q, k, v as a projection leaves them, with different numbers of heads.
  const Tensor fused(DType::kBFloat16, {2, 5, 10});
  const Tensor q = fused.view({2, 5, 1, 2}, {50, 10, 2, 1}), v = fused.view({2, 5, 3, 2}, {50, 10, 2, 1}, 4);
  EXPECT_FALSE(overlap(q, v));
  EXPECT_TRUE(overlap(fused.view({2, 5, 3, 2}, {50, 10, 2, 1}), v));
  // Interleaved without a common period: not told apart, so refused.
  EXPECT_TRUE(overlap(x.view({6}, {2}), x.view({4}, {3}, 1)));
}

OperatorCase packed_case(DType dtype, bool v_first) {
  OperatorCase c = make_case(dtype, 1, 230, 1, 2, 20, 36);
  c.problem.sequence_offsets = {0, 70, 70, 200, 229};
  c.problem.state_v_first = v_first;
  return c;
}

constexpr int64_t kSlots = 7;
const std::vector<int64_t> kSlotOf = {5, 0, 2, 3};

Tensor indices_of(DType dtype, const std::vector<int64_t>& values) {
  const Tensor indices(dtype, {static_cast<int64_t>(values.size())});
  for (size_t n = 0; n < values.size(); ++n) {
    if (dtype == DType::kInt32) {
      static_cast<int32_t*>(indices.dl()->data)[n] = static_cast<int32_t>(values[n]);
    } else {
      static_cast<int64_t*>(indices.dl()->data)[n] = values[n];
    }
  }
  return indices;
}

// A pool that holds the states of the sequences in their slots, and poison elsewhere.
Tensor make_pool(const Tensor& states, const std::vector<int64_t>& slots) {
  Shape shape = states.shape();
  shape[0] = kSlots;
  const Tensor pool(states.dtype(), shape);
  const int64_t size = states.numel() / states.shape()[0];
  for (size_t n = 0; n < slots.size(); ++n) {
    for (int64_t i = 0; i < size; ++i) {
      if (slots[n] >= 0) pool.set(slots[n] * size + i, states.at(static_cast<int64_t>(n) * size + i));
    }
  }
  return pool;
}

void call(bool recurrent, const gdn::Plan& plan, const gdn::ForwardTensors& tensors) {
  if (recurrent) return gdn::recurrent_forward(plan, tensors);
  call_forward(plan, tensors);
}

class Pools : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(All, Pools, testing::Bool(),
                         [](const auto& info) { return info.param ? "recurrent" : "chunks"; });

TEST_P(Pools, InPlaceGiveTheBitsOfSeparateStates) {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kBFloat16}) {
    for (const bool v_first : {false, true}) {
      for (const int threads : {1, 3}) {
        OperatorCase c = packed_case(dtype, v_first);
        c.problem.num_threads = threads;
        const gdn::Plan plan = gdn::Plan::make(c.problem);
        const Operands x = make_operands(c);
        const Results expected = GetParam() ? run_recurrent(c, x) : run(c, x, Mode::kForward);
        const Tensor pool = make_pool(x.initial_state, kSlotOf);
        const Tensor indices = indices_of(threads == 1 ? DType::kInt32 : DType::kInt64, kSlotOf);
        Results r = empty_results(c, x, Mode::kForward);
        gdn::ForwardTensors t = forward_tensors(x, r);
        t.initial_state = t.final_state = pool.dl();
        t.state_indices = indices.dl();
        call(GetParam(), plan, t);
        EXPECT_TRUE(same_bits(r.o, expected.o));
        for (size_t n = 0; n < kSlotOf.size(); ++n) {
          const auto row = static_cast<int64_t>(n);
          EXPECT_TRUE(
              same_bits(pool.slice(0, kSlotOf[n], kSlotOf[n] + 1), expected.final_state.slice(0, row, row + 1)));
        }
        for (const int64_t slot : {1, 4, 6}) EXPECT_TRUE(std::isnan(pool.slice(0, slot, slot + 1).at(0))) << slot;
        EXPECT_TRUE(pool.only_elements_written());
      }
    }
  }
}

TEST_P(Pools, SlotMinusOneStartsFromZerosAndLeavesNothing) {
  OperatorCase c = packed_case(DType::kFloat32, false);
  const gdn::Plan plan = gdn::Plan::make(c.problem);
  const Operands x = make_operands(c);
  const std::vector<int64_t> slots = {-1, -1, 2, -1};
  Operands zeroed = x;
  zeroed.initial_state = x.initial_state.to(DType::kFloat32);
  const int64_t size = x.initial_state.numel() / 4;
  for (int64_t i = 0; i < 4 * size; ++i) {
    if (i / size != 2) zeroed.initial_state.set(i, 0.0);
  }
  const Results expected = GetParam() ? run_recurrent(c, zeroed) : run(c, zeroed, Mode::kForward);
  const Tensor pool = make_pool(x.initial_state, slots);
  const Tensor indices = indices_of(DType::kInt64, slots);
  Results r = empty_results(c, x, Mode::kForward);
  gdn::ForwardTensors t = forward_tensors(x, r);
  t.initial_state = t.final_state = pool.dl();
  t.state_indices = indices.dl();
  call(GetParam(), plan, t);
  EXPECT_TRUE(same_bits(r.o, expected.o));
  EXPECT_TRUE(same_bits(pool.slice(0, 2, 3), expected.final_state.slice(0, 2, 3)));
  for (const int64_t slot : {0, 1, 3, 4, 5, 6}) EXPECT_TRUE(std::isnan(pool.slice(0, slot, slot + 1).at(0))) << slot;
}

TEST_P(Pools, CheckpointsAreTheFinalStatesOfPrefixes) {
  const int64_t every = GetParam() ? 50 : 64;
  OperatorCase c = packed_case(DType::kBFloat16, true);
  const gdn::Plan plan = gdn::Plan::make(c.problem);
  const Operands x = make_operands(c);
  EXPECT_EQ(gdn::count_checkpoints(plan, every), 3);
  Shape shape = x.initial_state.shape();
  shape[0] = 6;
  const Tensor checkpoints(DType::kFloat32, shape);
  const Tensor starts = indices_of(DType::kInt32, {1, 2, 2, 5, 6});
  const Results r = empty_results(c, x, Mode::kForward);
  gdn::ForwardTensors t = forward_tensors(x, r);
  t.state_checkpoints = checkpoints.dl();
  t.checkpoint_cu_starts = starts.dl();
  t.checkpoint_every_n_tokens = every;
  call(GetParam(), plan, t);
  expect_same_bits(r, GetParam() ? run_recurrent(c, x) : run(c, x, Mode::kForward));
  const struct { int64_t row, sequence, tokens; } wanted[] = {{1, 0, every}, {2, 2, every}, {3, 2, 2 * every}};
  for (const auto& [row, sequence, tokens] : wanted) {
    OperatorCase part = c;
    const int64_t begin = (*c.problem.sequence_offsets)[sequence];
    part.problem.sequence_offsets.reset();
    part.problem.tokens = tokens;
    Operands cut = x;
    for (Tensor Operands::*member : {&Operands::q, &Operands::k, &Operands::v, &Operands::g, &Operands::beta}) {
      cut.*member = (x.*member).slice(1, begin, begin + tokens);
    }
    cut.initial_state = x.initial_state.slice(0, sequence, sequence + 1);
    const Results expected = GetParam() ? run_recurrent(part, cut) : run(part, cut, Mode::kForward);
    EXPECT_TRUE(same_bits(checkpoints.slice(0, row, row + 1), expected.final_state)) << row;
  }
  for (const int64_t row : {0, 4, 5}) EXPECT_TRUE(std::isnan(checkpoints.slice(0, row, row + 1).at(0))) << row;
}

// What can not be done is refused before anything is written.
TEST_P(Pools, Errors) {
  const OperatorCase c = packed_case(DType::kFloat32, false);
  const gdn::Plan plan = gdn::Plan::make(c.problem);
  const Operands x = make_operands(c);
  const Results r = empty_results(c, x, Mode::kForward);
  const Tensor pool = make_pool(x.initial_state, kSlotOf);
  const auto before = pool.snapshot();
  const auto refuse = [&](const std::vector<std::string>& parts, const auto& change) {
    gdn::ForwardTensors t = forward_tensors(x, r);
    t.initial_state = t.final_state = pool.dl();
    change(t);
    expect_error([&] { call(GetParam(), plan, t); }, "ValueError", parts);
    EXPECT_TRUE(r.o.untouched());
    EXPECT_EQ(pool.snapshot(), before);
  };
  const Tensor beyond = indices_of(DType::kInt64, {0, 1, kSlots, 2}), below = indices_of(DType::kInt32, {-2, 1, 0, 2}),
               twice = indices_of(DType::kInt64, {0, -1, -1, 0}), good = indices_of(DType::kInt64, kSlotOf);
  refuse({"state_indices: ", "7 slots", "got 7 for sequence 2"}, [&](auto& t) { t.state_indices = beyond.dl(); });
  refuse({"state_indices: ", "got -2 for sequence 0"}, [&](auto& t) { t.state_indices = below.dl(); });
  refuse({"state_indices: ", "distinct", "got 0 twice", "sequence 3"}, [&](auto& t) { t.state_indices = twice.dl(); });
  refuse({"state_indices: ", "pool"}, [&](auto& t) {
    t.state_indices = good.dl();
    t.initial_state = t.final_state = nullptr;
  });
  refuse({"initial_state: ", "[N, HV, K, V]"}, [](auto&) {});  // a pool without indices
  const Tensor shifted = pool.slice(0, 1, kSlots);
  refuse({"final_state (output_state): ", "all of initial_state's"}, [&](auto& t) {
    t.state_indices = good.dl();
    t.final_state = shifted.dl();
  });
  const Tensor rows(DType::kFloat32, {2, 2, 20, 36});
  refuse({"state_checkpoints: ", "room for the", "got 2"}, [&](auto& t) {
    t.state_indices = good.dl();
    t.state_checkpoints = rows.dl();
    t.checkpoint_every_n_tokens = 64;
  });
  EXPECT_TRUE(rows.untouched());
}

TEST(PoolErrors, NotForTraining) {
  const OperatorCase c = packed_case(DType::kFloat32, false);
  const gdn::Plan plan = gdn::Plan::make(c.problem);
  const Operands x = make_operands(c);
  const Results r = empty_results(c, x, Mode::kTraining);
  const gdn::SavedTensors saved = saved_tensors(r);
  const Tensor indices = indices_of(DType::kInt64, {0, 1, 2, 3});
  gdn::ForwardTensors t = forward_tensors(x, r);
  t.saved = &saved;
  t.state_indices = indices.dl();
  expect_error([&] { call_forward(plan, t); }, "ValueError", {"state_indices: ", "gradients"});
  t.state_indices = nullptr;
  const Tensor rows(DType::kFloat32, {9, 2, 20, 36});
  t.state_checkpoints = rows.dl();
  t.checkpoint_every_n_tokens = 64;
  expect_error([&] { call_forward(plan, t); }, "ValueError", {"checkpoint_every_n_tokens: ", "gradients"});
  t.state_checkpoints = nullptr;
  t.checkpoint_every_n_tokens = 0;
  t.final_state = x.initial_state.dl();  // which backward reads
  expect_error([&] { call_forward(plan, t); }, "ValueError", {"final_state", "initial_state"});
  EXPECT_TRUE(r.o.untouched());
}

}  // namespace
}  // namespace cula::test
