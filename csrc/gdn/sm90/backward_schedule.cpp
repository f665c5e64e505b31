#include "gdn/sm90/backward_schedule.h"

#include <algorithm>

#include "common/host/tensor.h"
#include "gdn/sm90/schedule.h"

namespace cula::gdn::sm90 {

namespace {

constexpr int64_t kChunk = 64;
constexpr int64_t kTileElements = 64 * 64;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Slots of a window at most.
int64_t most_slots(const BackwardSizes& sizes, const BackwardCosts& costs) {
  const int64_t slot_bytes = sizes.slot_bytes();
  if (sizes.slots * slot_bytes <= costs.small_bytes) return std::max<int64_t>(sizes.slots, 1);
  const int64_t part = std::max(divide_up(9 * sizes.slots, 16), costs.small_bytes / slot_bytes);
  return std::max<int64_t>(std::min(part, costs.window_bytes / slot_bytes), 1);
}

}  // namespace

int64_t BackwardSizes::slot_bytes() const {
  const int64_t tiles = (value_dim / 64) * (2 * (key_dim / 64) + 1);  // S and D; V'
  return value_heads * tiles * kTileElements * 2;
}

std::string BackwardSchedule::describe() const {
  std::string text = concat("thread blocks: ", blocks, ", each 64 value columns of a head");
  if (segment_chunks != 0) text += concat(", sequences in segments of ", segment_chunks, " chunks");
  if (windows > 1) text += concat(", in ", windows, " windows of ", window_slots, " chunks");
  return text;
}

BackwardSchedule choose_backward_schedule(const BackwardSizes& sizes, const BackwardCosts& costs) {
  constexpr double kGain = 0.93;  // segments must be worth their noise
  const int64_t most = most_slots(sizes, costs);
  int64_t longest = 0;
  int64_t chunks = 0;
  for (const auto& sequence : sizes.sequences) {
    longest = std::max(longest, sequence.chunks);
    chunks += sequence.chunks;
  }
  const int64_t units = 2 * sizes.value_heads * (sizes.value_dim / 64);  // blocks a segment, of both scans

  BackwardSchedule best;
  bool found = false;
  const auto consider = [&](int64_t segment, int64_t window) {
    BackwardSchedule schedule;
    schedule.segment_chunks = segment;
    schedule.window_slots = window;
    schedule.windows = std::max<int64_t>(divide_up(sizes.slots, window), 1);
    int64_t segments = 0;
    for (const auto& sequence : sizes.sequences) {
      const int64_t length = std::max<int64_t>(sequence.chunks, 1);
      const int64_t offset = segment == 0 || schedule.cuts_from_start() ? 0 : sequence.first_slot % segment;
      segments += segment == 0 ? 1 : divide_up(offset + length, segment);
    }
    schedule.blocks = divide_up(segments * units, schedule.windows);
    const auto waves = [](int64_t blocks) { return static_cast<double>(divide_up(blocks, kMultiprocessors)); };
    // A pass that starts inside a sequence goes through what the state there remembers first.
    const int64_t cuts = segments - static_cast<int64_t>(sizes.sequences.size());
    const int64_t remembered = segment == 0 ? 0 : std::clamp(longest - segment, int64_t{0}, costs.remembered_chunks);
    const double average =
        static_cast<double>(chunks + cuts * remembered) / static_cast<double>(std::max<int64_t>(segments, 1));
    const double length = static_cast<double>(segment == 0 ? longest : std::min(segment, longest) + remembered);
    const double busy = std::min(1.0, static_cast<double>(schedule.blocks) / kMultiprocessors);
    const double chunk_us = costs.alone_chunk_us + busy * (costs.busy_chunk_us - costs.alone_chunk_us);
    schedule.microseconds = static_cast<double>(schedule.windows) *
                            (std::max(length, waves(schedule.blocks) * average) * chunk_us + costs.window_us);
    if (segment != 0) schedule.microseconds += costs.summary_us;
    const double factor = segment != 0 && best.segment_chunks == 0 ? kGain : 1.0;
    if (!found || schedule.microseconds < best.microseconds * factor) best = schedule;
    found = true;
  };
  // Whole sequences: all, or some rows of a batch.
  const auto consider_rows = [&](int64_t most_rows) {
    const int64_t rows = sizes.slots / sizes.slots_per_row;
    const int64_t windows = divide_up(rows, most_rows);
    consider(0, divide_up(rows, windows) * sizes.slots_per_row);
  };
  if (sizes.slots <= most) {
    consider(0, most);
  } else if (sizes.slots_per_row != 0 && sizes.slots_per_row <= most) {
    consider_rows(most / sizes.slots_per_row);
  }
  if (sizes.sequences_whole) {
    if (found) return best;
    if (sizes.slots_per_row != 0) {
      consider_rows(1);
    } else {
      consider(0, sizes.slots);
    }
    return best;
  }
  const auto consider_segments = [&](int64_t segment) {
    if (segment > most) return;
    const int64_t windows = sizes.slots <= most ? 1 : divide_up(sizes.slots, most / segment * segment);
    consider(segment, divide_up(divide_up(sizes.slots, windows), segment) * segment);
  };
  // Parts of the longest sequence, or of all slots: these keep packed sequences whole where a window can.
  for (const int64_t extent : {longest, sizes.slots}) {
    for (int64_t count = 1; count <= 64; ++count) {
      const int64_t segment = divide_up(extent, count);
      if (segment < std::min(costs.shortest_segment, most)) break;
      if (segment < longest || sizes.slots > most) consider_segments(segment);
    }
  }
  if (!found) consider_segments(most);
  return best;
}

int64_t count_slots(const Problem& problem) {
  if (!problem.sequence_offsets) return problem.batch * divide_up(problem.tokens, kChunk);
  if (problem.num_sequences() == 0) return 0;
  return problem.tokens / kChunk + problem.num_sequences();
}

BackwardSchedule choose_backward_schedule(const Plan& plan, const BackwardCosts& costs, bool may_split) {
  const Problem& problem = plan.problem();
  BackwardSizes sizes;
  sizes.slots = count_slots(problem);
  sizes.slots_per_row = problem.sequence_offsets ? 0 : divide_up(problem.tokens, kChunk);
  sizes.value_heads = problem.value_heads;
  sizes.key_dim = problem.key_dim;
  sizes.value_dim = problem.value_dim;
  sizes.sequences_whole = problem.batch_invariant || !may_split;
  int64_t n = 0;
  for (const SequenceRange& sequence : plan.sequences()) {
    const int64_t first = problem.sequence_offsets ? sequence.begin / kChunk + n : n * sizes.slots_per_row;
    sizes.sequences.push_back({first, divide_up(sequence.length, kChunk)});
    ++n;
  }
  return choose_backward_schedule(sizes, costs);
}

}  // namespace cula::gdn::sm90
