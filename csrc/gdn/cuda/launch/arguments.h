// From validated DLPack tensors to what kernels are told.
#pragma once

#include "common/host/tensor.h"
#include "gdn/cuda/collective/arguments.cuh"
#include "gdn/gdn.h"

namespace cula::gdn::cuda {

// The largest access (16, 4 or 0 bytes) that fits every row of a tensor whose dimension `dense` is its fastest.
int vector_bytes(const TensorView& view, int dense, DType operand);

// [B, T, heads, dim] or [B, T, heads]. A null tensor gives an empty argument.
TensorArg token_arg(const DLTensor* tensor, const char* name, DType operand);

// [N, HV, K, V] or, v_first, [N, HV, V, K]; always seen as sequence, head, key, value.
TensorArg state_arg(const DLTensor* tensor, const char* name, bool v_first);

// How sequences find their matrix in such a tensor, a pool if there are state_indices.
StateSlots state_slots(const DLTensor* state_indices, const DLTensor* pool);

CheckpointArgs checkpoint_args(const Problem& problem, const ForwardTensors& tensors);

// [B, NT, HV, K, V] or [B, NT, HV, V, K]; seen as batch, chunk, head, key, value.
TensorArg chunk_state_arg(const DLTensor* tensor, const char* name, DType operand, bool v_first);

// HV elements in any shape that is one run of equal steps.
TensorArg head_arg(const DLTensor* tensor, const char* name);

// A dense [B, T, heads, columns] tensor in the workspace.
TensorArg dense_arg(void* data, DType dtype, int64_t tokens, int64_t heads, int64_t columns);

// Dense fp32 states [.., heads, key_dim, value_dim] in the workspace, as sequence, head, key, value; of `width` columns
// a key, of which these start at `column`.
TensorArg dense_states(float* data, int64_t heads, int64_t key_dim, int64_t width, int64_t column = 0);

RowsArg rows_arg(const DLTensor* tensor, const char* name, bool single_elements);

SequenceTable sequence_table(const Plan& plan, const DLTensor* cu_seqlens);

}  // namespace cula::gdn::cuda
