#include "gdn/sm90/schedule.h"

#include <algorithm>

#include "common/host/tensor.h"
#include "gdn/segments.h"

namespace cula::gdn::sm90 {

namespace {

constexpr int64_t kChunk = 64;

int64_t waves(int64_t blocks) { return (blocks + kMultiprocessors - 1) / kMultiprocessors; }

// Expects times of schedules.
class Model {
 public:
  Model(const std::vector<int64_t>& lengths, int64_t value_heads, int64_t value_dim)
      : value_heads_(value_heads), value_dim_(value_dim) {
    for (const int64_t length : lengths) {
      chunks_.push_back((length + kChunk - 1) / kChunk);
      longest_ = std::max(longest_, chunks_.back());
    }
    const auto differs = [&](int64_t n) { return n != longest_; };
    differ_ = chunks_.size() <= kMostOrdered && std::any_of(chunks_.begin(), chunks_.end(), differs);
  }

  int64_t longest() const { return longest_; }  // chunks
  int most_value_tiles() const { return static_cast<int>(value_dim_ / 64); }

  Schedule schedule(int value_tiles, int64_t segment) const {
    constexpr Costs kCosts;
    const int64_t parts = value_dim_ / (64 * value_tiles);
    int64_t blocks = 0;
    int64_t steps = 0;  // over all blocks
    int64_t summaries = 0;
    for (const int64_t n : chunks_) {
      const int64_t count = segment == 0 ? 1 : std::max<int64_t>((n + segment - 1) / segment, 1);
      blocks += count * value_heads_ * parts;
      steps += n * value_heads_ * parts;
      summaries += (count - 1) * value_heads_;
    }
    // Equal blocks run in whole waves; unequal ones fill up behind each other.
    const double length = static_cast<double>(segment == 0 ? longest_ : std::min(segment, longest_));
    const double average = static_cast<double>(steps) / static_cast<double>(std::max<int64_t>(blocks, 1));
    const double forward_waves = static_cast<double>(waves(blocks));
    double time =
        std::max(length, forward_waves * average) * kCosts.chunk_us[value_tiles] + forward_waves * kCosts.start_us;
    if (segment != 0) {
      const auto summary_us = [&](double rounds, int64_t chunks) {
        return rounds * (static_cast<double>(chunks) * kCosts.summary_chunk_us + kCosts.start_us);
      };
      const int64_t remembered = std::min(std::max(longest_ - segment, int64_t{0}), kCosts.remembered_chunks);
      const int64_t slices = summaries * (value_dim_ / 64);  // and about as many of M
      const double typical = summary_us(static_cast<double>(waves(slices)), remembered);
      const double with_map = summary_us(
          2 * slices <= kMultiprocessors ? 1.0 : kCosts.crowding * static_cast<double>(waves(slices)), segment);
      time += (1.0 - kCosts.remembering) * typical + kCosts.remembering * with_map + kCosts.merge_us;
    }
    return {value_tiles, segment, blocks, segment == 0 && blocks > kMultiprocessors && differ_, time};
  }

 private:
  std::vector<int64_t> chunks_;  // of each sequence
  int64_t longest_ = 0;
  bool differ_ = false;  // so that an order pays
  int64_t value_heads_;
  int64_t value_dim_;
};

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
  if (longest_first) text += ", longest sequences first";
  return text;
}

Schedule choose_schedule(const std::vector<int64_t>& lengths, int64_t value_heads, int64_t value_dim, bool may_split) {
  constexpr int64_t kShortestSegment = 8;
  constexpr double kGain = 0.93;  // segments must be worth their noise
  const Model model(lengths, value_heads, value_dim);
  Schedule best;
  const auto consider = [&](int64_t segment) {
    for (int value_tiles = 1; value_tiles <= model.most_value_tiles(); value_tiles *= 2) {
      const Schedule schedule = model.schedule(value_tiles, segment);
      const double factor = segment != 0 && best.segment_chunks == 0 ? kGain : 1.0;
      if (best.blocks == 0 || schedule.microseconds < best.microseconds * factor) best = schedule;
    }
  };
  consider(0);
  for (int64_t count = 2; may_split && count <= 64; ++count) {
    const int64_t segment = (model.longest() + count - 1) / count;
    if (segment < kShortestSegment) break;
    consider(segment);
  }
  return best;
}

Schedule choose_invariant_schedule(const std::vector<int64_t>& lengths, int64_t value_heads, int64_t value_dim,
                                   bool may_split) {
  const int64_t segment = choose_schedule({kInvariantTokens}, value_heads, value_dim, may_split).segment_chunks;
  const Model model(lengths, value_heads, value_dim);
  Schedule best = model.schedule(1, segment);
  for (int value_tiles = 2; value_tiles <= model.most_value_tiles(); value_tiles *= 2) {
    const Schedule schedule = model.schedule(value_tiles, segment);
    if (schedule.microseconds < best.microseconds) best = schedule;
  }
  return best;
}

Schedule choose_schedule(const Plan& plan, bool may_split) {
  const Problem& problem = plan.problem();
  std::vector<int64_t> lengths;
  lengths.reserve(plan.sequences().size());
  for (const SequenceRange& sequence : plan.sequences()) lengths.push_back(sequence.length);
  return problem.batch_invariant ? choose_invariant_schedule(lengths, problem.value_heads, problem.value_dim, may_split)
                                 : choose_schedule(lengths, problem.value_heads, problem.value_dim, may_split);
}

}  // namespace cula::gdn::sm90
