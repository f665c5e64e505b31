#include "gdn/segments.h"

#include <algorithm>

#include "common/host/tensor.h"

namespace cula::gdn {

namespace {

constexpr int64_t kShortestSegment = 8;  // chunks: below, the ends of the pipelines and the merge outweigh the rest
constexpr double kWorthwhile = 0.9;

// Of a grid whose blocks all do `steps` chunks.
double grid_time(const ScanWork& work, int64_t blocks, double steps) {
  const int64_t at_once = work.multiprocessors * work.residency;
  const int64_t waves = blocks / at_once;
  const int64_t rest = blocks - waves * at_once;
  const auto crowded = [&](int64_t resident) {
    // Between one block a multiprocessor and all that fit.
    const double share = static_cast<double>(resident - work.multiprocessors) /
                         static_cast<double>(std::max<int64_t>(at_once - work.multiprocessors, 1));
    return 1.0 + std::clamp(share, 0.0, 1.0) * (work.crowding - 1.0);
  };
  return steps * (static_cast<double>(waves) * crowded(at_once) + (rest > 0 ? crowded(rest) : 0.0));
}

}  // namespace

std::string Segments::describe(int64_t longest) const {
  if (chunks == 0) return "sequences whole";
  return concat("segments of ", chunks, " chunks, ", of(longest), " in the longest sequence");
}

double scan_time(const ScanWork& work, const Segments& segments) {
  const int64_t count = segments.of(work.longest);
  if (count <= 1) return grid_time(work, work.sequences * work.blocks, static_cast<double>(work.longest));
  const double steps = static_cast<double>(segments.chunks);
  return grid_time(work, work.sequences * (count - 1) * work.summary_blocks, steps * work.summary_cost) +
         static_cast<double>(count) * work.merge_cost + work.split_cost +
         grid_time(work, work.sequences * count * work.blocks, steps);
}

Segments choose_segments(const ScanWork& work) {
  Segments best;
  if (work.sequences <= 0 || work.blocks <= 0 || work.multiprocessors <= 0) return best;
  double least = kWorthwhile * scan_time(work, best);
  for (int64_t count = 2; count * kShortestSegment <= work.longest; ++count) {
    const Segments candidate = {(work.longest + count - 1) / count};
    // More segments than the machine has places for never help again.
    if ((count - 1) * work.sequences * work.blocks > work.multiprocessors * work.residency) break;
    const double time = scan_time(work, candidate);
    if (time < least) {
      least = time;
      best = candidate;
    }
  }
  return best;
}

std::string ScanSchedule::describe(int64_t longest) const {
  return concat("blocks of ", value_block(), " value columns, ", segments.describe(longest));
}

bool has_wide_blocks(int64_t key_dim, int64_t element_bytes) {
  return key_dim <= 64 || (key_dim <= 128 && element_bytes == 2);
}

namespace {

constexpr double kNarrowCost = 0.7;  // of a chunk in a narrow block, in chunks of a wide one

ScanWork scan_work(const ScanSizes& sizes, int64_t columns) {
  const auto blocks = [&](int64_t dim) { return (dim + columns - 1) / columns; };
  ScanWork work;
  // Of sequences of unequal length, as many as would be of the longest's.
  work.sequences = sizes.longest == 0 ? 0 : (sizes.chunks + sizes.longest - 1) / sizes.longest;
  work.longest = sizes.longest;
  work.blocks = sizes.value_heads * blocks(sizes.value_dim);
  work.summary_blocks = sizes.value_heads * (blocks(sizes.value_dim) + blocks(sizes.key_dim));
  work.summary_cost = 0.7;  // no output
  work.merge_cost = 2.0;
  work.multiprocessors = kPlannedMultiprocessors;
  work.residency = sizes.element_bytes == 2 && sizes.key_dim <= 128 ? 2 : 1;
  return work;
}

}  // namespace

ScanSchedule choose_scan_schedule(const ScanSizes& sizes, bool may_split) {
  const auto segments = [&](const ScanWork& work) { return may_split ? choose_segments(work) : Segments{}; };
  const ScanWork narrow_work = scan_work(sizes, 32);
  ScanSchedule narrow = {true, segments(narrow_work)};
  if (!has_wide_blocks(sizes.key_dim, sizes.element_bytes) || sizes.value_dim <= 32) return narrow;
  const ScanWork wide_work = scan_work(sizes, 64);
  const ScanSchedule wide = {false, segments(wide_work)};
  const bool narrow_wins = kNarrowCost * scan_time(narrow_work, narrow.segments) < scan_time(wide_work, wide.segments);
  return narrow_wins ? narrow : wide;
}

ScanSchedule choose_summary_schedule(const ScanSizes& sizes, bool with_map) {
  if (!has_wide_blocks(sizes.key_dim, sizes.element_bytes)) return {true, {}};
  const auto time = [&](int64_t columns) {
    ScanWork work = scan_work(sizes, columns);
    work.sequences = 1;
    if (with_map) work.blocks = work.summary_blocks;
    return scan_time(work, {});
  };
  return {kNarrowCost * time(32) < time(64), {}};
}

ScanSizes scan_sizes(const Plan& plan) {
  const Problem& problem = plan.problem();
  ScanSizes sizes;
  for (const SequenceRange& sequence : plan.sequences()) {
    sizes.sequences += sequence.num_chunks > 0;
    sizes.longest = std::max(sizes.longest, sequence.num_chunks);
  }
  sizes.chunks = plan.num_chunks();
  sizes.value_heads = problem.value_heads;
  sizes.key_dim = problem.key_dim;
  sizes.value_dim = problem.value_dim;
  sizes.element_bytes = static_cast<int64_t>(dtype_size(from_dlpack(problem.dtype, "dtype")));
  return sizes;
}

ScanSchedule choose_scan_schedule(const Plan& plan, bool may_split) {
  ScanSizes sizes = scan_sizes(plan);
  if (plan.problem().batch_invariant) {
    sizes.sequences = 1;
    sizes.longest = sizes.chunks = kInvariantTokens / plan.problem().chunk_size;
  }
  return choose_scan_schedule(sizes, may_split);
}

}  // namespace cula::gdn
