// How the calls of a plan run: chosen once, when the plan is made, and read by every call.
#pragma once

#include <cstdint>
#include <vector>

#include "gdn/cpu/batches.h"
#include "gdn/gdn.h"
#include "gdn/segments.h"
#include "gdn/sm90/backward_schedule.h"
#include "gdn/sm90/schedule.h"

namespace cula::gdn {

// What a test or a benchmark asks of a plan; users have no need of it. None changes a result but for the order of
// roundings.
struct ScheduleOptions {
  bool may_split = true;  // sequences may be cut into segments
  sm90::BackwardCosts backward_costs = {};
};

// Those of other backends than the plan's are empty, but that sm90 hands calls to cuda.
struct Schedules {
  std::vector<cpu::Batch> forward_batches;
  std::vector<cpu::Batch> backward_batches;

  ScanCut scan;                  // cuda's passes over the chunks
  ScanSchedule summary;          // of context parallelism: of S_ext and M
  ScanSchedule adjoint_summary;  // of dS_ext

  sm90::Schedule sm90_forward;
  sm90::BackwardSchedule sm90_backward;
};

// Of a plan that has all but its schedules.
Schedules choose_schedules(const Plan& plan, const ScheduleOptions& options);

}  // namespace cula::gdn
