// The functions of the CPU backend as compiled for one instruction set.
#pragma once

#include "common/host/simd.h"
#include "gdn/backend.h"

namespace cula::gdn::cpu::CULA_ISA {

size_t forward_workspace_bytes(const Plan& plan, bool saves_for_backward);
size_t backward_workspace_bytes(const Plan& plan);
void forward(const Plan& plan, const ForwardTensors& t, Workspace workspace, Stream stream);
void backward(const Plan& plan, const BackwardTensors& t, Workspace workspace, Stream stream);
void recurrent_forward(const Plan& plan, const ForwardTensors& t, Stream stream);

#define CULA_GDN_DECLARE_STAGE(function, Arguments) \
  void function(const Plan& plan, const stages::Arguments& t, Stream stream);
CULA_GDN_STAGES(CULA_GDN_DECLARE_STAGE)
#undef CULA_GDN_DECLARE_STAGE

#define CULA_GDN_DECLARE_CP(function, Arguments)            \
  size_t cp_##function##_workspace_bytes(const Plan& plan); \
  void cp_##function(const Plan& plan, const Arguments& t, Workspace workspace, Stream stream);
CULA_GDN_CP(CULA_GDN_DECLARE_CP)
#undef CULA_GDN_DECLARE_CP

}  // namespace cula::gdn::cpu::CULA_ISA
