// How the Hopper forward fills the machine: pure functions of a problem's sizes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gdn/gdn.h"

namespace cula::gdn::sm90 {

inline constexpr int kMultiprocessors = 132;  // of an H100 or H200 SXM; a tuning constant, nothing depends on it

// Whether this backend has kernels for a problem; if not, why (for error messages and Plan::describe).
bool takes(const Problem& problem, std::string* reason = nullptr);

// Sequences that are put in order, at most: a thread of prepare's first block ranks one, comparing it with each, before
// the block's own work. With more sequences than that the last ones to start are a small part of all.
inline constexpr size_t kMostOrdered = 128;

struct Schedule {
  int value_tiles = 1;         // 64-wide blocks of value columns a thread block advances
  int64_t segment_chunks = 0;  // 0: sequences run whole
  int64_t blocks = 0;          // of the forward kernel
  bool longest_first = false;  // sequences run in the order of their chunks, which prepare finds on the device
  double microseconds = 0;     // what the model below expects, without prepare

  std::string describe() const;
};

// The model's constants, measured on an H200. What they are changes no result's correctness; value tiles change no bit,
// segments the order of roundings.
struct Costs {
  double chunk_us[3] = {0, 1.45, 2.15};  // one chunk of the forward kernel, by value tiles
  double start_us = 5.0;                 // of a wave of blocks: its first loads, its last stores
  double summary_chunk_us = 1.05;        // one chunk of the summary
  double merge_us = 4.0;                 // of its launch
  double crowding = 1.5;                 // a chunk of two blocks that share a multiprocessor, in chunks of one
  // Chunks that the summary goes through: with the decay of typical gates (here -0.05 a token) all that came before
  // them has vanished in fp32 (segments.cuh: kForgotten), and no transition is needed. Gates that decay less make the
  // summary longer, nothing else.
  int64_t remembered_chunks = 28;
  // Weight of inputs whose gates forget nothing, where a summary goes through its whole segment, and for M too: of
  // splits that are as good for typical gates it decides for the one that loses less.
  double remembering = 0.15;
};

// lengths: tokens of each sequence.
Schedule choose_schedule(const std::vector<int64_t>& lengths, int64_t value_heads, int64_t value_dim,
                         bool may_split = true);
// For Problem::batch_invariant: segments as of one sequence of kInvariantTokens (segments.h), so that cuts, which are
// counted from a sequence's start, are the same in any batch. Value tiles follow from the lengths.
Schedule choose_invariant_schedule(const std::vector<int64_t>& lengths, int64_t value_heads, int64_t value_dim,
                                   bool may_split = true);
Schedule choose_schedule(const Plan& plan, bool may_split = true);

}  // namespace cula::gdn::sm90
