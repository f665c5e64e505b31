// Every rule about what may be passed, in one place. Nothing is written before a call has passed here.
#pragma once

#include "common/host/tensor.h"
#include "gdn/cp/cp.h"
#include "gdn/gdn.h"
#include "gdn/stages.h"

namespace cula::gdn {

// The rules of a problem alone (sizes, lengths, flags); tensors come later.
void validate_problem(const Problem& problem);

void validate_forward(const Plan& plan, const ForwardTensors& t);
void validate_backward(const Plan& plan, const BackwardTensors& t);
void validate_recurrent(const Plan& plan, const ForwardTensors& t);
// A forward that is run in halves, and the rest of context parallelism.
void validate_split_forward(const Plan& plan, const ForwardTensors& t);
void validate_summary(const Plan& plan, const cp::Summary& t);
void validate_adjoint_summary(const Plan& plan, const cp::AdjointSummary& t);
void validate_merge(const Plan& plan, const cp::Merge& t);
void validate_workspace(Workspace workspace, size_t needed);

void validate(const Plan& plan, const stages::L2NormForward& t);
void validate(const Plan& plan, const stages::L2NormBackward& t);
void validate(const Plan& plan, const stages::BetaSigmoidForward& t);
void validate(const Plan& plan, const stages::BetaSigmoidBackward& t);
void validate(const Plan& plan, const stages::LocalCumsum& t);
void validate(const Plan& plan, const stages::GateForward& t);
void validate(const Plan& plan, const stages::GateCumsum& t);
void validate(const Plan& plan, const stages::GateBackward& t);
void validate(const Plan& plan, const stages::ScaledDotKkt& t);
void validate(const Plan& plan, const stages::SolveTril& t);
void validate(const Plan& plan, const stages::Intra& t);
void validate(const Plan& plan, const stages::RecomputeWU& t);
void validate(const Plan& plan, const stages::StateForward& t);
void validate(const Plan& plan, const stages::OutputForward& t);
void validate(const Plan& plan, const stages::LocalValueGradient& t);
void validate(const Plan& plan, const stages::StateBackward& t);
void validate(const Plan& plan, const stages::OperandGradients& t);
void validate(const Plan& plan, const stages::WyBackward& t);

// Type of accumulated results for a problem: float64 for float64 problems, else float32.
DType stat_dtype(const Problem& problem);

}  // namespace cula::gdn
