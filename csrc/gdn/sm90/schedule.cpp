#include "gdn/sm90/schedule.h"

#include <algorithm>

#include "common/host/tensor.h"
#include "gdn/segments.h"

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
  if (problem.key_dim != 64 && problem.key_dim != 128)
    return refuse(concat("expected K of 64 or 128, got ", problem.key_dim));
  if (problem.value_dim != 64 && problem.value_dim != 128) {
    return refuse(concat("expected V of 64 or 128, got ", problem.value_dim));
  }
  if (problem.chunk_size != kChunk) return refuse(concat("expected chunk_size 64, got ", problem.chunk_size));
  return true;
}

std::string Schedule::describe() const {
  std::string text = concat("thread blocks: ", blocks, ", each ", 64 * value_tiles, " value columns of a head");
  if (segment_chunks != 0) text += concat(", sequences in segments of ", segment_chunks, " chunks");
  return text;
}

Schedule choose_schedule(const std::vector<int64_t>& lengths, int64_t value_heads, int64_t value_dim, bool may_split) {
  constexpr Costs kCosts;
  constexpr int64_t kShortestSegment = 8;
  constexpr double kGain = 0.93;  // segments must be worth their noise
  std::vector<int64_t> chunks;
  int64_t longest = 0;
  for (const int64_t length : lengths) {
    chunks.push_back((length + kChunk - 1) / kChunk);
    longest = std::max(longest, chunks.back());
  }
  const auto waves = [](int64_t blocks) { return (blocks + kMultiprocessors - 1) / kMultiprocessors; };

  Schedule best;
  const auto consider = [&](int value_tiles, int64_t segment) {
    const int64_t parts = value_dim / (64 * value_tiles);
    int64_t blocks = 0;
    int64_t steps = 0;  // over all blocks
    int64_t summaries = 0;
    for (const int64_t n : chunks) {
      const int64_t count = segment == 0 ? 1 : std::max<int64_t>((n + segment - 1) / segment, 1);
      blocks += count * value_heads * parts;
      steps += n * value_heads * parts;
      summaries += (count - 1) * value_heads;
    }
    // Equal blocks run in whole waves; unequal ones fill up behind each other.
    const double length = static_cast<double>(segment == 0 ? longest : std::min(segment, longest));
    const double average = static_cast<double>(steps) / static_cast<double>(std::max<int64_t>(blocks, 1));
    const double forward_waves = static_cast<double>(waves(blocks));
    double time =
        std::max(length, forward_waves * average) * kCosts.chunk_us[value_tiles] + forward_waves * kCosts.start_us;
    if (segment != 0) {
      const int64_t remembered = std::min(longest - segment, kCosts.remembered_chunks);
      time += static_cast<double>(waves(summaries * (value_dim / 64))) *
                  (static_cast<double>(remembered) * kCosts.summary_chunk_us + kCosts.start_us) +
              kCosts.merge_us;
    }
    const bool better =
        best.blocks == 0 || time < best.microseconds * (segment != 0 && best.segment_chunks == 0 ? kGain : 1.0);
    if (better) best = {value_tiles, segment, blocks, time};
  };
  for (int value_tiles = 1; 64 * value_tiles <= value_dim; value_tiles *= 2) consider(value_tiles, 0);
  for (int64_t count = 2; may_split && count <= 64; ++count) {
    const int64_t segment = (longest + count - 1) / count;
    if (segment < kShortestSegment) break;
    for (int value_tiles = 1; 64 * value_tiles <= value_dim; value_tiles *= 2) consider(value_tiles, segment);
  }
  return best;
}

Schedule choose_schedule(const Plan& plan) {
  std::vector<int64_t> lengths;
  lengths.reserve(plan.sequences().size());
  for (const SequenceRange& sequence : plan.sequences()) lengths.push_back(sequence.length);
  return choose_schedule(lengths, plan.problem().value_heads, plan.problem().value_dim, !sequences_stay_whole());
}

}  // namespace cula::gdn::sm90
