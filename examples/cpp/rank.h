// One rank of context parallelism, on any device and with any transport: the caller says how memory is had and how the
// ranks' payloads are gathered.
#pragma once

#include <gdn/cp/cp.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <utility>
#include <vector>

namespace example {

namespace gdn = cula::gdn;

// Where a rank's tensors live.
struct Device {
  DLDevice device = {kDLCPU, 0};
  gdn::Stream stream = nullptr;
  std::function<std::shared_ptr<void>(size_t bytes)> allocate;
  std::function<void(void* to, const void* from, size_t bytes)> upload;
  std::function<void(float* to, const void* from, size_t bytes)> download;
};

// A dense float32 tensor.
class Tensor {
 public:
  Tensor(const Device& device, std::vector<int64_t> shape)
      : device_(device), shape_(std::move(shape)), memory_(device.allocate(bytes())) {
    view_ = {.data = memory_.get(),
             .device = device.device,
             .ndim = static_cast<int32_t>(shape_.size()),
             .dtype = {kDLFloat, 32, 1},
             .shape = shape_.data(),
             .strides = nullptr,
             .byte_offset = 0};
  }
  Tensor(const Device& device, std::vector<int64_t> shape, const std::vector<float>& values)
      : Tensor(device, std::move(shape)) {
    device_.upload(memory_.get(), values.data(), bytes());
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  DLTensor* view() { return &view_; }
  size_t count() const {
    return static_cast<size_t>(std::accumulate(shape_.begin(), shape_.end(), int64_t{1}, std::multiplies<>()));
  }
  size_t bytes() const { return count() * sizeof(float); }
  float* data() const { return static_cast<float*>(memory_.get()); }
  std::vector<float> values() const {
    std::vector<float> result(count());
    device_.download(result.data(), memory_.get(), bytes());
    return result;
  }

 private:
  Device device_;
  std::vector<int64_t> shape_;
  std::shared_ptr<void> memory_;
  DLTensor view_{};
};

// Some tokens of one sequence, on the host, token by token.
struct Data {
  std::vector<float> q, k, v, g, beta, grad_output;
};
struct Results {
  std::vector<float> o, dq, dk, dv, dg, dbeta;
};

struct Sizes {
  int64_t tokens, heads, value_heads, key_dim, value_dim;
};

// Puts the payloads of all ranks side by side, in the order of the ranks.
using AllGather = std::function<void(const Tensor& payload, Tensor& gathered)>;

// Forward and backward of the tokens of rank `rank` of `world_size` ranks that share one sequence.
inline Results run_rank(const Device& device, const Sizes& sizes, const Data& data, int rank, int world_size,
                        const AllGather& all_gather) {
  gdn::Problem problem;
  problem.tokens = sizes.tokens;
  problem.heads = sizes.heads;
  problem.value_heads = sizes.value_heads;
  problem.key_dim = sizes.key_dim;
  problem.value_dim = sizes.value_dim;
  problem.sequence_offsets = {0, sizes.tokens};
  problem.device = device.device;
  const gdn::Plan plan = gdn::Plan::make(problem);

  const int64_t T = sizes.tokens, H = sizes.heads, HV = sizes.value_heads, K = sizes.key_dim, V = sizes.value_dim;
  const bool is_first = rank == 0, is_last = rank == world_size - 1;
  const auto with_workspace = [&](size_t bytes, const auto& call) {
    const std::shared_ptr<void> memory = device.allocate((bytes + 63) / 64 * 64);
    call(gdn::Workspace{.data = memory.get(), .bytes = bytes});
  };
  // What the chain of ranks so far makes of a state.
  const auto merge = [&](Tensor& entries, const std::vector<int64_t>& order, Tensor& state) {
    with_workspace(gdn::cp::merge_workspace_bytes(plan), [&](gdn::Workspace workspace) {
      gdn::cp::merge(plan, {.summaries = entries.view(), .order = order, .state = state.view()}, workspace,
                     device.stream);
    });
  };

  Tensor q(device, {1, T, H, K}, data.q), k(device, {1, T, H, K}, data.k), v(device, {1, T, HV, V}, data.v);
  Tensor g(device, {1, T, HV}, data.g), beta(device, {1, T, HV}, data.beta);
  const std::vector<int32_t> offsets = {0, static_cast<int32_t>(T)};
  Tensor cu_seqlens(device, {2});  // of the same size as float32
  device.upload(cu_seqlens.data(), offsets.data(), cu_seqlens.bytes());
  cu_seqlens.view()->dtype = {kDLInt, 32, 1};

  // Forward. One state enters, [1, HV, K, V]; merge sees it without the first dimension.
  Tensor o(device, {1, T, HV, V}), A(device, {1, T, HV, problem.chunk_size});
  Tensor state(device, {1, HV, K, V}, std::vector<float>(static_cast<size_t>(HV * K * V)));
  const gdn::SavedTensors saved{.A = A.view()};
  const gdn::ForwardTensors forward{.q = q.view(),
                                    .k = k.view(),
                                    .v = v.view(),
                                    .g = g.view(),
                                    .beta = beta.view(),
                                    .initial_state = state.view(),
                                    .o = o.view(),
                                    .saved = &saved,
                                    .cu_seqlens = cu_seqlens.view()};
  with_workspace(gdn::cp::prepare_workspace_bytes(plan),
                 [&](gdn::Workspace workspace) { gdn::cp::prepare(plan, forward, workspace, device.stream); });
  const std::vector<float> nothing(static_cast<size_t>(HV * K * (V + K)));
  Tensor payload(device, {1, HV, K, V + K}, nothing), gathered(device, {world_size, HV, K, V + K});
  if (!is_last) {
    with_workspace(gdn::cp::summarize_workspace_bytes(plan), [&](gdn::Workspace workspace) {
      gdn::cp::summarize(plan,
                         {.k = k.view(),
                          .v = v.view(),
                          .g = g.view(),
                          .beta = beta.view(),
                          .saved = &saved,
                          .sequences = {0},
                          .summary = payload.view(),
                          .cu_seqlens = cu_seqlens.view()},
                         workspace, device.stream);
    });
  }
  all_gather(payload, gathered);
  Tensor merged(device, {HV, K, V});
  if (!is_first) {
    std::vector<int64_t> before(static_cast<size_t>(rank));
    std::iota(before.begin(), before.end(), 0);
    merge(gathered, before, merged);
    state.view()->data = merged.data();
  }
  with_workspace(gdn::cp::advance_workspace_bytes(plan),
                 [&](gdn::Workspace workspace) { gdn::cp::advance(plan, forward, workspace, device.stream); });

  // Backward, the same in reverse.
  Tensor grad_output(device, {1, T, HV, V}, data.grad_output);
  Tensor adjoint_payload(device, {1, HV, K, V + K}, nothing);
  if (!is_first) {
    with_workspace(gdn::cp::summarize_adjoint_workspace_bytes(plan), [&](gdn::Workspace workspace) {
      gdn::cp::summarize_adjoint(plan,
                                 {.q = q.view(),
                                  .k = k.view(),
                                  .g = g.view(),
                                  .beta = beta.view(),
                                  .saved = &saved,
                                  .grad_output = grad_output.view(),
                                  .sequences = {0},
                                  .summary = adjoint_payload.view(),
                                  .cu_seqlens = cu_seqlens.view()},
                                 workspace, device.stream);
    });
  }
  all_gather(adjoint_payload, gathered);
  Tensor merged_gradient(device, {HV, K, V});
  Tensor grad_state(device, {1, HV, K, V}, std::vector<float>(static_cast<size_t>(HV * K * V)));
  if (!is_last) {
    std::vector<int64_t> behind;
    for (int64_t i = world_size - 1; i > rank; --i) behind.push_back(i);
    merge(gathered, behind, merged_gradient);
    grad_state.view()->data = merged_gradient.data();
  }
  Tensor dq(device, {1, T, H, K}), dk(device, {1, T, H, K}), dv(device, {1, T, HV, V});
  Tensor dg(device, {1, T, HV}), dbeta(device, {1, T, HV});
  with_workspace(plan.backward_workspace_bytes(), [&](gdn::Workspace workspace) {
    gdn::backward(plan,
                  {.q = q.view(),
                   .k = k.view(),
                   .v = v.view(),
                   .g = g.view(),
                   .beta = beta.view(),
                   .initial_state = state.view(),
                   .saved = &saved,
                   .grad_output = grad_output.view(),
                   .grad_final_state = grad_state.view(),
                   .dq = dq.view(),
                   .dk = dk.view(),
                   .dv = dv.view(),
                   .dg = dg.view(),
                   .dbeta = dbeta.view(),
                   .cu_seqlens = cu_seqlens.view()},
                  workspace, device.stream);
  });
  return {o.values(), dq.values(), dk.values(), dv.values(), dg.values(), dbeta.values()};
}

// Seeded data of `sizes.tokens` tokens with unit keys and queries.
inline Data random_data(const Sizes& sizes) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform(0.01F, 0.99F);
  const auto values = [](int64_t rows, int64_t columns, const auto& next) {
    std::vector<float> result(static_cast<size_t>(rows * columns));
    for (float& value : result) value = next();
    return result;
  };
  const auto unit_rows = [&](int64_t rows) {
    std::vector<float> result = values(rows, sizes.key_dim, [&] { return normal(random); });
    for (auto row = result.begin(); row != result.end(); row += sizes.key_dim) {
      const float norm = std::sqrt(std::inner_product(row, row + sizes.key_dim, row, 0.0F));
      std::for_each(row, row + sizes.key_dim, [&](float& value) { value /= norm; });
    }
    return result;
  };
  const int64_t keys = sizes.tokens * sizes.heads, rows = sizes.tokens * sizes.value_heads;
  Data data;
  data.q = unit_rows(keys);
  data.k = unit_rows(keys);
  data.v = values(rows, sizes.value_dim, [&] { return normal(random); });
  data.g = values(rows, 1, [&] { return 0.05F * std::log(uniform(random)); });
  data.beta = values(rows, 1, [&] { return uniform(random); });
  data.grad_output = values(rows, sizes.value_dim, [&] { return normal(random); });
  return data;
}

// The share of one of `world_size` ranks: consecutive tokens, equally many on each.
inline Data share_of(const Data& whole, int rank, int world_size) {
  const auto part = [&](const std::vector<float>& all) {
    const auto each = static_cast<std::ptrdiff_t>(all.size()) / world_size;
    return std::vector<float>(all.begin() + rank * each, all.begin() + (rank + 1) * each);
  };
  return {part(whole.q), part(whole.k), part(whole.v), part(whole.g), part(whole.beta), part(whole.grad_output)};
}

// Runs `body(rank)` on a thread for each rank. An error of any of them is thrown once all have ended, so a body must
// not leave others waiting: here every rank makes the same calls, and what is wrong with one is wrong with all.
inline void run_ranks(int world_size, const std::function<void(int)>& body) {
  std::vector<std::exception_ptr> errors(static_cast<size_t>(world_size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (...) {
        errors[static_cast<size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

// Prints the relative error of the ranks' results, joined, and throws if one is above what float32 explains.
inline void compare(const std::vector<Results>& ranks, const Results& one) {
  const auto check = [&](const char* name, std::vector<float> Results::*member) {
    double difference = 0, norm = 0;
    auto expected = (one.*member).begin();
    for (const Results& rank : ranks) {
      for (const float value : rank.*member) {
        difference += (double{value} - *expected) * (double{value} - *expected);
        norm += double{*expected} * *expected;
        ++expected;
      }
    }
    const double error = std::sqrt(difference / norm);
    std::printf("%-6s differs from one rank by %.1e\n", name, error);
    if (!(error < 1e-5)) cula::throw_runtime_error(name, ": relative error ", error);
  };
  check("o", &Results::o);
  check("dq", &Results::dq);
  check("dk", &Results::dk);
  check("dv", &Results::dv);
  check("dg", &Results::dg);
  check("dbeta", &Results::dbeta);
}

}  // namespace example
