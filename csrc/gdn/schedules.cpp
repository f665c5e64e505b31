#include "gdn/schedules.h"

namespace cula::gdn {

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
