// Launches of the kernels that are not templates over the element type.
#pragma once

#include "common/device/launch.cuh"
#include "gdn/cuda/collective/gate.cuh"
#include "gdn/cuda/launch/arguments.h"

namespace cula::gdn::cuda {

void launch_l2norm(const RowsArg& x, const RowsArg& y, const RowsArg& rstd, int64_t rows, int columns,
                   device::Stream stream);
// sequences: without offsets every row has a gradient; with them those of `heads` rows a token that a sequence has.
void launch_l2norm_backward(const RowsArg& y, const RowsArg& rstd, const RowsArg& dy, const RowsArg& dx, int64_t rows,
                            int columns, const SequenceTable& sequences, int64_t heads, device::Stream stream);
void launch_sigmoid(const RowsArg& x, const RowsArg& y, int64_t elements, int64_t columns, float scale,
                    device::Stream stream);
void launch_sigmoid_backward(const RowsArg& x, const RowsArg& dy, const RowsArg& dx, int64_t elements, int64_t columns,
                             float scale, device::Stream stream);
void launch_gate(const GateArgs& gates, const TensorArg& out, const SequenceTable& sequences, int64_t batch,
                 int64_t heads, device::Stream stream);
void launch_cumsum(const GateArgs& gates, const TensorArg& out, const SequenceTable& sequences, int64_t heads,
                   double scale, bool reverse, device::Stream stream);

struct GateGradients {
  TensorArg dyg;
  TensorArg dg;
  TensorArg dA_log;
  TensorArg ddt_bias;
};
// Room for the sums over the tokens in several parts, side by side; one part needs none.
struct GatePartialSums {
  double* data = nullptr;  // [parts, heads, 2]
  int64_t parts = 1;
};
void launch_gate_backward(const GateArgs& gates, const GateGradients& t, int64_t batch, int64_t tokens, int64_t heads,
                          device::Stream stream, const GatePartialSums& sums = {});

// Zeroes [1, T, heads, columns] behind the last packed sequence; nothing to do without packing or without a tensor.
void launch_zero_padding(const SequenceTable& sequences, const TensorArg& x, int64_t heads, int64_t columns,
                         device::Stream stream);

void launch_solve(const SequenceTable& sequences, const TensorArg& L, const TensorArg& A, int64_t value_heads,
                  device::Stream stream);

struct GradientArgs;
void launch_gate_gradient(const GradientArgs& args, device::Stream stream);

struct RecurrentArgs;
void launch_recurrent(RecurrentArgs args, device::Stream stream);

}  // namespace cula::gdn::cuda
