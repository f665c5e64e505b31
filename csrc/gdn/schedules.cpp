#include "gdn/schedules.h"

#include <algorithm>

namespace cula::gdn {

namespace {

std::vector<ChunkRange> list_chunks(const Plan& plan) {
  const int64_t chunk_size = plan.problem().chunk_size;
  std::vector<ChunkRange> chunks;
  chunks.reserve(plan.num_chunks());
  int64_t number = 0;
  for (const SequenceRange& sequence : plan.sequences()) {
    for (int64_t i = 0; i < sequence.num_chunks; ++i) {
      const int64_t first = i * chunk_size;
      chunks.push_back({number, i, sequence.begin + first, std::min(chunk_size, sequence.length - first)});
    }
    ++number;
  }
  return chunks;
}

}  // namespace

const std::vector<ChunkRange>& Schedules::chunks(const Plan& plan) const {
  return chunks_.get([&] { return list_chunks(plan); });
}

const std::vector<cpu::Batch>& Schedules::forward_batches(const Plan& plan) const {
  return forward_batches_.get([&] { return cpu::make_batches(plan, cpu::forward_slot_bytes(plan.problem())); });
}

const std::vector<cpu::Batch>& Schedules::backward_batches(const Plan& plan) const {
  return backward_batches_.get([&] { return cpu::make_batches(plan, cpu::backward_slot_bytes(plan.problem())); });
}

const ScanCut& Schedules::scan(const Plan& plan) const {
  return scan_.get([&] { return ScanCut{choose_scan_schedule(plan, options_.may_split), scan_sizes(plan).longest}; });
}

const ScanSchedule& Schedules::summary(const Plan& plan) const {
  return summary_.get([&] { return choose_summary_schedule(scan_sizes(plan), true); });
}

const ScanSchedule& Schedules::adjoint_summary(const Plan& plan) const {
  return adjoint_summary_.get([&] { return choose_summary_schedule(scan_sizes(plan), false); });
}

const sm90::Schedule& Schedules::sm90_forward(const Plan& plan) const {
  return sm90_forward_.get([&] { return sm90::choose_schedule(plan, options_.may_split); });
}

const sm90::BackwardSchedule& Schedules::sm90_backward(const Plan& plan) const {
  return sm90_backward_.get(
      [&] { return sm90::choose_backward_schedule(plan, options_.backward_costs, options_.may_split); });
}

}  // namespace cula::gdn
