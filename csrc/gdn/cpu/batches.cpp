#include "gdn/cpu/batches.h"

#include <algorithm>

namespace cula::gdn::cpu {

namespace {

// Slots of all pairs before this one.
int64_t slots_before(const Plan& plan, int64_t pair) {
  const int64_t heads = plan.problem().heads, sequence = pair / heads;
  if (sequence == static_cast<int64_t>(plan.sequences().size())) {
    return static_cast<int64_t>(plan.chunks().size()) * heads;
  }
  const SequenceRange& range = plan.sequences()[sequence];
  return range.first_chunk * heads + pair % heads * range.num_chunks;
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

std::vector<Batch> make_batches(const Plan& plan, int64_t bytes_per_slot) {
  const Problem& p = plan.problem();
  const int64_t num_pairs = static_cast<int64_t>(plan.sequences().size()) * p.heads;
  const int64_t units_of_pair = p.value_heads / p.heads * plan.value_blocks();
  const int64_t fewest_pairs = (plan.num_threads() + units_of_pair - 1) / units_of_pair;
  std::vector<Batch> batches;
  for (int64_t pair = 0; pair < num_pairs;) {
    Batch batch = {pair, pair, slots_before(plan, pair), 0};
    const auto takes_another = [&] {
      return pair - batch.first_pair < fewest_pairs ||
             (slots_before(plan, pair + 1) - batch.first_slot) * bytes_per_slot <= kBatchBytes;
    };
    do ++pair;
    while (pair < num_pairs && takes_another());
    batch.end_pair = pair;
    batch.end_slot = slots_before(plan, pair);
    batches.push_back(batch);
  }
  return batches;
}

int64_t most_slots(const std::vector<Batch>& batches) {
  int64_t most = 0;
  for (const Batch& batch : batches) most = std::max(most, batch.num_slots());
  return most;
}

}  // namespace cula::gdn::cpu
