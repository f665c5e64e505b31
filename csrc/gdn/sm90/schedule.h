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

struct Schedule {
  int value_tiles = 1;  // 64-wide blocks of value columns a thread block advances
  int64_t blocks = 0;   // of the forward kernel

  std::string describe() const;
};

// What one chunk takes one thread block, in nanoseconds, by its value tiles (measured on an H200). The choice between
// them changes no bit of the result.
inline constexpr double kChunkNanoseconds[3] = {0, 1430, 2100};

// lengths: tokens of each sequence.
Schedule choose_schedule(const std::vector<int64_t>& lengths, int64_t value_heads, int64_t value_dim);
Schedule choose_schedule(const Plan& plan);

}  // namespace cula::gdn::sm90
