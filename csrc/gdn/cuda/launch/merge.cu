#include <type_traits>

#include "gdn/cuda/launch/scan.h"

namespace cula::gdn::cuda {

namespace {

template <int kKeyDim, bool kAdjoint>
void launch_merge_for(MergeArgs args, device::Stream stream) {
  args.value_blocks = (args.value_dim + kMapColumns - 1) / kMapColumns;
  device::launch<merge_kernel<kKeyDim, kAdjoint>>(
      kAdjoint ? "adjoint_merge" : "state_merge",
      {.blocks = args.sequences.num_sequences * args.value_heads * args.value_blocks,
       .threads = kMapThreads,
       .shared_bytes = sizeof(StateMapShared<kKeyDim, kAdjoint>),
       .stream = stream},
      args);
}

template <int kKeyDim>
void launch_merge_in(const MergeArgs& args, bool adjoint, device::Stream stream) {
  if (adjoint) return launch_merge_for<kKeyDim, true>(args, stream);
  launch_merge_for<kKeyDim, false>(args, stream);
}

template <int kKeyDim>
void launch_chain_in(ChainArgs args, device::Stream stream) {
  args.value_blocks = (args.value_dim + kMapColumns - 1) / kMapColumns;
  device::launch<chain_kernel<kKeyDim>>("cp_merge",
                                        {.blocks = args.value_heads * args.value_blocks,
                                         .threads = kMapThreads,
                                         .shared_bytes = sizeof(StateMapShared<kKeyDim, false>),
                                         .stream = stream},
                                        args);
}

}  // namespace

MergeArgs segment_merge(const ForwardScanArgs& args) {
  MergeArgs merge;
  merge.sequences = args.sequences;
  merge.value_heads = args.value_heads;
  merge.key_dim = args.key_dim;
  merge.value_dim = args.value_dim;
  merge.entry = args.initial_state;
  merge.slots = args.initial_slots;
  merge.summary = args.summary;
  merge.map = args.map;
  merge.seeds = args.seeds;
  return merge;
}

MergeArgs segment_merge(const AdjointScanArgs& args, const ForwardScanArgs& forward) {
  MergeArgs merge = segment_merge(forward);
  merge.entry = args.grad_final_state;
  merge.slots = {};
  merge.summary = args.summary;
  merge.seeds = args.seeds;
  return merge;
}

void launch_merge(const MergeArgs& args, bool adjoint, device::Stream stream) {
  if (args.key_dim <= 64) return launch_merge_in<64>(args, adjoint, stream);
  if (args.key_dim <= 128) return launch_merge_in<128>(args, adjoint, stream);
  launch_merge_in<256>(args, adjoint, stream);
}

void launch_chain(const ChainArgs& args, device::Stream stream) {
  if (args.key_dim <= 64) return launch_chain_in<64>(args, stream);
  if (args.key_dim <= 128) return launch_chain_in<128>(args, stream);
  launch_chain_in<256>(args, stream);
}

}  // namespace cula::gdn::cuda
