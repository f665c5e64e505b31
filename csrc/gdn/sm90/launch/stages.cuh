#pragma once

#include <algorithm>
#include <type_traits>

#include "gdn/sm90/launch/stages.h"

namespace cula::gdn::sm90 {

// f(K, V) with both as constants.
template <class F>
void with_dims(const StageShape& shape, F&& f) {
  constexpr std::integral_constant<int, 64> k64;
  constexpr std::integral_constant<int, 128> k128;
  if (shape.key_dim == 64) {
    if (shape.value_dim == 64) return f(k64, k64);
    return f(k64, k128);
  }
  if (shape.value_dim == 64) return f(k128, k64);
  return f(k128, k128);
}

inline int64_t stage_blocks(const StageGrid& grid) { return grid.sequences.num_slots() * grid.heads; }

template <class T, int kKeyDim, int kKeyHeads>
void launch_intra_for(const IntraArgs& args, device::Stream stream) {
  device::launch<intra_kernel<T, kKeyDim, kKeyHeads>>("intra",
                                                      {.blocks = args.grid.sequences.num_slots() * args.head_blocks,
                                                       .threads = kIntraThreads,
                                                       .shared_bytes = sizeof(IntraShared<kKeyDim / 64, kKeyHeads>),
                                                       .stream = stream},
                                                      args);
}

template <class T, int kKeyDim>
void launch_intra_for_keys(const IntraArgs& args, device::Stream stream) {
  if (args.grid.group % kIntraHeads == 0) return launch_intra_for<T, kKeyDim, 1>(args, stream);
  if (args.grid.group == 2) return launch_intra_for<T, kKeyDim, 2>(args, stream);
  return launch_intra_for<T, kKeyDim, kIntraHeads>(args, stream);
}

template <class T>
void launch_intra(IntraArgs args, const StageShape& shape, device::Stream stream) {
  args.head_blocks = (args.grid.heads + kIntraHeads - 1) / kIntraHeads;
  if (shape.key_dim == 64) return launch_intra_for_keys<T, 64>(args, stream);
  return launch_intra_for_keys<T, 128>(args, stream);
}

template <class T>
void launch_recompute_stage(const RecomputeStageArgs& args, const StageShape& shape, device::Stream stream) {
  with_dims(shape, [&](auto key_dim, auto value_dim) {
    using Shared = RecomputeStageShared<key_dim / 64, value_dim / 64>;
    device::launch<recompute_stage_kernel<T, key_dim, value_dim>>("recompute_w_u",
                                                                  {.blocks = stage_blocks(args.grid),
                                                                   .threads = kRecomputeThreads<key_dim, value_dim>,
                                                                   .shared_bytes = sizeof(Shared),
                                                                   .stream = stream},
                                                                  args);
  });
}

template <class T, int kKeyDim, int kValueDim, bool kValueFirst>
void launch_output_stage_for(const OutputStageArgs& args, device::Stream stream) {
  constexpr int kKeyTiles = kKeyDim / 64;
  constexpr int kValueTiles = kValueDim / 64;
  device::launch<output_stage_kernel<T, kKeyDim, kValueDim, kValueFirst>>(
      "chunk_fwd_o",
      {.blocks = stage_blocks(args.grid),
       .threads = kOutputThreads<kValueDim>,
       .shared_bytes = sizeof(OutputStageShared<kKeyTiles, kValueTiles, kKeyTiles * kValueTiles>),
       .stream = stream},
      args);
}

template <class T>
void launch_output_stage(const OutputStageArgs& args, const StageShape& shape, device::Stream stream) {
  with_dims(shape, [&](auto key_dim, auto value_dim) {
    if (shape.value_first) return launch_output_stage_for<T, key_dim, value_dim, true>(args, stream);
    return launch_output_stage_for<T, key_dim, value_dim, false>(args, stream);
  });
}

template <class T>
void launch_local_value_gradient(const OutputStageArgs& args, const StageShape& shape, device::Stream stream) {
  with_dims(shape, [&](auto key_dim, auto value_dim) {
    device::launch<local_value_gradient_kernel<T, key_dim, value_dim>>(
        "chunk_bwd_dv_local",
        {.blocks = stage_blocks(args.grid),
         .threads = kOutputThreads<value_dim>,
         .shared_bytes = sizeof(OutputStageShared<key_dim / 64, value_dim / 64, 0>),
         .stream = stream},
        args);
  });
}

template <class T, int kKeyDim, bool kAdjoint>
void launch_state_stage_for(const char* name, const StateStageArgs& args, device::Stream stream) {
  using Shared = StateStageShared<kKeyDim, kAdjoint>;
  static_assert(sizeof(Shared) <= 227 * 1024);
  device::launch<state_stage_kernel<T, kKeyDim, kAdjoint>>(
      name,
      {.blocks = args.grid.sequences.num_sequences * args.grid.heads * args.value_tiles,
       .threads = kStateStageThreads,
       .shared_bytes = sizeof(Shared),
       .stream = stream},
      args);
}

template <class T>
void launch_state_stage(const StateStageArgs& args, const StageShape& shape, device::Stream stream) {
  constexpr const char* kName = "chunk_gated_delta_rule_fwd_h";
  if (shape.key_dim == 64) return launch_state_stage_for<T, 64, false>(kName, args, stream);
  return launch_state_stage_for<T, 128, false>(kName, args, stream);
}

template <class T>
void launch_state_gradient_stage(const StateStageArgs& args, const StageShape& shape, device::Stream stream) {
  constexpr const char* kName = "chunk_gated_delta_rule_bwd_dhu";
  if (shape.key_dim == 64) return launch_state_stage_for<T, 64, true>(kName, args, stream);
  return launch_state_stage_for<T, 128, true>(kName, args, stream);
}

// Blocks that stay: one a multiprocessor.
inline int64_t resident_blocks(const StageGrid& grid) {
  return std::min<int64_t>(stage_blocks(grid), device::device_limits().multiprocessors);
}

template <class T, int kKeyDim, int kValueDim, bool kValueFirst>
void launch_operand_gradient_for(const OperandGradientArgs& args, device::Stream stream) {
  using Shared = OperandGradientShared<kKeyDim, kValueDim>;
  static_assert(sizeof(Shared) <= 227 * 1024);
  device::launch<operand_gradient_kernel<T, kKeyDim, kValueDim, kValueFirst>>(
      "chunk_bwd_dqkwg",
      {.blocks = resident_blocks(args.grid),
       .threads = kOperandGradientThreads<kKeyDim>,
       .shared_bytes = sizeof(Shared),
       .stream = stream},
      args);
}

template <class T>
void launch_operand_gradient(const OperandGradientArgs& args, const StageShape& shape, device::Stream stream) {
  with_dims(shape, [&](auto key_dim, auto value_dim) {
    if (shape.value_first) return launch_operand_gradient_for<T, key_dim, value_dim, true>(args, stream);
    return launch_operand_gradient_for<T, key_dim, value_dim, false>(args, stream);
  });
}

template <class T>
void launch_wy_gradient(const WyGradientArgs& args, const StageShape& shape, device::Stream stream) {
  with_dims(shape, [&](auto key_dim, auto value_dim) {
    using Shared = WyGradientShared<key_dim, value_dim>;
    static_assert(sizeof(Shared) <= 227 * 1024);
    device::launch<wy_gradient_kernel<T, key_dim, value_dim>>("prepare_wy_repr_bwd",
                                                              {.blocks = resident_blocks(args.grid),
                                                               .threads = kWyThreads<key_dim, value_dim>,
                                                               .shared_bytes = sizeof(Shared),
                                                               .stream = stream},
                                                              args);
  });
}

}  // namespace cula::gdn::sm90
