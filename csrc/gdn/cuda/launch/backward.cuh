#pragma once

#include "gdn/cuda/kernel/gradient.cuh"
#include "gdn/cuda/launch/backward.h"

namespace cula::gdn::cuda {

template <class T>
void launch_gradient(const GradientArgs& args, device::Stream stream) {
  const int64_t places = args.sequences.num_slots() * args.heads;
  device::launch<score_gradient_kernel<T>>(
      "score_gradient",
      {.blocks = places, .threads = kProductThreads, .shared_bytes = sizeof(ScoreGradientShared<T>), .stream = stream},
      args);
  device::launch<operand_gradient_kernel<T>>("operand_gradient",
                                             {.blocks = places * args.key_blocks,
                                              .threads = kProductThreads,
                                              .shared_bytes = sizeof(OperandGradientShared<T>),
                                              .stream = stream},
                                             args);
}

template <class T>
void launch_local_value_gradient(const LocalValueGradientArgs& args, device::Stream stream) {
  device::launch<local_value_gradient_kernel<T>>(
      "chunk_bwd_dv_local",
      {.blocks = args.sequences.num_slots() * args.value_heads * args.value_blocks,
       .threads = kStageThreads,
       .shared_bytes = sizeof(LocalValueGradientShared<T>),
       .stream = stream},
      args);
}

template <class T, int kKeyDim>
void launch_state_gradient_for(StateGradientArgs args, device::Stream stream) {
  constexpr int kColumns = 16 * kStageThreads / 32 / kKeySplit<kKeyDim>;
  constexpr size_t kPartial = kKeySplit<kKeyDim> == 2 ? kStageThreads * 32 * sizeof(float) : 0;
  args.value_blocks = (args.value_dim + kColumns - 1) / kColumns;
  device::launch<state_gradient_kernel<T, kKeyDim>>(
      "chunk_gated_delta_rule_bwd_dhu",
      {.blocks = args.sequences.num_sequences * args.value_heads * args.value_blocks,
       .threads = kStageThreads,
       .shared_bytes = sizeof(StateGradientShared<T, kKeyDim>) + kPartial,
       .stream = stream},
      args);
}

template <class T>
void launch_state_gradient(const StateGradientArgs& args, device::Stream stream) {
  if (args.key_dim <= 64) return launch_state_gradient_for<T, 64>(args, stream);
  if (args.key_dim <= 128) return launch_state_gradient_for<T, 128>(args, stream);
  return launch_state_gradient_for<T, 256>(args, stream);
}

template <class T>
void launch_operand_stage(const OperandStageArgs& args, device::Stream stream) {
  device::launch<operand_stage_kernel<T>>("chunk_bwd_dqkwg",
                                          {.blocks = args.sequences.num_slots() * args.heads,
                                           .threads = kStageThreads,
                                           .shared_bytes = sizeof(OperandStageShared<T>),
                                           .stream = stream},
                                          args);
}

template <class T>
void launch_wy_stage(const WyStageArgs& args, device::Stream stream) {
  const size_t sums = args.group * kRows * sizeof(float);
  device::launch<wy_stage_kernel<T>>("prepare_wy_repr_bwd",
                                     {.blocks = args.sequences.num_slots() * args.heads,
                                      .threads = kStageThreads,
                                      .shared_bytes = sizeof(WyStageShared<T>) + sums,
                                      .stream = stream},
                                     args);
}

}  // namespace cula::gdn::cuda
