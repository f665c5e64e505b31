#include "bindings/binding.h"
#include "common/host/tensor.h"

namespace cula::gdn::bindings {

namespace {

// A tensor of indices, which must be readable on the host.
class IndexTensor {
 public:
  IndexTensor(const DLTensor* tensor, const char* name) : view_(TensorView::from(tensor, name)) {
    if (view_.dtype != DType::kInt32 && view_.dtype != DType::kInt64) {
      throw_type_error(name, ": expected int32 or int64, got ", dtype_name(view_.dtype));
    }
    if (view_.device.device_type != kDLCPU) throw_value_error(name, ": expected a tensor on the CPU");
  }

  const TensorView& view() const { return view_; }
  int64_t at(int64_t row, int64_t column = 0) const {
    const int64_t offset = row * view_.stride[0] + column * view_.stride[1];
    return view_.dtype == DType::kInt32 ? static_cast<const int32_t*>(view_.data)[offset]
                                        : static_cast<const int64_t*>(view_.data)[offset];
  }

 private:
  TensorView view_;
};

void expect_4d(const DLTensor* tensor, const char* name, const char* letters) {
  if (tensor == nullptr) throw_type_error(name, ": expected a tensor, got None");
  const TensorView view = TensorView::from(tensor, name);
  if (view.ndim != 4) throw_value_error(name, ": expected shape ", letters, ", got ", view.shape_string());
}

}  // namespace

std::optional<std::vector<int64_t>> read_offsets(const DLTensor* cu_seqlens) {
  if (cu_seqlens == nullptr) return std::nullopt;
  const IndexTensor tensor(cu_seqlens, "cu_seqlens");
  if (tensor.view().ndim != 1) {
    throw_value_error("cu_seqlens: expected one dimension [N + 1], got shape ", tensor.view().shape_string());
  }
  std::vector<int64_t> offsets(tensor.view().shape[0]);
  for (size_t i = 0; i < offsets.size(); ++i) offsets[i] = tensor.at(static_cast<int64_t>(i));
  return offsets;
}

void Request::set_sizes(const DLTensor* q, const DLTensor* v) {
  expect_4d(q, "q", "[B, T, H, K]");
  expect_4d(v, "v", "[B, T, HV, V]");
  set_sizes(q->shape[0], q->shape[1], q->shape[2], v->shape[2], q->shape[3], v->shape[3]);
  problem.dtype = q->dtype;
  problem.device = q->device;
}

void Request::set_sizes(int64_t batch, int64_t tokens, int64_t heads, int64_t value_heads, int64_t key_dim,
                        int64_t value_dim) {
  problem.batch = batch;
  problem.tokens = tokens;
  problem.heads = heads;
  problem.value_heads = value_heads;
  problem.key_dim = key_dim;
  problem.value_dim = value_dim;
}

Plan Request::make_plan() const {
  Plan plan = Plan::make(problem);
  if (chunk_indices == nullptr) return plan;
  if (!problem.sequence_offsets) throw_value_error("chunk_indices: expected cu_seqlens with it, got it alone");
  const int64_t num_chunks = plan.num_chunks();
  check_shape(TensorView::from(chunk_indices, "chunk_indices"), "chunk_indices", "[NT, 2]", {num_chunks, 2});
  if (chunk_indices->device.device_type != kDLCPU) return plan;
  const std::vector<ChunkRange>& chunks = plan.chunks();
  const IndexTensor indices(chunk_indices, "chunk_indices");
  for (int64_t row = 0; row < num_chunks; ++row) {
    const int64_t sequence = indices.at(row, 0), index = indices.at(row, 1);
    if (sequence != chunks[row].sequence || index != chunks[row].index) {
      throw_value_error("chunk_indices: expected (", chunks[row].sequence, ", ", chunks[row].index, ") in row ", row,
                        " as of cu_seqlens and chunk_size ", problem.chunk_size, ", got (", sequence, ", ", index, ")");
    }
  }
  return plan;
}

}  // namespace cula::gdn::bindings
