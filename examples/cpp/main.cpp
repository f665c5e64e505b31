// Gated DeltaNet from C++, without Python or a tensor framework: describe the problem, plan it, run it forward and
// backward on plain arrays. Two packed sequences, grouped value heads, everything in fp32 on the CPU.
#include <gdn/gdn.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <utility>
#include <vector>

namespace gdn = cula::gdn;

namespace {

// A tensor that owns its numbers. DLTensor is only a view of them, which is all that the library asks for.
class Tensor {
 public:
  explicit Tensor(std::vector<int64_t> shape) : shape_(std::move(shape)) {
    int64_t count = 1;
    for (const int64_t extent : shape_) count *= extent;
    values_.resize(static_cast<size_t>(count));
    view_ = {.data = values_.data(),
             .device = {kDLCPU, 0},
             .ndim = static_cast<int32_t>(shape_.size()),
             .dtype = {kDLFloat, 32, 1},
             .shape = shape_.data(),
             .strides = nullptr,  // dense, row-major
             .byte_offset = 0};
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  DLTensor* view() { return &view_; }
  std::vector<float>& values() { return values_; }

  void fill_normal(std::mt19937& random, float factor) {
    std::normal_distribution<float> normal;
    for (float& value : values_) value = factor * normal(random);
  }

  double norm() const {
    double sum = 0;
    for (const float value : values_) sum += double{value} * value;
    return std::sqrt(sum);
  }

 private:
  std::vector<int64_t> shape_;
  std::vector<float> values_;
  DLTensor view_{};
};

// Workspace of the caller's, aligned as the library asks.
class Arena {
 public:
  explicit Arena(size_t bytes)
      : bytes_((bytes + 63) / 64 * 64), data_(bytes_ ? std::aligned_alloc(64, bytes_) : nullptr) {}
  ~Arena() { std::free(data_); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  gdn::Workspace workspace() const { return {.data = data_, .bytes = bytes_}; }

 private:
  size_t bytes_;
  void* data_;
};

void run() {
  gdn::Problem problem;
  problem.tokens = 200;
  problem.heads = 2;
  problem.value_heads = 4;
  problem.key_dim = 64;
  problem.value_dim = 64;
  problem.sequence_offsets = {0, 130, 200};
  problem.use_qk_l2norm = true;
  const gdn::Plan plan = gdn::Plan::make(problem);
  std::printf("%s\n", plan.describe().c_str());

  const int64_t T = problem.tokens, H = problem.heads, HV = problem.value_heads;
  const int64_t K = problem.key_dim, V = problem.value_dim, C = problem.chunk_size, N = problem.num_sequences();
  std::mt19937 random(1);
  Tensor q({1, T, H, K}), k({1, T, H, K}), v({1, T, HV, V}), g({1, T, HV}), beta({1, T, HV});
  for (Tensor* tensor : {&q, &k, &v}) tensor->fill_normal(random, 1.0F);
  std::uniform_real_distribution<float> uniform(0.01F, 0.99F);
  for (float& value : g.values()) value = 0.1F * std::log(uniform(random));
  for (float& value : beta.values()) value = uniform(random);

  // Forward: the outputs, and what backward will need.
  Tensor o({1, T, HV, V}), final_state({N, HV, K, V});
  Tensor q_normalized({1, T, H, K}), q_rstd({1, T, H}), k_normalized({1, T, H, K}), k_rstd({1, T, H});
  Tensor A({1, T, HV, C});
  const gdn::SavedTensors saved{.q_normalized = q_normalized.view(),
                                .q_rstd = q_rstd.view(),
                                .k_normalized = k_normalized.view(),
                                .k_rstd = k_rstd.view(),
                                .A = A.view()};
  const Arena forward_arena(plan.forward_workspace_bytes(/*saves_for_backward=*/true));
  gdn::forward(plan,
               {.q = q.view(),
                .k = k.view(),
                .v = v.view(),
                .g = g.view(),
                .beta = beta.view(),
                .o = o.view(),
                .final_state = final_state.view(),
                .saved = &saved},
               forward_arena.workspace());
  std::printf("|o| = %.6f, |final state| = %.6f\n", o.norm(), final_state.norm());

  // Backward of the loss |o|^2 / 2, whose gradient by o is o itself.
  Tensor dq({1, T, H, K}), dk({1, T, H, K}), dv({1, T, HV, V}), dg({1, T, HV}), dbeta({1, T, HV});
  const Arena backward_arena(plan.backward_workspace_bytes());
  gdn::backward(plan,
                {.v = v.view(),
                 .g = g.view(),
                 .beta = beta.view(),
                 .saved = &saved,
                 .grad_output = o.view(),
                 .dq = dq.view(),
                 .dk = dk.view(),
                 .dv = dv.view(),
                 .dg = dg.view(),
                 .dbeta = dbeta.view()},
                backward_arena.workspace());
  std::printf("|dq| = %.6f, |dk| = %.6f, |dv| = %.6f, |dg| = %.6f, |dbeta| = %.6f\n", dq.norm(), dk.norm(), dv.norm(),
              dg.norm(), dbeta.norm());

  // o is linear in v, so <dv, v> must equal <o, o>: a check that needs no other implementation.
  double inner = 0;
  for (size_t i = 0; i < v.values().size(); ++i) inner += double{v.values()[i]} * dv.values()[i];
  const double expected = o.norm() * o.norm();
  const double error = std::abs(inner / expected - 1);
  std::printf("<dv, v> / <o, o> - 1 = %.1e\n", error);
  if (!(error < 1e-4)) cula::throw_runtime_error("<dv, v> = ", inner, " differs from <o, o> = ", expected);
}

}  // namespace

int main() {
  try {
    run();
  } catch (const cula::Error& error) {
    std::fprintf(stderr, "%s: %s\n", error.kind().c_str(), error.what());
    return 1;
  }
  return 0;
}
