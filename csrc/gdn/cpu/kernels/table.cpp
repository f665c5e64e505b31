// The functions of one instruction set as a table.
#include "gdn/cpu/kernels/kernels.h"

namespace cula::gdn::cpu::CULA_ISA {

extern const BackendTable kTable;
const BackendTable kTable = {.forward_workspace_bytes = forward_workspace_bytes,
                             .backward_workspace_bytes = backward_workspace_bytes,
                             .forward = forward,
                             .backward = backward,
                             .recurrent_forward = recurrent_forward,
#define CULA_GDN_STAGE_ENTRY(function, Arguments) .function = function,
                             CULA_GDN_STAGES(CULA_GDN_STAGE_ENTRY)
#undef CULA_GDN_STAGE_ENTRY
#define CULA_GDN_CP_ENTRY(function, Arguments) \
  .cp_##function##_workspace_bytes = cp_##function##_workspace_bytes, .cp_##function = cp_##function,
                                 CULA_GDN_CP(CULA_GDN_CP_ENTRY)
#undef CULA_GDN_CP_ENTRY
};

}  // namespace cula::gdn::cpu::CULA_ISA
