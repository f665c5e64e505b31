#include "gdn/gdn.h"

#include <initializer_list>

#include "common/host/memory.h"
#include "gdn/backend.h"
#include "gdn/validate.h"

namespace cula::gdn {

const BackendTable& backend_table([[maybe_unused]] Backend backend) {
#ifdef CULA_WITH_CUDA
  if (backend == Backend::kCuda) return cuda_backend();
#endif
#ifdef CULA_WITH_SM90
  if (backend == Backend::kSm90) return sm90_backend();
#endif
  return cpu_backend();
}

void expect_writes(const Plan& plan, Workspace workspace, std::initializer_list<const DLTensor*> outputs) {
  if (plan.backend() != Backend::kCpu) return;
  prefer_huge_pages(workspace.data, workspace.bytes);
  for (const DLTensor* output : outputs) {
    const TensorView view = TensorView::from(output, "output");
    if (view && view.is_contiguous()) {
      prefer_huge_pages(view.data, static_cast<size_t>(view.numel()) * dtype_size(view.dtype));
    }
  }
}

void forward(const Plan& plan, const ForwardTensors& tensors, Workspace workspace, Stream stream) {
  validate_forward(plan, tensors);
  validate_workspace(workspace, plan.forward_workspace_bytes(tensors.saved != nullptr));
  expect_writes(plan, workspace, {tensors.o, tensors.saved != nullptr ? tensors.saved->A : nullptr});
  backend_table(plan.backend()).forward(plan, tensors, workspace, stream);
}

void backward(const Plan& plan, const BackwardTensors& tensors, Workspace workspace, Stream stream) {
  validate_backward(plan, tensors);
  validate_workspace(workspace, plan.backward_workspace_bytes());
  expect_writes(plan, workspace, {tensors.dq, tensors.dk, tensors.dv});
  backend_table(plan.backend()).backward(plan, tensors, workspace, stream);
}

void recurrent_forward(const Plan& plan, const ForwardTensors& tensors, Stream stream) {
  validate_recurrent(plan, tensors);
  backend_table(plan.backend()).recurrent_forward(plan, tensors, stream);
}

namespace stages {

#define CULA_GDN_DEFINE_STAGE(function, Arguments)                             \
  void function(const Plan& plan, const Arguments& arguments, Stream stream) { \
    validate(plan, arguments);                                                 \
    backend_table(plan.backend()).function(plan, arguments, stream);           \
  }
CULA_GDN_STAGES(CULA_GDN_DEFINE_STAGE)
#undef CULA_GDN_DEFINE_STAGE

}  // namespace stages

}  // namespace cula::gdn
