#include <algorithm>
#include <cmath>

#include "common/host/cpu_features.h"
#include "gdn/backend.h"
#include "gdn/schedules.h"
#include "gdn/sm90/operator.h"
#include "gdn/validate.h"

namespace cula::gdn {

namespace {

constexpr const char* kBackendNames[] = {"auto", "cpu", "cuda", "sm90"};

#ifdef CULA_WITH_CUDA
constexpr bool kWithCuda = true;
#else
constexpr bool kWithCuda = false;
#endif
#ifdef CULA_WITH_SM90
constexpr bool kWithSm90 = true;
bool is_hopper(int device_id) { return sm90::runs_on(device_id); }
#else
constexpr bool kWithSm90 = false;
bool is_hopper(int) { return false; }
#endif

Backend choose_backend(const Problem& problem) {
  const bool on_cpu = problem.device.device_type == kDLCPU;
  const bool on_cuda = problem.device.device_type == kDLCUDA;
  if (!on_cpu && !on_cuda) {
    throw_value_error("device: expected tensors on the CPU or on a CUDA device, got DLPack device type ",
                      int(problem.device.device_type));
  }
  const Backend wanted = problem.backend;
  if (wanted == Backend::kSm90 && on_cuda) {
    std::string reason;
    if (!kWithSm90) throw_value_error("backend: expected auto, cpu or cuda, got sm90, which this build does not have");
    if (!is_hopper(problem.device.device_id)) {
      throw_value_error("backend: expected auto or cuda for a GPU that is not of compute capability 9.0, got sm90");
    }
    if (!sm90::takes(problem, &reason)) throw_value_error("backend: sm90 does not take this problem: ", reason);
    return Backend::kSm90;
  }
  if (on_cpu) {
    if (wanted != Backend::kAuto && wanted != Backend::kCpu) {
      throw_value_error("backend: expected auto or cpu for tensors on the CPU, got ", backend_name(wanted));
    }
    return Backend::kCpu;
  }
  if (wanted == Backend::kCpu) throw_value_error("backend: expected auto, cuda or sm90 for CUDA tensors, got cpu");
  if (!kWithCuda) {
    throw_runtime_error("device: got CUDA tensors, but this build has the cpu backend only; build with CUDA (nvcc)");
  }
  if (wanted == Backend::kAuto && kWithSm90 && sm90::takes(problem) && is_hopper(problem.device.device_id)) {
    return Backend::kSm90;
  }
  return Backend::kCuda;
}

// Columns of the state for one unit of the sequential pass. Fewer columns make more units; the results are the same.
int64_t choose_value_block(const Problem& problem, int64_t busy_sequences, int num_threads) {
  constexpr int64_t kLargest = 128;  // a K x 128 state and the tiles of a chunk fit the L2 cache of a core
  constexpr int64_t kSmallest = 32;  // two vectors: below, the products lose speed
  const auto round_up = [](int64_t value, int64_t to) { return (value + to - 1) / to * to; };
  int64_t block = std::min(kLargest, round_up(problem.value_dim, kSmallest));
  const auto units = [&] { return busy_sequences * problem.value_heads * ((problem.value_dim + block - 1) / block); };
  while (units() < num_threads && block > kSmallest) block = round_up(block / 2, kSmallest);
  return block;
}

}  // namespace

const char* backend_name(Backend backend) { return kBackendNames[static_cast<int>(backend)]; }

Backend backend_from_name(const std::string& name) {
  for (int i = 0; i < static_cast<int>(std::size(kBackendNames)); ++i) {
    if (name == kBackendNames[i]) return static_cast<Backend>(i);
  }
  throw_value_error("backend: expected auto, cpu, cuda or sm90, got ", name);
}

std::vector<Backend> compiled_backends() {
  std::vector<Backend> backends = {Backend::kCpu};
  if (kWithCuda) backends.push_back(Backend::kCuda);
  if (kWithSm90) backends.push_back(Backend::kSm90);
  return backends;
}

int64_t Problem::num_sequences() const {
  return sequence_offsets ? static_cast<int64_t>(sequence_offsets->size()) - 1 : batch;
}

Plan Plan::make(const Problem& problem) { return make(problem, {}); }

Plan Plan::make(const Problem& problem, const ScheduleOptions& options) {
  validate_problem(problem);
  Plan plan;
  plan.problem_ = problem;
  plan.backend_ = choose_backend(problem);
  plan.scale_ = problem.scale.value_or(1.0 / std::sqrt(static_cast<double>(problem.key_dim)));
  plan.num_threads_ = problem.num_threads != 0 ? problem.num_threads : hardware_threads();

  plan.sequences_.reserve(problem.num_sequences());
  const auto append = [&](int64_t begin, int64_t length) {
    const int64_t chunks = length / problem.chunk_size + (length % problem.chunk_size != 0 ? 1 : 0);
    plan.sequences_.push_back({begin, length, plan.num_chunks_, chunks});
    plan.num_chunks_ += chunks;
  };
  if (problem.sequence_offsets) {
    const std::vector<int64_t>& offsets = *problem.sequence_offsets;
    for (size_t n = 0; n + 1 < offsets.size(); ++n) append(offsets[n], offsets[n + 1] - offsets[n]);
  } else {
    for (int64_t b = 0; b < problem.batch; ++b) append(b * problem.tokens, problem.tokens);
  }
  const auto busy = std::count_if(plan.sequences_.begin(), plan.sequences_.end(),
                                  [](const SequenceRange& sequence) { return sequence.length != 0; });
  plan.value_block_ = choose_value_block(problem, busy, plan.num_threads_);
  // Scratch is laid out a thread: one that would find no unit to run gets none.
  const int64_t most_units = std::max(2 * plan.sequential_units(), plan.num_chunks_ * problem.value_heads);
  plan.num_threads_ = static_cast<int>(std::clamp<int64_t>(most_units, 1, plan.num_threads_));
  plan.schedules_ = std::make_shared<const Schedules>(options);
  return plan;
}

const std::vector<ChunkRange>& Plan::chunks() const { return schedules_->chunks(*this); }

size_t Plan::forward_workspace_bytes(bool saves_for_backward) const {
  return backend_table(backend_).forward_workspace_bytes(*this, saves_for_backward);
}

size_t Plan::backward_workspace_bytes() const { return backend_table(backend_).backward_workspace_bytes(*this); }

size_t Plan::forward_workspace_bytes(const ForwardTensors& tensors) const {
  const auto for_tensors = backend_table(backend_).forward_workspace_bytes_for;
  return for_tensors != nullptr ? for_tensors(*this, tensors) : forward_workspace_bytes(tensors.saved != nullptr);
}

size_t Plan::backward_workspace_bytes(const BackwardTensors& tensors) const {
  const auto for_tensors = backend_table(backend_).backward_workspace_bytes_for;
  return for_tensors != nullptr ? for_tensors(*this, tensors) : backward_workspace_bytes();
}

std::string Plan::describe() const {
  const Problem& p = problem_;
  std::string text = concat("gated delta rule, backend ", backend_name(backend_), "\n  B=", p.batch, " T=", p.tokens,
                            " H=", p.heads, " HV=", p.value_heads, " K=", p.key_dim, " V=", p.value_dim,
                            " dtype=", dtype_name(from_dlpack(p.dtype, "dtype")), " chunk=", p.chunk_size,
                            " scale=", scale_, "\n  sequences: ", sequences_.size(),
                            p.sequence_offsets ? " packed" : " of equal length", ", chunks: ", num_chunks_);
  if (backend_ == Backend::kCpu) {
    text += concat("\n  instruction set: ", cpu_isa_name(), ", threads: ", num_threads_,
                   "\n  chunk-parallel units: ", num_chunks_ * p.heads, ", sequential units: ", sequential_units(),
                   " of ", value_block_, " state columns");
  }
  if (backend_ == Backend::kCuda) {
    const ScanCut& scan = schedules_->scan(*this);
    text += concat("\n  passes over the chunks: ", scan.schedule.describe(scan.longest));
  }
  if (backend_ == Backend::kCuda) {
    text +=
        concat("\n  context parallelism: summaries and merges backend cuda, ", schedules_->summary(*this).value_block(),
               " columns a block forward, ", schedules_->adjoint_summary(*this).value_block(), " backward");
  }
  if (backend_ == Backend::kSm90) {
    text += "\n  context parallelism: summaries backend sm90, merges backend cuda";
    text += concat("\n  forward: ", schedules_->sm90_forward(*this).describe(),
                   "\n  backward: ", schedules_->sm90_backward(*this).describe(),
                   "\n  stages intra, recompute_w_u, fwd_h, fwd_o, dv_local, dhu, dqkwg and wy backward: backend sm90",
                   "\n  other stages, decoding, and operands whose rows are not aligned to 16 bytes: backend cuda");
  }
  if (p.batch_invariant) {
    text += "\n  batch-invariant: ";
    text += backend_ == Backend::kCpu
                ? "as always on this backend"
                : concat("order of roundings as planned for one sequence of ", kInvariantTokens, " tokens");
  }
  text += concat("\n  workspace: forward ", forward_workspace_bytes(false), " B (", forward_workspace_bytes(true),
                 " B when saving for backward), backward ", backward_workspace_bytes(), " B");
  return text;
}

}  // namespace cula::gdn
