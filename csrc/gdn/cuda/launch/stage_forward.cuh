#pragma once

#include "gdn/cuda/launch/kernels.h"

namespace cula::gdn::cuda {

template <class T, GateKind kKind>
void launch_prepare(const PrepareArgs& args, device::Stream stream) {
  device::launch<prepare_kernel<T, kKind>>("prepare",
                                           {.blocks = args.sequences.num_slots() * args.heads,
                                            .threads = kInverseThreads,
                                            .shared_bytes = sizeof(PrepareShared<T>),
                                            .stream = stream},
                                           args);
}

template <class T>
void launch_recompute(const RecomputeArgs& args, device::Stream stream) {
  device::launch<recompute_kernel<T>>("recompute_w_u",
                                      {.blocks = args.sequences.num_slots() * args.value_heads * args.blocks,
                                       .threads = kStageThreads,
                                       .shared_bytes = sizeof(RecomputeShared<T>),
                                       .stream = stream},
                                      args);
}

template <class T, int kKeyDim>
void launch_state_stage_for(StateStageArgs args, device::Stream stream) {
  constexpr int kColumns = 16 * kStageThreads / 32 / kKeySplit<kKeyDim>;
  constexpr size_t kPartial = kKeySplit<kKeyDim> == 2 ? kStageThreads * 32 * sizeof(float) : 0;
  args.value_blocks = (args.value_dim + kColumns - 1) / kColumns;
  device::launch<state_stage_kernel<T, kKeyDim>>(
      "chunk_gated_delta_rule_fwd_h",
      {.blocks = args.sequences.num_sequences * args.value_heads * args.value_blocks,
       .threads = kStageThreads,
       .shared_bytes = sizeof(StateStageShared<T, kKeyDim>) + kPartial,
       .stream = stream},
      args);
}

template <class T>
void launch_state_stage(const StateStageArgs& args, device::Stream stream) {
  if (args.key_dim <= 64) return launch_state_stage_for<T, 64>(args, stream);
  if (args.key_dim <= 128) return launch_state_stage_for<T, 128>(args, stream);
  return launch_state_stage_for<T, 256>(args, stream);
}

template <class T>
void launch_output(const OutputArgs& args, device::Stream stream) {
  device::launch<output_kernel<T>>("chunk_fwd_o",
                                   {.blocks = args.sequences.num_slots() * args.value_heads * args.value_blocks,
                                    .threads = kStageThreads,
                                    .shared_bytes = sizeof(OutputShared<T>),
                                    .stream = stream},
                                   args);
}

}  // namespace cula::gdn::cuda
