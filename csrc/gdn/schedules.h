// How the calls of a plan run: each part chosen once, by the first call that needs it.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
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

// A value that is made when it is first asked for, by whichever thread that is. Most plans live for one call, and
// std::call_once costs each of them a system call, to wake threads that do not wait.
template <class T>
class Once {
 public:
  template <class F>
  const T& get(F&& make) const {
    if (!made_.load(std::memory_order_acquire)) {
      const std::lock_guard lock(making_);
      if (!made_.load(std::memory_order_relaxed)) {
        value_ = make();
        made_.store(true, std::memory_order_release);
      }
    }
    return value_;
  }

 private:
  mutable std::atomic<bool> made_ = false;
  mutable std::mutex making_;
  mutable T value_ = {};
};

// Of one plan, which every function takes. Choosing takes time where sequences are many (a millisecond for the backward
// pass of 2000), and a plan is often made for one call.
class Schedules {
 public:
  explicit Schedules(const ScheduleOptions& options) : options_(options) {}

  const std::vector<ChunkRange>& chunks(const Plan& plan) const;

  const std::vector<cpu::Batch>& forward_batches(const Plan& plan) const;
  const std::vector<cpu::Batch>& backward_batches(const Plan& plan) const;

  const ScanCut& scan(const Plan& plan) const;                  // cuda's passes over the chunks
  const ScanSchedule& summary(const Plan& plan) const;          // of context parallelism: of S_ext and M
  const ScanSchedule& adjoint_summary(const Plan& plan) const;  // of dS_ext

  const sm90::Schedule& sm90_forward(const Plan& plan) const;
  const sm90::BackwardSchedule& sm90_backward(const Plan& plan) const;

 private:
  ScheduleOptions options_;
  Once<std::vector<ChunkRange>> chunks_;
  Once<std::vector<cpu::Batch>> forward_batches_;
  Once<std::vector<cpu::Batch>> backward_batches_;
  Once<ScanCut> scan_;
  Once<ScanSchedule> summary_;
  Once<ScanSchedule> adjoint_summary_;
  Once<sm90::Schedule> sm90_forward_;
  Once<sm90::BackwardSchedule> sm90_backward_;
};

}  // namespace cula::gdn
