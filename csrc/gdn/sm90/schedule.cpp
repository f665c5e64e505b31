#include "gdn/sm90/schedule.h"

#include <algorithm>

#include "common/host/tensor.h"

namespace cula::gdn::sm90 {

namespace {

constexpr int64_t kChunk = 64;

}  // namespace

bool takes(const Problem& problem, std::string* reason) {
  const DType dtype = from_dlpack(problem.dtype, "dtype");
  const auto refuse = [&](const std::string& why) {
    if (reason != nullptr) *reason = why;
    return false;
  };
  if (dtype != DType::kBFloat16 && dtype != DType::kFloat16) {
    return refuse(concat("expected bfloat16 or float16, got ", dtype_name(dtype)));
  }
  if (problem.key_dim != 64 && problem.key_dim != 128) return refuse(concat("expected K of 64 or 128, got ", problem.key_dim));
  if (problem.value_dim != 64 && problem.value_dim != 128) {
    return refuse(concat("expected V of 64 or 128, got ", problem.value_dim));
  }
  if (problem.chunk_size != kChunk) return refuse(concat("expected chunk_size 64, got ", problem.chunk_size));
  return true;
}

std::string Schedule::describe() const {
  return concat("thread blocks: ", blocks, ", each ", 64 * value_tiles, " value columns of a head");
}

Schedule choose_schedule(const std::vector<int64_t>& lengths, int64_t value_heads, int64_t value_dim) {
  int64_t longest = 0;
  int64_t total = 0;
  for (const int64_t length : lengths) {
    const int64_t chunks = (length + kChunk - 1) / kChunk;
    longest = std::max(longest, chunks);
    total += chunks;
  }
  const int64_t tiles = value_dim / 64;
  Schedule best;
  double best_time = 0;
  for (int value_tiles = 1; value_tiles <= tiles; value_tiles *= 2) {
    const int64_t parts = tiles / value_tiles;
    // Blocks of equal length run in whole waves; unequal ones fill up behind each other.
    const int64_t blocks = static_cast<int64_t>(lengths.size()) * value_heads * parts;
    const int64_t waves = (blocks + kMultiprocessors - 1) / kMultiprocessors;
    const double average = static_cast<double>(total) / std::max<size_t>(lengths.size(), 1);
    const double steps = std::max<double>(static_cast<double>(longest), static_cast<double>(waves) * average);
    const double time = steps * kChunkNanoseconds[value_tiles];
    if (value_tiles == 1 || time < best_time) {
      best = {value_tiles, blocks};
      best_time = time;
    }
  }
  return best;
}

Schedule choose_schedule(const Plan& plan) {
  std::vector<int64_t> lengths;
  lengths.reserve(plan.sequences().size());
  for (const SequenceRange& sequence : plan.sequences()) lengths.push_back(sequence.length);
  return choose_schedule(lengths, plan.problem().value_heads, plan.problem().value_dim);
}

}  // namespace cula::gdn::sm90
