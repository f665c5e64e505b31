#include "gdn/sm90/launch/kernels.h"

namespace cula::gdn::sm90 {

namespace {

template <int kKeyDim>
void launch_merge_for(const ForwardArgs& args, device::Stream stream) {
  device::launch_dependent<merge_kernel<kKeyDim>>(
      "merge",
      {.blocks = args.segments.sequences.num_sequences * args.value_heads * (args.value_dim / cuda::kMapColumns),
       .threads = cuda::kMapThreads,
       .shared_bytes = SegmentChain<kKeyDim, true>::kSharedBytes,
       .stream = stream},
      args);
}

}  // namespace

void launch_merge(const ForwardArgs& args, const KernelShape& shape, device::Stream stream) {
  if (shape.key_dim == 64) return launch_merge_for<64>(args, stream);
  return launch_merge_for<128>(args, stream);
}

}  // namespace cula::gdn::sm90
