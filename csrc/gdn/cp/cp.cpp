#include "gdn/cp/cp.h"

#include "gdn/backend.h"
#include "gdn/validate.h"

namespace cula::gdn::cp {

namespace {

void refuse_batch_invariance(const Plan& plan) {
  if (!plan.problem().batch_invariant) return;
  throw_value_error(
      "batch_invariant: expected false in context parallelism, whose cuts follow from the whole stream, got true");
}

void validate(const Plan& plan, const ForwardTensors& t) { validate_split_forward(plan, t); }
void validate(const Plan& plan, const Summary& t) { validate_summary(plan, t); }
void validate(const Plan& plan, const AdjointSummary& t) { validate_adjoint_summary(plan, t); }
void validate(const Plan& plan, const Merge& t) { validate_merge(plan, t); }

// Large results: what prepare saves and advance writes. Summaries and states are small.
void expect_results(const Plan& plan, const ForwardTensors& t, Workspace workspace) {
  expect_writes(plan, workspace, {t.o, t.saved->A});
}
template <class Arguments>
void expect_results(const Plan& plan, const Arguments&, Workspace workspace) {
  expect_writes(plan, workspace, {});
}

}  // namespace

#define CULA_GDN_DEFINE_CP(function, Arguments)                                                     \
  size_t function##_workspace_bytes(const Plan& plan) {                                             \
    return backend_table(plan.backend()).cp_##function##_workspace_bytes(plan);                     \
  }                                                                                                 \
  void function(const Plan& plan, const Arguments& arguments, Workspace workspace, Stream stream) { \
    refuse_batch_invariance(plan);                                                                  \
    validate(plan, arguments);                                                                      \
    validate_workspace(workspace, function##_workspace_bytes(plan));                                \
    expect_results(plan, arguments, workspace);                                                     \
    backend_table(plan.backend()).cp_##function(plan, arguments, workspace, stream);                \
  }
CULA_GDN_CP(CULA_GDN_DEFINE_CP)
#undef CULA_GDN_DEFINE_CP

}  // namespace cula::gdn::cp
