// The Hopper backend: what plan and table need of it.
#pragma once

#include "gdn/backend.h"

namespace cula::gdn::sm90 {

// Whether a CUDA device has the instructions that this backend is made of. False where no device answers.
bool runs_on(int device_id);

size_t forward_workspace_bytes(const Plan& plan, bool saves_for_backward);
void forward(const Plan& plan, const ForwardTensors& t, Workspace workspace, Stream stream);

// The halves of forward for context parallelism.
void cp_prepare(const Plan& plan, const ForwardTensors& t, Workspace workspace, Stream stream);
size_t cp_advance_workspace_bytes(const Plan& plan);
void cp_advance(const Plan& plan, const ForwardTensors& t, Workspace workspace, Stream stream);

size_t cp_summarize_workspace_bytes(const Plan& plan);
void cp_summarize(const Plan& plan, const cp::Summary& t, Workspace workspace, Stream stream);
size_t cp_summarize_adjoint_workspace_bytes(const Plan& plan);
void cp_summarize_adjoint(const Plan& plan, const cp::AdjointSummary& t, Workspace workspace, Stream stream);

size_t backward_workspace_bytes(const Plan& plan);
size_t backward_workspace_bytes(const Plan& plan, const BackwardTensors& t);
void backward(const Plan& plan, const BackwardTensors& t, Workspace workspace, Stream stream);

// Puts this backend's stages in the place of those of the table that they are made for.
void put_stages(BackendTable& table);

}  // namespace cula::gdn::sm90
