// Splitting long sequences into segments of chunks that run side by side.
//
// The state map of a segment is affine, S -> M S + S_ext. A pass over split sequences is three kernels: a summary
// (S_ext and M of every segment but the last of its sequence, all at once), a merge (the state that enters each
// segment, in order, in fp32), and the pass itself, each segment from the state that enters it. The adjoint's map has
// the transpose of M. The split is exact: it changes the order of roundings, nothing else.
//
// Everything here is a pure function of sizes. The number of segments of a sequence follows from its chunks and from
// the length of a segment alone, so kernels that read cu_seqlens on the device find the same segments for new values.
#pragma once

#include <cstdint>
#include <string>

#include "gdn/gdn.h"

namespace cula::gdn {

// A pass over the chunks of all sequences, as the blocks of a grid see it.
struct ScanWork {
  int64_t sequences = 0;        // that have tokens
  int64_t longest = 0;          // chunks of the longest sequence
  int64_t blocks = 0;           // that one sequence or segment keeps busy: value heads x blocks of value columns
  int64_t summary_blocks = 0;   // the same for the summary of a segment: its state is V + K columns wide
  double summary_cost = 1.0;    // one chunk of the summary, in chunks of the pass
  double merge_cost = 2.0;      // one segment of the merge, in chunks of the pass
  double split_cost = 8.0;      // of two more kernels, whose first loads nothing hides, in chunks of the pass
  int64_t multiprocessors = 0;  // of the GPU that is planned for
  int64_t residency = 1;        // blocks that share a multiprocessor
  double crowding = 1.5;        // a chunk on a multiprocessor with all its blocks, in chunks of a block alone there
};

struct Segments {
  int64_t chunks = 0;  // of a segment; 0: sequences run whole

  explicit operator bool() const { return chunks != 0; }
  // Segments of a sequence; one without chunks has one, which hands its state on.
  int64_t of(int64_t sequence_chunks) const {
    if (chunks == 0 || sequence_chunks == 0) return 1;
    return (sequence_chunks + chunks - 1) / chunks;
  }
  // Places for all segments of N sequences that have `slots` places for their chunks (numbered without a prefix sum,
  // as SequenceTable does): the segments of sequence n, whose chunks start at place p, start at floor(p / chunks) + n.
  int64_t places(int64_t slots, int64_t sequences) const {
    return chunks == 0 ? sequences : slots / chunks + sequences;
  }
  std::string describe(int64_t longest) const;
};

// Time of a pass in chunks of a block that has a multiprocessor to itself.
double scan_time(const ScanWork& work, const Segments& segments);

// The split with the least time; none unless it gains a tenth.
Segments choose_segments(const ScanWork& work);

// The passes of the cuda backend. Planned for a GPU of this many multiprocessors whichever it is, so that workspace
// and results do not depend on it.
inline constexpr int64_t kPlannedMultiprocessors = 132;

// What changes bits is planned for one sequence of this many tokens, whatever the batch holds, where
// Problem::batch_invariant asks for it. Long enough for few heads to be cut; nothing depends on the value but speed.
inline constexpr int64_t kInvariantTokens = 32768;

struct ScanSizes {
  int64_t sequences = 0;  // that have tokens
  int64_t longest = 0;    // chunks of the longest sequence
  int64_t chunks = 0;     // of all sequences
  int64_t value_heads = 0;
  int64_t key_dim = 0;
  int64_t value_dim = 0;
  int64_t element_bytes = 2;
};

struct ScanSchedule {
  bool narrow = false;  // blocks of 32 value columns with the keys split over two warps, rather than of 64
  Segments segments;

  int64_t value_block() const { return narrow ? 32 : 64; }
  std::string describe(int64_t longest) const;
};

// How the passes of a plan run, and its longest sequence in chunks.
struct ScanCut {
  ScanSchedule schedule;
  int64_t longest = 0;
};

// Blocks of 64 columns need registers for a whole row of the state.
bool has_wide_blocks(int64_t key_dim, int64_t element_bytes);
ScanSchedule choose_scan_schedule(const ScanSizes& sizes, bool may_split = true);
// The blocks of a summary for context parallelism: of one whole sequence, V columns wide or, with M, V + K.
ScanSchedule choose_summary_schedule(const ScanSizes& sizes, bool with_map);
ScanSizes scan_sizes(const Plan& plan);
// Of the plan's own sizes, or of those of kInvariantTokens.
ScanSchedule choose_scan_schedule(const Plan& plan, bool may_split = true);

}  // namespace cula::gdn
