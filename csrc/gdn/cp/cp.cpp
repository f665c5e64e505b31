#include "gdn/cp/cp.h"

#include "gdn/backend.h"
#include "gdn/validate.h"

namespace cula::gdn::cp {

namespace {

// An entry of the plan's backend, which may not have it.
template <class Function>
Function entry(const Plan& plan, Function BackendTable::*field) {
  const Function function = backend_table(plan.backend()).*field;
  if (function == nullptr) {
    throw_runtime_error("backend: the ", backend_name(plan.backend()),
                        " backend has no context parallelism in this version; the cpu backend has");
  }
  return function;
}

void validate(const Plan& plan, const ForwardTensors& t) { validate_split_forward(plan, t); }
void validate(const Plan& plan, const Summary& t) { validate_summary(plan, t); }
void validate(const Plan& plan, const AdjointSummary& t) { validate_adjoint_summary(plan, t); }
void validate(const Plan& plan, const Merge& t) { validate_merge(plan, t); }

}  // namespace

#define CULA_GDN_DEFINE_CP(function, Arguments)                                                     \
  size_t function##_workspace_bytes(const Plan& plan) {                                             \
    return entry(plan, &BackendTable::cp_##function##_workspace_bytes)(plan);                       \
  }                                                                                                 \
  void function(const Plan& plan, const Arguments& arguments, Workspace workspace, Stream stream) { \
    const auto run = entry(plan, &BackendTable::cp_##function);                                     \
    validate(plan, arguments);                                                                      \
    validate_workspace(workspace, function##_workspace_bytes(plan));                                \
    run(plan, arguments, workspace, stream);                                                        \
  }
CULA_GDN_CP(CULA_GDN_DEFINE_CP)
#undef CULA_GDN_DEFINE_CP

}  // namespace cula::gdn::cp
