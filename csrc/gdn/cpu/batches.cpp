#include "gdn/cpu/batches.h"

#include <algorithm>
#include <functional>
#include <queue>

#include "common/host/tensor.h"
#include "gdn/validate.h"

namespace cula::gdn::cpu {

namespace {

// Slots of all pairs before this one.
int64_t slots_before(const Plan& plan, int64_t pair) {
  const int64_t heads = plan.problem().heads, sequence = pair / heads;
  if (sequence == static_cast<int64_t>(plan.sequences().size())) {
    return plan.num_chunks() * heads;
  }
  const SequenceRange& range = plan.sequences()[sequence];
  return range.first_chunk * heads + pair % heads * range.num_chunks;
}

int64_t units_of_pair(const Plan& plan) {
  return plan.problem().value_heads / plan.problem().heads * plan.value_blocks();
}

// Pairs in order, each batch as many as fit these slots, but one at least.
std::vector<Batch> cut(const Plan& plan, int64_t slots) {
  const int64_t num_pairs = static_cast<int64_t>(plan.sequences().size()) * plan.problem().heads;
  std::vector<Batch> batches;
  for (int64_t pair = 0; pair < num_pairs;) {
    Batch batch = {pair, pair + 1, slots_before(plan, pair), slots_before(plan, pair + 1)};
    for (++pair; pair < num_pairs && slots_before(plan, pair + 1) - batch.first_slot <= slots; ++pair) {
      batch.end_pair = pair + 1;
      batch.end_slot = slots_before(plan, pair + 1);
    }
    batches.push_back(batch);
  }
  return batches;
}

// Time of a pass over the sequences, in chunks: each unit goes to the thread that is free first, and a batch waits for
// its last one.
int64_t pass_time(const Plan& plan, const std::vector<Batch>& batches) {
  int64_t total = 0;
  for (const Batch& batch : batches) {
    std::priority_queue<int64_t, std::vector<int64_t>, std::greater<>> free_at(
        {}, std::vector<int64_t>(plan.num_threads(), 0));
    int64_t end = 0;
    for (int64_t pair = batch.first_pair; pair < batch.end_pair; ++pair) {
      const int64_t chunks = plan.sequences()[pair / plan.problem().heads].num_chunks;
      for (int64_t unit = 0; chunks != 0 && unit < units_of_pair(plan); ++unit) {
        const int64_t done = free_at.top() + chunks;
        free_at.pop();
        free_at.push(done);
        end = std::max(end, done);
      }
    }
    total += end;
  }
  return total;
}

}  // namespace

int64_t slot_of(const Plan& plan, const ChunkHead& chunk_head) {
  const SequenceRange& range = plan.sequences()[plan.chunks()[chunk_head.chunk].sequence];
  return range.first_chunk * plan.problem().heads + chunk_head.head * range.num_chunks + chunk_head.chunk -
         range.first_chunk;
}

ChunkHead chunk_head_of_slot(const Plan& plan, int64_t slot) {
  const int64_t heads = plan.problem().heads;
  // A sequence has `heads` slots a chunk, so this chunk is one of the same sequence.
  const SequenceRange& range = plan.sequences()[plan.chunks()[slot / heads].sequence];
  const int64_t in_sequence = slot - range.first_chunk * heads;
  return {.chunk = range.first_chunk + in_sequence % range.num_chunks, .head = in_sequence / range.num_chunks};
}

int64_t forward_slot_bytes(const Problem& problem) {
  return problem.value_heads / problem.heads * problem.chunk_size * problem.chunk_size *
         static_cast<int64_t>(dtype_size(from_dlpack(problem.dtype, "dtype")));
}

int64_t backward_slot_bytes(const Problem& problem) {
  return problem.value_heads / problem.heads * 2 * (problem.key_dim + problem.chunk_size) * problem.value_dim *
         static_cast<int64_t>(dtype_size(stat_dtype(problem)));
}

std::vector<Batch> make_batches(const Plan& plan, int64_t bytes_per_slot) {
  const int64_t num_pairs = static_cast<int64_t>(plan.sequences().size()) * plan.problem().heads;
  std::vector<Batch> together = {{0, num_pairs, 0, slots_before(plan, num_pairs)}};
  const int64_t all_slots = together[0].end_slot;
  int64_t slots = kBatchBytes / std::max<int64_t>(bytes_per_slot, 1);
  if (all_slots <= slots) return together;
  int64_t longest = 0;
  for (const SequenceRange& sequence : plan.sequences()) longest = std::max(longest, sequence.num_chunks);
  slots = std::max(slots, longest * plan.num_threads() /
                              std::max<int64_t>(units_of_pair(plan), 1));  // fewer leave threads without a unit
  for (const int64_t limit = pass_time(plan, together) * 9 / 8; slots < all_slots; slots += slots / 8 + 1) {
    std::vector<Batch> batches = cut(plan, slots);
    if (pass_time(plan, batches) <= limit) return batches;
  }
  return together;
}

int64_t most_slots(const std::vector<Batch>& batches) {
  int64_t most = 0;
  for (const Batch& batch : batches) most = std::max(most, batch.num_slots());
  return most;
}

}  // namespace cula::gdn::cpu
