#include "gdn/cuda/launch/arguments.h"

#include <algorithm>

namespace cula::gdn::cuda {

int vector_bytes(const TensorView& view, int dense, DType operand) {
  if (view.dtype != operand || (view.stride[dense] != 1 && view.shape[dense] > 1)) return 0;
  const int64_t size = static_cast<int64_t>(dtype_size(view.dtype));
  for (const int bytes : {16, 4}) {
    bool fits = reinterpret_cast<uintptr_t>(view.data) % bytes == 0 && view.shape[dense] * size % bytes == 0;
    for (int i = 0; i < view.ndim; ++i) {
      if (i != dense && view.shape[i] > 1) fits = fits && view.stride[i] * size % bytes == 0;
    }
    if (fits) return bytes;
  }
  return 0;
}

namespace {

TensorArg plain_arg(const TensorView& view) {
  TensorArg arg;
  arg.data = view.data;
  arg.dtype = view.dtype;
  for (int i = 0; i < view.ndim && i < 5; ++i) arg.stride[i] = view.stride[i];
  return arg;
}

}  // namespace

TensorArg token_arg(const DLTensor* tensor, const char* name, DType operand) {
  const TensorView view = TensorView::from(tensor, name);
  TensorArg arg = plain_arg(view);
  if (view.ndim == 4) arg.vector_bytes = vector_bytes(view, 3, operand);
  return arg;
}

TensorArg state_arg(const DLTensor* tensor, const char* name, bool v_first) {
  TensorArg arg = plain_arg(TensorView::from(tensor, name));
  if (v_first) std::swap(arg.stride[2], arg.stride[3]);
  return arg;
}

StateSlots state_slots(const DLTensor* state_indices, const DLTensor* pool) {
  StateSlots slots;
  if (state_indices == nullptr || pool == nullptr) return slots;
  const TensorView view = TensorView::from(state_indices, "state_indices");
  slots.indices = view.data;
  slots.wide = view.dtype == DType::kInt64;
  slots.stride = view.stride[0];
  slots.count = pool->shape[0];
  return slots;
}

CheckpointArgs checkpoint_args(const Problem& problem, const ForwardTensors& tensors) {
  CheckpointArgs args;
  // No sequence can get to a checkpoint: also where cu_seqlens changes under a captured graph.
  if (tensors.state_checkpoints == nullptr || tensors.checkpoint_every_n_tokens > problem.tokens) return args;
  args.states = state_arg(tensors.state_checkpoints, "state_checkpoints", problem.state_v_first);
  args.rows = tensors.state_checkpoints->shape[0];
  args.every = tensors.checkpoint_every_n_tokens;
  const TensorView starts = TensorView::from(tensors.checkpoint_cu_starts, "checkpoint_cu_starts");
  if (!starts) return args;
  args.starts = starts.data;
  args.wide = starts.dtype == DType::kInt64;
  args.stride = starts.stride[0];
  return args;
}

TensorArg chunk_state_arg(const DLTensor* tensor, const char* name, DType operand, bool v_first) {
  const TensorView view = TensorView::from(tensor, name);
  TensorArg arg = plain_arg(view);
  if (view.ndim == 5) arg.vector_bytes = vector_bytes(view, 4, operand);
  if (v_first) std::swap(arg.stride[3], arg.stride[4]);
  return arg;
}

TensorArg head_arg(const DLTensor* tensor, const char* name) {
  const TensorView view = TensorView::from(tensor, name);
  TensorArg arg;
  if (!view) return arg;
  arg.data = view.data;
  arg.dtype = view.dtype;
  int64_t step = 0;  // of the dimensions seen so far
  int64_t count = 1;
  for (int i = view.ndim - 1; i >= 0; --i) {
    if (view.shape[i] == 1) continue;
    if (count == 1) {
      step = view.stride[i];
    } else if (view.stride[i] != step * count) {
      throw_value_error(name, ": expected elements at equal steps, got shape ", view.shape_string(), " with stride ",
                        view.stride[i], " in dimension ", i);
    }
    count *= view.shape[i];
  }
  arg.stride[0] = step;
  return arg;
}

TensorArg dense_arg(void* data, DType dtype, int64_t tokens, int64_t heads, int64_t columns) {
  TensorArg arg;
  arg.data = data;
  arg.dtype = dtype;
  arg.stride[0] = tokens * heads * columns;
  arg.stride[1] = heads * columns;
  arg.stride[2] = columns;
  arg.stride[3] = 1;
  const int64_t row_bytes = columns * static_cast<int64_t>(dtype_size(dtype));
  arg.vector_bytes = row_bytes % 16 == 0 ? 16 : (row_bytes % 4 == 0 ? 4 : 0);
  return arg;
}

TensorArg dense_states(float* data, int64_t heads, int64_t key_dim, int64_t width, int64_t column) {
  TensorArg arg;
  if (data == nullptr) return arg;
  arg.data = data + column;
  arg.dtype = DType::kFloat32;
  arg.stride[0] = heads * key_dim * width;
  arg.stride[1] = key_dim * width;
  arg.stride[2] = width;
  arg.stride[3] = 1;
  return arg;
}

RowsArg rows_arg(const DLTensor* tensor, const char* name, bool single_elements) {
  const TensorView view = TensorView::from(tensor, name);
  RowsArg arg;
  if (tensor == nullptr) return arg;
  arg.data = view.data;
  arg.dtype = view.dtype;
  arg.dims = single_elements ? view.ndim : std::max(view.ndim - 1, 0);
  for (int i = 0; i < arg.dims; ++i) {
    arg.shape[i] = view.shape[i];
    arg.stride[i] = view.stride[i];
  }
  if (!single_elements && view.ndim > 0) arg.last_stride = view.stride[view.ndim - 1];
  return arg;
}

SequenceTable sequence_table(const Plan& plan, const DLTensor* cu_seqlens) {
  const Problem& problem = plan.problem();
  SequenceTable table;
  table.chunk_size = static_cast<int>(problem.chunk_size);
  table.num_sequences = problem.num_sequences();
  table.tokens = problem.tokens;
  table.slots_per_row = (problem.tokens + problem.chunk_size - 1) / problem.chunk_size;
  if (!problem.sequence_offsets) return table;
  const TensorView view = TensorView::from(cu_seqlens, "cu_seqlens");
  if (cu_seqlens == nullptr) {
    throw_value_error("cu_seqlens: the cuda backend needs the offsets of packed sequences on the device, got none");
  }
  if (view.dtype != DType::kInt32 && view.dtype != DType::kInt64) {
    throw_type_error("cu_seqlens: expected int32 or int64, got ", dtype_name(view.dtype));
  }
  if (view.ndim != 1 || view.shape[0] != table.num_sequences + 1 || (view.shape[0] > 1 && view.stride[0] != 1)) {
    throw_value_error("cu_seqlens: expected a dense tensor of shape [", table.num_sequences + 1, "], got ",
                      view.shape_string(), " with stride ", view.stride[0]);
  }
  if (view.device.device_type != problem.device.device_type || view.device.device_id != problem.device.device_id) {
    throw_value_error("cu_seqlens: expected a tensor on the device of the other arguments");
  }
  table.offsets = view.data;
  table.wide = view.dtype == DType::kInt64;
  return table;
}

}  // namespace cula::gdn::cuda
