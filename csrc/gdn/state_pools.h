// State pools and checkpoints (gdn.h: ForwardTensors) as the host sees them: for validation, and for the CPU backend.
#pragma once

#include <vector>

#include "common/host/tensor.h"
#include "gdn/gdn.h"

namespace cula::gdn {

// Element of an int32 or int64 tensor of one dimension in host memory.
int64_t index_at(const TensorView& indices, int64_t position);

// Which matrix of a state tensor is a sequence's.
class StateSlots {
 public:
  explicit StateSlots(const DLTensor* state_indices);
  // -1: none.
  int64_t of(int64_t sequence) const;

 private:
  TensorView indices_;
};

// Where the checkpoints of a call go.
class Checkpoints {
 public:
  Checkpoints(const Plan& plan, const ForwardTensors& tensors);
  Checkpoints(const Checkpoints&) = delete;
  ~Checkpoints();

  const TensorView& states() const { return states_; }
  // Row for the state behind the first `tokens` tokens of a sequence; -1 if that state is none of them.
  int64_t row(int64_t sequence, int64_t tokens) const;

 private:
  TensorView states_;
  int64_t every_ = 0;  // 0: none are wanted
  std::vector<int64_t> starts_;
};

// Checkpoints of a sequence of that many tokens, and of all sequences of a plan.
inline int64_t count_checkpoints(int64_t tokens, int64_t every_n_tokens) { return tokens / every_n_tokens; }
int64_t count_checkpoints(const Plan& plan, int64_t every_n_tokens);

}  // namespace cula::gdn
