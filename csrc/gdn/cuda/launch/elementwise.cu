#include "gdn/cuda/launch/elementwise.h"

#include <algorithm>

#include "gdn/cuda/kernel/elementwise.cuh"
#include "gdn/cuda/kernel/gate_gradient.cuh"
#include "gdn/cuda/kernel/recurrent.cuh"
#include "gdn/cuda/kernel/solve.cuh"

namespace cula::gdn::cuda {

namespace {

int64_t blocks_for(int64_t items, int64_t per_block) { return (items + per_block - 1) / per_block; }

}  // namespace

void launch_l2norm(const RowsArg& x, const RowsArg& y, const RowsArg& rstd, int64_t rows, int columns,
                   device::Stream stream) {
  device::launch<l2norm_kernel<false>>(
      "l2norm_fwd", {.blocks = blocks_for(rows, kElementThreads / 32), .threads = kElementThreads, .stream = stream},
      L2NormArgs{
          .x = x, .y = y, .rstd = rstd, .dx = {}, .rows = rows, .columns = columns, .sequences = {}, .heads = 1});
}

void launch_l2norm_backward(const RowsArg& y, const RowsArg& rstd, const RowsArg& dy, const RowsArg& dx, int64_t rows,
                            int columns, const SequenceTable& sequences, int64_t heads, device::Stream stream) {
  device::launch<l2norm_kernel<true>>(
      "l2norm_bwd", {.blocks = blocks_for(rows, kElementThreads / 32), .threads = kElementThreads, .stream = stream},
      L2NormArgs{.x = dy,
                 .y = y,
                 .rstd = rstd,
                 .dx = dx,
                 .rows = rows,
                 .columns = columns,
                 .sequences = sequences,
                 .heads = heads});
}

void launch_sigmoid(const RowsArg& x, const RowsArg& y, int64_t elements, int64_t columns, float scale,
                    device::Stream stream) {
  device::launch<sigmoid_kernel<false>>(
      "fused_beta_sigmoid_fwd",
      {.blocks = blocks_for(elements, kElementThreads), .threads = kElementThreads, .stream = stream},
      SigmoidArgs{.x = x, .dy = {}, .out = y, .elements = elements, .columns = columns, .scale = scale});
}

void launch_sigmoid_backward(const RowsArg& x, const RowsArg& dy, const RowsArg& dx, int64_t elements, int64_t columns,
                             float scale, device::Stream stream) {
  device::launch<sigmoid_kernel<true>>(
      "fused_beta_sigmoid_bwd",
      {.blocks = blocks_for(elements, kElementThreads), .threads = kElementThreads, .stream = stream},
      SigmoidArgs{.x = x, .dy = dy, .out = dx, .elements = elements, .columns = columns, .scale = scale});
}

void launch_gate(const GateArgs& gates, const TensorArg& out, const SequenceTable& sequences, int64_t batch,
                 int64_t heads, device::Stream stream) {
  device::launch<gate_kernel>("gdn_gate_fwd",
                              {.blocks = blocks_for(batch * sequences.tokens * heads, kElementThreads),
                               .threads = kElementThreads,
                               .stream = stream},
                              GateTokenArgs{gates, out, batch, sequences.tokens, heads});
}

void launch_cumsum(const GateArgs& gates, const TensorArg& out, const SequenceTable& sequences, int64_t heads,
                   double scale, bool reverse, device::Stream stream) {
  device::launch<cumsum_kernel>("chunk_local_cumsum",
                                {.blocks = blocks_for(sequences.num_slots() * heads, kElementThreads / 32),
                                 .threads = kElementThreads,
                                 .stream = stream},
                                CumsumArgs{sequences, gates, out, heads, scale, reverse});
}

void launch_gate_backward(const GateArgs& gates, const GateGradients& t, int64_t batch, int64_t tokens, int64_t heads,
                          device::Stream stream, const GatePartialSums& sums) {
  const GateBackwardArgs args = {gates, t.dyg, t.dg, t.dA_log, t.ddt_bias, batch, tokens, heads, sums.parts, sums.data};
  device::launch<gate_backward_kernel>("gdn_gate_bwd",
                                       {.blocks = heads * sums.parts,
                                        .threads = kElementThreads,
                                        .shared_bytes = 2 * sizeof(double) * (kElementThreads / 32),
                                        .stream = stream},
                                       args);
  if (sums.parts > 1)
    device::launch<gate_sums_kernel>("gdn_gate_bwd", {.blocks = heads, .threads = 32, .stream = stream}, args);
}

void launch_zero_padding(const SequenceTable& sequences, const TensorArg& x, int64_t heads, int64_t columns,
                         device::Stream stream) {
  constexpr int64_t kBlocks = 264;  // the padding is seldom long; its length is known on the device alone
  if (sequences.offsets == nullptr || !x) return;
  const int64_t blocks = std::min(kBlocks, blocks_for(sequences.tokens * heads * columns, kElementThreads));
  device::launch<zero_padding_kernel>("zero_padding", {.blocks = blocks, .threads = kElementThreads, .stream = stream},
                                      ZeroArgs{sequences, x, heads, columns});
}

void launch_solve(const SequenceTable& sequences, const TensorArg& L, const TensorArg& A, int64_t value_heads,
                  device::Stream stream) {
  device::launch<solve_kernel>("solve_tril",
                               {.blocks = sequences.num_slots() * value_heads,
                                .threads = kInverseThreads,
                                .shared_bytes = sizeof(Tile<float, kRows>),
                                .stream = stream},
                               SolveArgs{sequences, value_heads, L, A});
}

void launch_gate_gradient(const GradientArgs& args, device::Stream stream) {
  constexpr int kWarps = kGateGradientThreads / 32;
  device::launch<gate_gradient_kernel>(
      "gate_gradient",
      {.blocks = blocks_for(args.sequences.num_slots() * args.heads * args.group, kWarps),
       .threads = kGateGradientThreads,
       .shared_bytes = sizeof(GateGradientShared<kWarps>),
       .stream = stream},
      args);
}

void launch_recurrent(RecurrentArgs args, device::Stream stream) {
  constexpr int kColumns = kRecurrentValues * kRecurrentThreads / 32;
  args.value_blocks = blocks_for(args.value_dim, kColumns);
  const device::LaunchShape shape = {.blocks = args.sequences.num_sequences * args.value_heads * args.value_blocks,
                                     .threads = kRecurrentThreads,
                                     .stream = stream};
  if (args.key_dim <= 64) return device::launch<recurrent_kernel<64>>("recurrent", shape, args);
  if (args.key_dim <= 128) return device::launch<recurrent_kernel<128>>("recurrent", shape, args);
  return device::launch<recurrent_kernel<256>>("recurrent", shape, args);
}

}  // namespace cula::gdn::cuda
