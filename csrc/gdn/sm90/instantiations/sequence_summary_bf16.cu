#include "gdn/sm90/launch/context_parallel.cuh"

namespace cula::gdn::sm90 {

template void launch_sequence_summary<bf16>(const SequenceSummaryArgs& args, int key_dim, device::Stream stream);
template void launch_sequence_adjoint_summary<bf16>(const SequenceSummaryArgs& args, int key_dim,
                                                    device::Stream stream);

}  // namespace cula::gdn::sm90
