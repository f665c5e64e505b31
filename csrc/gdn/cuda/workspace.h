// Cuts a workspace into arrays. Run over a null workspace it only counts, so that the size that is asked for and the
// arrays that are used come from the same lines.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gdn/cuda/operator.h"

namespace cula::gdn::cuda {

class WorkspaceCutter {
 public:
  explicit WorkspaceCutter(void* data) : data_(static_cast<char*>(data)) {}

  template <class T>
  T* take(int64_t elements) {
    return static_cast<T*>(take_bytes(static_cast<size_t>(elements) * sizeof(T)));
  }
  void* take_bytes(size_t bytes) {
    constexpr size_t kAlignment = 64;
    void* result = data_ == nullptr ? nullptr : data_ + used_;
    used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return result;
  }
  size_t used() const { return used_; }

 private:
  char* data_;
  size_t used_ = 0;
};

// What a split pass keeps of its segments; nothing if sequences run whole.
struct SegmentWorkspace {
  float* summary = nullptr;    // [places, HV, K, V + K]: S_ext and M
  float* seeds = nullptr;      // [places, HV, K, V]: the states that enter the segments
  int64_t state_elements = 0;  // of the latter

  SegmentWorkspace(const Problem& problem, const ScanCut& cut, WorkspaceCutter& cutter) {
    const Segments& segments = cut.schedule.segments;
    if (!segments) return;
    const int64_t places = problem.sequence_offsets ? segments.places(chunk_slots(problem), problem.num_sequences())
                                                    : problem.batch * segments.of(cut.longest);
    const int64_t keys = places * problem.value_heads * problem.key_dim;
    summary = cutter.take<float>(keys * (problem.value_dim + problem.key_dim));
    state_elements = keys * problem.value_dim;
    seeds = cutter.take<float>(state_elements);
  }
};

}  // namespace cula::gdn::cuda
