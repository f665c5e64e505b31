// How the Hopper backward fills the machine and bounds its memory: pure functions of a problem's sizes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gdn/gdn.h"

namespace cula::gdn::sm90 {

struct BackwardSchedule {
  int64_t segment_chunks = 0;  // 0: sequences run whole
  int64_t window_slots = 0;    // slots of chunks whose states are kept at a time; with segments a multiple of those
  int64_t windows = 1;
  int64_t blocks = 0;       // of both scans of a window, on average
  double microseconds = 0;  // what the model below expects of the scans

  // Cuts are counted from a sequence's start, and otherwise lie where windows may end (SlotSegments).
  bool cuts_from_start() const { return windows == 1; }
  std::string describe() const;
};

struct BackwardSizes {
  struct Sequence {
    int64_t first_slot;
    int64_t chunks;
  };
  std::vector<Sequence> sequences;
  int64_t slots = 0;          // of all chunks
  int64_t slots_per_row = 0;  // 0: packed sequences
  int64_t value_heads = 0;
  int64_t key_dim = 0;
  int64_t value_dim = 0;
  // Sequences run whole, whatever else is there, and only windows of rows bound memory. So Problem::batch_invariant
  // has it: how many windows there are, and so where a sequence is cut, follows from the whole batch.
  bool sequences_whole = false;

  int64_t slot_bytes() const;  // what the scans leave of a slot
};

// The model's constants, and what bounds memory. None changes a result's correctness; segments change the order of
// roundings. Those of scans were measured on an H200 with all multiprocessors at work; what a chunk takes with few of
// them, and the summary that has nothing to do, are estimates.
struct BackwardCosts {
  double busy_chunk_us = 1.78;  // one chunk of a scan while every multiprocessor runs one
  double alone_chunk_us = 1.35;
  double window_us = 10.0;  // first loads and last stores of a window's kernels
  double summary_us = 10.0;
  // Chunks that a pass goes through before a segment, as in the forward (schedule.h).
  int64_t remembered_chunks = 28;
  int64_t shortest_segment = 8;  // chunks
  // Inputs that need less run in one window; windows of others hold 9/16 of their slots at most, and never more than
  // the second figure.
  int64_t small_bytes = int64_t{400} << 20;
  int64_t window_bytes = int64_t{864} << 20;
};

BackwardSchedule choose_backward_schedule(const BackwardSizes& sizes, const BackwardCosts& costs);
BackwardSchedule choose_backward_schedule(const Plan& plan, const BackwardCosts& costs = {}, bool may_split = true);

// Slots of the chunks of a problem: one for each chunk, and empty ones between packed sequences.
int64_t count_slots(const Problem& problem);

}  // namespace cula::gdn::sm90
