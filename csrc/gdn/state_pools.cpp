#include "gdn/state_pools.h"

namespace cula::gdn {

int64_t index_at(const TensorView& indices, int64_t position) {
  const int64_t offset = position * indices.stride[0];
  return indices.dtype == DType::kInt32 ? static_cast<const int32_t*>(indices.data)[offset]
                                        : static_cast<const int64_t*>(indices.data)[offset];
}

int64_t count_checkpoints(const Plan& plan, int64_t every_n_tokens) {
  int64_t count = 0;
  for (const SequenceRange& sequence : plan.sequences()) count += count_checkpoints(sequence.length, every_n_tokens);
  return count;
}

StateSlots::StateSlots(const DLTensor* state_indices) : indices_(TensorView::from(state_indices, "state_indices")) {}

int64_t StateSlots::of(int64_t sequence) const { return indices_ ? index_at(indices_, sequence) : sequence; }

Checkpoints::Checkpoints(const Plan& plan, const ForwardTensors& tensors)
    : states_(TensorView::from(tensors.state_checkpoints, "state_checkpoints")) {
  if (!states_) return;
  every_ = tensors.checkpoint_every_n_tokens;
  const TensorView given = TensorView::from(tensors.checkpoint_cu_starts, "checkpoint_cu_starts");
  starts_.reserve(plan.sequences().size());
  int64_t next = 0;
  for (size_t n = 0; n < plan.sequences().size(); ++n) {
    starts_.push_back(given ? index_at(given, static_cast<int64_t>(n)) : next);
    next += count_checkpoints(plan.sequences()[n].length, every_);
  }
}

Checkpoints::~Checkpoints() = default;

int64_t Checkpoints::row(int64_t sequence, int64_t tokens) const {
  if (every_ == 0 || tokens == 0 || tokens % every_ != 0) return -1;
  return starts_[sequence] + tokens / every_ - 1;
}

}  // namespace cula::gdn
