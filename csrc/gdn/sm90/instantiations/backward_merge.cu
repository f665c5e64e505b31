#include <algorithm>

#include "gdn/sm90/launch/backward.h"

namespace cula::gdn::sm90 {

namespace {

template <int kKeyDim>
void launch_backward_merge_for(const ScanArgs& args, device::Stream stream) {
  device::launch_dependent<backward_merge_kernel<kKeyDim>>(
      "backward_merge",
      {.blocks = 2 * args.segments.sequences.num_sequences * args.value_heads * (args.value_dim() / cuda::kMapColumns),
       .threads = cuda::kMapThreads,
       .shared_bytes = std::max(SegmentChain<kKeyDim, true>::kSharedBytes, SegmentChain<kKeyDim, false>::kSharedBytes),
       .stream = stream},
      args);
}

}  // namespace

void launch_backward_merge(const ScanArgs& args, int key_dim, device::Stream stream) {
  if (key_dim == 64) return launch_backward_merge_for<64>(args, stream);
  return launch_backward_merge_for<128>(args, stream);
}

}  // namespace cula::gdn::sm90
