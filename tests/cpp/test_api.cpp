// The small parts of the public interface, and the host helpers that every operator shares.
#include <atomic>
#include <cmath>
#include <limits>
#include <mutex>
#include <set>
#include <stdexcept>

#include <sys/wait.h>
#include <unistd.h>

#include "common/host/cpu_features.h"
#include "common/host/thread_pool.h"
#include "operator_case.h"

namespace cula::test {
namespace {

TEST(Names, BackendsRoundTrip) {
  for (const gdn::Backend backend :
       {gdn::Backend::kAuto, gdn::Backend::kCpu, gdn::Backend::kCuda, gdn::Backend::kSm90}) {
    EXPECT_EQ(gdn::backend_from_name(gdn::backend_name(backend)), backend);
  }
  EXPECT_STREQ(gdn::backend_name(gdn::Backend::kCpu), "cpu");
  expect_error([] { gdn::backend_from_name("gpu"); }, "ValueError", {"auto", "cpu", "cuda", "sm90", "gpu"});
}

TEST(Errors, CarryKindAndMessage) {
  const Error error("TypeError", "v: wrong");
  EXPECT_EQ(error.kind(), "TypeError");
  EXPECT_STREQ(error.what(), "v: wrong");
  EXPECT_THROW(throw_value_error("x"), std::runtime_error);
  expect_error([] { throw_value_error("a", 1, " b"); }, "ValueError", {"a1 b"});
  expect_error([] { throw_type_error("a"); }, "TypeError", {"a"});
  expect_error([] { throw_assertion_error("a"); }, "AssertionError", {"a"});
  expect_error([] { throw_runtime_error("a"); }, "RuntimeError", {"a"});
}

TEST(DTypes, RoundTripThroughDlpack) {
  const std::pair<DType, size_t> sizes[] = {{DType::kFloat64, 8}, {DType::kFloat32, 4}, {DType::kBFloat16, 2},
                                            {DType::kFloat16, 2}, {DType::kInt64, 8},   {DType::kInt32, 4}};
  for (const auto& [dtype, size] : sizes) {
    EXPECT_EQ(from_dlpack(to_dlpack(dtype), "x"), dtype);
    EXPECT_EQ(dtype_size(dtype), size);
  }
  EXPECT_TRUE(is_float(DType::kBFloat16));
  EXPECT_FALSE(is_float(DType::kInt64));
  EXPECT_STREQ(dtype_name(DType::kFloat16), "float16");
  expect_error([] { from_dlpack({kDLBool, 8, 1}, "mask"); }, "TypeError", {"mask", "8 bits"});
}

TEST(TensorViews, ReadDlpackTensors) {
  int64_t shape[] = {2, 3, 4}, strides[] = {12, 1, 3};
  float data[24] = {};
  DLTensor tensor = {.data = data,
                     .device = {kDLCPU, 0},
                     .ndim = 3,
                     .dtype = {kDLFloat, 32, 1},
                     .shape = shape,
                     .strides = nullptr,
                     .byte_offset = 8};
  const TensorView dense = TensorView::from(&tensor, "x");
  EXPECT_TRUE(dense);
  EXPECT_EQ(dense.data, data + 2);
  EXPECT_EQ(dense.numel(), 24);
  EXPECT_EQ(dense.stride[0], 12);
  EXPECT_EQ(dense.stride[2], 1);
  EXPECT_TRUE(dense.is_contiguous());
  EXPECT_EQ(dense.shape_string(), "[2, 3, 4]");
  tensor.strides = strides;
  EXPECT_FALSE(TensorView::from(&tensor, "x").is_contiguous());
  EXPECT_EQ(TensorView::from(&tensor, "x").stride[2], 3);
  EXPECT_FALSE(TensorView::from(nullptr, "x"));
  tensor.ndim = 0;
  EXPECT_TRUE(TensorView::from(&tensor, "x"));
  EXPECT_EQ(TensorView::from(&tensor, "x").numel(), 1);
}

TEST(TensorViews, RejectWhatTheyCanNotHold) {
  int64_t shape[] = {1, 1, 1, 1, 1, 1, 1};
  float data = 0;
  DLTensor tensor = {.data = &data,
                     .device = {kDLCPU, 0},
                     .ndim = 7,
                     .dtype = {kDLFloat, 32, 1},
                     .shape = shape,
                     .strides = nullptr,
                     .byte_offset = 0};
  expect_error([&] { TensorView::from(&tensor, "x"); }, "ValueError", {"x", "6", "7"});
  tensor.ndim = 2;
  tensor.data = nullptr;
  expect_error([&] { TensorView::from(&tensor, "x"); }, "ValueError", {"x", "null", "[1, 1]"});
  shape[0] = 0;
  EXPECT_TRUE(TensorView::from(&tensor, "x"));
}

TEST(TensorViews, ShapeChecksNameWhatCame) {
  const Tensor t(DType::kInt32, {2, 3});
  const TensorView view = TensorView::from(t.dl(), "x");
  EXPECT_NO_THROW(check_shape(view, "x", "[A, B]", {2, 3}));
  expect_error([&] { check_shape(view, "x", "[A, B]", {2, 4}); }, "ValueError", {"x", "[A, B] = [2, 4]", "[2, 3]"});
  expect_error([&] { check_shape(view, "x", "[A]", {2}); }, "ValueError", {"x", "[2, 3]"});
  expect_error([&] { check_float(view, "x"); }, "TypeError", {"x", "int32"});
  expect_error([&] { check_same_dtype(view, "x", DType::kFloat32, "like q"); }, "TypeError",
               {"x", "float32", "like q", "int32"});
}

// The shared test helpers must be able to fail, or nothing else here can.
TEST(TestSupport, SeesStrayWrites) {
  const Tensor strided(DType::kFloat32, {2, 2}, {4, 2});
  EXPECT_TRUE(strided.only_elements_written());
  EXPECT_TRUE(strided.untouched());
  strided.filled([](int64_t) { return 1.0; });
  EXPECT_TRUE(strided.only_elements_written());
  EXPECT_FALSE(strided.untouched());
  strided.view({1}, {1}, 1).set(0, 1);  // between the first two elements
  EXPECT_FALSE(strided.only_elements_written());
  Buffer buffer(10);
  EXPECT_TRUE(buffer.red_zones_intact());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 64, 0U);
  buffer.data()[10] = 0;
  EXPECT_FALSE(buffer.red_zones_intact());
  Buffer before(10);
  *(before.data() - 1) = 0;
  EXPECT_FALSE(before.red_zones_intact());
}

TEST(TestSupport, SeesDifferences) {
  const Tensor a = constant(DType::kFloat32, {100}, 1), b = a.contiguous();
  EXPECT_TRUE(same_bits(a, b));
  b.set(99, 1 + 1e-6);
  EXPECT_FALSE(same_bits(a, b));
  EXPECT_TRUE(close(a, b, 1e-6));
  EXPECT_FALSE(close(a, b, 1e-8));
  EXPECT_NEAR(relative_error(b, a), 0.95e-7, 1e-8);
  b.set(5, std::numeric_limits<double>::quiet_NaN());
  EXPECT_FALSE(close(b, a, 1e3));
  EXPECT_FALSE(all_finite(b));
  EXPECT_TRUE(std::isinf(relative_error(b, a)));
  EXPECT_FALSE(close(Tensor(DType::kFloat32, {3}), constant(DType::kFloat32, {3}, 0), 1e3));  // poison is not zero
}

TEST(CpuFeatures, HaveNames) {
  EXPECT_GE(hardware_threads(), 1);
  EXPECT_EQ(cpu_isa_name(), cpu_isa_name(cpu_isa()));
  EXPECT_STREQ(cpu_isa_name(CpuIsa::kAvx512Bf16), "avx512_bf16");
}

TEST(ThreadPool, RunsEveryUnitOnce) {
  for (const int threads : {1, 2, 7, 32}) {
    for (const int64_t units : {0, 1, 5, 1000}) {
      std::vector<std::atomic<int>> runs(units);
      std::atomic<int> wrong_workers = 0;
      parallel_for(units, threads, [&](int64_t unit, int worker) {
        ++runs[unit];
        if (worker < 0 || worker >= threads) ++wrong_workers;
      });
      for (const std::atomic<int>& count : runs) EXPECT_EQ(count, 1);
      EXPECT_EQ(wrong_workers, 0);
    }
  }
}

TEST(ThreadPool, NoTwoConcurrentUnitsShareAWorker) {
  std::vector<std::atomic<int>> busy(4);
  std::atomic<int> collisions = 0;
  parallel_for(2000, 4, [&](int64_t, int worker) {
    if (busy[worker]++ != 0) ++collisions;
    for (int i = 0; i < 50; ++i) std::atomic_signal_fence(std::memory_order_seq_cst);
    --busy[worker];
  });
  EXPECT_EQ(collisions, 0);
}

TEST(ThreadPool, RethrowsAndGoesOn) {
  for (const int threads : {1, 3}) {
    EXPECT_THROW(parallel_for(100, threads,
                              [](int64_t unit, int) {
                                if (unit == 37) throw std::runtime_error("unit 37");
                              }),
                 std::runtime_error);
    std::atomic<int64_t> sum = 0;
    parallel_for(100, threads, [&](int64_t unit, int) { sum += unit; });
    EXPECT_EQ(sum, 4950);
  }
}

TEST(ThreadPool, MayBeUsedFromInside) {
  std::atomic<int> count = 0;
  parallel_for(4, 2, [&](int64_t, int) { parallel_for(5, 2, [&](int64_t, int) { ++count; }); });
  EXPECT_EQ(count, 20);
}

// CASES 56 on the CPU: a process forked after the pool's threads exist has none of them.
TEST(ThreadPool, Case56_WorksInAForkedChildLarge) {
  OperatorCase c = make_case(DType::kFloat32, 1, 100, 1, 2, 16, 16);
  c.problem.num_threads = 3;
  const Operands x = make_operands(c);
  const Results expected = run(c, x);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);
    const Results r = run(c, x);
    _exit(same_bits(r.o, expected.o) && same_bits(r.dq, expected.dq) ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

}  // namespace
}  // namespace cula::test
