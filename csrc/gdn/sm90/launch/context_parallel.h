// Launches of context parallelism, compiled an element type at a time under instantiations/.
#pragma once

#include "gdn/sm90/kernel/sequence_summary.cuh"

namespace cula::gdn::sm90 {

// The factors of a sequence's chunks, then its summary. key_dim: 64 or 128.
template <class T>
void launch_sequence_summary(const SequenceSummaryArgs& args, int key_dim, device::Stream stream);
template <class T>
void launch_sequence_adjoint_summary(const SequenceSummaryArgs& args, int key_dim, device::Stream stream);

}  // namespace cula::gdn::sm90
