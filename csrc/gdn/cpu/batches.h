// Forward and backward run over batches of pairs of a sequence and a key head, one after another: what one pass hands
// to the next is reused memory, a few heads' worth however many there are, and often still in the caches.
//
// Pairs are numbered sequence by sequence. The chunks of pair 0, then those of pair 1, and so
// on are the slots: a pair's slots are one range, and so are those of a batch of pairs.
#pragma once

#include <vector>

#include "gdn/gdn.h"

namespace cula::gdn::cpu {

struct ChunkHead {
  int64_t chunk;  // index in the plan
  int64_t head;   // key head
};

int64_t slot_of(const Plan& plan, const ChunkHead& chunk_head);
ChunkHead chunk_head_of_slot(const Plan& plan, int64_t slot);

struct Batch {
  int64_t first_pair, end_pair;
  int64_t first_slot, end_slot;
  int64_t num_slots() const { return end_slot - first_slot; }
};

// All pairs in order, in batches of as many as kBatchBytes of workspace hold; of more, as long as the batches, each of
// which ends with a barrier, would take an eighth more time than all pairs together.
inline constexpr int64_t kBatchBytes = int64_t{32} << 20;
int64_t forward_slot_bytes(const Problem& problem);   // A
int64_t backward_slot_bytes(const Problem& problem);  // S, D, V' and X
std::vector<Batch> make_batches(const Plan& plan, int64_t bytes_per_slot);
int64_t most_slots(const std::vector<Batch>& batches);  // of any one

}  // namespace cula::gdn::cpu
