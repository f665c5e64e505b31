#include "gdn/gdn.h"

#include "gdn/backend.h"
#include "gdn/validate.h"

namespace cula::gdn {

const BackendTable& backend_table([[maybe_unused]] Backend backend) {
#ifdef CULA_WITH_CUDA
  if (backend == Backend::kCuda) return cuda_backend();
#endif
  return cpu_backend();
}

void forward(const Plan& plan, const ForwardTensors& tensors, Workspace workspace, Stream stream) {
  validate_forward(plan, tensors);
  validate_workspace(workspace, plan.forward_workspace_bytes(tensors.saved != nullptr));
  backend_table(plan.backend()).forward(plan, tensors, workspace, stream);
}

void backward(const Plan& plan, const BackwardTensors& tensors, Workspace workspace, Stream stream) {
  validate_backward(plan, tensors);
  validate_workspace(workspace, plan.backward_workspace_bytes());
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
