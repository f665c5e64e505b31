#include "gdn/sm90/launch/backward.h"

namespace cula::gdn::sm90 {

void launch_factors(const FactorArgs& args, device::Stream stream) {
  const int64_t items = args.sequences.num_slots() * args.value_heads;
  device::launch<factors_kernel>(
      "factors", {.blocks = (items + kFactorWarps - 1) / kFactorWarps, .threads = 32 * kFactorWarps, .stream = stream},
      args);
}

}  // namespace cula::gdn::sm90
