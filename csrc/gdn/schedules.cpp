#include "gdn/schedules.h"

namespace cula::gdn {

Schedules choose_schedules(const Plan& plan, const ScheduleOptions& options) {
  const Problem& problem = plan.problem();
  Schedules schedules;
  if (plan.backend() == Backend::kCpu) {
    schedules.forward_batches = cpu::make_batches(plan, cpu::forward_slot_bytes(problem));
    schedules.backward_batches = cpu::make_batches(plan, cpu::backward_slot_bytes(problem));
    return schedules;
  }
  const ScanSizes sizes = scan_sizes(plan);
  schedules.scan = {choose_scan_schedule(plan, options.may_split), sizes.longest};
  schedules.summary = choose_summary_schedule(sizes, true);
  schedules.adjoint_summary = choose_summary_schedule(sizes, false);
  if (plan.backend() == Backend::kSm90) {
    schedules.sm90_forward = sm90::choose_schedule(plan, options.may_split);
    schedules.sm90_backward = sm90::choose_backward_schedule(plan, options.backward_costs, options.may_split);
  }
  return schedules;
}

}  // namespace cula::gdn
